"""The weights of a torchtitan model under their Hugging Face names, in the modes of ``get_per_tensor_param``."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_rl_engines.export.dtensors import stream_dtensors
from lightning_rl_engines.models.titan.token_model import TitanTokenModel
from lightning_rl_engines.models.weights import MODES


def stream_titan_weights(
    model: TitanTokenModel, mode: str, dtype: torch.dtype | None, pipeline_group: ProcessGroup | None
) -> Iterator[tuple[str, Tensor]]:
    """Stream full weights; collective over the world, ordered and bounded in memory as ``stream_dtensors``.

    Args:
        model: The model, or the stages of it that this rank holds.
        mode: ``"full"``.
        dtype: Type to cast floating-point tensors to; ``None`` keeps the stored one.
        pipeline_group: Ranks that hold the other stages.

    Raises:
        ValueError: The model has no such weights.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is unknown; use one of {MODES}.")
    if mode != "full":
        raise ValueError(f"mode={mode!r} needs a model with an adapter (ModelConfig(lora=...)); use mode='full'.")
    return stream_dtensors(
        model.held_tensors(), model.export_plan, model.names, pipeline_group=pipeline_group, dtype=dtype
    )


def stream_titan_gradients(model: TitanTokenModel, pipeline_group: ProcessGroup | None) -> Iterator[tuple[str, Tensor]]:
    """Stream full gradients of trainable parameters as :func:`stream_titan_weights` does weights."""
    return stream_dtensors(
        model.held_tensors(), model.export_plan, model.names, pipeline_group=pipeline_group, grads=True
    )
