"""Block masks of flex attention for packed rows, made from ranges: nothing is as large as all pairs of tokens."""

from typing import Final

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lightning_rl_engines.sequence.packing import PackedRow

BLOCK_SIZE: Final = 128
"""Tokens in a block, of queries and of keys; torch's default."""


def make_block_mask(row: PackedRow, queries: Tensor, keys: Tensor, *, window: int | None = None) -> BlockMask:
    """Mask by which tokens see those before them in their documents, for tokens of a row in any order.

    Which blocks matter follows from the range of documents and of positions in each: torch's ``create_block_mask``
    would make a mask of all pairs of tokens first. A block is taken to matter when ranges allow it, so there may be
    some too many where tokens of a block do not follow one another; the mask decides within blocks.

    Args:
        row: The documents of the row.
        queries: int64 ``[L]``, positions in the row of the tokens that see, on the row's device.
        keys: int64 ``[S]``, positions of the tokens that are seen.
        window: Tokens that a token sees at most, itself included; ``None`` for all before it.
    """
    ends = row.cu_seqlens[1:]
    query_documents, key_documents = (torch.bucketize(x, ends, right=True, out_int32=True) for x in (queries, keys))

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        inside = (query_documents[query] == key_documents[key]) & (queries[query] >= keys[key])
        return inside if window is None else inside & (queries[query] - keys[key] < window)

    (query_first, query_last), (key_first, key_last) = (_ranges(x) for x in (query_documents, key_documents))
    (query_low, query_high), (key_low, key_high) = (_ranges(x) for x in (queries, keys))
    query_first, query_last, query_low, query_high = (
        x[:, None] for x in (query_first, query_last, query_low, query_high)
    )
    some = (query_first <= key_last) & (query_last >= key_first) & (query_high >= key_low)
    every = (query_first == key_last) & (query_last == key_first) & (query_low >= key_high)
    if window is not None:
        some &= query_low - key_high < window
        every &= query_high - key_low < window
    # A block that reaches over the end of the tokens is never seen as a whole.
    every[len(queries) // BLOCK_SIZE :] = False
    every[:, len(keys) // BLOCK_SIZE :] = False
    return BlockMask.from_kv_blocks(
        *_ordered(some & ~every),
        *_ordered(every),
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=visible,
        seq_lengths=(len(queries), len(keys)),
    )


def _ranges(values: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each block."""
    missing = -len(values) % BLOCK_SIZE
    blocks = torch.cat([values, values[-1:].expand(missing)]).view(-1, BLOCK_SIZE)
    return blocks.amin(1), blocks.amax(1)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """``[1, 1, Q]``, how many blocks of keys are True for each block of queries; ``[1, 1, Q, K]``, all, these first."""
    numbers = blocks.sum(1, dtype=torch.int32)
    indices = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return numbers[None, None], indices[None, None]
