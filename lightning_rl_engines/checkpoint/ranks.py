"""What ranks of which some hold other parts of a model than others, as in a pipeline, must know of each other."""

import hashlib
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")

Gather = Callable[[Any], list[Any]]
"""Returns the objects of all ranks, in their order; collective over the world."""


def gather_distinct(gather: Gather, item: _T) -> list[_T]:
    """Return the different items that the ranks have, in the order of the first ranks; collective over the world.

    Most ranks hold the same names, so each of them sends a digest, and one rank of each kind sends the names.
    """
    digests = gather(hashlib.sha256(pickle.dumps(item)).digest())
    rank = dist.get_rank() if dist.is_initialized() else 0
    is_first = digests.index(digests[rank]) == rank
    return [found[0] for found in gather((item,) if is_first else None) if found is not None]


def raise_together(gather: Gather, problem: str | None) -> None:
    """Raise the first rank's problem on all ranks; collective over the world.

    Raises:
        ValueError: A rank has a problem.
    """
    problems = [found for found in gather(problem) if found is not None]
    if problems:
        raise ValueError(problems[0])
