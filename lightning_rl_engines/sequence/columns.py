"""Reading and checking the columns of an experience."""

from collections.abc import Sequence
from numbers import Number
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Column: TypeAlias = Sequence[Any] | Tensor | np.ndarray
"""``N`` scalars (per document) or ``N`` 1-D sequences of the documents' lengths (per token)."""


def read_column(name: str, column: Column, lengths: Sequence[int], device: torch.device) -> tuple[bool, Tensor]:
    """Turn a column given document by document into one flat tensor.

    Args:
        name: Name of the column, for errors.
        column: ``N`` scalars or ``N`` 1-D sequences. Python floats become float32, ints int64, bools bool; tensors and
            arrays keep their dtype.
        lengths: Tokens of each document.
        device: Where the result goes.

    Returns:
        Whether the column is per token, and the tensor: ``[num_tokens]`` or ``[N]``. Without documents the two kinds
        cannot be told apart, and the column counts as per document.

    Raises:
        ValueError: The column is neither per token nor per document.
    """
    if isinstance(column, (Tensor, np.ndarray)) and column.ndim == 1:
        values = column if isinstance(column, Tensor) else torch.tensor(column)
        _check_count(name, len(values), lengths)
        return False, values.detach().to(device)
    if isinstance(column, str) or not hasattr(column, "__len__"):
        raise ValueError(f"column {name!r} is {column!r}: give one entry per document ({len(lengths)})")
    _check_count(name, len(column), lengths)
    scalar = [_is_scalar(entry) for entry in column]
    if all(scalar):
        return False, as_tensor(name, None, list(column)).to(device)
    if any(scalar):
        index = scalar.index(not scalar[0])
        raise ValueError(
            f"column {name!r} mixes scalars and sequences: document {index} has {column[index]!r}, document 0 "
            f"{column[0]!r}; give one scalar per document or one value per token"
        )
    return True, flatten(name, column, lengths, device)


def flatten(name: str, column: Column, lengths: Sequence[int], device: torch.device) -> Tensor:
    """Join one 1-D sequence per document into a flat ``[num_tokens]`` tensor on ``device``.

    Raises:
        ValueError: The number of entries or the length of one does not fit the documents.
    """
    _check_count(name, len(column), lengths)
    parts = [as_tensor(name, index, entry) for index, entry in enumerate(column)]
    for index, (part, length) in enumerate(zip(parts, lengths, strict=True)):
        if part.shape != (length,):
            raise ValueError(
                f"column {name!r} of document {index} has shape {list(part.shape)}, but the document has {length} "
                f"tokens: give {length} values, or one scalar for every document"
            )
    return torch.cat([part.to(device) for part in parts]) if parts else torch.empty(0, device=device)


def as_tensor(name: str, index: int | None, values: Any) -> Tensor:
    """Convert one entry: Python floats to float32, ints to int64, bools to bool; tensors and arrays keep their dtype.

    Raises:
        ValueError: ``values`` are not numbers, or are nested to different depths.
    """
    if isinstance(values, Tensor):
        return values.detach()
    if isinstance(values, np.ndarray):
        return torch.tensor(values)
    try:
        if isinstance(values, (list, tuple)) and values and all(isinstance(value, Tensor) for value in values):
            return torch.stack([value.detach() for value in values])
        # Through numpy: torch would round Python floats to whatever the default dtype is at the moment.
        array = np.asarray(values)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"dtype {array.dtype}")
    except (TypeError, ValueError, RuntimeError) as error:
        where = "" if index is None else f" of document {index}"
        raise ValueError(f"column {name!r}{where} does not hold numbers of one shape: {error}") from error
    tensor = torch.tensor(array)
    return tensor.float() if tensor.is_floating_point() else tensor


def check_flat(name: str, column: Tensor, size: int, what: str) -> None:
    """Refuse a column that is not one-dimensional with ``size`` entries.

    Raises:
        ValueError: The shape is not ``[size]``.
    """
    if column.shape != (size,):
        raise ValueError(f"column {name!r} has shape {list(column.shape)}: it must be [{size}] for {size} {what}")


def checked_token_ids(ids: Tensor, lengths: Sequence[int]) -> Tensor:
    """``ids`` as int64, none of them negative. Waits for the device.

    Raises:
        ValueError: A token id is negative or no integer.
    """
    if ids.numel() and (ids.is_floating_point() or ids.dtype == torch.bool):
        raise ValueError(f"column 'input_ids' has dtype {ids.dtype}: token ids must be integers, for instance int64")
    ids = ids.to(torch.int64)
    bad = _first(ids < 0, lengths)
    if bad is not None:
        document, token, flat = bad
        raise ValueError(
            f"input_ids of document {document} holds {int(ids[flat])} at token {token} of {lengths[document]}: "
            "token ids must be 0 or more"
        )
    return ids


def checked_response_mask(mask: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """``mask`` as bool without the first token of each document, on its device and on the CPU. Waits for the device.

    Raises:
        ValueError: A value is neither 0 nor 1.
    """
    host = mask.cpu()
    bad = _first((host != 0) & (host != 1), lengths)
    if bad is not None:
        document, token, flat = bad
        raise ValueError(
            f"response_mask of document {document} holds {host[flat].item()} at token {token} of {lengths[document]}: "
            "it must be 0 or 1"
        )
    host = host.to(torch.bool, copy=True)
    starts = torch.tensor(lengths, dtype=torch.int64).cumsum(0) - torch.tensor(lengths, dtype=torch.int64)
    host[starts] = False
    return host.to(mask.device), host


def check_rewards(rewards: Tensor, lengths: Sequence[int]) -> None:
    """Refuse rewards that are not finite. Waits for the device.

    Args:
        rewards: Per-token or per-document column.
        lengths: Entries of each document: its tokens, or 1 each.

    Raises:
        ValueError: A reward is NaN or infinite.
    """
    bad = _first(~torch.isfinite(rewards), lengths)
    if bad is not None:
        document, _, flat = bad
        raise ValueError(
            f"rewards of document {document} holds {rewards[flat].item()}: every reward must be finite, "
            "for instance 0.0 for a response that could not be judged"
        )


def _is_scalar(entry: Any) -> bool:
    return isinstance(entry, (Number, np.generic)) or (isinstance(entry, (Tensor, np.ndarray)) and entry.ndim == 0)


def _check_count(name: str, count: int, lengths: Sequence[int]) -> None:
    if count != len(lengths):
        hint = "; add a flat tensor with with_token_columns" if count == sum(lengths) else ""
        raise ValueError(f"column {name!r} has {count} entries for {len(lengths)} documents: give one each{hint}")


def _first(bad: Tensor, lengths: Sequence[int]) -> tuple[int, int, int] | None:
    """Document, position in it and flat position of the first True."""
    if not bool(bad.any()):
        return None
    flat = int(bad.to(torch.uint8).argmax())
    position = flat
    for document, length in enumerate(lengths):
        if position < length:
            return document, position, flat
        position -= length
    raise AssertionError("the column is longer than the documents")
