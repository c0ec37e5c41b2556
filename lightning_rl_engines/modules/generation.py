"""Modules with a rollout engine: keeping its weights fresh, generating, scoring, validation and prediction."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_rl_engines.data.base import ShardedDataModule
from lightning_rl_engines.data.rewards import Reward, RewardFunction
from lightning_rl_engines.models.config import ModelConfig
from lightning_rl_engines.models.token_model import TokenModel
from lightning_rl_engines.modules.base import RLModule
from lightning_rl_engines.modules.metrics import Tally
from lightning_rl_engines.modules.samples import Samples, Scores, raise_on_all_ranks, sample_rows, score
from lightning_rl_engines.modules.tokenizer import load_tokenizer, require_tokenizer
from lightning_rl_engines.rollout.base import Generation, Prompt, RolloutEngine, RolloutStrategy
from lightning_rl_engines.sequence.experience import Experience
from lightning_rl_engines.strategies.engine import Engine, WeightsMode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_LAST_SAMPLES = 32
"""Rows that ``last_samples`` keeps of one validation."""

SUSPICIOUS_GAP = 0.1
"""Mean absolute difference of sampler's and trainer's log-probabilities, in nats, that rounding does not explain."""


class GenerationModule(RLModule):
    """A module whose policy generates responses through a rollout engine that it owns and keeps up to date.

    Attributes:
        policy: The built policy, from ``configure_model`` on.
        last_samples: Greedy responses of the last validation on this rank, one dictionary each with ``prompt``,
            ``response``, ``tokens``, ``finish_reason``, ``reward`` and ``reward_<name>``.

    Args:
        policy: What to train.
        rollout: Where responses come from.
        reward: Reward functions by name, or one function.
        **options: Arguments of :class:`RLModule`.
    """

    policy: TokenModel

    def __init__(
        self,
        *,
        policy: ModelConfig,
        rollout: RolloutEngine | None,
        reward: dict[str, Reward] | RewardFunction | None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not isinstance(policy, ModelConfig):
            raise TypeError(f"policy={policy!r} is no ModelConfig; use ModelConfig(path={policy!r}).")
        self.policy_config = policy
        self.rollout = rollout
        self.rewards = _named_rewards(reward)
        self.last_samples: list[dict[str, Any]] = []
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._rollout_engine: Engine | None = None
        self._rollout_stale = True
        self._suspected = False
        self._evaluated: dict[Any, tuple[float | None, dict[str, float | None], int]] = {}

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The policy's tokenizer, loaded on first use.

        Raises:
            ValueError: The policy names none.
        """
        if self._tokenizer is None:
            self._tokenizer = require_tokenizer(self.policy_config)
        return self._tokenizer

    # ------------------------------------------------------------------------------------------------ rollout

    @override
    def setup(self, stage: str) -> None:
        """Take the rollout's weights for stale: a checkpoint may be loaded before the stage begins."""
        self._rollout_stale = True

    def sync_rollout(self) -> None:
        """Stream the policy's weights into the rollout, unless it has them already. Collective over the world."""
        if self.rollout is None:
            return
        engine = self.engine
        if self._rollout_engine is not engine:
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(self.policy_config)
            self.rollout.setup(cast(RolloutStrategy, engine), self.policy_config, self._tokenizer)
            self._rollout_engine, self._rollout_stale = engine, True
        if self._rollout_stale:
            mode: WeightsMode = "full" if self.policy.adapter is None else "merged"
            self.rollout.update_weights(engine.get_per_tensor_param(self.policy, mode=mode))
            self._rollout_stale = False

    @override
    def on_train_start(self) -> None:
        """Give the rollout the weights that training starts from, and all prompts to look at."""
        super().on_train_start()
        for model, budget in self.readers():
            self.check_data(model, budget)
        self.sync_rollout()
        data = getattr(self.trainer, "datamodule", None)
        if self.rollout is not None and isinstance(data, ShardedDataModule):
            for split in ("train", "val"):
                prompts = [item for items in data.items(split) for item in items if isinstance(item, Prompt)]
                self.rollout.check_prompts(prompts)
                if split == "train":
                    self._check_room(prompts)

    def readers(self) -> list[tuple[TokenModel, int | None]]:
        """Return the models that read the documents of an update, and the most tokens of their rows."""
        return [(self.policy, self.max_tokens_per_micro_batch)]

    def _check_room(self, prompts: Sequence[Prompt]) -> None:
        """Refuse a budget that a response of the greatest length would exceed, as one will after hours.

        Raises:
            ValueError: On all ranks.
        """
        new = getattr(self.rollout, "max_new_tokens", None)  # a user's engine may have no limit
        if new is None or not prompts:
            return
        longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
        needed = len(longest.token_ids) + new
        for _, budget in self.readers():
            capacity = self.engine.row_capacity(budget)
            if capacity is not None and needed > capacity:
                raise ValueError(
                    f"prompt {longest.index} has {len(longest.token_ids)} tokens and may get max_new_tokens={new} "
                    f"more, and max_tokens_per_micro_batch={budget} allows {capacity} in a row; raise it to at least "
                    f"{needed}, or set a smaller max_new_tokens, or max_prompt_length in the data module."
                )

    def watch_rollout(self, metrics: Mapping[str, float]) -> None:
        """Warn, once, if responses come from other weights or another temperature than the policy's.

        Args:
            metrics: Of an update; ``rollout_log_prob_gap`` is read.
        """
        gap = metrics.get("rollout_log_prob_gap", 0.0)
        if self.rollout is None or self._suspected or not gap > SUSPICIOUS_GAP:
            return
        self._suspected = True
        rank_zero_warn(
            f"Log-probabilities of {type(self.rollout).__name__} differ from the trainer's by {gap:.2f} nats per token "
            f"on average, more than rounding explains (up to {SUSPICIOUS_GAP}): it samples from other weights, at "
            "another temperature, or from another model. Training goes on, and is biased; RolloutCorrection corrects "
            "for what cannot be helped."
        )

    def require_rollout(self) -> RolloutEngine:
        """Return the rollout engine.

        Raises:
            ValueError: There is none.
        """
        if self.rollout is None:
            raise ValueError(
                f"{type(self).__name__}(rollout=None) cannot generate; give one, such as HFRollout(num_generations=8), "
                "or pass ready experiences as batches."
            )
        return self.rollout

    def require_rewards(self) -> dict[str, Reward]:
        """Return the rewards.

        Raises:
            ValueError: There is none.
        """
        if self.rewards is None:
            raise ValueError(
                f"{type(self).__name__}(reward=None) cannot score responses; give one, such as "
                "reward={'exact': Reward(exact_match)}."
            )
        return self.rewards

    def sample(self, prompts: Sequence[Prompt], *, greedy: bool = False, num_generations: int | None = None) -> Samples:
        """Generate responses to this data rank's prompts. Collective over the world.

        What fails on one rank, such as a prompt that is too long, is raised on all of them.
        """
        failure: Exception | None = None
        generations: list[list[Generation]] = []
        try:
            if strange := [type(item).__name__ for item in prompts if not isinstance(item, Prompt)]:
                raise TypeError(
                    f"a batch holds {strange[0]} instead of Prompt; use PromptDataModule, or a loader of "
                    "Prompt(token_ids=[...], columns={...})."
                )
            generations = self.require_rollout().generate(prompts, greedy=greedy, num_generations=num_generations)
        except Exception as error:
            failure = error
        raise_on_all_ranks(self.engine, failure, "Generation")
        return Samples.flatten(prompts, generations)

    def generate(self, prompts: Sequence[str | Prompt], *, greedy: bool = True) -> list[str]:
        """Return one response to each prompt, with the current weights: for notebooks and debugging.

        Collective over the world: call it on every rank, with the same prompts on the ranks of one row.

        Args:
            prompts: Texts, tokenized as they are (no chat template), or prompts of the data module.
            greedy: Take the most probable tokens instead of sampling.
        """
        self.sync_rollout()
        encoded = [
            Prompt(token_ids=list(self.tokenizer(prompt)["input_ids"]), index=index, text=prompt)
            if isinstance(prompt, str)
            else prompt
            for index, prompt in enumerate(prompts)
        ]
        samples = self.sample(encoded, greedy=greedy, num_generations=1)
        return [generation.text for generation in samples.generations]

    # --------------------------------------------------------------------------------------------- evaluation

    @override
    def on_validation_epoch_start(self) -> None:
        self._start_evaluation()

    @override
    def validation_step(self, batch: list[Prompt], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Answer held-out prompts greedily and score the answers."""
        self._evaluate(batch, dataloader_idx)

    @override
    def on_validation_epoch_end(self) -> None:
        self._finish_evaluation("val")

    @override
    def on_test_epoch_start(self) -> None:
        self._start_evaluation()

    @override
    def test_step(self, batch: list[Prompt], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Answer test prompts greedily and score the answers."""
        self._evaluate(batch, dataloader_idx)

    @override
    def on_test_epoch_end(self) -> None:
        self._finish_evaluation("test")

    def _start_evaluation(self) -> None:
        self.sync_rollout()
        self.last_samples = []
        self._evaluated = {}

    def _evaluate(self, batch: list[Prompt], dataloader_idx: int) -> None:
        if isinstance(batch, Experience):
            raise ValueError(
                f"{type(self).__name__} evaluates on prompts, and the batch is an Experience; use PromptDataModule for "
                "validation, or leave the validation data out."
            )
        samples = self.sample(batch, greedy=True, num_generations=1)
        scores = None if self.rewards is None else score(self.engine, self.rewards, samples)
        for index, (prompt, generation) in enumerate(zip(samples.prompts, samples.generations, strict=True)):
            key = (dataloader_idx, prompt.index, tuple(prompt.token_ids))
            total, named = _score_of(scores, index)
            self._evaluated[key] = (total, named, len(generation.token_ids))
        room = MAX_LAST_SAMPLES - len(self.last_samples)
        self.last_samples += sample_rows(samples, scores)[:room]

    def _finish_evaluation(self, prefix: str) -> None:
        # Samplers repeat prompts to give each rank equally many: the key of a prompt counts it once.
        joint: dict[Any, tuple[float | None, dict[str, float | None], int]] = {}
        for item in self.engine.all_gather_objects(self._evaluated, "data"):
            joint |= item
        self._evaluated = {}
        tally = Tally()
        for total, named, length in joint.values():
            tally.add("response_length", [length])
            tally.add("reward", [] if total is None else [total])
            for name, value in named.items():
                tally.add(f"reward_{name}", [] if value is None else [value])
        if not joint:
            rank_zero_warn(f"No prompt was evaluated, so {prefix}/reward is not logged.")
        for name, value in Tally.means([tally]).items():
            self.log_validation(f"{prefix}/{name}", value, batch_size=max(1, len(joint)))

    # --------------------------------------------------------------------------------------------- prediction

    @override
    def on_predict_epoch_start(self) -> None:
        self.sync_rollout()

    @override
    def predict_step(
        self, batch: list[Prompt] | Experience, batch_idx: int, dataloader_idx: int = 0
    ) -> list[dict[str, Any]]:
        """Return the greedy responses to prompts with their log-probabilities, or those of recorded responses.

        Returns:
            For each prompt ``index``, ``prompt``, ``response``, ``token_ids``, ``log_probs`` (the sampler's, one per
            response token), ``finish_reason`` and the further columns of the prompt as ``columns``. For each document
            of an experience ``index``, ``token_ids`` and ``log_probs`` of its response tokens under the policy.
        """
        if isinstance(batch, Experience):
            return self._predict_log_probs(batch)
        samples = self.sample(batch, greedy=True, num_generations=1)
        return [
            {
                "index": prompt.index,
                "prompt": prompt.text,
                "response": generation.text,
                "token_ids": list(generation.token_ids),
                "log_probs": list(generation.log_probs),
                "finish_reason": generation.finish_reason,
                "columns": dict(prompt.columns),
            }
            for prompt, generation in zip(samples.prompts, samples.generations, strict=True)
        ]

    def _predict_log_probs(self, experience: Experience) -> list[dict[str, Any]]:
        with self.engine.eval_mode(self.policy):
            output = self.engine.infer_batch(
                self.policy,
                experience,
                temperature="temperature" if "temperature" in experience else 1.0,
                max_tokens_per_micro_batch=self.max_tokens_per_micro_batch,
                balance=self.balance,
            )
        scored = experience.to("cpu").with_token_columns(log_probs=output.columns["log_probs"])
        columns = (scored.documents(name) for name in ("input_ids", "response_mask", "log_probs"))
        return [
            {"index": index, "token_ids": ids[mask].tolist(), "log_probs": log_probs[mask].tolist()}
            for index, (ids, mask, log_probs) in enumerate(zip(*columns, strict=True))
        ]

    # -------------------------------------------------------------------------------------------- checkpoints

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.rollout is not None:
            checkpoint[self.checkpoint_key]["rollout"] = self.rollout.state_dict()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._rollout_stale = True
        state = checkpoint.get(self.checkpoint_key, {})
        if self.rollout is not None and "rollout" in state:
            self.rollout.load_state_dict(state["rollout"])


def _named_rewards(reward: dict[str, Reward] | RewardFunction | None) -> dict[str, Reward] | None:
    if reward is None:
        return None
    if isinstance(reward, dict):
        if not reward:
            raise ValueError("reward={} is empty; give one function, or None when batches are experiences.")
        return dict(reward)
    if isinstance(reward, Reward):
        return {"reward": reward}
    return {"reward": Reward(function=reward)}


def _score_of(scores: Scores | None, index: int) -> tuple[float | None, dict[str, float | None]]:
    if scores is None:
        return None, {}
    return scores.total[index], {name: values[index] for name, values in scores.named.items()}
