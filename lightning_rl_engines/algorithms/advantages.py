"""Advantages of whole responses from their rewards, over the global batch.

Computed on the host in fp64 and rounded once at the end; the result follows any permutation of the documents exactly.
A group without a learning signal (one document, or equal rewards) never gives NaN.
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rl_engines.algorithms.groups import center_by_group, check_group_columns, group_extrema, ordered_sum


class Advantage(ABC):
    """Base of the advantage estimators that give each response one number.

    Subclasses implement :meth:`estimate`; validation, precision and devices are handled here.

    Attributes:
        needs_groups: Whether a response without others to the same prompt has no advantage.
    """

    needs_groups: ClassVar[bool] = False

    def __call__(self, rewards: Tensor, group_ids: Tensor, response_lengths: Tensor) -> Tensor:
        """Compute the advantage of each response. No communication: pass the documents of all ranks.

        Args:
            rewards: ``[N]`` finite floats, one per document of the global batch.
            group_ids: ``[N]`` int64, equal for the responses to one prompt.
            response_lengths: ``[N]`` response tokens per document, integer or float.

        Returns:
            ``[N]`` fp32 on the device of ``rewards``, without gradient.

        Raises:
            ValueError: Shapes differ, a reward is not finite, or a length is negative.
        """
        values, groups, count = check_group_columns(rewards, group_ids)
        if response_lengths.shape != rewards.shape:
            raise ValueError(
                f"response_lengths of shape {tuple(response_lengths.shape)} does not match rewards of shape "
                f"{tuple(rewards.shape)}; pass one number of tokens per document"
            )
        lengths = response_lengths.detach().to("cpu", torch.float64)
        negative = torch.nonzero(~(lengths >= 0)).flatten()
        if len(negative):
            index = int(negative[0])
            raise ValueError(f"response_lengths[{index}]={float(lengths[index])} must be a number of tokens, 0 or more")
        return self.estimate(values, groups, count, lengths).to(rewards.device, torch.float32)

    @abstractmethod
    def estimate(self, rewards: Tensor, groups: Tensor, count: int, response_lengths: Tensor) -> Tensor:
        """Compute the advantages of validated columns.

        Args:
            rewards: ``[N]`` fp64 on the host, finite.
            groups: ``[N]`` int64 on the host, each in ``0..count-1`` and each of these present.
            count: Number of groups.
            response_lengths: ``[N]`` fp64 on the host, not negative.

        Returns:
            ``[N]`` fp64.
        """


def _check_eps(eps: float) -> float:
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps={eps} must be finite and not negative, for instance 1e-6")
    return eps


class GRPOAdvantage(Advantage):
    """Rewards relative to their group: ``(r - mean) / (std + eps)`` (Shao et al. 2024, "DeepSeekMath").

    ``std`` is the unbiased standard deviation of the group (divisor n - 1), as in verl and TRL. A group of one and a
    group of equal rewards get exact zeros.
    """

    needs_groups = True

    def __init__(self, *, normalize_std: bool = True, eps: float = 1e-6) -> None:
        """Configure the estimator.

        Args:
            normalize_std: Divide by the standard deviation of the group.
            eps: Added to the standard deviation, not negative.

        Raises:
            ValueError: ``eps`` is out of range.
        """
        self.normalize_std = normalize_std
        self.eps = _check_eps(eps)

    @override
    def estimate(self, rewards: Tensor, groups: Tensor, count: int, response_lengths: Tensor) -> Tensor:
        centered = center_by_group(rewards, groups, count)
        if not self.normalize_std:
            return centered
        sizes = torch.bincount(groups, minlength=count)
        variance = ordered_sum(centered.square(), groups, count) / (sizes - 1).clamp(min=1)
        scaled = centered / (variance.sqrt() + self.eps)[groups]
        # With eps = 0 a group without a signal would be 0 / 0.
        return torch.where(centered == 0, centered, scaled)


class DrGRPOAdvantage(Advantage):
    """Rewards minus the mean of their group, not divided by its deviation (Liu et al. 2025, "Dr. GRPO").

    Goes with the loss aggregation ``"seq-mean-token-sum-norm"``, ``loss_scale_factor`` being the maximal response
    length. A group of one and a group of equal rewards get exact zeros.
    """

    needs_groups = True

    @override
    def estimate(self, rewards: Tensor, groups: Tensor, count: int, response_lengths: Tensor) -> Tensor:
        return center_by_group(rewards, groups, count)


class RLOOAdvantage(Advantage):
    """Rewards minus the mean of the *other* rewards of their group (Ahmadian et al. 2024, "Back to Basics").

    Equal to ``n / (n - 1) * (r - mean)`` for a group of ``n``. A group of one has no others and gets an exact zero,
    as does a group of equal rewards.
    """

    needs_groups = True

    @override
    def estimate(self, rewards: Tensor, groups: Tensor, count: int, response_lengths: Tensor) -> Tensor:
        sizes = torch.bincount(groups, minlength=count)
        factor = sizes / (sizes - 1).clamp(min=1)
        return center_by_group(rewards, groups, count) * factor.double()[groups]


class ReinforcePlusPlusAdvantage(Advantage):
    """Rewards whitened over all response tokens of the global batch (Hu 2025, "REINFORCE++").

    Each token of a response carries its reward, so mean and (unbiased) variance weigh documents by their response
    tokens: ``(r - mean) / sqrt(var + eps)``. With ``baseline`` the mean of the group is subtracted first
    ("REINFORCE++-baseline"). If that leaves equal numbers everywhere, all advantages are exact zeros; otherwise the
    whitening gives groups without a signal ``-mean / sqrt(var + eps)``, as in the paper (drop such groups with
    ``zero_variance_groups`` where that is unwanted).
    """

    def __init__(self, *, baseline: bool = False, eps: float = 1e-8) -> None:
        """Configure the estimator.

        Args:
            baseline: Subtract the mean of the group before whitening.
            eps: Added to the variance, not negative.

        Raises:
            ValueError: ``eps`` is out of range.
        """
        self.baseline = baseline
        self.eps = _check_eps(eps)

    @override
    def estimate(self, rewards: Tensor, groups: Tensor, count: int, response_lengths: Tensor) -> Tensor:
        values = center_by_group(rewards, groups, count) if self.baseline else rewards
        one_group = torch.zeros_like(groups)
        tokens = response_lengths.sum()
        low, high = group_extrema(values[response_lengths > 0], one_group[response_lengths > 0], 1)
        if not bool(high > low):
            return torch.zeros_like(values)
        centered = values - ordered_sum(values * response_lengths, one_group, 1) / tokens
        variance = ordered_sum(centered.square() * response_lengths, one_group, 1) / (tokens - 1)
        return centered * torch.rsqrt(variance + self.eps)
