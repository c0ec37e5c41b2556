"""Reward shaping and filtering of documents, as pure functions over the global batch."""

import torch
from torch import Tensor

from lightning_rl_engines.algorithms.groups import check_group_columns, group_extrema


def zero_variance_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Mark the documents to keep when groups without a learning signal are dropped.

    This is the filter of DAPO's dynamic sampling (Yu et al. 2025): a group whose rewards are all equal, or that has
    one document only, has zero advantages. Kept in the batch, its tokens still count in the denominators and still
    move the policy through KL and entropy terms; dropped, they do neither.

    Args:
        rewards: ``[N]`` finite floats of the global batch.
        group_ids: ``[N]`` int64, equal for the documents of one prompt.

    Returns:
        ``[N]`` bool on the device of ``rewards``: True for documents of groups with at least two different rewards.

    Raises:
        ValueError: Shapes differ or a reward is not finite (the message names its index).
    """
    values, groups, count = check_group_columns(rewards, group_ids)
    low, high = group_extrema(values, groups, count)
    return (high > low)[groups].to(rewards.device)


def overlong_penalty(response_lengths: Tensor, max_length: int, buffer: int, penalty_factor: float = 1.0) -> Tensor:
    """Compute the soft punishment of overlong responses of DAPO (Yu et al. 2025, equation 13), to be added to rewards.

    Zero up to ``max_length - buffer`` tokens, then falling linearly to ``-penalty_factor`` at ``max_length`` and
    constant beyond.

    Args:
        response_lengths: ``[N]`` response tokens per document, integer or float.
        max_length: Length in tokens at which the penalty is full, at least 1.
        buffer: Width in tokens of the linear part, between 1 and ``max_length``.
        penalty_factor: Size of the full penalty, not negative.

    Returns:
        ``[N]`` fp32 on the same device, between ``-penalty_factor`` and 0.

    Raises:
        ValueError: A number is out of range.
    """
    if max_length < 1:
        raise ValueError(f"max_length={max_length} must be at least 1, for instance 1024")
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer={buffer} must lie between 1 and max_length={max_length}, for instance {max_length}")
    if not 0 <= penalty_factor < float("inf"):
        raise ValueError(f"penalty_factor={penalty_factor} must be finite and not negative, for instance 1.0")
    excess = response_lengths.to(torch.float32) - (max_length - buffer)
    # The subtraction from zero avoids negative zeros in rewards that are printed.
    return 0.0 - penalty_factor * (excess / buffer).clamp(0.0, 1.0)
