"""Adds up losses and metrics over micro-batches on the device, and over ranks once per batch."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_rl_engines.algorithms.outputs import LossOutput, MetricReduction, TokenOutputs
from lightning_rl_engines.sequence import MicroBatch
from lightning_rl_engines.strategies.global_batch import Denominators
from lightning_rl_engines.strategies.passes import LossFunction

ERROR = "error"
"""Name under which :meth:`MetricAccumulator.finish` sends what a rank's loss raised; counts from every rank."""

GRADIENT = "has_gradient"
"""Name under which :meth:`MetricAccumulator.finish` sends whether a rank's loss has a gradient."""

_LOSS = "loss"


class MetricAccumulator:
    """Sums or extremes of named scalars; nothing is read from the device before :meth:`finish`.

    Args:
        denominators: Counts over the whole global batch.
        place: What a message adds to the rank on which a loss failed.
    """

    def __init__(self, denominators: Denominators, *, place: str = "") -> None:
        self._denominators = denominators
        self._place = place
        self._values: dict[str, Tensor] = {}
        self._reductions: dict[str, MetricReduction] = {}
        self._error: Exception | None = None
        self._has_gradient = False

    def evaluate(self, loss_fn: LossFunction, outputs: TokenOutputs, micro_batch: MicroBatch) -> LossOutput:
        """Compute the loss of a micro-batch and add it.

        What it raises is kept for :meth:`finish`: the other ranks are about to enter a backward pass, whose collectives
        would wait for this one. Until then the loss is 0, without a gradient. A loss with collectives of its own, such
        as ``segment_sum``, must still raise on all ranks of a row or on none.
        """
        if self._error is None:
            try:
                result = loss_fn(outputs, micro_batch)
                if not isinstance(result, LossOutput):
                    raise TypeError(
                        f"the loss returned {type(result).__name__}; return LossOutput(total=..., "
                        "denominator='tokens'), with sums over the micro-batch."
                    )
                self.add(result)
                self._has_gradient |= result.total.requires_grad
                return result
            except torch.OutOfMemoryError:
                raise  # no rank has the memory to go on with; the pass says what would need less
            except Exception as error:
                self._error = error
        first = next(output for output in outputs if output is not None)
        return LossOutput(total=first.new_zeros(()), denominator="tokens")

    def add(self, output: LossOutput) -> None:
        """Add one micro-batch.

        Raises:
            ValueError: A metric has one of our names or changes its reduction, or a denominator is unknown.
        """
        for name, meaning in (
            (_LOSS, "the total"),
            (ERROR, "what a loss raises"),
            (GRADIENT, "its gradient's presence"),
        ):
            if name in output.metrics:
                raise ValueError(
                    f"a metric is called {name!r}, the name of {meaning}; call it 'policy_{name}' instead."
                )
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

    def finish(self, gather: Callable[[Any], list[Any]], *, trained: bool = False) -> dict[str, float]:
        """Return the global metrics, the loss among them; collective over the world.

        Args:
            gather: Returns the host objects of all ranks, in rank order.
            trained: Whether the loss is there to be minimised.

        Raises:
            ValueError: On every rank: the loss has a gradient on none.
            ValueError: On every rank: ranks reduce the loss or a metric in different ways.
            Exception: What the loss raised on this rank.
            RuntimeError: The loss raised on another rank.
        """
        names = list(self._values)
        numbers = torch.stack([self._values[name] for name in names]).tolist() if names else []
        local: dict[str, Any] = {
            name: (number, self._reductions[name]) for name, number in zip(names, numbers, strict=True)
        }
        if names:
            local[GRADIENT] = (float(self._has_gradient), "max")
        if self._error is not None:
            local = {ERROR: f"{type(self._error).__name__}: {self._error}"}
        gathered = gather(local)
        self._raise_together(gathered)
        total: dict[str, tuple[float, MetricReduction]] = {}
        for item in gathered:
            for name, (number, reduction) in item.items():
                if name in total and total[name][1] != reduction:
                    raise ValueError(
                        f"ranks reduce {name!r} by {total[name][1]!r} and by {reduction!r}; return the same on every "
                        "rank, also for a micro-batch without response tokens."
                    )
                total[name] = (_combine(total[name][0], number, reduction) if name in total else number, reduction)
        gradient, _ = total.pop(GRADIENT, (1.0, "max"))
        if trained and not gradient:
            raise ValueError(
                "the loss has no gradient in any micro-batch, so nothing would be trained; compute its total from "
                "outputs.log_probs, outputs.entropy or outputs.values, without detaching them, of a model that is not "
                "frozen."
            )
        result: dict[str, float] = {}
        for name, (number, reduction) in total.items():
            if reduction == "max" or reduction == "min":
                # An extremum over no token at all is its neutral element, and nothing to report.
                if number != (-math.inf if reduction == "max" else math.inf):
                    result[name] = number
            else:
                result[name] = number / self._denominators[reduction]
        return result

    def _raise_together(self, gathered: list[dict[str, Any]]) -> None:
        failed = [(rank, item[ERROR]) for rank, item in enumerate(gathered) if ERROR in item]
        if self._error is not None:
            raise self._error
        if failed:
            rank, text = failed[0]
            raise RuntimeError(f"the loss failed on rank {rank}{self._place}: {text}")


def _combine(left: float, right: float, reduction: MetricReduction) -> float:
    if left != left or right != right:  # NaN must reach the log, whichever rank has it
        return float("nan")
    if reduction == "max":
        return max(left, right)
    if reduction == "min":
        return min(left, right)
    return left + right
