"""The policy loss on sequence-level importance ratios."""

from typing import TYPE_CHECKING

from torch import Tensor
from typing_extensions import override

from lightning_rl_engines.algorithms.aggregation import AggregationMode
from lightning_rl_engines.algorithms.kl import KLEstimator
from lightning_rl_engines.algorithms.losses.base import (
    Metrics,
    PolicyInputs,
    PolicyLossBase,
    importance_ratio,
    ratio_metrics,
)
from lightning_rl_engines.algorithms.losses.policy import (
    check_lower_width,
    check_upper_width,
    clip_metrics,
    clipped_surrogate,
)

if TYPE_CHECKING:
    from lightning_rl_engines.sequence.packing import MicroBatch


class GSPOLoss(PolicyLossBase):
    """GSPO (Zheng et al. 2025): PPO's clipped loss on the length-normalised ratio of the whole response.

    ``s = exp(mean over the response of (log_probs - old_log_probs))``, clipped to
    ``[1 - sequence_clip_low, 1 + sequence_clip_high]``, a range far narrower than that of token-level ratios. Each
    token takes ``sg[s] * exp(log_probs - sg[log_probs])`` (the paper's GSPO-token, equation 14): the value is ``s``,
    and with one advantage per document and ``"seq-mean-token-mean"`` value and gradient are exactly those of the
    sequence form, while advantages per token work too. The sum over the response runs over the whole row (collective
    over the sequence group); being detached, it needs no communication in the backward pass.

    Further metrics, as fractions of documents: ``clip_fraction``, ``clip_fraction_low``, ``clip_fraction_high``;
    ``ratio_mean`` is over documents as well.
    """

    default_aggregation = "seq-mean-token-mean"

    def __init__(
        self,
        *,
        sequence_clip_low: float = 3e-4,
        sequence_clip_high: float = 4e-4,
        aggregation: AggregationMode | None = None,
        loss_scale_factor: float | None = None,
        constant: float | None = None,
        entropy_coef: float = 0.0,
        kl_coef: float = 0.0,
        kl_estimator: KLEstimator = "k3",
    ) -> None:
        """Configure the loss.

        Args:
            sequence_clip_low: Width of the clip range below 1, between 0 and 1.
            sequence_clip_high: Width of the clip range above 1, not negative.
            aggregation: How tokens are weighted and what their sum is divided by (``algorithms.aggregation``); None for
                ``"seq-mean-token-mean"``.
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
        self.sequence_clip_low = check_lower_width("sequence_clip_low", sequence_clip_low, 3e-4)
        self.sequence_clip_high = check_upper_width("sequence_clip_high", sequence_clip_high, 4e-4)

    @override
    def policy_terms(self, inputs: PolicyInputs, micro_batch: "MicroBatch") -> tuple[Tensor, Metrics]:
        assert inputs.old_log_probs is not None
        current = inputs.log_probs.detach()
        sums = micro_batch.segment_sum(current - inputs.old_log_probs)
        sequence_log_ratio = (sums / micro_batch.response_lengths.clamp(min=1))[micro_batch.document_ids]
        # Both operands are zero outside the mask and the difference is zero in value everywhere: only the gradient
        # of the token's own log-probability enters here.
        ratio = importance_ratio(sequence_log_ratio + (inputs.log_probs - current))
        values, masks = clipped_surrogate(ratio, inputs.advantages, self.sequence_clip_low, self.sequence_clip_high)
        metrics = ratio_metrics(ratio, inputs, micro_batch, "seq-mean-token-mean")
        return values, {**metrics, **clip_metrics(masks, micro_batch, "seq-mean-token-mean")}
