"""Packed rows: documents one after another, and this rank's slice of them.

``cu_seqlens`` is the single truth about a row; positions and document ids follow from it. Padding at the end is a
document of its own, so that no real document sees it.

The model's output at position *p* of a row describes token *p + 1*. Every per-token column is therefore rolled by -1
once, on the whole row, before the row is split over sequence ranks: slot *i* of a slice holds the column of the token
that output *i* describes, also at the edges of slices. The roll is a bijection: the first token of a document, which
has no prediction and is masked, lands on the slot of the token before it in the row.

Context parallelism deals the tokens of a row out in another order, so that attention costs every rank the same. One
permutation is applied to everything of the row, after the roll and before the split; results need no inverse, since
each slot knows the token that it describes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_rl_engines.sequence.experience import Experience
from lightning_rl_engines.sequence.planner import round_up

# Padding is cut into documents of this length at most, which cost little attention.
_PADDING = 128

RowOrder = Callable[[tuple[int, ...], int], Tensor]
"""``(cu_seqlens, sequence_size) -> int64 [row]`` on the CPU: the row's positions, in the order in which it is split."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedRow:
    """Where the documents of a whole row begin and end, padding included.

    Attributes:
        cu_seqlens: int32 ``[S + 1]`` on the device: starts of the documents, and the length of the row.
        cu_seqlens_host: The same numbers on the host.
        max_seqlen: Length of the longest document.
        order: int64 ``[row]`` on the CPU: the row's positions in the order in which the row is split over sequence
            ranks; ``None`` for the row's own order.
    """

    cu_seqlens: Tensor
    cu_seqlens_host: tuple[int, ...]
    max_seqlen: int
    order: Tensor | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class MicroBatch:
    """One packed row as the model sees it on this sequence rank.

    "local" is the length of this rank's slice, "slots" are the positions of it; a slot describes the token after the
    one it holds. Columns are found with ``micro_batch[name]``: ``[local]`` per token, in slot order, or
    ``[num_documents]`` per document. Dummy and padding documents hold 0 and False in every column.

    Attributes:
        input_ids: int64 ``[local]``, what the model reads, in row order or that of ``row.order``.
        position_ids: int64 ``[local]``, from 0 in every document.
        row: The whole row, the same on all sequence ranks.
        labels: int64 ``[local]``, the token that each slot describes.
        predicted: int64, the slots that describe a response token, in order.
        document_ids: int64 ``[local]``, index into ``documents`` of the token that each slot describes.
        documents: Index of each document of the row in the experience; -1 for a dummy and for those of padding.
        token_indices: int64 ``[local]`` on the CPU, position of the described token in the experience's flat columns;
            -1 for a dummy and for padding.
        owned_documents: bool ``[num_documents]``, True for the real documents on sequence rank 0. Terms that exist
            once per document are summed over these, so that they count once.
        response_lengths: float32 ``[num_documents]``, response tokens of each document in the whole row.
        last_response: bool ``[local]``, the slots that describe the last response token of a document of the whole row.
        token_columns: Per-token columns except ``input_ids``.
        document_columns: Per-document columns.
        group: Sequence ranks that share the row, or ``None``.
        sequence_rank: Which of the equal slices of the row this is.
    """

    input_ids: Tensor
    position_ids: Tensor
    row: PackedRow
    labels: Tensor
    predicted: Tensor
    document_ids: Tensor
    documents: tuple[int, ...]
    token_indices: Tensor
    owned_documents: Tensor
    response_lengths: Tensor
    last_response: Tensor
    token_columns: Mapping[str, Tensor]
    document_columns: Mapping[str, Tensor]
    group: ProcessGroup | None = None
    sequence_rank: int = 0

    @property
    def num_documents(self) -> int:
        """Documents in the row, dummy and padding included."""
        return len(self.documents)

    @property
    def device(self) -> torch.device:
        """Where the row is."""
        return self.input_ids.device

    def __contains__(self, name: object) -> bool:
        return name in self.token_columns or name in self.document_columns

    def __getitem__(self, name: str) -> Tensor:
        columns = self.token_columns if name in self.token_columns else self.document_columns
        if name not in columns:
            names = [*self.token_columns, *self.document_columns]
            raise KeyError(f"no column {name!r}; there are {names}; tokens are in .input_ids and .labels")
        return columns[name]

    def __repr__(self) -> str:
        names = ", ".join([*self.token_columns, *self.document_columns])
        return (
            f"MicroBatch({len(self.input_ids)} of {self.row.cu_seqlens_host[-1]} tokens, documents {self.documents} "
            f"on {self.device}: {names})"
        )

    def per_token(self, name: str) -> Tensor:
        """A column as ``[local]``: per-document values are repeated for each of their tokens.

        Raises:
            KeyError: There is no such column.
        """
        column = self[name]
        return column if name in self.token_columns else column.index_select(0, self.document_ids)

    def segment_sum(self, values: Tensor) -> Tensor:
        """Sum ``values`` per document over the whole row. Collective over the sequence group, forward and backward.

        Args:
            values: ``[local]``, one value per slot.

        Returns:
            ``[num_documents]``, the same on all sequence ranks; fp64 for fp64 values, fp32 otherwise. Differentiable:
            the gradient of a value is the sum of what all sequence ranks ask for.
        """
        dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
        sums = torch.zeros(self.num_documents, dtype=dtype, device=values.device)
        sums = sums.index_add(0, self.document_ids, values.to(dtype))
        return sums if self.group is None else _AllReduceSum.apply(sums, self.group)

    def segment_last(self, values: Tensor) -> Tensor:
        """Take ``values`` at the last response token of each document. Collective like :meth:`segment_sum`.

        Args:
            values: ``[local]``, one value per slot.

        Returns:
            ``[num_documents]``, the same on all sequence ranks and differentiable; 0 for a document without response.
        """
        return self.segment_sum(torch.where(self.last_response, values, torch.zeros_like(values)))


class _AllReduceSum(torch.autograd.Function):
    """Sum over a group in both directions: every rank's loss depends on every rank's values."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, values: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        # A copy: the incoming gradient may be shared with other consumers.
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)  # type: ignore[attr-defined]
        return total, None


def pack_row(
    experience: Experience,
    documents: Sequence[int],
    *,
    sequence_size: int = 1,
    sequence_rank: int = 0,
    group: ProcessGroup | None = None,
    device: torch.device | str | None = None,
    pad_to: int | None = None,
    multiple_of: int | None = None,
    order: RowOrder | None = None,
    longest_document: int | None = None,
) -> MicroBatch:
    """Pack documents into one row and take this sequence rank's slice.

    All index arithmetic happens on the host; where the experience is on a device already, nothing waits for it.

    Args:
        experience: Where the documents come from.
        documents: Their indices, in row order. Empty: a masked dummy document of one token.
        sequence_size: Equal slices that the row is split into.
        sequence_rank: Which of them to take.
        group: Ranks that hold the other slices; ``None`` when there are none.
        device: Where the micro-batch goes; default: where the experience is.
        pad_to: Length of the row; default: the next multiple of ``multiple_of``. Padding is made of masked documents of
            at most 128 tokens, or ``longest_document``.
        multiple_of: A multiple of ``sequence_size``; default: ``sequence_size``.
        order: Makes the order in which the row is split; default: the row's own.
        longest_document: Tokens that the model has positions for; ``None`` for no limit.

    Raises:
        ValueError: A document index, a size or a rank is out of range, the documents do not fit into ``pad_to``, or
            ``order`` makes no permutation of the row.
    """
    device = torch.device(device) if device is not None else experience.device
    if sequence_size < 1 or not 0 <= sequence_rank < sequence_size:
        raise ValueError(f"sequence_rank={sequence_rank} must be in [0, sequence_size={sequence_size}), for instance 0")
    length = partial(_row_length, sequence_size=sequence_size, pad_to=pad_to, multiple_of=multiple_of)
    owners, lengths = _layout(experience, documents, length, longest_document)
    starts = list(accumulate(lengths, initial=0))
    total = starts[-1]
    permutation, here = _places(order, tuple(starts), sequence_size, sequence_rank)
    document_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position_ids = torch.arange(total) - torch.tensor(starts[:-1]).index_select(0, document_ids)
    tokens = experience.token_indices(documents)
    tokens = torch.cat([tokens, tokens.new_full((total - len(tokens),), -1)])
    described = tokens.roll(-1)[here]
    responses = _take({"response_mask": experience.response_mask_host}, tokens)["response_mask"]

    move = partial(to_device, device=device)

    def columns(named: Mapping[str, Tensor], indices: Tensor) -> Mapping[str, Tensor]:
        taken = _take(named, indices)
        return MappingProxyType({name: move(value) for name, value in taken.items()})

    ids = {"input_ids": experience["input_ids"]}
    others = {name: value for name, value in experience.token_columns.items() if name != "input_ids"}
    response_lengths = [float(experience.response_lengths[index]) if index >= 0 else 0.0 for index in owners]
    owned = [sequence_rank == 0 and index >= 0 for index in owners]
    return MicroBatch(
        input_ids=columns(ids, tokens[here])["input_ids"],
        position_ids=move(position_ids[here]),
        row=PackedRow(
            cu_seqlens=move(torch.tensor(starts, dtype=torch.int32)),
            cu_seqlens_host=tuple(starts),
            max_seqlen=max(lengths),
            order=permutation,
        ),
        labels=columns(ids, described)["input_ids"],
        predicted=move(responses.roll(-1)[here].nonzero().flatten()),
        document_ids=move(document_ids.roll(-1)[here]),
        documents=owners,
        token_indices=described,
        owned_documents=move(torch.tensor(owned)),
        response_lengths=move(torch.tensor(response_lengths, dtype=torch.float32)),
        last_response=move(_last_of_each(responses, document_ids, len(lengths)).roll(-1)[here]),
        token_columns=columns(others, described),
        document_columns=columns(experience.document_columns, torch.tensor(owners)),
        group=group,
        sequence_rank=sequence_rank,
    )


def _places(
    order: RowOrder | None, cu_seqlens: tuple[int, ...], sequence_size: int, sequence_rank: int
) -> tuple[Tensor | None, Tensor | slice]:
    """The permutation of the row, if any, and what a rank takes of the row's positions."""
    total = cu_seqlens[-1]
    local = total // sequence_size
    here = slice(sequence_rank * local, (sequence_rank + 1) * local)
    if order is None:
        return None, here
    permutation = order(cu_seqlens, sequence_size)
    if permutation.dtype != torch.int64 or not torch.equal(permutation.sort().values, torch.arange(total)):
        raise ValueError(
            f"order made {permutation.dtype} {tuple(permutation.shape)}, which is no permutation of the row's {total} "
            f"positions; return int64 numbers 0 to {total - 1} on the CPU, for instance torch.arange({total})"
        )
    return permutation, permutation[here]


def _last_of_each(mask: Tensor, document_ids: Tensor, count: int) -> Tensor:
    """``[row]`` bool, True at the last True of ``mask`` in each document."""
    places = mask.nonzero().flatten()
    last = torch.full((count,), -1).scatter_reduce_(0, document_ids[places], places, "amax")
    return torch.zeros_like(mask).index_fill_(0, last[last >= 0], True)


def _layout(
    experience: Experience, documents: Sequence[int], row_length: Callable[[int], int], longest: int | None
) -> tuple[tuple[int, ...], list[int]]:
    """Documents of the row and their lengths, a dummy and those of padding included as -1."""
    for index in documents:
        if not 0 <= index < len(experience):
            raise ValueError(f"documents contains {index}, but there are {len(experience)}: use 0 to N - 1")
    lengths = [experience.lengths[index] for index in documents] or [1]
    owners = tuple(documents) or (-1,)
    padding, piece = row_length(sum(lengths)) - sum(lengths), min(_PADDING, longest or _PADDING)
    dummies = [min(piece, padding - start) for start in range(0, padding, piece)]
    return (*owners, *[-1] * len(dummies)), [*lengths, *dummies]


def _row_length(tokens: int, sequence_size: int, pad_to: int | None, multiple_of: int | None) -> int:
    multiple = sequence_size if multiple_of is None else multiple_of
    if multiple < 1 or multiple % sequence_size:
        raise ValueError(
            f"multiple_of={multiple} must be a multiple of sequence_size={sequence_size}, for instance "
            f"{math.lcm(max(multiple, 1), sequence_size)}"
        )
    needed = round_up(tokens, multiple)
    if pad_to is None:
        return needed
    if pad_to < needed or pad_to % multiple:
        raise ValueError(
            f"pad_to={pad_to} must be a multiple of {multiple} and hold the {tokens} tokens of the row, for instance "
            f"{needed}"
        )
    return pad_to


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Bring a tensor to a device; from the CPU to CUDA without waiting for the device."""
    # A copy from pageable memory waits for the device, one from pinned memory does not.
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=tensor.is_pinned())


def _take(columns: Mapping[str, Tensor], indices: Tensor) -> dict[str, Tensor]:
    """``column[indices]`` for each column, and 0 or False where the index is -1. ``indices`` is on the CPU."""
    absent = indices < 0
    any_absent = bool(absent.any())
    taken = {}
    for name, column in columns.items():
        if not len(column):
            taken[name] = column.new_zeros(len(indices))
            continue
        value = column.index_select(0, to_device(indices.clamp(min=0), column.device))
        taken[name] = value.masked_fill(to_device(absent, column.device), 0) if any_absent else value
    return taken
