"""Mean and variance over the response tokens of all ranks, and whitening with them.

Sums over ranks usually depend on who holds which token: floating-point addition is not associative. Here a rank sends
an exact representation of its sum, a few floats that do not overlap (Shewchuk 1997, "Adaptive precision floating-point
arithmetic"), and every rank rounds the mean once. So mean, variance and whitened values are the same to the last bit
for every number of ranks and every order of documents.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from lightning_rl_engines.algorithms.aggregation import masked


@dataclass(frozen=True)
class Moments:
    """Moments of the response tokens of all ranks.

    Attributes:
        count: Number of tokens.
        mean: Mean, 0 without tokens.
        variance: Unbiased variance (divisor ``count - 1``), 0 for fewer than two tokens.
    """

    count: int
    mean: float
    variance: float


def exact_sum(values: Tensor) -> tuple[float, ...]:
    """Sum values without rounding: a few floats, largest first, whose sum is the exact total.

    Args:
        values: Floats of any shape.

    Returns:
        As many floats as the exact sum needs, usually two or three; ``(nan,)`` where a value is not finite.
    """
    terms = values.detach().to("cpu", torch.float64).flatten()
    if not bool(torch.isfinite(terms).all()):
        return (math.nan,)
    rest = terms.tolist()
    parts: list[float] = []
    while (part := math.fsum(rest)) != 0.0:
        parts.append(part)
        rest.append(-part)
    return tuple(parts)


def _mean(sums: Iterable[Sequence[float]], count: int) -> float:
    """The quotient of exact sums, rounded once: the mean of equal numbers is that number."""
    parts = [part for parts in sums for part in parts]
    if any(math.isnan(part) for part in parts):
        return math.nan
    return float(sum(map(Fraction, parts), Fraction()) / count)


def _alone(item: Any) -> list[Any]:
    return [item]


def global_moments(values: Tensor, mask: Tensor, gather: Callable[[Any], list[Any]] = _alone) -> Moments:
    """Compute mean and variance in two passes. Collective where ``gather`` is.

    Args:
        values: ``[T]`` floats of this rank; those outside the mask do not matter.
        mask: ``[T]`` bool.
        gather: All-gathers a host object over the ranks that hold different documents, such as
            ``lambda item: engine.all_gather_objects(item, "data")``; by default this rank is alone.

    Returns:
        The moments, the same bits on every rank. A value that is not finite makes both NaN.

    Raises:
        ValueError: Shapes differ.
    """
    if values.shape != mask.shape:
        raise ValueError(
            f"values of shape {tuple(values.shape)} do not match mask of shape {tuple(mask.shape)}; pass one number "
            "per token in both"
        )
    own = values.detach()[mask].to("cpu", torch.float64)
    gathered = gather((len(own), exact_sum(own)))
    count = sum(number for number, _ in gathered)
    if count == 0:
        return Moments(0, 0.0, 0.0)
    mean = _mean((parts for _, parts in gathered), count)
    squares = gather(exact_sum((own - mean).square()))
    return Moments(count, mean, _mean(squares, max(count - 1, 1)))


def whiten(
    values: Tensor,
    mask: Tensor,
    gather: Callable[[Any], list[Any]] = _alone,
    *,
    center: bool = True,
    eps: float = 1e-8,
) -> Tensor:
    """Whiten values over the response tokens of all ranks: ``(x - mean) / sqrt(variance + eps)``.

    Collective where ``gather`` is. Equal values everywhere give exact zeros (with ``center``), one token too.

    Args:
        values: ``[T]`` floats of this rank.
        mask: ``[T]`` bool.
        gather: See :func:`global_moments`.
        center: Subtract the mean; without it values are only scaled.
        eps: Added to the variance, positive.

    Returns:
        ``[T]`` on the same device, zero outside the mask; fp64 for fp64 values, else fp32.

    Raises:
        ValueError: Shapes differ, or ``eps`` is out of range.
    """
    if not 0 < eps < math.inf:
        raise ValueError(f"eps={eps} must be positive and finite, for instance 1e-8")
    moments = global_moments(values, mask, gather)
    shift = moments.mean if center else 0.0
    scale = 1.0 / math.sqrt(moments.variance + eps)
    host = values.detach().to("cpu", torch.float64)
    whitened = masked((host - shift) * scale, mask.cpu())
    return whitened.to(values.device, torch.float64 if values.dtype == torch.float64 else torch.float32)
