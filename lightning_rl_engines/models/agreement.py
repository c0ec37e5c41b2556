"""What fails on one rank fails on all: ranks that go on would wait for one that does not come."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_rl_engines.models.config import ModelConfig


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
