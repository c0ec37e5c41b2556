"""What all token losses share: validation, masking, aggregation, entropy and KL terms, metrics."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_rl_engines.algorithms.aggregation import AggregationMode, aggregate, check_aggregation, masked
from lightning_rl_engines.algorithms.kl import (
    LOG_RATIO_BOUND,
    KLEstimator,
    check_kl_estimator,
    kl_estimate,
    kl_k3,
)
from lightning_rl_engines.algorithms.outputs import Denominator, LossOutput, MetricReduction, TokenOutputs

if TYPE_CHECKING:
    from lightning_rl_engines.sequence.packing import MicroBatch

Metrics = dict[str, tuple[Tensor, MetricReduction]]


class PolicyInputs(NamedTuple):
    """What a policy loss sees of each token; every tensor is ``[local]``, and zero outside the response mask.

    Attributes:
        mask: Bool, True for response tokens.
        log_probs: Log-probabilities under the policy that is trained, fp32 or fp64, with gradient.
        advantages: Advantage of the token, or of its document.
        old_log_probs: Log-probabilities at the start of the update; None where the experience has none.
    """

    mask: Tensor
    log_probs: Tensor
    advantages: Tensor
    old_log_probs: Tensor | None


class TokenLoss(ABC):
    """Base of losses that are a weighted sum of per-token terms.

    Attributes:
        needs_entropy: The forward pass has to compute the entropy.
        needs_reference: The experience needs the column ``ref_log_probs``.
        required_columns: Columns that the experience needs.
        default_aggregation: Mode of this class where none is named. Not the default of the argument, because the
            command line carries arguments over when only the class is changed: GSPO would inherit PPO's mode.
    """

    needs_entropy: bool = False
    needs_reference: bool = False
    required_columns: tuple[str, ...] = ("response_mask",)
    default_aggregation: AggregationMode = "token-mean"

    def __init__(
        self,
        *,
        aggregation: AggregationMode | None = None,
        loss_scale_factor: float | None = None,
        constant: float | None = None,
    ) -> None:
        """Configure the aggregation.

        Args:
            aggregation: How tokens are weighted and what their sum is divided by (``algorithms.aggregation``); None for
                ``default_aggregation``.
            loss_scale_factor: Divisor in tokens of ``"seq-mean-token-sum-norm"``.
            constant: Denominator of ``"token-sum-over-constant"``.

        Raises:
            ValueError: The mode is unknown, or its number is missing, out of range or not used.
        """
        mode = self.default_aggregation if aggregation is None else aggregation
        check_aggregation(mode, loss_scale_factor, constant)
        self.aggregation: AggregationMode = mode
        self.loss_scale_factor = loss_scale_factor
        self.constant = constant

    @abstractmethod
    def __call__(self, outputs: TokenOutputs, micro_batch: "MicroBatch") -> LossOutput:
        """Compute the sums of the loss and of its metrics over this rank's tokens.

        Args:
            outputs: Results of the forward pass on this micro-batch.
            micro_batch: The micro-batch, with the columns named by ``required_columns``.

        Returns:
            Sums and the denominators that the engine divides them by.
        """

    def aggregate(self, values: Tensor, micro_batch: "MicroBatch") -> tuple[Tensor, Denominator]:
        """Sum per-token values with the weights of this loss.

        Args:
            values: ``[local]`` floats.
            micro_batch: The row that they belong to.

        Returns:
            Scalar sum and its denominator.
        """
        return aggregate(
            values,
            micro_batch,
            self.aggregation,
            loss_scale_factor=self.loss_scale_factor,
            constant=self.constant,
        )

    def log_probs(self, outputs: TokenOutputs, mask: Tensor) -> Tensor:
        """Return the log-probabilities of the forward pass, zero outside the mask.

        Args:
            outputs: Results of the forward pass.
            mask: ``[local]`` bool.

        Returns:
            ``[local]`` fp32 or fp64.

        Raises:
            ValueError: The model returned none.
        """
        if outputs.log_probs is None:
            raise ValueError(
                f"{type(self).__name__} needs outputs.log_probs, got None; use a model with head='lm', not 'value'"
            )
        return masked(outputs.log_probs, mask)


class PolicyLossBase(TokenLoss):
    """Base of the policy losses: a policy term, minus an entropy bonus, plus a KL penalty.

    ``total = policy - entropy_coef * entropy + kl_coef * KL(policy || reference)``, all three aggregated in the same
    way. A subclass implements :meth:`policy_terms`.

    A group whose rewards are all equal has zero advantages, so its policy term vanishes; but its tokens still count in
    the denominators, and entropy and KL terms still act on them. To leave such groups out altogether, select the
    documents that ``zero_variance_groups`` keeps before the update.

    The column ``rollout_weights`` (``algorithms.corrections``), where the experience has it, multiplies the policy term
    of each token, without gradient; entropy and KL terms are not weighted.

    Log-ratios are bounded to +-20 nats (``LOG_RATIO_BOUND``) before they are exponentiated; a token beyond has no
    gradient. Columns in half precision are widened to fp32 first. Nothing outside the response mask, NaN included, has
    any influence.

    Metrics: ``policy_loss``, ``approx_kl`` (k3 of old against new), ``ratio_mean``, ``ratio_max``, ``ratio_min``,
    those of the subclass, ``entropy`` where it was computed, and ``kl_to_reference`` (by ``kl_estimator``) where
    ``ref_log_probs`` are there.
    """

    needs_old_log_probs: bool = True

    def __init__(
        self,
        *,
        aggregation: AggregationMode | None = None,
        loss_scale_factor: float | None = None,
        constant: float | None = None,
        entropy_coef: float = 0.0,
        kl_coef: float = 0.0,
        kl_estimator: KLEstimator = "k3",
    ) -> None:
        """Configure what the policy losses share.

        Args:
            aggregation: How tokens are weighted and what their sum is divided by (``algorithms.aggregation``); None for
                ``default_aggregation``.
            loss_scale_factor: Divisor in tokens of ``"seq-mean-token-sum-norm"``.
            constant: Denominator of ``"token-sum-over-constant"``.
            entropy_coef: Weight of the entropy bonus.
            kl_coef: Weight of the KL penalty, not negative.
            kl_estimator: Estimator of the KL; ``algorithms.kl`` tells their gradients apart.

        Raises:
            ValueError: A value is unknown or out of range.
        """
        super().__init__(aggregation=aggregation, loss_scale_factor=loss_scale_factor, constant=constant)
        check_kl_estimator(kl_estimator)
        if not math.isfinite(entropy_coef):
            raise ValueError(f"entropy_coef={entropy_coef} must be finite, for instance 0.001")
        if not (math.isfinite(kl_coef) and kl_coef >= 0):
            raise ValueError(f"kl_coef={kl_coef} must be finite and not negative, for instance 0.001")
        self.entropy_coef = entropy_coef
        self.kl_coef = kl_coef
        self.kl_estimator: KLEstimator = kl_estimator
        self.needs_entropy = entropy_coef != 0
        self.needs_reference = kl_coef != 0
        old = ("old_log_probs",) if self.needs_old_log_probs else ()
        reference = ("ref_log_probs",) if self.needs_reference else ()
        self.required_columns = ("response_mask", "advantages", *old, *reference)

    @abstractmethod
    def policy_terms(self, inputs: PolicyInputs, micro_batch: "MicroBatch") -> tuple[Tensor, Metrics]:
        """Compute the policy term of each token.

        Called on every rank that holds a slice of the row, also one without response tokens, so it may use
        ``micro_batch.segment_sum``.

        Args:
            inputs: What is known of each token.
            micro_batch: The micro-batch.

        Returns:
            ``[local]`` loss per token with gradient (values outside the mask do not matter), and metrics.
        """

    def __call__(self, outputs: TokenOutputs, micro_batch: "MicroBatch") -> LossOutput:
        """Compute the sums of the loss and of its metrics over this rank's tokens.

        Communicates only where :meth:`policy_terms` does (GSPO: one sum over the sequence group).

        Args:
            outputs: Results of the forward pass on this micro-batch.
            micro_batch: The micro-batch, with the columns named by ``required_columns``.

        Returns:
            Sums and the denominators that the engine divides them by.

        Raises:
            ValueError: A required column is missing, or an output that the loss needs.
        """
        require_columns(type(self).__name__, self.required_columns, micro_batch)
        mask = micro_batch["response_mask"].bool()
        old = masked(micro_batch.per_token("old_log_probs"), mask) if "old_log_probs" in micro_batch else None
        inputs = PolicyInputs(
            mask=mask,
            log_probs=self.log_probs(outputs, mask),
            advantages=masked(micro_batch.per_token("advantages"), mask),
            old_log_probs=old,
        )
        values, metrics = self.policy_terms(inputs, micro_batch)
        if "rollout_weights" in micro_batch:
            values = values * masked(micro_batch.per_token("rollout_weights"), mask).detach()
        total, denominator = self.aggregate(values, micro_batch)
        metrics = {"policy_loss": (total.detach(), denominator), **metrics}
        total = total + self._entropy_term(outputs, inputs, micro_batch, metrics)
        total = total + self._kl_term(inputs, micro_batch, metrics)
        return LossOutput(total=total, denominator=denominator, metrics=metrics)

    def _entropy_term(
        self, outputs: TokenOutputs, inputs: PolicyInputs, micro_batch: "MicroBatch", metrics: Metrics
    ) -> Tensor | float:
        if outputs.entropy is None:
            if self.needs_entropy:
                raise ValueError(
                    f"entropy_coef={self.entropy_coef} needs outputs.entropy, got None; "
                    "call the engine with calculate_entropy=True"
                )
            return 0.0
        entropy = masked(outputs.entropy, inputs.mask)
        metrics["entropy"] = (entropy.detach().sum(), "tokens")
        return -self.entropy_coef * self.aggregate(entropy, micro_batch)[0] if self.needs_entropy else 0.0

    def _kl_term(self, inputs: PolicyInputs, micro_batch: "MicroBatch", metrics: Metrics) -> Tensor | float:
        if "ref_log_probs" not in micro_batch:
            return 0.0
        reference = masked(micro_batch.per_token("ref_log_probs"), inputs.mask)
        kl = kl_estimate(inputs.log_probs, reference, self.kl_estimator)
        metrics["kl_to_reference"] = (kl.detach().sum(), "tokens")
        return self.kl_coef * self.aggregate(kl, micro_batch)[0] if self.needs_reference else 0.0


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """Exponentiate a log-ratio that is first bounded to +-20 nats; beyond the bound the gradient is zero.

    Args:
        log_ratio: Any shape.

    Returns:
        Ratio between 2e-9 and 4.9e8, same shape.
    """
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def ratio_metrics(
    ratio: Tensor, inputs: PolicyInputs, micro_batch: "MicroBatch", mode: AggregationMode = "token-mean"
) -> Metrics:
    """Describe the importance ratios: ``approx_kl``, ``ratio_mean``, ``ratio_max``, ``ratio_min``.

    ``approx_kl`` is k3 of KL(old || new), always over tokens. The extrema of a micro-batch without response tokens are
    -inf and +inf, neutral when the engine combines them with those of others.

    Args:
        ratio: ``[local]``.
        inputs: Tokens that it belongs to, with old log-probabilities.
        micro_batch: The micro-batch.
        mode: Mean that ``ratio_mean`` is: ``"token-mean"`` or ``"seq-mean-token-mean"``.

    Returns:
        Metrics.
    """
    assert inputs.old_log_probs is not None
    ratio = ratio.detach()
    approx_kl = kl_k3(inputs.old_log_probs, inputs.log_probs.detach())
    infinity = torch.full_like(ratio, torch.inf)
    return {
        "approx_kl": (masked(approx_kl, inputs.mask).sum(), "tokens"),
        "ratio_mean": aggregate(ratio, micro_batch, mode),
        "ratio_max": (torch.where(inputs.mask, ratio, -infinity).amax(), "max"),
        "ratio_min": (torch.where(inputs.mask, ratio, infinity).amin(), "min"),
    }


def fraction_metrics(
    conditions: dict[str, Tensor], micro_batch: "MicroBatch", mode: AggregationMode = "token-mean"
) -> Metrics:
    """Turn conditions into the fractions of tokens, or of documents, for which they hold.

    Args:
        conditions: ``name -> [local]`` bool.
        micro_batch: The micro-batch.
        mode: ``"token-mean"`` or ``"seq-mean-token-mean"``.

    Returns:
        Metrics.
    """
    return {name: aggregate(condition.float(), micro_batch, mode) for name, condition in conditions.items()}


def require_columns(name: str, columns: Sequence[str], micro_batch: "MicroBatch") -> None:
    """Check that a micro-batch has the columns that a loss reads.

    Raises:
        ValueError: One is missing.
    """
    missing = [column for column in columns if column not in micro_batch]
    if missing:
        raise ValueError(
            f"{name} needs the column {missing[0]!r}, which the experience lacks; it needs {', '.join(columns)}"
        )
