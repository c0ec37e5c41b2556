"""The documents of one update as ragged columns.

A per-token column is one flat tensor of shape ``[num_tokens]``, the documents one after another; a per-document column
has shape ``[N]``. Lengths and the response mask are kept on the host as well, so that planning and packing never wait
for a device. Index *t* of a per-token column describes token *t*; the first token of a document has no prediction and
is never part of the response.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import Tensor

from lightning_rl_engines.sequence.columns import (
    Column,
    as_tensor,
    check_flat,
    check_rewards,
    checked_response_mask,
    checked_token_ids,
    flatten,
    read_column,
)

_REQUIRED = ("input_ids", "response_mask")


class Experience:
    """``N`` documents and their columns. Immutable: every method that changes something returns a new experience.

    Use :meth:`from_documents` to build one. A plain class on purpose: Lightning looks into dataclasses, tuples and
    mappings to cast their tensors to the compute precision, and the columns keep their dtypes. It does offer
    :meth:`to`, which is what Lightning's batch transfer calls.

    Args:
        lengths: Tokens of each document.
        token_columns: Flat tensors of shape ``[num_tokens]``; ``input_ids`` and ``response_mask`` are required.
        document_columns: Tensors of shape ``[N]``.

    Raises:
        ValueError: A column has the wrong shape, a document is empty, a token id is negative or a reward is not
            finite; the message names the column and the document.
    """

    __slots__ = ("_document_columns", "_lengths", "_response_lengths", "_response_mask", "_token_columns")

    # Columns are found by name: without this, iteration would ask for e[0], e[1], ...
    __iter__ = None

    def __init__(
        self,
        *,
        lengths: Sequence[int],
        token_columns: Mapping[str, Tensor],
        document_columns: Mapping[str, Tensor] | None = None,
    ) -> None:
        lengths = tuple(int(n) for n in lengths)
        tokens = dict(token_columns)
        documents = dict(document_columns or {})
        missing = [name for name in _REQUIRED if name not in tokens]
        if missing:
            raise ValueError(f"token_columns={sorted(tokens)} lacks {missing}; both {list(_REQUIRED)} are needed")
        for index, length in enumerate(lengths):
            if length < 1:
                raise ValueError(f"document {index} is empty: input_ids needs at least one token per document")
        both = sorted(tokens.keys() & documents.keys())
        if both:
            raise ValueError(f"columns {both} are given per token and per document; give each name once")
        for name, column in tokens.items():
            check_flat(name, column, sum(lengths), "tokens")
        for name, column in documents.items():
            check_flat(name, column, len(lengths), "documents")
        tokens["input_ids"] = checked_token_ids(tokens["input_ids"], lengths)
        tokens["response_mask"], mask = checked_response_mask(tokens["response_mask"], lengths)
        for columns, owners in ((tokens, lengths), (documents, (1,) * len(lengths))):
            if "rewards" in columns:
                check_rewards(columns["rewards"], owners)
        counts = (int(part.sum()) for part in mask.split(list(lengths))) if lengths else ()
        self._assign(lengths, tokens, documents, mask, tuple(counts))

    def _assign(
        self,
        lengths: tuple[int, ...],
        tokens: dict[str, Tensor],
        documents: dict[str, Tensor],
        response_mask: Tensor,
        response_lengths: tuple[int, ...],
    ) -> "Experience":
        self._lengths = lengths
        self._token_columns = tokens
        self._document_columns = documents
        self._response_mask = response_mask
        self._response_lengths = response_lengths
        return self

    @classmethod
    def from_documents(cls, *, input_ids: Column, response_mask: Column, **columns: Column) -> "Experience":
        """Build an experience from one entry per document.

        Python floats become float32, ints int64 and bools bool; tensors keep their dtype, except that ``input_ids``
        is always int64 and ``response_mask`` bool. Everything lands on the device of ``input_ids``.

        Args:
            input_ids: One 1-D sequence or tensor of token ids per document.
            response_mask: One 0-1 sequence per document, as long as its tokens: 1 where the policy wrote the token.
                The first entry of each document is forced to 0.
            **columns: Per token (a list of 1-D sequences as long as the documents) or per document (``N`` scalars).

        Raises:
            ValueError: A column does not fit the documents; the message names column, document and lengths.
        """
        ids = [as_tensor("input_ids", index, ids) for index, ids in enumerate(input_ids)]
        for index, document in enumerate(ids):
            if document.dim() != 1 or document.numel() == 0:
                raise ValueError(
                    f"input_ids of document {index} has shape {list(document.shape)}: "
                    "it must be a non-empty 1-D sequence, for instance [1, 2]"
                )
        lengths = tuple(len(document) for document in ids)
        device = ids[0].device if ids else torch.device("cpu")
        tokens = {
            "input_ids": flatten("input_ids", ids, lengths, device),
            "response_mask": flatten("response_mask", response_mask, lengths, device),
        }
        documents: dict[str, Tensor] = {}
        for name, column in columns.items():
            per_token, value = read_column(name, column, lengths, device)
            (tokens if per_token else documents)[name] = value
        return cls(lengths=lengths, token_columns=tokens, document_columns=documents)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document, on the host."""
        return self._lengths

    @property
    def response_lengths(self) -> tuple[int, ...]:
        """Response tokens of each document, on the host."""
        return self._response_lengths

    @property
    def response_mask_host(self) -> Tensor:
        """The response mask, bool ``[num_tokens]``, on the CPU wherever the columns are."""
        return self._response_mask

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents together."""
        return len(self._response_mask)

    @property
    def device(self) -> torch.device:
        """Where the columns are."""
        return self._token_columns["input_ids"].device

    @property
    def token_columns(self) -> Mapping[str, Tensor]:
        """Read-only ``name -> [num_tokens]``."""
        return MappingProxyType(self._token_columns)

    @property
    def document_columns(self) -> Mapping[str, Tensor]:
        """Read-only ``name -> [N]``."""
        return MappingProxyType(self._document_columns)

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names of all columns: per token first, then per document."""
        return (*self._token_columns, *self._document_columns)

    def __len__(self) -> int:
        return len(self._lengths)

    def __contains__(self, name: object) -> bool:
        return name in self._token_columns or name in self._document_columns

    def __getitem__(self, name: str) -> Tensor:
        columns = self._token_columns if name in self._token_columns else self._document_columns
        if name not in columns:
            raise KeyError(f"no column {name!r}; there are {list(self.column_names)}")
        return columns[name]

    def __repr__(self) -> str:
        names = ", ".join(self.column_names)
        return f"Experience({len(self)} documents, {self.num_tokens} tokens on {self.device}: {names})"

    def documents(self, name: str) -> list[Tensor]:
        """Views of a per-token column, one ``[length]`` tensor per document.

        Raises:
            KeyError: There is no per-token column of that name.
        """
        if name not in self._token_columns:
            raise KeyError(f"no per-token column {name!r}; there are {list(self._token_columns)}")
        return list(self._token_columns[name].split(list(self._lengths))) if self._lengths else []

    def select(self, indices: Iterable[int]) -> "Experience":
        """The documents at ``indices``, in that order; repeats are allowed.

        Raises:
            ValueError: An index is not in ``[0, N)``.
        """
        chosen = [int(index) for index in indices]
        for index in chosen:
            if not 0 <= index < len(self):
                raise ValueError(f"indices contains {index}, but there are {len(self)} documents: use 0 to N - 1")
        flat = self.token_indices(chosen)
        rows = torch.tensor(chosen, dtype=torch.int64)
        flat_device, rows_device = flat.to(self.device), rows.to(self.device)
        return self._derive(
            tuple(self._lengths[index] for index in chosen),
            {name: column.index_select(0, flat_device) for name, column in self._token_columns.items()},
            {name: column.index_select(0, rows_device) for name, column in self._document_columns.items()},
            self._response_mask.index_select(0, flat),
            tuple(self._response_lengths[index] for index in chosen),
        )

    def token_indices(self, documents: Sequence[int]) -> Tensor:
        """Flat indices of the tokens of ``documents``, one document after another: int64 on the CPU."""
        starts = list(accumulate(self._lengths, initial=0))
        parts = [torch.arange(starts[index], starts[index + 1]) for index in documents]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def to(self, device: torch.device | str) -> "Experience":
        """All columns on ``device``; dtypes stay."""

        def move(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: value.to(device, non_blocking=value.is_pinned()) for name, value in columns.items()}

        return self._derive(
            self._lengths,
            move(self._token_columns),
            move(self._document_columns),
            self._response_mask,
            self._response_lengths,
        )

    def with_token_columns(self, **columns: Tensor) -> "Experience":
        """Add or replace per-token columns, given as flat tensors of shape ``[num_tokens]``.

        Raises:
            ValueError: A column has another shape.
        """
        return self._replace({name: torch.as_tensor(value) for name, value in columns.items()}, {})

    def with_document_columns(self, **columns: Tensor) -> "Experience":
        """Add or replace per-document columns, given as tensors of shape ``[N]``.

        Raises:
            ValueError: A column has another shape.
        """
        return self._replace({}, {name: torch.as_tensor(value) for name, value in columns.items()})

    def with_columns(self, **columns: Column) -> "Experience":
        """Add or replace columns, given one entry per document as in :meth:`from_documents`.

        Raises:
            ValueError: A column does not fit the documents.
        """
        tokens: dict[str, Tensor] = {}
        documents: dict[str, Tensor] = {}
        for name, column in columns.items():
            per_token, value = read_column(name, column, self._lengths, self.device)
            # Without documents, nothing shows what kind of column it is.
            per_token = per_token or (not self._lengths and name in self._token_columns)
            (tokens if per_token else documents)[name] = value
        return self._replace(tokens, documents)

    def drop(self, *names: str) -> "Experience":
        """Without the columns ``names``.

        Raises:
            ValueError: A name is unknown, or is ``input_ids`` or ``response_mask``.
        """
        for name in names:
            if name in _REQUIRED or name not in self:
                able = [column for column in self.column_names if column not in _REQUIRED]
                raise ValueError(f"names contains {name!r}, which cannot be dropped; these can: {able}")
        return self._derive(
            self._lengths,
            {name: value for name, value in self._token_columns.items() if name not in names},
            {name: value for name, value in self._document_columns.items() if name not in names},
            self._response_mask,
            self._response_lengths,
        )

    @classmethod
    def cat(cls, experiences: Sequence["Experience"]) -> "Experience":
        """The documents of several experiences, one after another.

        Empty experiences are left out as long as another has documents: the kind and dtype of a column without
        documents mean nothing.

        Raises:
            ValueError: There is none, or two differ in a column, its kind or its dtype.
        """
        if not experiences:
            raise ValueError("experiences=[] is empty: give at least one experience")
        experiences = [experience for experience in experiences if len(experience)] or experiences[:1]
        first = experiences[0]
        for index, other in enumerate(experiences[1:], start=1):
            for name in dict.fromkeys((*first.column_names, *other.column_names)):
                if _kind(first, name) != _kind(other, name):
                    raise ValueError(
                        f"column {name!r} is {_kind(other, name)} in experience {index} but {_kind(first, name)} "
                        "in experience 0: all need the same columns and dtypes"
                    )
        return first._derive(
            tuple(n for e in experiences for n in e._lengths),
            {name: torch.cat([e._token_columns[name] for e in experiences]) for name in first._token_columns},
            {name: torch.cat([e._document_columns[name] for e in experiences]) for name in first._document_columns},
            torch.cat([e._response_mask for e in experiences]),
            tuple(n for e in experiences for n in e._response_lengths),
        )

    def mini_batches(self, count: int, generator: torch.Generator | None = None) -> list["Experience"]:
        """Split into ``count`` parts whose numbers of documents differ by at most one.

        Args:
            count: Number of parts; with more parts than documents the last ones are empty.
            generator: CPU generator that shuffles the documents first; ``None`` keeps their order.

        Raises:
            ValueError: ``count`` is less than 1.
        """
        if count < 1:
            raise ValueError(f"count={count} must be at least 1, for instance 1")
        total = len(self)
        order = list(range(total)) if generator is None else torch.randperm(total, generator=generator).tolist()
        sizes = [total // count + (part < total % count) for part in range(count)]
        starts = list(accumulate(sizes, initial=0))
        return [self.select(order[start : start + size]) for start, size in zip(starts, sizes, strict=False)]

    def _replace(self, tokens: dict[str, Tensor], documents: dict[str, Tensor]) -> "Experience":
        for name in _REQUIRED:
            if name in documents:
                raise ValueError(f"column {name!r} is per token: give {self.num_tokens} values, not one per document")
        device = self.device
        for columns in (tokens, documents):
            columns.update({name: value.to(device) for name, value in columns.items()})
        kept_tokens = {name: value for name, value in self._token_columns.items() if name not in documents}
        kept_documents = {name: value for name, value in self._document_columns.items() if name not in tokens}
        if not any(name in tokens for name in _REQUIRED):
            # Only the new columns need a look: checking token ids again would wait for the device.
            for name, value in tokens.items():
                check_flat(name, value, self.num_tokens, "tokens")
            for name, value in documents.items():
                check_flat(name, value, len(self), "documents")
            if "rewards" in tokens:
                check_rewards(tokens["rewards"], self._lengths)
            if "rewards" in documents:
                check_rewards(documents["rewards"], (1,) * len(self))
            mask, counts = self._response_mask, self._response_lengths
            return self._derive(self._lengths, kept_tokens | tokens, kept_documents | documents, mask, counts)
        return type(self)(
            lengths=self._lengths,
            token_columns=kept_tokens | tokens,
            document_columns=kept_documents | documents,
        )

    def _derive(
        self,
        lengths: tuple[int, ...],
        tokens: dict[str, Tensor],
        documents: dict[str, Tensor],
        response_mask: Tensor,
        response_lengths: tuple[int, ...],
    ) -> "Experience":
        # Columns of a valid experience need no second check.
        new = type(self).__new__(type(self))
        return new._assign(lengths, tokens, documents, response_mask, response_lengths)


def _kind(experience: Experience, name: str) -> str:
    """Kind and dtype of a column in words, equal for columns that can be joined."""
    if name in experience.token_columns:
        return f"per token, {experience[name].dtype}"
    return f"per document, {experience[name].dtype}" if name in experience else "missing"
