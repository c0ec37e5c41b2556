"""What every engine's model looks like from outside: a micro-batch in, per-token results out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_rl_engines.algorithms.outputs import TokenOutputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from lightning_rl_engines.export.plan import ExportPlan
    from lightning_rl_engines.models.config import ModelConfig
    from lightning_rl_engines.models.lora import Adapter
    from lightning_rl_engines.sequence.packing import MicroBatch


class TokenModel(nn.Module, ABC):
    """A model that maps a packed row to per-token log-probabilities, entropies or values.

    Attributes:
        model_config: What it was built from.
        config: The Hugging Face configuration.
        export_plan: Names, shapes and types of its weights as a Hugging Face save holds them.
    """

    model_config: "ModelConfig"
    config: "PretrainedConfig"
    export_plan: "ExportPlan"

    @property
    @abstractmethod
    def document_cost(self) -> tuple[float, float]:
        """Linear and quadratic coefficient of a document's cost in its length, in multiply-adds of a forward pass."""

    @abstractmethod
    def checkpoint_names(self) -> Mapping[str, str]:
        """Return the name in checkpoints of each tensor that this rank holds a part of, by its name in the model.

        Names in checkpoints do not depend on the layout, nor on the engine where engines hold the same tensor: that
        is ``hf.`` and the name in the Hugging Face model. Tied tensors share the first one's.
        """

    @property
    def longest_document(self) -> int | None:
        """Tokens of the longest document that the model has positions for; ``None`` where it has no limit."""
        return None

    @property
    def adapter(self) -> "Adapter | None":
        """The adapter that is trained instead of the weights, if there is one."""
        return None

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Return a context in which the base model runs alone.

        Raises:
            ValueError: The model has no adapter.
        """
        raise ValueError("disable_adapter(model) needs a model with an adapter; build it with ModelConfig(lora=...).")

    def forget_graphs(self) -> None:
        """Give up forward passes whose backward pass has not come, such as those of a step that raised."""

    @abstractmethod
    def forward(
        self, micro_batch: "MicroBatch", *, calculate_entropy: bool = False, temperature: float | str = 1.0
    ) -> TokenOutputs:
        """Run one row.

        Collective over the sequence group, and over the sharding group where parameters are sharded.

        Args:
            micro_batch: This rank's slice of the row.
            calculate_entropy: Also return the entropy of each predicted token's distribution.
            temperature: What logits are divided by: a number, or the name of a column (per document or per token).

        Returns:
            Tensors of shape ``[local tokens]``, 0 outside the response.
        """


def inverse_temperature(micro_batch: "MicroBatch", temperature: float | str) -> Tensor | float:
    """Return ``1 / temperature`` of the predicted tokens: a number, or an fp32 tensor of shape ``[predicted]``."""
    if isinstance(temperature, str):
        return micro_batch.per_token(temperature).index_select(0, micro_batch.predicted).float().reciprocal()
    return 1.0 / temperature


def scatter_predicted(values: Tensor, micro_batch: "MicroBatch") -> Tensor:
    """Place ``values`` of shape ``[predicted]`` into a zero tensor of shape ``[local tokens]``, differentiably."""
    empty = torch.zeros(micro_batch.input_ids.shape[0], dtype=values.dtype, device=values.device)
    return empty.index_copy(0, micro_batch.predicted, values)
