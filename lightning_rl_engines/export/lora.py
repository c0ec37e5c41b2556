"""Base weights with a LoRA adapter added, one tensor at a time and out of place."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_rl_engines.export.plan import ExportPlan
from lightning_rl_engines.export.stream import gathered, stream_full_parameters


def stream_merged_parameters(
    root: nn.Module,
    plan: ExportPlan,
    layers: Iterable[Any],
    *,
    adapter: str,
    prefix: str = "hf.",
    rename: Callable[[str], str | None] | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Stream the full weights of a module as :func:`stream_full_parameters` does, adapters added where there are some.

    Each adapted weight is gathered with its own adapter only. The sum is made in fp32 in new memory, so live weights
    stay what they are, and is rounded once.

    Args:
        root: The outermost FSDP module, or a plain module.
        plan: What to export: the tensors of the base.
        layers: peft's adapted linear layers in ``root``; their adapter weights may be FSDP units of their own.
        adapter: Name of the adapter in them.
        prefix: Where in ``root`` the planned model lies.
        rename: Maps a name in the adapted model to a source of the plan.
        dtype: Type to cast floating-point tensors to; ``None`` is fp32, of every tensor.

    Returns:
        Iterator over pairs of exported name and tensor, as :func:`stream_full_parameters`.
    """
    by_base = {cast(nn.Module, layer.get_base_layer()): layer for layer in layers}

    @torch.no_grad()
    def merge(owner: nn.Module, name: str, tensor: Tensor) -> Tensor:
        layer = by_base.get(owner)
        if layer is None or name != "weight":
            return tensor
        with gathered(layer.lora_A[adapter]), gathered(layer.lora_B[adapter]):
            # peft's own formula, so that rsLoRA and rank patterns mean what they mean there.
            delta = cast(Tensor, layer.get_delta_weight(adapter))
            return tensor.float() + delta

    return stream_full_parameters(
        root, plan, prefix=prefix, rename=rename, dtype=dtype or torch.float32, transform=merge
    )
