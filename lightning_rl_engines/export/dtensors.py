"""Full weights of a model of DTensors, one tensor at a time: FSDP2, tensor, expert and pipeline parallelism."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from lightning_rl_engines.export.plan import ExportPlan

Transform: TypeAlias = Callable[[str, range | None, Tensor], Tensor]
"""Maps a source's name, a range of its experts (``None``: the whole tensor) and their value to what is exported."""

_DEFAULT_BUCKET_BYTES = 512 * 2**20


class Piece(Protocol):
    """One exported tensor inside a tensor ``t`` of the model: ``t`` or ``t[expert]``, its last two dims swapped or not.

    Attributes:
        name: Its exported name.
        expert: Index on dim 0 of the model's tensor; ``None`` for the whole.
        transposed: Whether the last two dims are swapped.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def expert(self) -> int | None: ...  # noqa: D102
    @property
    def transposed(self) -> bool: ...  # noqa: D102


class PieceNames(Protocol):
    """Knows which exported tensors a tensor of the model holds."""

    def pieces(self, fqn: str, shape: tuple[int, ...]) -> Sequence[Piece]:
        """Return the exported tensors in the tensor ``fqn`` of full shape ``shape``, in the order of their export."""


@dataclass(frozen=True)
class _Source:
    """One tensor of the model, as every rank knows it; its value where this rank has a part of it."""

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int  # rank in the pipeline group
    pieces: tuple[Piece, ...]
    value: Tensor | None

    @property
    def is_stack(self) -> bool:
        return any(piece.expert is not None for piece in self.pieces)


def stream_dtensors(
    parameters: Mapping[str, Tensor],
    plan: ExportPlan,
    names: PieceNames,
    *,
    bucket_bytes: int = _DEFAULT_BUCKET_BYTES,
    pipeline_group: ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    grads: bool = False,
    transform: Transform | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Stream the full weights of a model, or their gradients, each entry of the plan once.

    Collective over the world, also the call itself: every rank calls it and walks the iterator, to the end or to the
    same point. Names come in the same order on all ranks: sources as in the plan, and what a source holds together.
    Values are exact to the bit. Live weights are only read, so a walk may end anywhere.

    Placements may be any that DTensors have: FSDP2, HSDP, tensor and expert parallelism, uneven and strided shards.
    Stacks of experts are gathered in blocks of experts and never whole. Memory beyond the sharded model: one block, the
    same for the whole walk, and one tensor, with what torch's ``full_tensor`` needs to gather one that is no stack.

    Args:
        parameters: Parameters and persistent buffers of this rank's part of the model, as DTensors or plain tensors,
            which are whole; by the plan's sources. Others are not exported.
        plan: What to export; entries name the tensor of the model as their source.
        names: What each of these tensors holds.
        bucket_bytes: Largest block of experts, in the type of the weights; a block has one expert at least.
        pipeline_group: Ranks that hold the other stages' layers in the same place of their meshes. Each tensor is
            broadcast from the first stage that has it. ``None`` without pipeline parallelism.
        dtype: Type to cast floating-point tensors to; ``None`` keeps the stored type.
        grads: Stream what is in ``.grad`` instead; frozen parameters and buffers are skipped.
        transform: Changes values before they are cut, on the ranks that hold the source. It returns its argument, which
            it does not write to, or new memory of the same shape, and may gather other tensors. Its result is cast to
            ``dtype``, or to the stored type. ``None`` on all ranks or on none.

    Returns:
        Iterator over pairs of exported name and tensor: contiguous copies on the model's device, without gradient,
        that stay valid.

    Raises:
        RuntimeError: A tensor of the plan is nowhere or has another shape, or a trainable parameter has no gradient;
            on all ranks.
        ValueError: ``bucket_bytes`` is not positive, or ``parameters`` is empty.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes} must be positive, for instance {_DEFAULT_BUCKET_BYTES}.")
    if not parameters:
        raise ValueError("parameters={} is empty; every pipeline stage must hold some of the model.")
    sources = _agreed_sources(parameters, plan, names, pipeline_group, grads)
    device = next(iter(parameters.values())).device
    return _walk(sources, _Blocks(sources, bucket_bytes, pipeline_group, dtype, transform, device))


def _walk(sources: list[_Source], blocks: "_Blocks") -> Iterator[tuple[str, Tensor]]:
    for source in sources:
        for experts in blocks.ranges(source):
            # In a frame of its own: a block that is still referred to would live on while the next one is made.
            yield from _cut(source, experts, *blocks.gather(source, experts), blocks.export_dtype(source))


def _cut(
    source: _Source, experts: range | None, block: Tensor, is_fresh: bool, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    if experts is None and is_fresh and len(source.pieces) == 1:
        (piece,) = source.pieces
        block = block.mT if piece.transposed else block
        yield piece.name, block.to(dtype).contiguous()
        return
    for piece in source.pieces:
        if experts is None:
            value = block
        elif piece.expert is not None and piece.expert in experts:
            value = block[piece.expert - experts.start]
        else:
            continue
        value = value.mT if piece.transposed else value
        yield piece.name, value.to(dtype, copy=True, memory_format=torch.contiguous_format)


class _Blocks:
    """Gathers tensors, or blocks of experts of a stack, on all ranks."""

    def __init__(
        self,
        sources: list[_Source],
        bucket_bytes: int,
        pipeline_group: ProcessGroup | None,
        dtype: torch.dtype | None,
        transform: Transform | None,
        device: torch.device,
    ) -> None:
        self._bucket_bytes = bucket_bytes
        self._group = pipeline_group
        self._dtype = dtype
        self._transform = transform
        self._device = device
        sizes = [
            self._step(source)
            * math.prod(source.shape[1:])
            * max(source.dtype.itemsize, self._sent_dtype(source).itemsize)
            for source in sources
            if source.is_stack
        ]
        # One memory for all blocks: collectives may hold on to theirs for a while after they are done.
        self._num_words = -(-max(sizes, default=0) // 4)
        self._words: Tensor | None = None

    def ranges(self, source: _Source) -> Iterator[range | None]:
        if not source.is_stack:
            yield None
            return
        count, step = source.shape[0], self._step(source)
        for start in range(0, count, step):
            yield range(start, min(start + step, count))

    def _step(self, source: _Source) -> int:
        expert_bytes = math.prod(source.shape[1:]) * source.dtype.itemsize
        return min(source.shape[0], max(1, self._bucket_bytes // max(1, expert_bytes)))

    def export_dtype(self, source: _Source) -> torch.dtype:
        return self._dtype if self._dtype is not None and source.dtype.is_floating_point else source.dtype

    def _sent_dtype(self, source: _Source) -> torch.dtype:
        return source.dtype if self._transform is None else self.export_dtype(source)

    def _block(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the words of a block, and the block as a view of them."""
        if self._words is None:
            self._words = torch.empty(self._num_words, dtype=torch.int32, device=self._device)
        return _words_and_view(shape, dtype, self._device, self._words)

    @torch.no_grad()
    def gather(self, source: _Source, experts: range | None) -> tuple[Tensor, bool]:
        """Return the full value, good until the next one, and whether it is memory of its own."""
        group = self._group
        block = None
        if source.value is not None and (group is None or dist.get_rank(group) == source.owner):
            block = _gather_whole(source.value) if experts is None else self._gather_experts(source.value, experts)
            if self._transform is not None:
                block = self._transform(source.fqn, experts, block).to(self.export_dtype(source))
            block = block.to(self._device)  # under cpu_offload buffers are elsewhere than parameters
        if group is not None:
            if block is None and experts is None:
                block = torch.empty(source.shape, dtype=self._sent_dtype(source), device=self._device)
            elif block is None and experts is not None:
                _, block = self._block((len(experts), *source.shape[1:]), self._sent_dtype(source))
            assert block is not None
            block = block.contiguous()
            dist.broadcast(_as_bytes(block), group=group, group_src=source.owner)
        assert block is not None
        return block, experts is None and (source.value is None or not _share_memory(block, source.value))

    def _gather_experts(self, value: Tensor, experts: range) -> Tensor:
        if not isinstance(value, DTensor):
            return value[experts.start : experts.stop]
        words, block = self._block((len(experts), *value.shape[1:]), value.dtype)
        _gather_rows(value, experts, words, block)
        return block


def _gather_whole(value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return value
    if not _is_strided(value):
        return value.full_tensor()
    # torch gathers strided shards, too, but needs the memory twice to put them in order, and warns of it.
    words, block = _words_and_view(tuple(value.shape), value.dtype, value.device)
    _gather_rows(value, range(value.shape[0]), words, block)
    return block


def _words_and_view(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, words: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return memory in words of four bytes, new or the first ones of ``words``, and a tensor that is a view of it."""
    num_bytes = math.prod(shape) * dtype.itemsize
    num_words = -(-num_bytes // 4)
    words = torch.empty(num_words, dtype=torch.int32, device=device) if words is None else words[:num_words]
    return words, words.view(torch.uint8)[:num_bytes].view(dtype).view(shape)


def _gather_rows(value: DTensor, rows: range, words: Tensor, block: Tensor) -> None:
    """Gather some rows of a tensor into ``block``, a view of ``words``.

    Each rank puts its part into zeros, and integers are summed over the axes that shard the tensor: every element comes
    from one rank of these, so the sum has its very bits, whatever they stand for.
    """
    if any(placement.is_partial() for placement in value.placements):
        value = value.redistribute(placements=[Replicate() if p.is_partial() else p for p in value.placements])
    local, box = value.to_local(), _local_box(value)
    first = max(rows.start, box[0].start)
    last = max(first, min(rows.stop, box[0].stop))
    inside = (slice(first - rows.start, last - rows.start), *(slice(r.start, r.stop) for r in box[1:]))
    words.zero_()
    block[inside].copy_(local[first - box[0].start : last - box[0].start])
    for axis, placement in enumerate(value.placements):
        if not placement.is_replicate() and value.device_mesh.size(axis) > 1:
            # Words, for back-ends sum no two-byte integers. Elements that share one may come from two ranks, and as
            # each sets its own bits only there is no carry.
            dist.all_reduce(words, group=value.device_mesh.get_group(axis))


def _local_box(value: DTensor) -> list[range]:
    """Return which indices of each dim this rank holds; always neighbours, for a shard of a shard is contiguous.

    Raises:
        RuntimeError: The local tensor has another shape: this split is not the one that made it.
    """
    mesh, coordinate = value.device_mesh, value.device_mesh.get_coordinate()
    assert coordinate is not None
    box = []
    for dim, size in enumerate(value.shape):
        start, length = 0, size
        for axis in _split_order(value, dim):
            chunk = -(-length // mesh.size(axis))
            begin = min(chunk * coordinate[axis], length)
            start, length = start + begin, min(chunk, length - begin)
        box.append(range(start, start + length))
    if tuple(map(len, box)) != tuple(value.to_local().shape):
        raise RuntimeError(
            f"A tensor of shape {tuple(value.shape)} with placements {value.placements} on {mesh} has a local part of "
            f"shape {tuple(value.to_local().shape)} at {coordinate}, and {tuple(map(len, box))} was expected."
        )
    return box


def _split_order(value: DTensor, dim: int) -> list[int]:
    """Return the axes of the mesh that split ``dim``, in the order in which they were applied.

    That is the mesh's own, except for strided shards, as FSDP makes over tensor and expert parallelism: they split what
    ``split_factor`` earlier shards, further right in the mesh, had left.
    """
    mesh = value.device_mesh
    order: list[int] = []
    for axis in reversed(range(mesh.ndim)):
        placement: Any = value.placements[axis]
        if placement.is_replicate() or placement.is_partial() or placement.dim != dim:
            continue
        before, factor = 0, _split_factor(placement)
        while factor > 1 and before < len(order):
            factor //= mesh.size(order[before])
            before += 1
        order.insert(before, axis)
    return order


def _split_factor(placement: Any) -> int:
    # Public placements say nothing of strides; the class that does is private and adds this attribute.
    return int(getattr(placement, "split_factor", 1))


def _is_strided(value: DTensor) -> bool:
    return any(_split_factor(placement) > 1 for placement in value.placements)


def _as_bytes(tensor: Tensor) -> Tensor:
    # Bits are what counts, and back-ends lack some types.
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def _share_memory(tensor: Tensor, value: Tensor) -> bool:
    local = value.to_local() if isinstance(value, DTensor) else value
    return tensor.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()


def _agreed_sources(
    parameters: Mapping[str, Tensor],
    plan: ExportPlan,
    names: PieceNames,
    pipeline_group: ProcessGroup | None,
    grads: bool,
) -> list[_Source]:
    """Return what is streamed, the same on all ranks, or raise on all of them."""
    problems: list[str] = []
    values: dict[str, Tensor] = {}
    described: dict[str, tuple[tuple[int, ...], torch.dtype, bool]] = {}
    for fqn in plan.by_source:
        if (parameter := parameters.get(fqn)) is None:
            continue
        value = parameter.grad if grads else parameter
        if value is None and parameter.requires_grad:
            problems.append(f"{fqn} has no gradient; call backward before the stream, or freeze it.")
        if value is not None:
            values[fqn] = value.detach()
        stored = parameter if value is None else value
        described[fqn] = tuple(parameter.shape), stored.dtype, not grads or parameter.requires_grad
    stages = [described]
    if pipeline_group is not None:
        stages = [{} for _ in range(dist.get_world_size(pipeline_group))]
        dist.all_gather_object(stages, described, group=pipeline_group)
    sources = []
    for fqn, entries in plan.by_source.items():
        owner = next((rank for rank, stage in enumerate(stages) if fqn in stage), None)
        if owner is None:
            problems.append(f"no rank holds {fqn}, the source of {entries[0].name}.")
            continue
        shape, dtype, is_streamed = stages[owner][fqn]
        pieces = tuple(names.pieces(fqn, shape))
        found = {piece.name: _piece_shape(piece, shape) for piece in pieces}
        expected = {entry.name: entry.shape for entry in entries}
        if found != expected:
            different = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
            problems.append(
                f"{fqn} of shape {shape} holds {different[0]} as {found.get(different[0])}; the plan says "
                f"{expected.get(different[0])}."
            )
        elif is_streamed:
            sources.append(_Source(fqn, shape, dtype, owner, pieces, values.get(fqn)))
    problems += _unknown_splits(sources)
    _raise_together(problems)
    return sources


def _piece_shape(piece: Piece, shape: tuple[int, ...]) -> tuple[int, ...]:
    own = shape if piece.expert is None else shape[1:]
    return (*own[:-2], own[-1], own[-2]) if piece.transposed else own


def _unknown_splits(sources: list[_Source]) -> Iterator[str]:
    for source in sources:
        if isinstance(source.value, DTensor) and (source.is_stack or _is_strided(source.value)):
            try:
                _local_box(source.value)
            except RuntimeError as error:
                yield f"{source.fqn}: {error}"


def _raise_together(problems: list[str]) -> None:
    """Raise the first rank's first problem on all ranks, so that none is left waiting in a gather."""
    first = problems[0] if problems else None
    if dist.is_initialized():
        answers: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, first)
        first = next((answer for answer in answers if answer is not None), None)
    if first is not None:
        raise RuntimeError(first)
