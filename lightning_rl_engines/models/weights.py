"""The weights of a token model, in the modes of ``get_per_tensor_param``."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_rl_engines.export.lora import stream_merged_parameters
from lightning_rl_engines.export.stream import stream_full_parameters
from lightning_rl_engines.models.lora import ADAPTER, adapters_are_disabled, lora_layers
from lightning_rl_engines.models.token_model import TokenModel

MODES = ("full", "merged", "adapter")


def stream_weights(
    root: nn.Module, model: TokenModel, mode: str, dtype: torch.dtype | None, *, prefix: str = "hf."
) -> Iterator[tuple[str, Tensor]]:
    """Stream a token model's weights; collective, ordered and bounded in memory as ``stream_full_parameters``.

    Args:
        root: The outermost FSDP module, or a plain one.
        model: What is in it.
        mode: ``"full"``, ``"merged"`` or ``"adapter"``.
        dtype: Type to cast floating-point tensors to; ``None`` keeps the storage type, and fp32 for ``"merged"``.
        prefix: Where in ``root`` the Hugging Face model lies.

    Raises:
        ValueError: The model has no such weights.
    """
    adapter = model.adapter
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is unknown; use one of {MODES}.")
    if adapter is None:
        if mode != "full":
            raise ValueError(f"mode={mode!r} needs a model with an adapter (ModelConfig(lora=...)); use mode='full'.")
        return stream_full_parameters(root, model.export_plan, prefix=prefix, dtype=dtype)
    if mode == "adapter":
        return stream_full_parameters(root, adapter.plan, prefix=prefix, dtype=dtype)
    if mode == "merged":
        layers = [layer for _, layer in lora_layers(root)]
        names = adapter.merged_names.get
        return stream_merged_parameters(
            root, adapter.base_plan, layers, adapter=ADAPTER, prefix=prefix, rename=names, dtype=dtype
        )
    if not adapters_are_disabled(root):
        raise ValueError(
            "mode='full' of a model with an adapter would leave it out; use mode='merged' or mode='adapter', or enter "
            "disable_adapter(model) for the base."
        )
    return stream_full_parameters(root, adapter.base_plan, prefix=prefix, rename=adapter.base_names.get, dtype=dtype)
