"""Reductions over groups of documents that give the same bits for every order of the documents."""

import torch
from torch import Tensor


def check_group_columns(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, int]:
    """Validate the columns and bring them to the host in fp64.

    The host, because the columns are small, some devices have no fp64, and sums there are deterministic.

    Args:
        rewards: ``[N]`` numbers.
        group_ids: ``[N]`` integers.

    Returns:
        Rewards ``[N]`` fp64, groups renumbered ``0..count-1`` ``[N]`` int64, and the count; tensors on the host.

    Raises:
        ValueError: Shapes differ, or a reward is not finite (the message names its index).
    """
    if rewards.dim() != 1 or group_ids.shape != rewards.shape:
        raise ValueError(
            f"rewards of shape {tuple(rewards.shape)} and group_ids of shape {tuple(group_ids.shape)} do not match; "
            "pass one number per document in both, shape [N]"
        )
    values = rewards.detach().to("cpu", torch.float64)
    bad = torch.nonzero(~torch.isfinite(values)).flatten()
    if len(bad):
        index = int(bad[0])
        raise ValueError(
            f"rewards[{index}]={float(values[index])} is not finite; pass a finite number, for instance 0.0"
        )
    unique, groups = torch.unique(group_ids.detach().cpu(), return_inverse=True)
    return values, groups, len(unique)


def ordered_sum(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """Sum values by group, in an order that depends on the values alone and not on that of the documents.

    Args:
        values: ``[N]`` fp64 on the host.
        groups: ``[N]`` int64, each in ``0..count-1``.
        count: Number of groups.

    Returns:
        ``[count]`` fp64.
    """
    order = torch.argsort(values)
    return torch.zeros(count, dtype=values.dtype).index_add_(0, groups[order], values[order])


def group_extrema(values: Tensor, groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Find the smallest and the largest value of each group.

    Args:
        values: ``[N]`` fp64 on the host.
        groups: ``[N]`` int64, each in ``0..count-1``.
        count: Number of groups.

    Returns:
        Minima and maxima, ``[count]`` fp64 each.
    """
    low = torch.full((count,), torch.inf, dtype=values.dtype).scatter_reduce_(0, groups, values, "amin")
    high = torch.full((count,), -torch.inf, dtype=values.dtype).scatter_reduce_(0, groups, values, "amax")
    return low, high


def center_by_group(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """Subtract from each value the mean of its group; groups of equal values give exact zeros.

    Args:
        values: ``[N]`` fp64 on the host.
        groups: ``[N]`` int64, each in ``0..count-1``.
        count: Number of groups.

    Returns:
        ``[N]`` fp64.
    """
    sizes = torch.bincount(groups, minlength=count)
    centered = values - (ordered_sum(values, groups, count) / sizes)[groups]
    low, high = group_extrema(values, groups, count)
    # The mean of equal numbers may differ from them in the last bit, which a division by the deviation would blow up.
    return torch.where((high > low)[groups], centered, torch.zeros_like(centered))
