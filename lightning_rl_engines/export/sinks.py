"""What receives streamed weights, and how a stream is walked into it on all ranks without a hang."""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_rl_engines.export.plan import ExportPlan, plan_from_hf_model

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class ExportContext:
    """What belongs to an export beside its tensors.

    Attributes:
        step: Optimizer steps so far.
        update: Updates (one experience each) so far.
        config: Configuration of the model.
        generation_config: How the model is sampled by default.
        tokenizer: Its tokenizer.
        adapter_config: Content of ``adapter_config.json`` where the tensors are an adapter in PEFT layout, else
            ``None``.
    """

    step: int = 0
    update: int = 0
    config: "PretrainedConfig | None" = None
    generation_config: "GenerationConfig | None" = None
    tokenizer: "PreTrainedTokenizerBase | None" = None
    adapter_config: dict[str, Any] | None = None


class WeightSink(ABC):
    """Receives the tensors of one export after another; every method runs on rank 0 only.

    The order of calls is ``open``, ``write`` for each tensor, then ``close``, or ``abort`` after an error in any of
    them or in the stream. A sink may be opened again after either. :func:`drain` makes these calls.
    """

    @property
    def location(self) -> str | None:
        """Where the last finished export lies, for people to read; ``None`` where that means nothing."""
        return None

    @abstractmethod
    def open(self, plan: ExportPlan | None, context: ExportContext) -> None:
        """Begin an export.

        Args:
            plan: What will come, in any order; ``None`` where only the stream knows.
            context: What belongs to it beside its tensors.
        """

    @abstractmethod
    def write(self, name: str, tensor: Tensor) -> None:
        """Take one full tensor, on the model's device. It is a copy: a sink may keep it."""

    @abstractmethod
    def close(self) -> None:
        """Finish the export; what was there before is replaced here and not earlier."""

    def abort(self, error: BaseException) -> None:  # noqa: B027 - nothing to undo is a valid answer
        """Give up the export and leave what was there before, as far as the sink can."""


class Communicator(Protocol):
    """The part of a strategy that :func:`drain` needs."""

    @property
    def global_rank(self) -> int:
        """Rank of this process."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank ``src``'s object on every rank."""


def drain(
    stream: Iterator[tuple[str, Tensor]],
    sink: WeightSink | None,
    strategy: Communicator,
    *,
    plan: ExportPlan | None = None,
    context: ExportContext | None = None,
) -> str | None:
    """Walk a stream of weights to its end and write it into a sink on rank 0.

    Collective over the world. After an error of the sink rank 0 walks on without writing, so no rank is left waiting
    inside a gather, and the error is then raised on all ranks.

    Args:
        stream: Pairs of name and full tensor; producing them may be collective.
        sink: Where they go; only rank 0's is used, the others may pass ``None``.
        strategy: Rank and broadcast.
        plan: What the stream holds, handed to the sink.
        context: What belongs to the export beside its tensors.

    Returns:
        The sink's location, on every rank.

    Raises:
        Exception: The sink's error, the same on every rank (a ``RuntimeError`` quoting it where it cannot be pickled),
            or the stream's.
    """
    writer = _Writer(sink if strategy.global_rank == 0 else None)
    if strategy.global_rank == 0 and sink is None:
        writer.error = ValueError("sink=None on rank 0; pass a WeightSink such as HFFolderSink(path='export').")
    writer.call("open", plan, context or ExportContext())
    try:
        for name, tensor in stream:
            writer.call("write", name, tensor)
            del tensor  # or it would live on while the next one is made
    except BaseException as error:
        writer.fail(error)
        raise
    writer.call("close")
    location = sink.location if sink is not None and writer.error is None else None
    failure, location = strategy.broadcast((_portable(writer.error), location), src=0)
    if writer.error is not None:
        raise writer.error
    if failure is not None:
        raise failure
    return location


class _Writer:
    """Calls a sink until its first error, which is kept, and never after."""

    def __init__(self, sink: WeightSink | None) -> None:
        self._sink = sink
        self.error: Exception | None = None

    def call(self, method: str, *args: Any) -> None:
        if self._sink is None or self.error is not None:
            return
        try:
            getattr(self._sink, method)(*args)
        except Exception as error:
            self.error = error
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        if self._sink is None:
            return
        sink, self._sink = self._sink, None
        try:
            sink.abort(error)
        except Exception as second:
            error.add_note(f"{type(sink).__name__}.abort failed as well: {second!r}")


def _portable(error: Exception | None) -> Exception | None:
    # Exceptions with constructors of their own may pickle and then fail to load on the other ranks.
    if error is None:
        return None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"rank 0: {type(error).__name__}: {error}")
    return error


class ModuleSink(WeightSink):
    """Copies weights into a module of this process, such as a plain Hugging Face model for generation.

    Values are cast to the module's types. An aborted export leaves it partly written.

    Args:
        module: A Hugging Face model, by the names of its saves (stacked experts included), or any module, by its
            ``state_dict``.

    Raises:
        ValueError: The module's save transforms a parameter in a way that cannot be written back in place.
    """

    def __init__(self, *, module: nn.Module) -> None:
        self.module = module
        self._targets: dict[str, Tensor] = {}
        self._missing: set[str] = set()

    @override
    def open(self, plan: ExportPlan | None, context: ExportContext) -> None:
        self._targets = _views(self.module)
        self._missing = set(self._targets)

    @override
    def write(self, name: str, tensor: Tensor) -> None:
        target = self._targets.get(name)
        if target is None or target.shape != tensor.shape:
            have = "no such tensor" if target is None else f"one of shape {tuple(target.shape)}"
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} does not fit {type(self.module).__name__}, which has {have}; "
                "build the module from the same configuration."
            )
        with torch.no_grad():
            target.copy_(tensor)
        self._missing.discard(name)

    @override
    def close(self) -> None:
        self._targets = {}
        if self._missing:
            raise ValueError(
                f"The export lacks {sorted(self._missing)[:5]} of {type(self.module).__name__}; build the module from "
                "the same configuration."
            )

    @override
    def abort(self, error: BaseException) -> None:
        self._targets = {}


def _views(module: nn.Module) -> dict[str, Tensor]:
    """Map exported names to views of the module's own storage."""
    from transformers import PreTrainedModel

    state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    if not isinstance(module, PreTrainedModel):
        return state
    plan, views = plan_from_hf_model(module), {}
    for source in plan.by_source:
        for name, piece in plan.pieces(source, state[source]):
            if piece.untyped_storage().data_ptr() != state[source].untyped_storage().data_ptr():
                raise ValueError(
                    f"ModuleSink(module={type(module).__name__}): {name} is not a slice of {source}, so it cannot be "
                    "written in place; export to a folder with HFFolderSink and load that."
                )
            views[name] = piece
    return views


class MemorySink(WeightSink):
    """Keeps the last finished export on the CPU: to look at weights in a notebook, or to try a callback dry.

    Attributes:
        tensors: Name to CPU tensor of the last finished export.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._incoming: dict[str, Tensor] = {}

    @override
    def open(self, plan: ExportPlan | None, context: ExportContext) -> None:
        self._incoming = {}

    @override
    def write(self, name: str, tensor: Tensor) -> None:
        self._incoming[name] = tensor.cpu()

    @override
    def close(self) -> None:
        self.tensors, self._incoming = self._incoming, {}

    @override
    def abort(self, error: BaseException) -> None:
        self._incoming = {}
