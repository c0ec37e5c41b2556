"""What receives streamed weights, and how a stream is walked into it on all ranks without a hang."""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

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
    """Receives the tensors of one export after another.

    The order of calls is ``open``, ``write`` for each tensor, then ``close``, or ``abort`` after an error in any of
    them or in the stream. A sink may be opened again after either. :func:`drain` makes these calls, on rank 0 only.

    A sink that ranks write together invites the others: after ``open`` on rank 0 they ``join``, those that did learn
    their ``share``, each is given every tensor, and ``finish`` ends the part of each before rank 0 calls ``close``.
    Each rank has an instance of its own then, built with the same arguments.
    """

    @property
    def location(self) -> str | None:
        """Where the last finished export lies, for people to read; ``None`` where that means nothing."""
        return None

    @abstractmethod
    def open(self, plan: ExportPlan | None, context: ExportContext) -> None:
        """Begin an export; rank 0 only.

        Args:
            plan: What will come, in any order; ``None`` where only the stream knows.
            context: What belongs to it beside its tensors.
        """

    @abstractmethod
    def write(self, name: str, tensor: Tensor) -> None:
        """Take one full tensor, on the model's device. It is a copy: a sink may keep it."""

    @abstractmethod
    def close(self) -> None:
        """Finish the export; what was there before is replaced here and not earlier. Rank 0 only."""

    def abort(self, error: BaseException) -> None:  # noqa: B027 - nothing to undo is a valid answer
        """Give up the export and leave what was there before, as far as the sink can."""

    @property
    def takes_adapters(self) -> bool:
        """Whether the receiver can be given an adapter without its base (``adapter_config`` in the context)."""
        return True

    def wants_base(self) -> bool:
        """Say whether the base must be exported before an adapter, which is exported right after it; rank 0 only."""
        return False

    def invite(self) -> Any:
        """Return what other ranks need to write along, as plain data; ``None`` to write alone. Rank 0 only."""
        return None

    def join(self, invitation: Any, context: ExportContext) -> bool:
        """Say whether this rank can write along; every rank but rank 0.

        Args:
            invitation: What rank 0's ``invite`` returned.
            context: What belongs to the export beside its tensors.
        """
        return False

    def share(self, index: int, count: int) -> None:  # noqa: B027 - a sink that writes alone has nothing to share
        """Learn this rank's place among those that write; rank 0 is the first.

        Args:
            index: Place of this rank, from 0.
            count: Number of ranks that write.
        """

    def finish(self) -> None:  # noqa: B027 - a sink that writes alone does this in close
        """Write what is left of this rank's part; every rank that writes, before rank 0 calls ``close``."""


class Communicator(Protocol):
    """The part of a strategy that :func:`drain` needs."""

    @property
    def global_rank(self) -> int:
        """Rank of this process."""

    def all_gather_objects(self, item: Any) -> list[Any]:
        """Return the host objects of all ranks, in rank order."""


def drain(
    stream: Iterator[tuple[str, Tensor]],
    sink: WeightSink | None,
    strategy: Communicator,
    *,
    plan: ExportPlan | None = None,
    context: ExportContext | None = None,
) -> str | None:
    """Walk a stream of weights to its end and write it into a sink, on rank 0 or on all ranks that the sink invites.

    Collective over the world. After an error of a sink its rank walks on without writing, so no rank is left waiting
    inside a gather, and the error is then raised on all ranks; one in ``open`` before the first tensor.

    Args:
        stream: Pairs of name and full tensor, the same on all ranks; producing them may be collective.
        sink: Where they go; only rank 0 must have one.
        strategy: Rank and gathering.
        plan: What the stream holds, handed to the sink.
        context: What belongs to the export beside its tensors.

    Returns:
        The sink's location, on every rank.

    Raises:
        Exception: The sink's error, the lowest failing rank's on those that have none (a ``RuntimeError`` quoting it
            where it cannot be pickled), or the stream's.
    """
    context = context or ExportContext()
    first = strategy.global_rank == 0
    writer = _Writer(sink, strategy)
    if first and sink is None:
        writer.error = ValueError("sink=None on rank 0; pass a WeightSink such as HFFolderSink(path='export').")
    invitation = None
    if first:
        writer.call("open", plan, context)
        invitation = writer.call("invite")
    writes = first
    if (invitation := writer.agree(invitation)[0]) is not None:
        writes = first or bool(writer.call("join", invitation, context))
        joined = [rank for rank, item in enumerate(writer.agree(writes)) if item]
        if writes:
            writer.call("share", joined.index(strategy.global_rank), len(joined))
    try:
        for name, tensor in stream:
            if writes:
                writer.call("write", name, tensor)
            del tensor  # or it would live on while the next one is made
    except BaseException as error:
        writer.fail(error)
        raise
    if writes:
        writer.call("finish")
    writer.agree()
    if first:
        writer.call("close")
    location = sink.location if first and sink is not None and writer.error is None else None
    return cast(str | None, writer.agree(location)[0])


def receiver_wants_base(sink: WeightSink | None, strategy: Communicator) -> bool:
    """Ask rank 0's sink whether an adapter needs its base exported first.

    Collective over the world.

    Args:
        sink: Where the adapter will go; only rank 0 must have one.
        strategy: Rank and gathering.

    Returns:
        The answer, the same on every rank.

    Raises:
        Exception: The sink's error, on every rank.
    """
    writer = _Writer(sink if strategy.global_rank == 0 else None, strategy)
    return bool(writer.agree(writer.call("wants_base"))[0])


class _Writer:
    """Calls a rank's sink until its first error, which is kept, and never after."""

    def __init__(self, sink: WeightSink | None, strategy: Communicator) -> None:
        self._sink = sink
        self._strategy = strategy
        self.error: Exception | None = None

    def call(self, method: str, *args: Any) -> Any:
        if self._sink is None or self.error is not None:
            return None
        try:
            return getattr(self._sink, method)(*args)
        except Exception as error:
            self.error = error
        return None

    def agree(self, item: Any = None) -> list[Any]:
        """Return every rank's ``item``, or abort and raise on all ranks if one of them has failed."""
        answers = self._strategy.all_gather_objects((_portable(self.error, self._strategy.global_rank), item))
        failed = next((error for error, _ in answers if error is not None), None)
        if failed is None:
            return [item for _, item in answers]
        # Only now: no rank writes any more, so what they wrote can be removed.
        failure = self.error or failed
        self.fail(failure)
        raise failure

    def fail(self, error: BaseException) -> None:
        if self._sink is None:
            return
        sink, self._sink = self._sink, None
        try:
            sink.abort(error)
        except Exception as second:
            error.add_note(f"{type(sink).__name__}.abort failed as well: {second!r}")


def _portable(error: Exception | None, rank: int) -> Exception | None:
    # Exceptions with constructors of their own may pickle and then fail to load on the other ranks.
    if error is None:
        return None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")
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
