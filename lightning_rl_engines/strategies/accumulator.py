"""Adds up losses and metrics over micro-batches on the device, and over ranks once per batch."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_rl_engines.algorithms.outputs import LossOutput, MetricReduction
from lightning_rl_engines.strategies.global_batch import Denominators

_LOSS = "loss"


class MetricAccumulator:
    """Sums or extremes of named scalars; nothing is read from the device before :meth:`finish`."""

    def __init__(self, denominators: Denominators) -> None:
        self._denominators = denominators
        self._values: dict[str, Tensor] = {}
        self._reductions: dict[str, MetricReduction] = {}

    def add(self, output: LossOutput) -> None:
        """Add one micro-batch.

        Raises:
            ValueError: A metric is called ``loss`` or changes its reduction, or a denominator is unknown.
        """
        if _LOSS in output.metrics:
            raise ValueError("a metric is called 'loss', the name of the total; call it 'policy_loss' or the like.")
        _ = self._denominators[output.denominator]
        self._add(_LOSS, output.total, output.denominator)
        for name, (value, reduction) in output.metrics.items():
            self._add(name, value, reduction)

    def _add(self, name: str, value: Tensor, reduction: MetricReduction) -> None:
        if reduction not in ("max", "min"):
            _ = self._denominators[reduction]  # type: ignore[index]  # an unknown one is refused before any backward
        value = value.detach().double()
        if name not in self._values:
            self._values[name], self._reductions[name] = value, reduction
            return
        if self._reductions[name] != reduction:
            raise ValueError(
                f"metric {name!r} is reduced by {reduction!r} after {self._reductions[name]!r}; use one of them."
            )
        if reduction == "max":
            self._values[name] = torch.maximum(self._values[name], value)
        elif reduction == "min":
            self._values[name] = torch.minimum(self._values[name], value)
        else:
            self._values[name] = self._values[name] + value

    def finish(self, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
        """Return the global metrics, the loss among them; collective over the world.

        Raises:
            ValueError: On every rank: ranks reduce the loss or a metric in different ways.
        """
        names = list(self._values)
        numbers = torch.stack([self._values[name] for name in names]).tolist() if names else []
        local = {name: (number, self._reductions[name]) for name, number in zip(names, numbers, strict=True)}
        total: dict[str, tuple[float, MetricReduction]] = {}
        for item in gather(local):
            for name, (number, reduction) in item.items():
                if name in total and total[name][1] != reduction:
                    raise ValueError(
                        f"ranks reduce {name!r} by {total[name][1]!r} and by {reduction!r}; return the same on every "
                        "rank, also for a micro-batch without response tokens."
                    )
                total[name] = (_combine(total[name][0], number, reduction) if name in total else number, reduction)
        result: dict[str, float] = {}
        for name, (number, reduction) in total.items():
            if reduction == "max" or reduction == "min":
                # An extremum over no token at all is its neutral element, and nothing to report.
                if number != (-math.inf if reduction == "max" else math.inf):
                    result[name] = number
            else:
                result[name] = number / self._denominators[reduction]
        return result


def _combine(left: float, right: float, reduction: MetricReduction) -> float:
    if left != left or right != right:  # NaN must reach the log, whichever rank has it
        return float("nan")
    if reduction == "max":
        return max(left, right)
    if reduction == "min":
        return min(left, right)
    return left + right
