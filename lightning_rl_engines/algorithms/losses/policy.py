"""Policy losses on token-level importance ratios: PPO and its kin, CISPO, REINFORCE."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rl_engines.algorithms.aggregation import AggregationMode
from lightning_rl_engines.algorithms.kl import KLEstimator
from lightning_rl_engines.algorithms.losses.base import (
    Metrics,
    PolicyInputs,
    PolicyLossBase,
    fraction_metrics,
    importance_ratio,
    ratio_metrics,
)

if TYPE_CHECKING:
    from lightning_rl_engines.sequence.packing import MicroBatch


def check_lower_width(name: str, value: float, example: float) -> float:
    """Return the width of a clip range below 1, refusing one outside ``[0, 1]``.

    Args:
        name: Name of the argument, for the message.
        value: Its value.
        example: A value that works, for the message.

    Returns:
        The value.

    Raises:
        ValueError: The value is out of range.
    """
    if not 0 <= value <= 1:
        raise ValueError(
            f"{name}={value} must lie between 0 and 1, since ratios are positive; use for instance {example}"
        )
    return value


def check_upper_width(name: str, value: float, example: float) -> float:
    """Return the width of a clip range above 1, refusing one that is negative or not finite.

    Args:
        name: Name of the argument, for the message.
        value: Its value.
        example: A value that works, for the message.

    Returns:
        The value.

    Raises:
        ValueError: The value is out of range.
    """
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}={value} must be finite and not negative; use for instance {example}")
    return value


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped surrogate (Schulman et al. 2017, equation 7) and where its clips bind.

    ``-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)``; with ``dual_clip`` a negative advantage costs at most
    ``-dual_clip * A`` (Ye et al. 2020, equation 5). Where a clip binds, the gradient is zero.

    Args:
        ratio: Importance ratio, any shape, with gradient.
        advantages: Same shape.
        low: Width of the range below 1.
        high: Width of the range above 1.
        dual_clip: Largest ratio that counts for negative advantages, above 1; None for no such bound.

    Returns:
        Loss per token, and the bool masks ``clip_fraction_low``, ``clip_fraction_high`` and, with ``dual_clip``,
        ``dual_clip_fraction``.
    """
    below = (advantages < 0) & (ratio < 1 - low)
    above = (advantages > 0) & (ratio > 1 + high)
    counted = torch.where(below, 1 - low, torch.where(above, 1 + high, ratio))
    masks = {"clip_fraction_low": below, "clip_fraction_high": above}
    if dual_clip is not None:
        capped = (advantages < 0) & (ratio > dual_clip)
        counted = torch.where(capped, dual_clip, counted)
        masks["dual_clip_fraction"] = capped
    return -advantages * counted, masks


def clip_metrics(masks: dict[str, Tensor], micro_batch: "MicroBatch", mode: AggregationMode = "token-mean") -> Metrics:
    """Turn the masks of :func:`clipped_surrogate` into fractions, ``clip_fraction`` being the sum of low and high.

    Args:
        masks: ``name -> [local]`` bool.
        micro_batch: The micro-batch.
        mode: ``"token-mean"`` or ``"seq-mean-token-mean"``.

    Returns:
        Metrics.
    """
    either = masks["clip_fraction_low"] | masks["clip_fraction_high"]
    return fraction_metrics({"clip_fraction": either, **masks}, micro_batch, mode)


class PolicyLoss(PolicyLossBase):
    """PPO's clipped loss (Schulman et al. 2017) on token-level ratios; also that of GRPO and DAPO.

    ``-min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)`` with ``r = exp(log_probs - old_log_probs)``. Unequal
    widths are DAPO's "clip-higher" (Yu et al. 2025: 0.2 and 0.28); ``dual_clip`` is that of Ye et al. 2020.

    Further metrics, as fractions of response tokens: ``clip_fraction``, ``clip_fraction_low`` (negative advantage,
    ratio below the range), ``clip_fraction_high`` (positive advantage, ratio above it), ``dual_clip_fraction``.
    """

    def __init__(
        self,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        aggregation: AggregationMode | None = None,
        loss_scale_factor: float | None = None,
        constant: float | None = None,
        entropy_coef: float = 0.0,
        kl_coef: float = 0.0,
        kl_estimator: KLEstimator = "k3",
    ) -> None:
        """Configure the loss.

        Args:
            clip_low: Width of the clip range below 1, between 0 and 1.
            clip_high: Width of the clip range above 1, not negative.
            dual_clip: Largest ratio that counts for negative advantages, above 1 (Ye et al.: 3); None for no bound.
            aggregation: How tokens are weighted and what their sum is divided by (``algorithms.aggregation``); None for
                ``"token-mean"``.
            loss_scale_factor: Divisor in tokens of ``"seq-mean-token-sum-norm"``.
            constant: Denominator of ``"token-sum-over-constant"``.
            entropy_coef: Weight of the entropy bonus.
            kl_coef: Weight of the KL penalty, not negative.
            kl_estimator: Estimator of the KL; ``algorithms.kl`` tells their gradients apart.

        Raises:
            ValueError: A value is unknown or out of range.
        """
        super().__init__(
            aggregation=aggregation,
            loss_scale_factor=loss_scale_factor,
            constant=constant,
            entropy_coef=entropy_coef,
            kl_coef=kl_coef,
            kl_estimator=kl_estimator,
        )
        self.clip_low = check_lower_width("clip_low", clip_low, 0.2)
        self.clip_high = check_upper_width("clip_high", clip_high, 0.2)
        if dual_clip is not None and not (math.isfinite(dual_clip) and dual_clip > 1):
            raise ValueError(f"dual_clip={dual_clip} must be finite and above 1; use for instance 3.0, or None")
        self.dual_clip = dual_clip

    @override
    def policy_terms(self, inputs: PolicyInputs, micro_batch: "MicroBatch") -> tuple[Tensor, Metrics]:
        assert inputs.old_log_probs is not None
        ratio = importance_ratio(inputs.log_probs - inputs.old_log_probs)
        values, masks = clipped_surrogate(ratio, inputs.advantages, self.clip_low, self.clip_high, self.dual_clip)
        return values, {**ratio_metrics(ratio, inputs, micro_batch), **clip_metrics(masks, micro_batch)}


class CISPOLoss(PolicyLossBase):
    """CISPO (MiniMax-M1, 2025): REINFORCE with a clipped importance weight that carries no gradient.

    ``-sg[clip(r, 1 - is_weight_low, 1 + is_weight_high)] * A * log_probs`` with
    ``r = exp(log_probs - old_log_probs)``: unlike in PPO, every token keeps a gradient. The defaults bound the weight
    to ``[0, 5]``, that is from above only, as the paper does.

    Further metrics, as fractions of response tokens whatever their advantage: ``clip_fraction``,
    ``clip_fraction_low``, ``clip_fraction_high``.
    """

    def __init__(
        self,
        *,
        is_weight_low: float = 1.0,
        is_weight_high: float = 4.0,
        aggregation: AggregationMode | None = None,
        loss_scale_factor: float | None = None,
        constant: float | None = None,
        entropy_coef: float = 0.0,
        kl_coef: float = 0.0,
        kl_estimator: KLEstimator = "k3",
    ) -> None:
        """Configure the loss.

        Args:
            is_weight_low: Width of the range of the weight below 1, between 0 and 1; 1 for no lower bound.
            is_weight_high: Width of the range of the weight above 1, not negative.
            aggregation: How tokens are weighted and what their sum is divided by (``algorithms.aggregation``); None for
                ``"token-mean"``.
            loss_scale_factor: Divisor in tokens of ``"seq-mean-token-sum-norm"``.
            constant: Denominator of ``"token-sum-over-constant"``.
            entropy_coef: Weight of the entropy bonus.
            kl_coef: Weight of the KL penalty, not negative.
            kl_estimator: Estimator of the KL; ``algorithms.kl`` tells their gradients apart.

        Raises:
            ValueError: A value is unknown or out of range.
        """
        super().__init__(
            aggregation=aggregation,
            loss_scale_factor=loss_scale_factor,
            constant=constant,
            entropy_coef=entropy_coef,
            kl_coef=kl_coef,
            kl_estimator=kl_estimator,
        )
        self.is_weight_low = check_lower_width("is_weight_low", is_weight_low, 1.0)
        self.is_weight_high = check_upper_width("is_weight_high", is_weight_high, 4.0)

    @override
    def policy_terms(self, inputs: PolicyInputs, micro_batch: "MicroBatch") -> tuple[Tensor, Metrics]:
        assert inputs.old_log_probs is not None
        ratio = importance_ratio(inputs.log_probs.detach() - inputs.old_log_probs)
        low, high = 1 - self.is_weight_low, 1 + self.is_weight_high
        masks = {"clip_fraction_low": ratio < low, "clip_fraction_high": ratio > high}
        values = -ratio.clamp(low, high) * inputs.advantages * inputs.log_probs
        return values, {**ratio_metrics(ratio, inputs, micro_batch), **clip_metrics(masks, micro_batch)}


class ReinforceLoss(PolicyLossBase):
    """REINFORCE (Williams 1992): ``-A * log_probs``, for data sampled from the current policy.

    Needs no ``old_log_probs``; where the experience has them, the metrics on ratios are there as well.
    """

    needs_old_log_probs = False

    @override
    def policy_terms(self, inputs: PolicyInputs, micro_batch: "MicroBatch") -> tuple[Tensor, Metrics]:
        metrics: Metrics = {}
        if inputs.old_log_probs is not None:
            ratio = importance_ratio(inputs.log_probs.detach() - inputs.old_log_probs)
            metrics = ratio_metrics(ratio, inputs, micro_batch)
        return -inputs.advantages * inputs.log_probs, metrics
