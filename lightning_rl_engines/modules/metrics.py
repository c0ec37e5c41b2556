"""Means over the global batch from host numbers, and the metrics of several optimizer steps as one row."""

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

STEP_NAMES = {"kl_to_reference": "kl", "ratio_mean": "ratio"}
"""Losses name these in full; the log keeps the short names that one looks for."""


class Tally:
    """Sums and counts by name on one rank; :meth:`means` joins those of all data ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, name: str, values: Iterable[float]) -> None:
        """Add numbers; their order has no influence on the sum."""
        numbers = list(values)
        self._add(name, math.fsum(numbers), len(numbers))

    def add_tokens(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add the values of the tokens under a mask: ``[num_tokens]`` floats and bools on the host."""
        chosen = values[mask]
        self._add(name, float(chosen.double().sum()), chosen.numel())

    def merge(self, other: "Tally") -> None:
        """Add the sums and counts of another tally."""
        for name, (total, count) in other._sums.items():
            self._add(name, total, count)

    def _add(self, name: str, total: float, count: int) -> None:
        before, documents = self._sums.get(name, (0.0, 0))
        self._sums[name] = (before + total, documents + count)

    @staticmethod
    def means(tallies: Sequence["Tally"]) -> dict[str, float]:
        """Return ``name -> mean`` over all tallies; names without any value are left out."""
        joint: dict[str, tuple[list[float], int]] = {}
        for tally in tallies:
            for name, (total, count) in tally._sums.items():
                totals, before = joint.setdefault(name, ([], 0))
                totals.append(total)
                joint[name] = (totals, before + count)
        return {name: math.fsum(totals) / count for name, (totals, count) in joint.items() if count}


def combine_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Turn the metrics of an update's optimizer steps into one row.

    ``skipped_steps`` is the number of skipped steps. Of the others, names that end in ``_max`` and ``_min`` keep
    their extremum, the rest their mean over the steps that were taken.

    Args:
        steps: ``name -> value`` for each step, in order; ``skipped_steps`` is 0 or 1.

    Returns:
        ``name -> value``; without any step taken only ``skipped_steps`` and ``lr``.
    """
    row = {"skipped_steps": math.fsum(step["skipped_steps"] for step in steps)}
    taken = [step for step in steps if not step["skipped_steps"]]
    for name in dict.fromkeys(name for step in taken for name in step):
        if name == "skipped_steps":
            continue
        values = [step[name] for step in taken if name in step]
        if name.endswith("_max"):
            value = max(values)
        elif name.endswith("_min"):
            value = min(values)
        else:
            value = math.fsum(values) / len(values)
        row[STEP_NAMES.get(name, name)] = value
    if steps and not taken:
        row["lr"] = steps[-1]["lr"]
    return row
