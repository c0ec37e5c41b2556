"""Copies named Hugging Face weights into a live model, in place, and accounts for every name."""

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lightning_rl_engines.export.plan import ExportEntry, plan_from_hf_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WeightReceiver:
    """Takes the tensors of a Hugging Face save, in any order, into a plain model on any device.

    Parameters that the model keeps fused (stacked experts) are put together as soon as their parts are complete; only
    those parts are held meanwhile. Tied tensors may come under any one of their names. Tensors are cast to the
    model's own types. Non-persistent buffers are the model's own business.

    Args:
        model: An unsharded model whose data is not on the meta device.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        self._model = model
        plan = plan_from_hf_model(model)
        state = model.state_dict()
        self._targets: dict[str, Tensor] = {source: state[source] for source in plan.by_source}
        self._entries: dict[str, ExportEntry] = {entry.name: entry for entry in plan.entries}
        self._by_source = plan.by_source
        self._fused = plan.fused
        names = {_identity(self._targets[e.source]): e.name for e in plan.entries if e.source not in self._fused}
        self._aliases = {
            alias: names[_identity(tensor)]
            for alias, tensor in state.items()
            if alias not in self._entries and _identity(tensor) in names
        }

    @torch.no_grad()
    def receive(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Copy all tensors; the iterator is walked to its end also when a name or shape is wrong.

        Args:
            named_tensors: Names and tensors, on any device and of any floating type.

        Raises:
            ValueError: Names are missing, unknown or come twice, or a shape differs; the weights are then unusable.
        """
        unknown: list[str] = []
        duplicates: list[str] = []
        shapes: list[str] = []
        seen: set[str] = set()
        parts: dict[str, dict[str, Tensor]] = {}
        for given, tensor in named_tensors:
            name = self._aliases.get(given, given)
            entry = self._entries.get(name)
            if entry is None:
                unknown.append(given)
            elif name in seen:
                duplicates.append(given)
            elif tuple(tensor.shape) != entry.shape:
                seen.add(name)
                shapes.append(f"{given} {list(tensor.shape)} instead of {list(entry.shape)}")
            else:
                seen.add(name)
                self._take(entry, tensor, parts)
        missing = [name for name in self._entries if name not in seen]
        problems = [
            f"{what}: {names}"
            for what, names in (
                ("missing", missing),
                ("unknown", unknown),
                ("twice", duplicates),
                ("of another shape", shapes),
            )
            if names
        ]
        if problems:
            raise ValueError(
                f"The weights do not fit the rollout model ({type(self._model).__name__}): {'; '.join(problems)}. "
                "Send the tensors of strategy.get_per_tensor_param(model), each once."
            )

    def _take(self, entry: ExportEntry, tensor: Tensor, parts: dict[str, dict[str, Tensor]]) -> None:
        target = self._targets[entry.source]
        if entry.source not in self._fused:
            target.copy_(tensor)
            return
        group = parts.setdefault(entry.source, {})
        group[entry.name] = tensor.to(device=target.device, dtype=target.dtype)
        if len(group) == len(self._by_source[entry.source]):
            target.copy_(_fuse(self._model, entry.source, parts.pop(entry.source)))


def _identity(tensor: Tensor) -> tuple[object, ...]:
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()


def _fuse(model: "PreTrainedModel", source: str, tensors: dict[str, Tensor]) -> Tensor:
    """Put saved tensors together as transformers does when it loads a model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    state = model.state_dict()
    converter: WeightConverter | None = None
    # Converters stack the tensors in the order in which they are added, so expert 10 must come after expert 9.
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if converter is None:
            # A converter collects tensors, so each parameter needs one of its own.
            converter = copy.deepcopy(next(c for c in converters if pattern in c.source_patterns))
        # Its loader adds futures as well as tensors; the annotation names the former only.
        converter.add_tensor(target, name, cast(str, pattern), cast(Any, tensors[name]))
    assert converter is not None
    fused = converter.convert(source, model=model, config=model.config)[source]
    return fused[0] if isinstance(fused, list) else fused
