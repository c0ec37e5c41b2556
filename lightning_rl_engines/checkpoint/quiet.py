"""Warnings of torch that tell users nothing."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_shard_warnings() -> Iterator[None]:
    """Context of FSDP1's state dictionaries: on one rank, tensors are whole, and it warns of that at each call."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="When using ``NO_SHARD``")
        yield
