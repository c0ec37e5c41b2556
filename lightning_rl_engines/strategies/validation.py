"""What a strategy refuses: sizes that do not fit the run, parameters that it would not train."""

from typing import Any, cast

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_rl_engines.checkpoint.training import token_models


def require_size(name: str, value: Any) -> None:
    """Refuse what is no number of ranks.

    Raises:
        ValueError: The value is no positive integer.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} must be a positive integer, such as 1 or 2.")


def require_engine_models(module: nn.Module) -> None:
    """Refuse trainable parameters that lie in no model of the engine: nothing would reduce or save them.

    Raises:
        ValueError: With the name of one.
    """
    inside = {id(parameter) for _, root in token_models(module) for parameter in root.parameters()}
    outside = [name for name, item in module.named_parameters() if item.requires_grad and id(item) not in inside]
    if outside:
        raise ValueError(
            f"{outside[0]!r} is trainable and belongs to no model of the engine, which would neither reduce its "
            "gradients nor save it; build models with strategy.build_model(ModelConfig(...)), or freeze it with "
            "requires_grad_(False)."
        )


def refuse_callbacks(module: LightningModule | None) -> None:
    """Refuse callbacks that copy or cut a module's parameters, which here are sharded or do not exist yet.

    Before any callback's own ``setup``, and after the module's ``configure_callbacks``.

    Raises:
        MisconfigurationException: With the name of one.
    """
    for callback in [] if module is None else cast(Any, module.trainer).callbacks:
        if isinstance(callback, ModelPruning | StochasticWeightAveraging | WeightAveraging):
            raise MisconfigurationException(
                f"the callback {type(callback).__name__} works on whole parameters, and this strategy's are sharded; "
                "leave it out, or average exported weights (WeightExport) afterwards."
            )


def require_divisor(name: str, value: int, world: int) -> None:
    """Refuse a number of ranks that does not divide the world.

    Raises:
        ValueError: With the numbers that do.
    """
    if world % value:
        legal = [size for size in range(1, world + 1) if world % size == 0]
        raise ValueError(f"{name}={value} does not divide the {world} processes of this run; use one of {legal}.")
