"""Context parallelism: which tokens of a packed row go to which rank.

Causal attention costs a token as much as it has tokens before it in its document, so equal slices of a row are unequal
work. An *order* is a permutation of the row: its entry *i* is the position in the row of the token at sharded place
*i*, and equal slices of it are the ranks' parts. Everything follows from the documents' lengths on the host, so that
all ranks make the same order without talking.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from lightning_rl_engines.sequence.planner import round_up

BALANCERS: Final[tuple[str | None, ...]] = (None, "headtail", "ptrr")
"""Load balancers by torchtitan's names: none, head and tail, and round-robin by processing time."""

BLOCK_SIZE: Final = 128
"""Tokens in a block of the round-robin: those of a block of flex attention's masks, which then stay sparse."""

_BLOCKS_PER_RANK = 4
"""Blocks that a rank gets at least, or there would be nothing to balance with."""


def row_multiple(balancer: str | None, size: int) -> int:
    """What the length of a row must be a multiple of.

    Args:
        balancer: One of :data:`BALANCERS`.
        size: Ranks that share the row.

    Raises:
        ValueError: If the balancer is unknown.
    """
    _check_balancer(balancer)
    return 2 * size if balancer == "headtail" else size


def row_order(balancer: str | None, cu_seqlens: Sequence[int], size: int, *, block_size: int = BLOCK_SIZE) -> Tensor:
    """The order in which a packed row is dealt out to ranks.

    ``functools.partial(row_order, balancer)`` is what ``pack_row(order=)`` takes.

    - ``None``: the row's own order.
    - ``"headtail"``: of 2 * ``size`` chunks of the row, a rank gets one of the first half and its mirror image.
      Balanced for one document as long as the row.
    - ``"ptrr"``: blocks of tokens, sorted by what attention costs them, are dealt out to and fro. Balanced for any
      documents.

    Args:
        balancer: One of :data:`BALANCERS`.
        cu_seqlens: Where the row's documents start, and its length: the padding document included.
        size: Ranks that share the row.
        block_size: Tokens in a block of ``"ptrr"`` at most; blocks shrink until each rank has a few of them.

    Returns:
        int64 ``[row]`` on the CPU, the position in the row of each sharded place. A pure function of its arguments.

    Raises:
        ValueError: If the balancer is unknown, the row is no multiple of :func:`row_multiple`, or the block size is
            not positive.
    """
    length, multiple = cu_seqlens[-1], row_multiple(balancer, size)
    if length % multiple:
        raise ValueError(
            f"a row of {length} tokens cannot be dealt out by load balancer {balancer!r} to {size} ranks; pad it to a "
            f"multiple of {multiple}, for instance {round_up(length, multiple)}"
        )
    if block_size < 1:
        raise ValueError(f"block_size={block_size} must be positive, for instance {BLOCK_SIZE}")
    if balancer == "headtail":
        return _head_tail(length, size)
    if balancer == "ptrr":
        return _round_robin(attention_costs(cu_seqlens), size, block_size)
    return torch.arange(length)


def inverse_order(order: Tensor) -> Tensor:
    """The sharded place of each position of the row: ``order[inverse_order(order)]`` counts up from 0.

    Args:
        order: int64 ``[row]``, a permutation.

    Returns:
        int64 ``[row]`` on the same device.
    """
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def attention_costs(cu_seqlens: Sequence[int]) -> Tensor:
    """Tokens that each token of a row attends to: its document's up to itself.

    Args:
        cu_seqlens: Where the row's documents start, and its length.

    Returns:
        int64 ``[row]`` on the CPU.
    """
    return torch.cat([torch.arange(1, end - start + 1) for start, end in pairwise(cu_seqlens)])


def _head_tail(length: int, size: int) -> Tensor:
    chunks = torch.arange(length).view(2 * size, -1)
    head = torch.arange(size)
    return torch.stack([chunks[head], chunks[2 * size - 1 - head]], dim=1).flatten()


def _round_robin(costs: Tensor, size: int, block_size: int) -> Tensor:
    """Deal out whole blocks to and fro, and what is left at the end of the row to those who have least so far."""
    local = len(costs) // size
    block = min(block_size, max(1, local // _BLOCKS_PER_RANK))
    blocks, rest = divmod(local, block)
    whole = size * blocks * block
    positions = torch.arange(len(costs))
    block_costs = costs[:whole].view(-1, block).sum(1)
    dealt = block_costs.argsort(descending=True, stable=True).view(-1, size)
    # To and fro: who comes first in one turn comes last in the next.
    dealt[1::2] = dealt[1::2].flip(1)
    # Within a rank blocks keep the row's order, in which attention's masks are sparse.
    dealt = dealt.T.sort(1).values
    parts = positions[:whole].view(-1, block)[dealt].flatten(1)
    totals = block_costs[dealt].sum(1)
    rest_costs = costs[whole:].view(size, rest).sum(1)
    takers = torch.empty(size, dtype=torch.int64)
    takers[totals.argsort(stable=True)] = rest_costs.argsort(descending=True, stable=True)
    return torch.cat([parts, positions[whole:].view(size, rest)[takers]], dim=1).flatten()


def _check_balancer(balancer: str | None) -> None:
    if balancer not in BALANCERS:
        raise ValueError(f"load balancer {balancer!r} is not known; use one of {list(BALANCERS)}")
