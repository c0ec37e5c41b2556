"""What a rollout engine is: prompts in, sampled responses out, weights from outside."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightning_rl_engines.models.config import ModelConfig


@dataclass(kw_only=True)
class Prompt:
    """One prompt of the data set.

    Args:
        token_ids: What the model reads, at least one token.
        columns: The further columns of the data set; rewards receive them by name.
        index: Position in the data set, the same on every rank and in every epoch; errors name it.
        text: What the model reads as text, chat template included; empty when the data holds token ids only.
    """

    token_ids: list[int]
    columns: dict[str, Any] = field(default_factory=dict)
    index: int = 0
    text: str = ""


@dataclass(kw_only=True)
class Generation:
    """One sampled response.

    Args:
        token_ids: The response, including the token that ended it.
        log_probs: One per token: the log-probability of the token in ``softmax(logits / temperature)`` over the whole
            vocabulary. Truncation by top-k or top-p is not part of it, so that the trainer can compute the same number.
        finish_reason: ``"stop"`` at an end token or a stop string, ``"length"`` when the limit was reached.
        text: The response as text, without special tokens.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: Literal["stop", "length"]
    text: str = ""


class RolloutStrategy(Protocol):
    """What a rollout engine needs from a strategy; both engines of this package offer it."""

    @property
    def root_device(self) -> torch.device:
        """Device of this rank."""
        ...

    @property
    def global_rank(self) -> int:
        """Rank of this process."""
        ...

    @property
    def data_parallel_rank(self) -> int:
        """Ranks that differ in it have different prompts."""
        ...

    @property
    def peer_rank(self) -> int:
        """Place among the ranks that have the same prompts."""
        ...

    @property
    def peer_size(self) -> int:
        """How many ranks have the same prompts."""
        ...

    def all_gather_objects(self, obj: Any, group: Literal["data", "sequence", "peers", "world"] = ...) -> list[Any]:
        """Return the objects of all ranks of the group, in rank order. Collective over the group."""
        ...


class RolloutEngine(ABC):
    """Samples responses with weights that it is given; a training module owns one.

    The order of calls is :meth:`setup`, then :meth:`update_weights`, then any number of :meth:`generate` and further
    updates. The state that a resumed run needs is in :meth:`state_dict`.

    Attributes:
        num_generations: Responses per prompt when :meth:`generate` is not told otherwise.
    """

    num_generations: int

    @abstractmethod
    def setup(
        self, strategy: RolloutStrategy, model_config: "ModelConfig", tokenizer: "PreTrainedTokenizerBase | None"
    ) -> None:
        """Prepare the engine; every rank calls it. No weights are read.

        Args:
            strategy: Where this rank stands.
            model_config: The policy; its architecture is used, never its weights.
            tokenizer: The policy's tokenizer; ``None`` leaves texts empty.
        """

    @abstractmethod
    def update_weights(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Take new weights, by their Hugging Face names; every rank calls it.

        The whole iterator is consumed, also when something is wrong with it: it may be collective.

        Args:
            named_tensors: Every parameter and persistent buffer once, tied ones under one of their names.

        Raises:
            ValueError: Names are missing, unknown or come twice, or a shape differs.
        """

    @abstractmethod
    def generate(
        self, prompts: Sequence[Prompt], *, greedy: bool = False, num_generations: int | None = None
    ) -> list[list[Generation]]:
        """Generate responses to this data rank's prompts. Collective over the sequence group.

        Args:
            prompts: This data rank's prompts, the same on its sequence peers; may be empty.
            greedy: Take the most probable token instead of sampling.
            num_generations: Responses per prompt; ``None`` means ``self.num_generations``.

        Returns:
            For each prompt its generations; the same on all sequence peers.

        Raises:
            RuntimeError: No weights have arrived yet.
        """

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:  # noqa: B027 - an engine may take any prompt
        """Refuse prompts that the engine could not continue; called before training with all that will come.

        Args:
            prompts: The prompts of the whole data set, the same on every rank.

        Raises:
            ValueError: A prompt is too long, empty, or of another vocabulary.
        """

    def teardown(self) -> None:  # noqa: B027 - an engine may hold nothing
        """Free what :meth:`setup` made; every rank calls it.

        Modules leave this to the user, who may want to sample with the trained weights after a run, as in a notebook.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain data; the weights are not part of it."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: B027 - an engine may have no state
        """Restore what :meth:`state_dict` returned."""
