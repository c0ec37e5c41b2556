"""Which tensors a model exports: names, order, shapes and types of a Hugging Face save, without its data."""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_rl_engines import _compat

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ExportEntry:
    """One exported tensor.

    Attributes:
        name: Its name in a Hugging Face save.
        shape: Its full, unsharded shape.
        dtype: Type it is stored in; an export may cast.
        source: Name of the model's parameter or buffer that holds it; ``name`` where none is given. Several entries
            share one where a model keeps its experts stacked.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: str = ""

    def __post_init__(self) -> None:
        if not self.source:
            object.__setattr__(self, "source", self.name)

    @property
    def num_bytes(self) -> int:
        """Size in bytes in the stored type."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SourceSplitter:
    """Takes fused tensors apart as transformers does when it saves a model.

    Holds rules and the configuration, no weights, so a plan can be copied and kept.

    Args:
        conversions: The load-time conversions of the model's family; they are run in reverse.
        config: The model's configuration.
    """

    def __init__(self, *, conversions: list[Any], config: Any) -> None:
        self._conversions = conversions
        self._config = config

    def revert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``tensors`` under the names and shapes of a save; no input is modified."""
        return _compat.revert_weight_conversion(self._conversions, self._config, dict(tensors))

    def split(self, source: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the saved tensors that ``source`` holds, one expert at a time where it is a stack of experts.

        Args:
            source: Name of the fused parameter.
            tensor: Its full value.

        Yields:
            Pairs of name and tensor; tensors may be views of ``tensor``.
        """
        names = self._names_by_expert(source, tuple(tensor.shape))
        if names is None:
            yield from self.revert({source: tensor}).items()
            return
        for expert, expert_names in enumerate(names):
            pieces = self.revert({source: tensor[expert : expert + 1]}).values()
            yield from zip(expert_names, pieces, strict=True)

    def _names_by_expert(self, source: str, shape: tuple[int, ...]) -> list[list[str]] | None:
        # A conversion that yields k tensors per index of the first axis, in k blocks, acts on each index alone, so a
        # slice of one index gives the same tensors under the names of index 0. None where that is not the case.
        whole = self.revert({source: torch.empty(shape, device="meta")})
        first = self.revert({source: torch.empty((1, *shape[1:]), device="meta")})
        size, names = shape[0], list(whole)
        if len(names) != size * len(first) or any(len(t.shape) != len(shape) - 1 for t in whole.values()):
            return None
        for block, (name, tensor) in enumerate(first.items()):
            block_names = names[block * size : (block + 1) * size]
            if block_names[0] != name or any(whole[n].shape != tensor.shape for n in block_names):
                return None
        return [names[expert::size] for expert in range(size)]


@dataclass(frozen=True)
class ExportPlan:
    """The ordered tensors of an export; the same on every rank.

    Attributes:
        entries: In the order of a Hugging Face save; streams may walk them in another one.
        num_parameters: Elements of the model's parameters, tied ones once; ``None`` where unknown.
        architecture: Class that loads the export, such as ``"LlamaForCausalLM"``; ``None`` where unknown.
        splitter: How fused sources are taken apart; ``None`` where there are none.
        fused: Sources whose value is transformed, and not only renamed, on export.
    """

    entries: tuple[ExportEntry, ...]
    num_parameters: int | None = None
    architecture: str | None = None
    splitter: SourceSplitter | None = None
    fused: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        counts = Counter(entry.name for entry in self.entries)
        if repeated := sorted(name for name, count in counts.items() if count > 1):
            raise ValueError(f"entries names {repeated} more than once; give each exported tensor one entry.")
        if bool(self.fused) != (self.splitter is not None):
            raise ValueError(f"fused={sorted(self.fused)} and splitter={self.splitter} go together; give both or none.")

    @cached_property
    def by_source(self) -> dict[str, tuple[ExportEntry, ...]]:
        """Entries of each source, in the order of the sources' first entries."""
        grouped: dict[str, list[ExportEntry]] = {}
        for entry in self.entries:
            grouped.setdefault(entry.source, []).append(entry)
        return {source: tuple(entries) for source, entries in grouped.items()}

    def metadata(self, *, dtype: torch.dtype | None = None) -> dict[str, list[Any]]:
        """Describe the export without its data, as inference servers want it before the first tensor.

        Args:
            dtype: Type that floating-point tensors are cast to; ``None`` keeps the stored ones.

        Returns:
            Plain lists of the same length: ``names``, ``dtype_names`` (such as ``"bfloat16"``) and ``shapes``.
        """
        dtypes = [dtype if dtype is not None and e.dtype.is_floating_point else e.dtype for e in self.entries]
        return {
            "names": [entry.name for entry in self.entries],
            "dtype_names": [str(item).removeprefix("torch.") for item in dtypes],
            "shapes": [list(entry.shape) for entry in self.entries],
        }

    def pieces(self, source: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the exported tensors that one parameter or buffer holds.

        Args:
            source: Its name in the model.
            tensor: Its full value, or its gradient.

        Yields:
            Pairs of exported name and tensor; tensors are ``tensor``, views of it, or copies of parts.

        Raises:
            RuntimeError: A name or shape differs from the plan's.
        """
        expected = {entry.name: entry.shape for entry in self.by_source[source]}
        found: Iterable[tuple[str, Tensor]] = [(name, tensor) for name in expected]
        if self.splitter is not None and source in self.fused:
            found = self.splitter.split(source, tensor)
        for name, piece in found:
            shape = expected.pop(name, None)
            if shape != tuple(piece.shape):
                raise RuntimeError(f"{source} gave {name} of shape {tuple(piece.shape)}; the plan says {shape}.")
            yield name, piece
        if expected:
            raise RuntimeError(f"{source} did not give {sorted(expected)}.")


def plan_from_hf_model(model: "PreTrainedModel") -> ExportPlan:
    """Plan the export of a Hugging Face model: exactly the tensors that its ``save_pretrained`` would write.

    Persistent state only, tied tensors once under the name transformers keeps, renamed and unfused as its save does
    by the rules of the model's class. Rules of one particular checkpoint are left out, so a rank that read the
    weights and one that holds meta tensors get the same plan.

    Args:
        model: A plain, unsharded model, on any device, the meta device included; its data is not read.

    Returns:
        The plan, with shapes and types of the model.

    Raises:
        ValueError: Its save merges several parameters into one tensor, so it cannot be exported one at a time.
    """
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = _compat.keys_to_ignore_on_save(model)
    state = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in model.state_dict().items()
        if name not in ignored
    }
    # For meta tensors it goes by the identity of the model's own parameters, so ties are found on any device.
    state = remove_tied_weights_from_state_dict(state, model)
    splitter = _splitter_of(model)
    saved = state if splitter is None else splitter.revert(state)
    # A renamed tensor is still the same object; what is left over is transformed.
    names = {id(tensor): name for name, tensor in state.items()}
    sources = {name: names[id(tensor)] for name, tensor in saved.items() if id(tensor) in names}
    fused = [name for name in state if name not in sources.values()]
    if splitter is not None and fused:
        sources |= _sources_of_fused(model, {name: state[name] for name in fused}, saved, splitter)
    if sources.keys() != saved.keys():
        raise ValueError(_merges(model, sorted(saved.keys() ^ sources.keys())))
    entries = tuple(ExportEntry(name, tuple(t.shape), t.dtype, sources[name]) for name, t in saved.items())
    return ExportPlan(
        entries,
        num_parameters=model.num_parameters(),
        architecture=type(model).__name__,
        splitter=splitter if fused else None,
        fused=frozenset(fused),
    )


def _sources_of_fused(
    model: "PreTrainedModel", fused: dict[str, Tensor], saved: dict[str, Tensor], splitter: SourceSplitter
) -> dict[str, str]:
    sources: dict[str, str] = {}
    for source, tensor in fused.items():
        try:
            parts = splitter.revert({source: tensor})
        except (ValueError, AttributeError, KeyError) as error:
            # What a rule raises that needs other parameters, or the model itself.
            raise ValueError(_merges(model, [source])) from error
        for name, part in parts.items():
            # One parameter must give each of its tensors whole, and no other parameter may give it too.
            if name in sources or name not in saved or part.shape != saved[name].shape:
                raise ValueError(_merges(model, [name]))
            sources[name] = source
    return sources


def _merges(model: "PreTrainedModel", names: list[str]) -> str:
    return (
        f"The save of model_type={model.config.model_type!r} combines several parameters into {names[:3]}, so it "
        "cannot be exported one parameter at a time; use strategy='torchtitan' where it supports this family, or one "
        "such as llama, qwen2, qwen3, qwen3_moe or mistral."
    )


def _splitter_of(model: "PreTrainedModel") -> SourceSplitter | None:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    # The choice transformers makes for a model that was not loaded from a checkpoint.
    conversions = [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]
    return SourceSplitter(conversions=conversions, config=copy.deepcopy(model.config)) if conversions else None
