"""The loss of a critic."""

import math
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from lightning_rl_engines.algorithms.aggregation import AggregationMode, masked
from lightning_rl_engines.algorithms.losses.base import Metrics, TokenLoss, fraction_metrics, require_columns
from lightning_rl_engines.algorithms.outputs import LossOutput, TokenOutputs

if TYPE_CHECKING:
    from lightning_rl_engines.sequence.packing import MicroBatch


class ValueLoss(TokenLoss):
    """Clipped squared error of the values, as in the implementation of PPO (Schulman et al. 2017).

    ``0.5 * max((v - R)^2, (clip(v, v_old - value_clip, v_old + value_clip) - R)^2)`` per response token, with the
    columns ``returns`` (R) and ``values`` (v_old, the critic's values at the start of the update). Where the clip binds
    the gradient is zero. Half precision is widened to fp32; nothing outside the response mask has any influence.

    Metrics: ``value_loss`` as aggregated; ``value_mean``, ``return_mean`` and, with ``value_clip``,
    ``value_clip_fraction`` over response tokens.
    """

    def __init__(
        self,
        *,
        value_clip: float | None = 0.2,
        aggregation: AggregationMode | None = None,
        loss_scale_factor: float | None = None,
        constant: float | None = None,
    ) -> None:
        """Configure the loss.

        Args:
            value_clip: How far a value may move from the old one before its gradient stops, in units of the returns;
                None for the plain squared error, which does not need the column ``values``.
            aggregation: How tokens are weighted and what their sum is divided by (``algorithms.aggregation``); None for
                ``"token-mean"``.
            loss_scale_factor: Divisor in tokens of ``"seq-mean-token-sum-norm"``.
            constant: Denominator of ``"token-sum-over-constant"``.

        Raises:
            ValueError: A value is unknown or out of range.
        """
        super().__init__(aggregation=aggregation, loss_scale_factor=loss_scale_factor, constant=constant)
        if value_clip is not None and not (math.isfinite(value_clip) and value_clip > 0):
            raise ValueError(
                f"value_clip={value_clip} must be positive and finite; use for instance 0.2, or None for no clip"
            )
        self.value_clip = value_clip
        old = () if value_clip is None else ("values",)
        self.required_columns = ("response_mask", "returns", *old)

    @override
    def __call__(self, outputs: TokenOutputs, micro_batch: "MicroBatch") -> LossOutput:
        if outputs.values is None:
            raise ValueError("ValueLoss needs outputs.values, got None; use a model with head='value', not 'lm'")
        require_columns("ValueLoss", self.required_columns, micro_batch)
        mask = micro_batch["response_mask"].bool()
        values = masked(outputs.values, mask)
        returns = masked(micro_batch.per_token("returns"), mask)
        errors = (values - returns).square()
        metrics: Metrics = {
            "value_mean": (values.detach().sum(), "tokens"),
            "return_mean": (returns.sum(), "tokens"),
        }
        if self.value_clip is not None:
            old = masked(micro_batch.per_token("values"), mask)
            clipped = values.detach().clamp(old - self.value_clip, old + self.value_clip)
            clipped_errors = (clipped - returns).square()
            # Inside the range both errors are equal and the plain one keeps its gradient. Not "clipped > plain", which
            # would drop the NaN of an old value.
            binds = ~(clipped_errors <= errors)
            errors = torch.where(binds, clipped_errors, errors)
            metrics |= fraction_metrics({"value_clip_fraction": binds}, micro_batch)
        total, denominator = self.aggregate(0.5 * errors, micro_batch)
        metrics["value_loss"] = (total.detach(), denominator)
        return LossOutput(total=total, denominator=denominator, metrics=metrics)
