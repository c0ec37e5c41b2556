"""Weights of a torchtitan model in a training checkpoint, under their Hugging Face names."""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_rl_engines.export.plan import ExportPlan
from lightning_rl_engines.models.titan.attention import PackedAttention
from lightning_rl_engines.models.titan.families import titan_spec
from lightning_rl_engines.models.titan.names import HFNames

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def saved_sources(
    hf_config: "PretrainedConfig", plan: ExportPlan, stored: Collection[str], *, is_critic: bool
) -> Iterator[tuple[str, Callable[[Tensor], Iterator[tuple[str, Tensor]]]]]:
    """Yield the stored tensors that an export needs, each with what takes it apart: stacks of experts hold many.

    Args:
        hf_config: The Hugging Face configuration.
        plan: What to export.
        stored: Names of the model's tensors in the checkpoint.
        is_critic: Whether the head gives values.

    Raises:
        ValueError: The model has no place for a tensor of the plan.
    """
    spec = titan_spec(hf_config, attention=PackedAttention.Config(), max_seq_len=int(hf_config.max_position_embeddings))
    names = spec.names.for_value_head() if is_critic else spec.names
    by_fqn: dict[str, list[str]] = {}
    for entry in plan.entries:
        place = names.locate(entry.name)
        if place is None:
            raise ValueError(f"{entry.name!r} of a Hugging Face save has no place in the torchtitan model.")
        by_fqn.setdefault(place[0], []).append(entry.name)
    for fqn, wanted in by_fqn.items():
        candidates = [f"titan.{fqn}", *(f"hf.{name}" for name in wanted)]
        yield next((name for name in candidates if name in stored), candidates[0]), partial(_pieces, names, fqn)


def _pieces(names: HFNames, fqn: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    for piece in names.pieces(fqn, tuple(tensor.shape)):
        value = tensor if piece.expert is None else tensor[piece.expert]
        yield piece.name, value.mT if piece.transposed else value
