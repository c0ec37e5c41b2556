"""Ulysses: between projections and attention, a sequence slice of all heads becomes the whole row of some heads.

Shapes: S tokens of the whole row, L = S / sequence ranks of this rank's slice, H heads, D head size.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override


class _AllToAll(torch.autograd.Function):
    """Send part i of the first dim to rank i of the group; its own transpose, since all parts have one size."""

    @staticmethod
    @override
    def forward(ctx: Any, parts: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        parts = grads[0].contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=ctx.group)
        return received, None


def check_head_counts(module_name: str, query_heads: int, kv_heads: int, sequence_size: int) -> None:
    """Refuse a number of sequence ranks over which the heads of an attention module cannot be spread.

    Args:
        module_name: Name for the error.
        query_heads: Query heads of the module.
        kv_heads: Key and value heads of the module.
        sequence_size: Sequence ranks.

    Raises:
        ValueError: If the query heads are no multiple of the ranks, or if of KV heads and ranks neither is a multiple
            of the other.
    """
    if query_heads % sequence_size == 0 and (kv_heads % sequence_size == 0 or sequence_size % kv_heads == 0):
        return
    possible = [
        size
        for size in range(1, query_heads + 1)
        if query_heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    ]
    raise ValueError(
        f"ulysses_sp_size={sequence_size} cannot split {query_heads} query heads and {kv_heads} key/value heads of "
        f"{module_name!r}; use one of {possible}"
    )


def exchange_heads(query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Gather the row and scatter the heads of queries, keys and values in one all-to-all; differentiable.

    Key/value heads fewer than the ranks are repeated, just enough for each rank to get one; their gradients add up.
    Collective over ``group``, forward and backward.

    Args:
        query: ``[L, Hq, D]``, this rank's slice of the row.
        key: ``[L, Hkv, D]``.
        value: ``[L, Hkv, Dv]``, of the same dtype.
        group: The sequence ranks, in row order.

    Returns:
        Query ``[S, Hq / size, D]``, key and value ``[S, max(Hkv / size, 1), D]``: the whole row, this rank's heads.

    Raises:
        ValueError: If the heads do not split over the group.
    """
    size = dist.get_world_size(group)
    check_head_counts("attention", query.shape[1], key.shape[1], size)
    if key.shape[1] < size:
        repeats = size // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    # [L, H, D] -> [size, L, H / size * D]: what goes to one rank lies together, so one tensor carries all three.
    parts = [x.unflatten(1, (size, -1)).flatten(2).transpose(0, 1) for x in (query, key, value)]
    received = _AllToAll.apply(torch.cat(parts, -1), group).flatten(0, 1)
    split = received.split([part.shape[-1] for part in parts], -1)
    query, key, value = (x.unflatten(-1, (-1, y.shape[-1])) for x, y in zip(split, (query, key, value), strict=True))
    return query, key, value


def return_heads(output: Tensor, group: ProcessGroup) -> Tensor:
    """Scatter the row and gather the heads of an attention output; differentiable.

    Collective over ``group``, forward and backward.

    Args:
        output: ``[S, H / size, D]``, the whole row of this rank's heads.
        group: The sequence ranks, in row order.

    Returns:
        ``[L, H, D]``, this rank's slice of all heads.
    """
    size = dist.get_world_size(group)
    received = _AllToAll.apply(output.unflatten(0, (size, -1)).contiguous(), group)
    return received.transpose(0, 1).flatten(1, 2)
