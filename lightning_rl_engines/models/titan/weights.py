"""The weights of a torchtitan model under their Hugging Face names, in the modes of ``get_per_tensor_param``."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_rl_engines.export.dtensors import stream_dtensors
from lightning_rl_engines.models.titan.lora import TitanAdapter, adapters_are_disabled
from lightning_rl_engines.models.titan.names import HFPiece
from lightning_rl_engines.models.titan.token_model import TitanTokenModel
from lightning_rl_engines.models.weights import MODES

if TYPE_CHECKING:
    from lightning_rl_engines.models.lora import Adapter


def stream_titan_weights(
    model: TitanTokenModel, mode: str, dtype: torch.dtype | None, pipeline_group: ProcessGroup | None
) -> Iterator[tuple[str, Tensor]]:
    """Stream full weights; collective over the world, ordered and bounded in memory as ``stream_dtensors``.

    Args:
        model: The model, or the stages of it that this rank holds.
        mode: ``"full"``, ``"merged"`` or ``"adapter"``.
        dtype: Type to cast floating-point tensors to; ``None`` keeps the stored one, and is fp32 for ``"merged"``.
        pipeline_group: Ranks that hold the other stages.

    Raises:
        ValueError: The model has no such weights.
    """
    titan, held = model.titan_adapter, model.held_tensors()
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is unknown; use one of {MODES}.")
    if titan is None:
        if mode != "full":
            raise ValueError(f"mode={mode!r} needs a model with an adapter (ModelConfig(lora=...)); use mode='full'.")
        return stream_dtensors(held, model.export_plan, model.names, pipeline_group=pipeline_group, dtype=dtype)
    adapter = titan.adapter
    if mode == "adapter":
        return stream_dtensors(held, adapter.plan, AdapterNames(adapter), pipeline_group=pipeline_group, dtype=dtype)
    if mode == "merged":
        return stream_dtensors(
            _renamed(held, adapter.merged_names),
            adapter.base_plan,
            model.names,
            pipeline_group=pipeline_group,
            dtype=dtype or torch.float32,
            transform=_Merge(titan, held),
        )
    if not adapters_are_disabled(model):
        raise ValueError(
            "mode='full' of a model with an adapter would leave it out; use mode='merged' or mode='adapter', or enter "
            "disable_adapter(model) for the base."
        )
    base = _renamed(held, adapter.base_names)
    return stream_dtensors(base, adapter.base_plan, model.names, pipeline_group=pipeline_group, dtype=dtype)


def stream_titan_gradients(model: TitanTokenModel, pipeline_group: ProcessGroup | None) -> Iterator[tuple[str, Tensor]]:
    """Stream full gradients of trainable parameters as :func:`stream_titan_weights` does weights."""
    adapter = model.adapter
    plan, names = (model.export_plan, model.names) if adapter is None else (adapter.plan, AdapterNames(adapter))
    return stream_dtensors(model.held_tensors(), plan, names, pipeline_group=pipeline_group, grads=True)


class AdapterNames:
    """Names in a PEFT folder of an adapter's tensors, each of which lies whole in one of the model."""

    def __init__(self, adapter: "Adapter") -> None:
        self._names = {entry.source: entry.name for entry in adapter.plan.entries}

    def pieces(self, fqn: str, shape: tuple[int, ...]) -> tuple[HFPiece, ...]:
        """Return the tensor of the folder that ``fqn`` is; none for one of the base."""
        return (HFPiece(self._names[fqn]),) if fqn in self._names else ()


def _renamed(held: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    return {names[fqn]: tensor for fqn, tensor in held.items() if fqn in names}


class _Merge:
    """Adds ``s B A`` to the weight of an adapted layer, in fp32 and new memory; collective over the layer's ranks."""

    def __init__(self, adapter: TitanAdapter, held: Mapping[str, Tensor]) -> None:
        self._scalings = {layer: scaling for layer, (_, scaling) in adapter.layers.items()}
        self._held = held

    def __call__(self, fqn: str, experts: range | None, tensor: Tensor) -> Tensor:
        layer = fqn.removesuffix(".weight")
        if not fqn.endswith(".weight") or layer not in self._scalings:
            return tensor
        a, b = (_whole(self._held[f"{layer}.lora.{part}"].detach()) for part in ("a", "b"))
        # The order of peft's own formula.
        return tensor.float() + (b @ a) * self._scalings[layer]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
