"""Optimizers and schedulers from the callables that LightningCLI passes."""

import math
from collections.abc import Callable

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import LRSchedulerTypeUnion
from torch import nn
from torch.optim import Optimizer

from lightning_rl_engines.optim import WarmupSchedule


def total_optimizer_steps(
    trainer: Trainer, steps_per_batch: int, share: Callable[[int], int] = lambda steps: steps
) -> int | None:
    """Return how many steps an optimizer will take in the fit, or ``None`` when the fit has no limit.

    ``Trainer.estimated_stepping_batches`` takes batches for steps; an update may take several. ``max_steps`` counts
    the steps of all optimizers.

    Args:
        trainer: A trainer that is fitting.
        steps_per_batch: Steps of this optimizer per training batch.
        share: Turns a number of steps of all optimizers into that of this one; by default it is the only one.
    """
    limits = [share(trainer.max_steps)] if trainer.max_steps != -1 else []
    # The property loads the training data, without which the number of batches is not known.
    batches = trainer.estimated_stepping_batches
    if trainer.max_epochs is not None and trainer.max_epochs != -1 and math.isfinite(trainer.num_training_batches):
        assert not math.isnan(batches)
        limits.append(int(trainer.num_training_batches) * trainer.max_epochs * steps_per_batch)
    return min(limits) if limits else None


def build_optimizer(
    model: nn.Module,
    optimizer: OptimizerCallable,
    lr_scheduler: LRSchedulerCallable | None,
    *,
    argument: str = "lr_scheduler",
) -> tuple[Optimizer, LRSchedulerTypeUnion | None]:
    """Build the optimizer of a model's trainable parameters, and its scheduler.

    Args:
        model: The built model.
        optimizer: Called with the list of parameters.
        lr_scheduler: Called with the optimizer; stepped once per optimizer step.
        argument: Name of the scheduler's argument, for messages.

    Raises:
        ValueError: The model has no trainable parameter, or the scheduler needs a metric.
        TypeError: The optimizer is no function.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError(
            "The model has no trainable parameter; leave requires_grad on for at least one, with a pipeline in each "
            "rank's stages."
        )
    if isinstance(optimizer, Optimizer):
        raise TypeError(
            f"the optimizer {type(optimizer).__name__} is built already, of parameters that the engine does not train; "
            "give a function, as in optimizer=lambda parameters: AdamW(parameters, lr=1e-5)."
        )
    built = optimizer(parameters)
    if lr_scheduler is None:
        return built, None
    scheduler = lr_scheduler(built)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            f"{argument}={type(scheduler).__name__} waits for a metric, but schedulers are stepped once per optimizer "
            "step; use WarmupCosine, or another scheduler of steps."
        )
    return built, scheduler


def fill_total_steps(scheduler: WarmupSchedule, steps: int | None) -> None:
    """Set the length of a schedule that the user left open.

    Args:
        scheduler: The schedule.
        steps: Optimizer steps of the fit, ``None`` for no limit.

    Raises:
        ValueError: The schedule needs a length and the fit has no limit.
    """
    if steps is None and scheduler.decays:
        raise ValueError(
            f"{type(scheduler).__name__}(total_steps=None) takes its length from the Trainer, which has no limit; give "
            "max_steps or max_epochs to the Trainer, or total_steps=1000 to the scheduler."
        )
    scheduler.total_steps = steps


def apply_schedule(scheduler: WarmupSchedule) -> None:
    """Set the learning rates that the schedule gives for its current step.

    The last step of a finished fit, or a checkpoint of one, leaves the rate of a schedule with another length.
    """
    factor = scheduler.factor(scheduler.last_epoch)
    for group, base in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
        group["lr"] = base * factor
