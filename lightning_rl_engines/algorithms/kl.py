"""Per-token estimators of KL(policy || reference) from the log-probabilities of sampled tokens.

With ``x`` drawn from the policy and ``d = log pi(x) - log pi_ref(x)``, after Schulman, "Approximating KL
divergence" (2020, http://joschu.net/blog/kl-approx.html):

=========  =======================  ======================================================================
name       value                    its gradient with respect to ``log pi(x)``
=========  =======================  ======================================================================
``k1``     ``d``                    1: expectation zero, so as a loss term it is pure noise
``abs``    ``|d|``                  sign(d): not that of the KL
``k2``     ``d**2 / 2``             d: in expectation exactly the gradient of KL(policy || reference)
``k3``     ``exp(-d) - 1 + d``      1 - exp(-d): in expectation that of KL(reference || policy)
``k1+``    that of ``k1``           that of ``k2``
``k3+``    that of ``k3``           that of ``k2``
=========  =======================  ======================================================================

The values of ``k1`` and ``k3`` are unbiased for the KL; ``k3`` is never negative and varies less. For a KL term that
is differentiated choose ``k2``, ``k1+`` or ``k3+`` when the gradient must be that of the KL, and ``k3`` for what
GRPO (Shao et al. 2024) does.
"""

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

KLEstimator: TypeAlias = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]
"""Names accepted by :func:`kl_estimate`."""

LOG_RATIO_BOUND = 20.0
"""Bound in nats on log-ratios that are exponentiated: exp(20) is 4.9e8, far from overflow in fp32."""


def check_kl_estimator(estimator: str) -> None:
    """Refuse an unknown estimator.

    Args:
        estimator: Name to check.

    Raises:
        ValueError: The name is unknown; the message lists the known ones.
    """
    if estimator not in get_args(KLEstimator):
        raise ValueError(f"kl_estimator={estimator!r} is unknown; use one of {', '.join(get_args(KLEstimator))}")


def kl_k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate the KL by ``k1 = d``: unbiased, of either sign (Schulman 2020).

    Args:
        log_probs: Policy, any shape.
        ref_log_probs: Reference, same shape.

    Returns:
        Estimate per token, same shape.
    """
    return log_probs - ref_log_probs


def kl_k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate the KL by ``k2 = d**2 / 2``: biased value, right gradient (Schulman 2020).

    Args:
        log_probs: Policy, any shape.
        ref_log_probs: Reference, same shape.

    Returns:
        Estimate per token, same shape, never negative.
    """
    return 0.5 * (log_probs - ref_log_probs).square()


def kl_k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate the KL by ``k3 = exp(-d) - 1 + d``: unbiased, never negative (Schulman 2020; "low_var_kl" in verl).

    ``-d`` is bounded from above by :data:`LOG_RATIO_BOUND`, so the result is finite; beyond the bound the gradient
    is zero. ``-d`` needs no bound from below, where the exponential vanishes.

    Args:
        log_probs: Policy, any shape.
        ref_log_probs: Reference, same shape.

    Returns:
        Estimate per token, same shape.
    """
    negative_d = (ref_log_probs - log_probs).clamp(max=LOG_RATIO_BOUND)
    # expm1 keeps the leading digits of d**2 / 2 that exp(-d) - 1 + d cancels when the two models are close.
    return torch.expm1(negative_d) - negative_d


def kl_abs(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Measure the distance by ``|d|``: not an estimate of the KL, but robust (verl's "abs"; cf. Schulman 2020).

    Args:
        log_probs: Policy, any shape.
        ref_log_probs: Reference, same shape.

    Returns:
        Distance per token, same shape.
    """
    return (log_probs - ref_log_probs).abs()


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """Estimate KL(policy || reference) per token with the named estimator.

    The table at the top of this module says what each name means in value and in gradient. The names with a plus
    are verl's: the value of the first estimator, and, straight through, the gradient of ``k2``.

    Args:
        log_probs: Log-probabilities of the sampled tokens under the policy, any shape, fp32 or fp64.
        ref_log_probs: The same under the reference, same shape.
        estimator: Name of the estimator.

    Returns:
        Estimate per token in nats, same shape.

    Raises:
        ValueError: The estimator is unknown.
    """
    check_kl_estimator(estimator)
    functions = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3, "abs": kl_abs}
    value = functions[estimator.removesuffix("+")](log_probs, ref_log_probs)
    if not estimator.endswith("+"):
        return value
    carrier = kl_k2(log_probs, ref_log_probs)
    return value.detach() + (carrier - carrier.detach())
