"""Critic-free policy optimization: GRPO and its kin."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import LRSchedulerTypeUnion
from torch import Tensor
from torch.optim import AdamW, Optimizer
from typing_extensions import override

from lightning_rl_engines.algorithms import Advantage, GRPOAdvantage, PolicyLoss, PolicyLossBase
from lightning_rl_engines.algorithms.corrections import RolloutCorrection
from lightning_rl_engines.algorithms.kl import kl_k3
from lightning_rl_engines.data.rewards import Reward, RewardFunction
from lightning_rl_engines.models.config import ModelConfig
from lightning_rl_engines.models.token_model import TokenModel
from lightning_rl_engines.modules.base import require_at_least
from lightning_rl_engines.modules.correction import correct, require_two_policies
from lightning_rl_engines.modules.generation import GenerationModule
from lightning_rl_engines.modules.metrics import Tally, combine_steps
from lightning_rl_engines.modules.optimization import build_optimizer
from lightning_rl_engines.modules.reference import find_reference, reference_model
from lightning_rl_engines.modules.samples import build_experience, score, shared_temperature
from lightning_rl_engines.modules.selection import GlobalColumns, SkippedBatches, gather_columns, select_mask
from lightning_rl_engines.rollout.base import Prompt, RolloutEngine
from lightning_rl_engines.sequence.experience import Experience
from lightning_rl_engines.strategies.engine import Engine

PolicyBatch: TypeAlias = list[Prompt] | Experience
"""What a training step takes: prompts of this data rank, or its documents."""


@dataclass
class _Collected:
    """What was sampled for one update so far: over several batches with dynamic sampling."""

    tally: Tally = field(default_factory=Tally)
    experience: Experience | None = None
    target: int = 0
    rounds: int = 0
    started: float = field(default_factory=time.perf_counter)

    def add(self, experience: Experience) -> Experience:
        """Append the documents of one more batch and return all."""
        self.rounds += 1
        self.experience = experience if self.experience is None else Experience.cat([self.experience, experience])
        return self.experience


class PolicyModule(GenerationModule):
    """Trains a policy on responses to prompts, or on ready experiences, without a critic.

    One update: prompts -> responses -> rewards -> advantages over the global batch -> old (and reference)
    log-probabilities -> ``update_epochs`` x ``mini_batches`` optimizer steps -> new weights in the rollout.

    A batch is a list of prompts, or an :class:`Experience` of this data rank's documents. An experience has
    ``rewards`` and ``group_ids`` (equal for the responses to one prompt, which may lie on several ranks) or ready
    ``advantages``; ``rollout_log_probs``, ``old_log_probs``, ``ref_log_probs`` and ``temperature`` are used where it
    has them.

    Metrics, each over the global batch: ``train/reward``, ``train/reward_<name>``, ``train/loss`` and the metrics of
    the loss (means over the optimizer steps of the update), ``train/entropy``, ``train/advantage_mean``,
    ``train/advantage_abs``, ``train/response_length``, ``train/truncated``, ``train/groups_without_signal``,
    ``train/rollout_log_prob_gap`` (mean absolute difference of trainer and sampler; a large one is warned about),
    ``train/rollout_kl`` (k3 of sampler against trainer), ``train/grad_norm``, ``train/lr``, ``train/skipped_steps``,
    ``train/tokens_per_second``.

    Args:
        policy: What to train.
        rollout: Where responses come from; ``None`` when batches are experiences.
        reward: Reward functions by name, or one function.
        loss: A policy loss, or any ``loss_fn(outputs, micro_batch) -> LossOutput``.
        advantage: An estimator, or any ``(rewards [N], group_ids [N], response_lengths [N]) -> advantages [N]``, which
            sees the documents of all ranks.
        reference: ``"auto"`` builds a frozen copy of the policy when the loss needs one, under LoRA it is the policy
            without its adapter; a configuration builds that model; ``None`` builds none.
        optimizer: Called with the trainable parameters.
        lr_scheduler: Called with the optimizer; stepped once per optimizer step.
        max_tokens_per_micro_batch: The most tokens in a row, over all ranks that share it; ``None`` packs all documents
            of a data rank into one row.
        mini_batches: Parts that each data rank's documents are split into; one optimizer step each.
        update_epochs: Passes over the experience per update.
        max_grad_norm: Global gradient norm to clip to; ``None`` does not clip.
        temperature: What logits are divided by; ``None`` takes the rollout's.
        filter_zero_variance: Drop groups whose rewards are all equal. They have no advantages, but kept they count in
            the denominators and KL and entropy terms act on them.
        dynamic_sampling: DAPO's: drop those groups and go on with further batches until as many groups as a first batch
            holds have different rewards; only then update.
        max_sampling_rounds: Update with what there is after this many batches.
        mask_truncated: Take responses that hit the length limit out of the loss; their rewards still count.
        recompute_old_log_probs: Compute ``old_log_probs`` with the policy before the update. ``False`` takes the
            sampler's for them, which saves a pass and leaves the gap between the two in the ratio.
        correction: Correction of the gap between sampler and trainer, applied once per update, after the advantages.
        balance: Let documents change their data rank for a pass where that balances the load.
        max_skipped_steps: Raise when more than this many optimizer steps in a row had a non-finite gradient.
        seed: Seed of the shuffling into mini-batches.

    Raises:
        ValueError: An argument is out of range, or contradicts another.
    """

    reference: TokenModel | None

    def __init__(
        self,
        *,
        policy: ModelConfig,
        rollout: RolloutEngine | None = None,
        reward: dict[str, Reward] | RewardFunction | None = None,
        loss: PolicyLossBase | Callable = PolicyLoss(),  # noqa: B008
        advantage: Advantage | Callable = GRPOAdvantage(),  # noqa: B008
        reference: Literal["auto"] | ModelConfig | None = "auto",
        optimizer: OptimizerCallable = lambda parameters: AdamW(parameters, lr=1e-6, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | None = None,
        max_tokens_per_micro_batch: int | None = None,
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
        super().__init__(
            policy=policy,
            rollout=rollout,
            reward=reward,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            max_grad_norm=max_grad_norm,
            balance=balance,
            max_skipped_steps=max_skipped_steps,
        )
        for name, value in (
            ("mini_batches", mini_batches),
            ("update_epochs", update_epochs),
            ("max_sampling_rounds", max_sampling_rounds),
        ):
            require_at_least(name, value, 1, 1)
        self.loss = loss
        if getattr(advantage, "needs_groups", False) and getattr(rollout, "num_generations", 2) == 1:
            raise ValueError(
                f"num_generations=1 with {type(advantage).__name__} gives every response an advantage of 0; sample 2 "
                "or more responses to a prompt, or use ReinforcePlusPlusAdvantage()."
            )
        self.advantage = advantage
        needed = bool(getattr(loss, "needs_reference", False))
        self.reference_config = find_reference(reference, policy, rollout, needed=needed)
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.mini_batches = mini_batches
        self.update_epochs = update_epochs
        self.temperature = shared_temperature(temperature, rollout)
        self.filter_zero_variance = filter_zero_variance
        self.dynamic_sampling = dynamic_sampling
        self.max_sampling_rounds = max_sampling_rounds
        self.mask_truncated = mask_truncated
        self.recompute_old_log_probs = recompute_old_log_probs
        require_two_policies(correction, recompute_old_log_probs)
        self.correction = correction
        self.seed = seed
        self._collected: _Collected | None = None
        self._skipped = SkippedBatches()
        self._prompts_seen = 0
        self.save_plain_hyperparameters(**arguments)

    # --------------------------------------------------------------------------------- models and optimizers

    @override
    def build_models(self, engine: Engine) -> None:
        self.policy = engine.build_model(self.policy_config)
        self.reference = None
        if isinstance(self.reference_config, ModelConfig):
            self.reference = engine.build_model(self.reference_config, trainable=False)

    @property
    @override
    def optimizer_steps_per_batch(self) -> int:
        return self.mini_batches * self.update_epochs

    @override
    def build_optimizers(self) -> tuple[list[Optimizer], list[LRSchedulerTypeUnion]]:
        optimizer, scheduler = build_optimizer(self.policy, self.optimizer, self.lr_scheduler)
        return [optimizer], [] if scheduler is None else [scheduler]

    # ------------------------------------------------------------------------------------------------ update

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        # An earlier fit may have ended in the middle of dynamic sampling, on older weights.
        self._collected = None

    @override
    def training_step(self, batch: PolicyBatch, batch_idx: int) -> None:
        """Run one update, or with dynamic sampling one round towards it. Collective over the world."""
        if self._collected is None:
            self._collected = _Collected()
        collected = self._collected
        experience = collected.add(self.collect(batch, collected.tally))
        selected = self._select(experience, collected)
        if selected is None:
            return
        self._collected = None
        experience, columns = selected
        if sum(columns.counts) == 0:
            self._skipped.add()
            return
        self._skipped.clear()
        tally = collected.tally
        experience = correct(self.engine, self.correction, self.prepare(experience, columns, tally), tally)
        steps = self.update(experience, columns)
        metrics = {**self._means(tally), **steps}
        self.watch_rollout(metrics)
        metrics["tokens_per_second"] = self.tokens_per_second(experience, collected.started)
        if self.dynamic_sampling:
            metrics["sampling_rounds"] = float(collected.rounds)
        self.finish_update({f"train/{name}": value for name, value in metrics.items()}, batch_size=len(experience))
        self.sync_rollout()

    def collect(self, batch: PolicyBatch, tally: Tally) -> Experience:
        """Turn a batch into scored documents. Collective over the world.

        Args:
            batch: Prompts of this data rank, or its documents.
            tally: Rewards and response lengths are added to it.

        Returns:
            This data rank's documents, with a column ``temperature``.
        """
        if isinstance(batch, Experience):
            if self.dynamic_sampling:
                raise ValueError(
                    "dynamic_sampling=True samples further prompts, but the batch is an Experience; use "
                    "filter_zero_variance=True to drop groups without a signal."
                )
            experience = batch.to("cpu")
            if "rewards" in experience.document_columns:
                tally.add("reward", experience["rewards"].tolist())
            tally.add("response_length", experience.response_lengths)
            if "temperature" not in experience:
                experience = experience.with_columns(temperature=[self.temperature] * len(experience))
            return experience
        rewards = self.require_rewards()
        samples = self.sample(batch)
        scores = score(self.engine, rewards, samples)
        tally.add("reward", scores.total)
        for name, values in scores.named.items():
            tally.add(f"reward_{name}", [value for value in values if value is not None])
        tally.add("response_length", [len(generation.token_ids) for generation in samples.generations])
        tally.add("truncated", [generation.finish_reason == "length" for generation in samples.generations])
        # Unique over the run and over data ranks, without communication.
        first, size = self._prompts_seen, self.engine.data_parallel_size
        self._prompts_seen += len(batch)
        return build_experience(
            samples,
            scores.total,
            [(first + group) * size + self.engine.data_parallel_rank for group in samples.groups],
            temperature=self.temperature,
            mask_truncated=self.mask_truncated,
        )

    def _select(self, experience: Experience, collected: _Collected) -> tuple[Experience, GlobalColumns] | None:
        """Return the documents to train on with the columns of all ranks, or ``None`` to sample on."""
        filtered = self.filter_zero_variance or self.dynamic_sampling
        needed = ("rewards", "group_ids") if filtered else self.columns_for_advantages(experience)
        columns = gather_columns(self.engine, experience, needed)
        if "group_ids" in needed and collected.rounds == 1:
            collected.target = columns.num_groups
            signal = columns.signal()
            groups = columns.keep(signal).num_groups
            if columns.num_groups:
                collected.tally.add("groups_without_signal", [1 - groups / columns.num_groups])
        if not filtered:
            return experience, columns
        mask = columns.signal(limit=collected.target if self.dynamic_sampling else None)
        kept, selection = columns.keep(mask), select_mask(experience, columns.own(mask))
        short = self.dynamic_sampling and kept.num_groups < collected.target
        if short and collected.rounds < self.max_sampling_rounds:
            collected.experience = selection
            return None
        return selection, kept

    def columns_for_advantages(self, experience: Experience) -> tuple[str, ...]:
        """Return the per-document columns that advantages are computed from; none where the experience has them."""
        return () if "advantages" in experience else ("rewards", "group_ids")

    def prepare(self, experience: Experience, columns: GlobalColumns, tally: Tally) -> Experience:
        """Add the columns that the optimizer steps need. Collective over the world."""
        return self.add_log_probs(self.add_advantages(experience, columns, tally), tally)

    def add_advantages(self, experience: Experience, columns: GlobalColumns, tally: Tally) -> Experience:
        """Add the column ``advantages`` unless it is there, from the rewards of all ranks. No communication."""
        if "advantages" not in experience:
            values = columns.require(self.advantage(columns.rewards, columns.group_ids, columns.response_lengths))
            experience = experience.with_document_columns(advantages=columns.own(values).float())
        advantages = experience["advantages"]
        if "advantages" in experience.token_columns:
            advantages = advantages[experience.response_mask_host]
        tally.add("advantage_mean", advantages.tolist())
        tally.add("advantage_abs", advantages.abs().tolist())
        return experience

    def add_log_probs(self, experience: Experience, tally: Tally) -> Experience:
        """Add ``old_log_probs``, and ``ref_log_probs`` where there is a reference. Collective over the world."""
        mask = experience.response_mask_host
        if "old_log_probs" not in experience:
            if self.recompute_old_log_probs:
                columns = self.infer(self.policy, experience, calculate_entropy=True)
                experience = experience.with_token_columns(old_log_probs=columns["log_probs"])
                tally.add_tokens("entropy", columns["entropy"], mask)
                if "rollout_log_probs" in experience:
                    sampler, trainer = experience["rollout_log_probs"], columns["log_probs"]
                    tally.add_tokens("rollout_log_prob_gap", (sampler - trainer).abs(), mask)
                    tally.add_tokens("rollout_kl", kl_k3(sampler, trainer), mask)
            elif "rollout_log_probs" in experience:
                experience = experience.with_token_columns(old_log_probs=experience["rollout_log_probs"])
        if self.reference_config is not None and "ref_log_probs" not in experience:
            with reference_model(self.engine, self.policy, self.reference) as model:
                columns = self.infer(model, experience)
            experience = experience.with_token_columns(ref_log_probs=columns["log_probs"])
        return experience

    def infer(
        self,
        model: TokenModel,
        experience: Experience,
        *,
        calculate_entropy: bool = False,
        max_tokens_per_micro_batch: int | None = None,
    ) -> dict[str, Tensor]:
        """Return a model's per-token columns, without gradients. Collective over the world.

        Args:
            model: The model.
            experience: This data rank's documents, with a column ``temperature``.
            calculate_entropy: Compute entropies.
            max_tokens_per_micro_batch: The most tokens in a row; ``None`` takes the module's.
        """
        with self.engine.eval_mode(model):
            output = self.engine.infer_batch(
                model,
                experience,
                calculate_entropy=calculate_entropy,
                temperature="temperature",
                max_tokens_per_micro_batch=max_tokens_per_micro_batch or self.max_tokens_per_micro_batch,
                balance=self.balance,
            )
        return output.columns

    def update(self, experience: Experience, columns: GlobalColumns) -> dict[str, float]:
        """Take the optimizer steps of one update. Collective over the world.

        Returns:
            The metrics of the steps as one row.
        """
        optimizer, scheduler = self.optimizer_and_scheduler()
        self._rollout_stale = True
        with self.engine.train_mode(self.policy, optimizer):
            steps = [
                self.optimize(
                    self.policy,
                    optimizer,
                    part,
                    self.loss,
                    scheduler=scheduler,
                    temperature="temperature",
                    calculate_entropy=bool(getattr(self.loss, "needs_entropy", False)),
                )
                for part in self.parts(experience, columns)
            ]
        return combine_steps(steps)

    def parts(self, experience: Experience, columns: GlobalColumns) -> Iterator[Experience]:
        """Yield what each optimizer step of an update works on: ``update_epochs`` times ``mini_batches`` parts."""
        # No rank has a document left for further parts, and a step without any document is none.
        count = min(self.mini_batches, max(columns.counts))
        for epoch in range(self.update_epochs):
            yield from experience.mini_batches(count, self._shuffle(epoch) if count > 1 else None)

    def _shuffle(self, epoch: int) -> torch.Generator:
        # The same on the ranks of one row, another one in each pass, and the same again in a resumed run.
        passes = self.updates * self.update_epochs + epoch
        return torch.Generator().manual_seed(self.seed * 1_000_003 + passes)

    def _means(self, tally: Tally) -> dict[str, float]:
        return Tally.means(self.engine.all_gather_objects(tally, "data"))
