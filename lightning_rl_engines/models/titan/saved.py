"""Weights of a torchtitan model from a training checkpoint, under their Hugging Face names."""

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_rl_engines.export.plan import ExportPlan
from lightning_rl_engines.models.titan.attention import PackedAttention
from lightning_rl_engines.models.titan.families import titan_spec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def saved_weights(
    hf_config: "PretrainedConfig",
    plan: ExportPlan,
    stored: Collection[str],
    read: Callable[[str], Tensor],
    *,
    is_critic: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the exported tensors, one stored tensor in memory at a time; stacks of experts are taken apart.

    Args:
        hf_config: The Hugging Face configuration.
        plan: What to export.
        stored: Names of the model's tensors in the checkpoint.
        read: Returns one of them.
        is_critic: Whether the head gives values.

    Raises:
        ValueError: The model has no place for a tensor of the plan; also what ``read`` raises.
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
        tensor = read(next((name for name in candidates if name in stored), candidates[0]))
        for piece in names.pieces(fqn, tuple(tensor.shape)):
            value = tensor if piece.expert is None else tensor[piece.expert]
            yield piece.name, (value.mT if piece.transposed else value).contiguous()
