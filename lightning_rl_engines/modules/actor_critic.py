"""Policy optimization with a critic: PPO."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import LRSchedulerTypeUnion
from peft import LoraConfig
from torch import Tensor
from torch.optim import AdamW, Optimizer
from typing_extensions import override

from lightning_rl_engines.algorithms import (
    PolicyLoss,
    PolicyLossBase,
    ValueLoss,
    gae,
    global_moments,
    kl_penalty_rewards,
    outcome_rewards,
    whiten,
)
from lightning_rl_engines.algorithms.corrections import RolloutCorrection
from lightning_rl_engines.data.rewards import Reward, RewardFunction
from lightning_rl_engines.models.config import ModelConfig
from lightning_rl_engines.models.lora_config import lora_to_dict
from lightning_rl_engines.models.token_model import TokenModel
from lightning_rl_engines.modules.base import require_at_least
from lightning_rl_engines.modules.hyperparameters import plain
from lightning_rl_engines.modules.metrics import Tally, combine_steps
from lightning_rl_engines.modules.optimization import build_optimizer, total_optimizer_steps
from lightning_rl_engines.modules.policy import PolicyModule
from lightning_rl_engines.modules.reference import find_reference
from lightning_rl_engines.modules.selection import GlobalColumns
from lightning_rl_engines.rollout.base import RolloutEngine
from lightning_rl_engines.sequence.experience import Experience
from lightning_rl_engines.strategies.engine import Engine

RewardKLEstimator: TypeAlias = Literal["k1", "k2", "k3", "abs"]
"""Estimators of the KL that rewards can be charged with: those that differ in more than a gradient."""

CRITIC_ARGUMENTS = (
    "critic",
    "critic_loss",
    "critic_optimizer",
    "critic_lr_scheduler",
    "critic_warmup_updates",
    "critic_max_tokens_per_micro_batch",
    "gamma",
    "lam",
    "whiten_advantages",
    "kl_in_reward",
    "kl_in_reward_estimator",
)
"""Arguments that :class:`PolicyModule` does not have."""


class ActorCriticModule(PolicyModule):
    """Trains a policy and a critic by PPO with generalized advantage estimation (GAE).

    One update: prompts -> responses -> rewards, on the last response token -> old (and reference) log-probabilities ->
    values of the critic -> advantages and returns -> ``update_epochs`` x ``mini_batches`` optimizer steps of the
    critic, then as many of the policy, on the same parts -> new weights in the rollout.

    A batch is a list of prompts, or an :class:`Experience` with ``rewards`` per document; ``values``, the columns of
    log-probabilities of :class:`PolicyModule`, and ready ``advantages`` together with ``returns`` are used where it has
    them. A response that hits the length limit counts as ended: no value is added behind its last token.

    Two optimizers: ``trainer.global_step`` and ``max_steps`` count the steps of both, so an update is
    ``2 * update_epochs * mini_batches`` of them (half as many during critic warm-up), while each scheduler is stepped
    with its own optimizer. Schedules without ``total_steps`` get the number of steps of their own optimizer.

    Metrics are those of :class:`PolicyModule` (``train/advantage_mean`` and ``train/advantage_abs`` before whitening),
    ``train/reward_kl`` with ``kl_in_reward`` (KL per response token), and of the critic ``train/critic/loss``, those of
    its loss (``value_loss``, ``value_clip_fraction``, ``value_mean``, ``return_mean``), ``train/critic/grad_norm``,
    ``train/critic/lr``, ``train/critic/skipped_steps`` and ``train/critic/explained_variance``: the share of the
    returns' variance that the values before the update explain, left out where returns do not vary.

    Args:
        policy: What to train.
        critic: The critic, with ``head="value"``: a saved critic, or a language model, whose head is then fresh.
            ``None`` takes the policy's source with a fresh head.
        rollout: See :class:`PolicyModule`, as for all arguments that are not about the critic.
        reward: Reward functions by name, or one function.
        loss: A policy loss, or any ``loss_fn(outputs, micro_batch) -> LossOutput``.
        critic_loss: The loss of the critic; reads the columns ``returns`` and ``values``.
        gamma: Discount per response token.
        lam: GAE's weight of longer estimates: 1 sums all rewards to come, 0 looks one token ahead.
        whiten_advantages: Give the advantages of all response tokens of the global batch mean 0 and variance 1.
        kl_in_reward: Weight of a KL penalty that is taken from the reward of each response token; 0 for none.
        kl_in_reward_estimator: Its estimator: ``"k1"``, ``"k2"``, ``"k3"`` or ``"abs"``.
        reference: ``"auto"`` builds a frozen copy of the policy when a KL term needs one; a configuration builds that
            model; ``None`` builds none.
        optimizer: Called with the policy's trainable parameters.
        lr_scheduler: Called with the policy's optimizer.
        critic_optimizer: Called with the critic's trainable parameters.
        critic_lr_scheduler: Called with the critic's optimizer.
        critic_warmup_updates: Train the critic alone in so many first updates; the policy takes no step in them.
        max_tokens_per_micro_batch: The most tokens in a row, over all ranks that share it.
        critic_max_tokens_per_micro_batch: The same for the critic; ``None`` takes the policy's.
        mini_batches: Parts of each data rank's documents; one optimizer step of each model for each.
        update_epochs: Passes over the experience per update, of both models.
        max_grad_norm: Global gradient norm to clip to, for each model on its own; ``None`` does not clip.
        temperature: What logits are divided by; ``None`` takes the rollout's.
        filter_zero_variance: Drop groups whose rewards are all equal.
        dynamic_sampling: Go on sampling until enough groups have different rewards.
        max_sampling_rounds: Update with what there is after this many batches.
        mask_truncated: Take responses that hit the length limit out of both losses.
        recompute_old_log_probs: Compute ``old_log_probs`` with the policy before the update.
        correction: Correction of the gap between sampler and trainer, applied once per update, after the advantages.
        balance: Let documents change their data rank for a pass where that balances the load.
        max_skipped_steps: Raise when more than this many steps of a model in a row had a non-finite gradient.
        seed: Seed of the shuffling into mini-batches.

    Raises:
        ValueError: An argument is out of range, or contradicts another.
    """

    critic: TokenModel

    def __init__(
        self,
        *,
        policy: ModelConfig,
        critic: ModelConfig | None = None,
        rollout: RolloutEngine | None = None,
        reward: dict[str, Reward] | RewardFunction | None = None,
        loss: PolicyLossBase | Callable = PolicyLoss(),  # noqa: B008
        critic_loss: ValueLoss | Callable = ValueLoss(),  # noqa: B008
        gamma: float = 1.0,
        lam: float = 0.95,
        whiten_advantages: bool = True,
        kl_in_reward: float = 0.0,
        kl_in_reward_estimator: RewardKLEstimator = "k1",
        reference: Literal["auto"] | ModelConfig | None = "auto",
        optimizer: OptimizerCallable = lambda parameters: AdamW(parameters, lr=1e-6, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | None = None,
        critic_optimizer: OptimizerCallable = lambda parameters: AdamW(parameters, lr=1e-5, weight_decay=0.0),
        critic_lr_scheduler: LRSchedulerCallable | None = None,
        critic_warmup_updates: int = 0,
        max_tokens_per_micro_batch: int | None = None,
        critic_max_tokens_per_micro_batch: int | None = None,
        mini_batches: int = 1,
        update_epochs: int = 1,
        max_grad_norm: float | None = 1.0,
        temperature: float | None = None,
        filter_zero_variance: bool = False,
        dynamic_sampling: bool = False,
        max_sampling_rounds: int = 10,
        mask_truncated: bool = False,
        recompute_old_log_probs: bool = True,
        correction: RolloutCorrection | None = None,
        balance: bool = True,
        max_skipped_steps: int = 5,
        seed: int = 0,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(**{name: value for name, value in arguments.items() if name not in CRITIC_ARGUMENTS})
        _check_range("gamma", gamma, 1.0, 1.0)
        _check_range("lam", lam, 1.0, 0.95)
        _check_range("kl_in_reward", kl_in_reward, math.inf, 0.001)
        if kl_in_reward_estimator not in get_args(RewardKLEstimator):
            raise ValueError(
                f"kl_in_reward_estimator={kl_in_reward_estimator!r} is unknown; use one of "
                f"{', '.join(get_args(RewardKLEstimator))}."
            )
        require_at_least("critic_warmup_updates", critic_warmup_updates, 0, 10)
        require_at_least("critic_max_tokens_per_micro_batch", critic_max_tokens_per_micro_batch, 1, 8192)
        self.critic_config = _critic_config(critic, policy)
        self.critic_loss = critic_loss
        self.gamma = gamma
        self.lam = lam
        self.whiten_advantages = whiten_advantages
        self.kl_in_reward = kl_in_reward
        self.kl_in_reward_estimator: RewardKLEstimator = kl_in_reward_estimator
        needed = kl_in_reward > 0 or bool(getattr(loss, "needs_reference", False))
        self.reference_config = find_reference(reference, policy, rollout, needed=needed)
        self.critic_optimizer = critic_optimizer
        self.critic_lr_scheduler = critic_lr_scheduler
        self.critic_warmup_updates = critic_warmup_updates
        self.critic_max_tokens_per_micro_batch = critic_max_tokens_per_micro_batch
        # GAE stands in for the estimator; and an export of the critic needs to know what it is.
        self.hparams.pop("advantage", None)
        self.save_plain_hyperparameters(**arguments)
        self.hparams["critic"] = plain(self.critic_config)

    # --------------------------------------------------------------------------------- models and optimizers

    @override
    def build_models(self, engine: Engine) -> None:
        super().build_models(engine)
        self.critic = engine.build_model(self.critic_config)

    @override
    def readers(self) -> list[tuple[TokenModel, int | None]]:
        budget = self.critic_max_tokens_per_micro_batch or self.max_tokens_per_micro_batch
        return [*super().readers(), (self.critic, budget)]

    @override
    def build_optimizers(self) -> tuple[list[Optimizer], list[LRSchedulerTypeUnion]]:
        optimizers, schedulers = super().build_optimizers()
        optimizer, scheduler = build_optimizer(
            self.critic, self.critic_optimizer, self.critic_lr_scheduler, argument="critic_lr_scheduler"
        )
        return [*optimizers, optimizer], [*schedulers, *([] if scheduler is None else [scheduler])]

    @property
    @override
    def optimizer_steps_per_batch(self) -> int:
        return 2 * super().optimizer_steps_per_batch

    @override
    def count_optimizer_steps(self) -> list[int | None]:
        each = super().optimizer_steps_per_batch
        alone = self.critic_warmup_updates * each

        def of_critic(steps: int) -> int:
            return min(steps, alone) + math.ceil(max(0, steps - alone) / 2)

        critic = total_optimizer_steps(self.trainer, each, of_critic)
        return [None if critic is None else max(0, critic - alone), critic]

    # ------------------------------------------------------------------------------------------------ update

    @override
    def columns_for_advantages(self, experience: Experience) -> tuple[str, ...]:
        return () if "advantages" in experience else ("rewards",)

    @override
    def prepare(self, experience: Experience, columns: GlobalColumns, tally: Tally) -> Experience:
        """Add log-probabilities, values, advantages and returns. Collective over the world."""
        if ("advantages" in experience) != ("returns" in experience):
            # All ranks have the same columns.
            raise ValueError(
                f"The experience has the columns {experience.column_names}: of 'advantages' and 'returns' only one. "
                "Give both, or neither, for GAE to compute them from 'rewards'."
            )
        experience = self.add_log_probs(experience, tally)
        if "values" not in experience:
            found = self.infer(
                self.critic, experience, max_tokens_per_micro_batch=self.critic_max_tokens_per_micro_batch
            )
            experience = experience.with_token_columns(values=found["values"])
        if "advantages" in experience:
            return self.add_advantages(experience, columns, tally)
        return self.add_gae(experience, tally)

    def add_gae(self, experience: Experience, tally: Tally) -> Experience:
        """Add ``advantages`` and ``returns`` from rewards and values. Collective over the data group.

        Args:
            experience: This data rank's documents, with ``rewards`` per document, ``values``, and with
                ``kl_in_reward`` log-probabilities of policy and reference.
            tally: Moments of the advantages before whitening are added to it.
        """
        mask = experience.response_mask_host
        advantages, returns = gae(
            self.token_rewards(experience, tally),
            experience["values"],
            experience.lengths,
            mask,
            gamma=self.gamma,
            lam=self.lam,
        )
        tally.add_tokens("advantage_mean", advantages, mask)
        tally.add_tokens("advantage_abs", advantages.abs(), mask)
        if self.whiten_advantages:
            advantages = whiten(advantages, mask, self._gather)
        return experience.with_token_columns(advantages=advantages, returns=returns)

    def token_rewards(self, experience: Experience, tally: Tally) -> Tensor:
        """Return the reward of each token: that of the document on its last response token, minus the KL penalty.

        Args:
            experience: This data rank's documents.
            tally: The KL is added to it.

        Returns:
            ``[num_tokens]`` fp32 on the host, zero outside the response.
        """
        mask = experience.response_mask_host
        rewards = outcome_rewards(experience["rewards"], experience.lengths, mask)
        if self.kl_in_reward == 0:
            return rewards
        missing = [name for name in ("old_log_probs", "ref_log_probs") if name not in experience]
        if missing:
            raise ValueError(
                f"kl_in_reward={self.kl_in_reward} needs the column {missing[0]!r}, which the experience lacks; use "
                "reference='auto' and recompute_old_log_probs=True, or kl_in_reward=0."
            )
        penalty = kl_penalty_rewards(
            experience["old_log_probs"],
            experience["ref_log_probs"],
            mask,
            coef=1.0,
            estimator=self.kl_in_reward_estimator,
        )
        tally.add_tokens("reward_kl", -penalty, mask)
        return rewards + self.kl_in_reward * penalty

    @override
    def update(self, experience: Experience, columns: GlobalColumns) -> dict[str, float]:
        """Take the steps of the critic and, after its warm-up, of the policy. Collective over the world."""
        row = {f"critic/{name}": value for name, value in self.update_critic(experience, columns).items()}
        if self.updates < self.critic_warmup_updates:
            return row
        return {**super().update(experience, columns), **row}

    def update_critic(self, experience: Experience, columns: GlobalColumns) -> dict[str, float]:
        """Take the critic's optimizer steps of one update. Collective over the world.

        Returns:
            The metrics of the steps as one row, with ``explained_variance`` of the values before them.
        """
        optimizer, scheduler = self.optimizer_and_scheduler(1)
        with self.engine.train_mode(self.critic, optimizer):
            steps = [
                self.optimize(
                    self.critic,
                    optimizer,
                    part,
                    self.critic_loss,
                    scheduler=scheduler,
                    max_tokens_per_micro_batch=self.critic_max_tokens_per_micro_batch,
                )
                for part in self.parts(experience, columns)
            ]
        return {**combine_steps(steps), **self._explained_variance(experience)}

    def _explained_variance(self, experience: Experience) -> dict[str, float]:
        mask, returns = experience.response_mask_host, experience["returns"].double()
        total = global_moments(returns, mask, self._gather).variance
        rest = global_moments(returns - experience["values"], mask, self._gather).variance
        return {"explained_variance": 1.0 - rest / total} if total > 0 else {}

    def _gather(self, item: Any) -> list[Any]:
        return self.engine.all_gather_objects(item, "data")


def _critic_config(critic: ModelConfig | None, policy: ModelConfig) -> ModelConfig:
    if critic is None:
        if policy.adapter is not None:
            raise ValueError(
                f"critic=None would start from the adapter of the policy, {policy.adapter!r}, which is one of a "
                "language model; use critic=ModelConfig(path=..., head='value', lora=...)."
            )
        lora = policy.lora
        if isinstance(lora, LoraConfig):
            lora = {name: value for name, value in lora_to_dict(lora).items() if name != "task_type"}
        # Names of parameters that are frozen need not exist in the critic.
        return replace(policy, head="value", freeze=(), lora=lora)
    if critic.head != "value":
        raise ValueError(
            f"critic=ModelConfig(head={critic.head!r}) gives no values; use ModelConfig(path=..., head='value')."
        )
    return critic


def _check_range(name: str, value: float, most: float, example: float) -> None:
    if not 0 <= value <= most or math.isinf(value):
        upper = f" and at most {most}" if math.isfinite(most) else ""
        raise ValueError(f"{name}={value} must be at least 0{upper}, for instance {example}.")
