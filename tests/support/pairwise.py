"""Few cases of a grid in which every pair of values of two axes occurs."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def pairwise(grid: Mapping[str, Sequence[Any]], legal: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """Cover every pair that a legal case can hold; greedy and deterministic.

    Args:
        grid: Values by name of the axis.
        legal: Whether a case, possibly with some axes only, is one.
    """
    names = list(grid)
    wanted = {
        ((left, a), (right, b))
        for left, right in itertools.combinations(names, 2)
        for a in grid[left]
        for b in grid[right]
        if legal({left: a, right: b})
    }
    cases: list[Case] = []
    while wanted:
        case = dict(min(wanted, key=str))
        for name in names:
            if name not in case:
                options = [value for value in grid[name] if legal({**case, name: value})]
                case[name] = max(options, key=lambda value: len(_pairs(names, {**case, name: value}) & wanted))
        cases.append(case)
        wanted -= _pairs(names, case)
    return cases


def _pairs(names: list[str], case: Case) -> set[Any]:
    present = [name for name in names if name in case]
    return {((left, case[left]), (right, case[right])) for left, right in itertools.combinations(present, 2)}
