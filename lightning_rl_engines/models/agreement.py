"""What fails on one rank fails on all: ranks that go on would wait for one that does not come."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from lightning_rl_engines.models.config import ModelConfig


T = TypeVar("T")


def on_rank_zero(action: Callable[[], T], is_zero: bool, gather: Callable[[Any], list[Any]]) -> T:
    """Do something on rank 0; its result, or its error, is that of all ranks. Collective over the world.

    Args:
        action: What is done.
        is_zero: Whether this is rank 0.
        gather: Returns the host objects of all ranks, in rank order.

    Raises:
        Exception: On rank 0, what it raised; elsewhere a ``ValueError`` if it was one, or else a ``RuntimeError``.
    """
    result: T | None = None
    failure: Exception | None = None
    if is_zero:
        try:
            result = action()
        except Exception as error:  # of any type: the other ranks wait
            failure = error
    message = None if failure is None else (type(failure) is ValueError, str(failure))
    ((found, wrong), *_) = gather((result, message))
    if wrong is not None:
        raise failure or (ValueError if wrong[0] else RuntimeError)(wrong[1])
    return cast(T, found)


def raise_on_all_ranks(config: "ModelConfig", error: Exception | None, gather: Callable[[Any], list[Any]]) -> None:
    """Raise if any rank failed to build a model; collective over the world.

    Args:
        config: What is built.
        error: This rank's error, if it had one.
        gather: Returns the host objects of all ranks, in rank order.

    Raises:
        ValueError: With the first rank's reason.
    """
    text = None if error is None else str(error) or type(error).__name__
    failed = [item for item in gather(text) if item]
    if failed:
        raise ValueError(f"The model of {config.source} cannot be built: {failed[0]}") from error
