"""Learning-rate schedules that fit into one line of YAML: warm-up, then constant, linear or cosine.

``total_steps`` may be left out: the modules fill it in ``configure_optimizers`` with the number of optimizer steps of
the run. A checkpoint keeps where a schedule is, not its shape: a run resumed with a larger ``max_steps`` follows the
longer schedule.
"""

import math
from abc import ABC, abstractmethod
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override


class WarmupSchedule(LRScheduler, ABC):
    """Base of the schedules: the learning rate of step ``t`` is that of the optimizer times ``factor(t)``.

    Step 0 is the first optimizer step. During warm-up the factor of step ``t`` is ``(t + 1) / (warmup_steps + 1)``, so
    the first step is not wasted at a learning rate of 0 and step ``warmup_steps`` is the first at the full rate.

    Attributes:
        total_steps: Steps of the whole run, in calls of ``step``.

    Args:
        optimizer: The optimizer whose parameter groups are scheduled; each keeps its own learning rate.
        warmup_steps: Steps over which the rate rises linearly.
        total_steps: Steps of the whole run; ``None`` is filled by the module in ``configure_optimizers``.
        min_ratio: Where the decay ends, as a fraction of the full rate.
        last_epoch: The last step taken; -1 starts anew.

    Raises:
        ValueError: A negative ``warmup_steps``, a ``total_steps`` that is not beyond it, or a ``min_ratio`` outside
            0 to 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        warmup_steps: int = 0,
        total_steps: int | None = None,
        min_ratio: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        name = type(self).__name__
        if warmup_steps < 0:
            raise ValueError(f"{name}(warmup_steps={warmup_steps}) must not be negative; use 0 for no warm-up.")
        if not 0.0 <= min_ratio <= 1.0:
            raise ValueError(f"{name}(min_ratio={min_ratio}) must lie between 0 and 1; 0.1 ends at a tenth.")
        self.warmup_steps = warmup_steps
        self.min_ratio = min_ratio
        if total_steps is not None and total_steps <= warmup_steps and self.decays:
            raise ValueError(
                f"{name}(warmup_steps={warmup_steps}, total_steps={total_steps}) leaves no step to decay over; use "
                f"warmup_steps below {total_steps}."
            )
        # May be set later, also to less than the warm-up: a short trial of a long configuration just warms up.
        self.total_steps = total_steps
        super().__init__(optimizer, last_epoch)

    @property
    def decays(self) -> bool:
        """Whether the schedule falls after the warm-up, and so needs ``total_steps``."""
        return True

    @abstractmethod
    def decay(self, progress: float) -> float:
        """Return the part of the way from the full rate to the lowest that is left: 1 at 0, 0 at 1."""

    def factor(self, step: int) -> float:
        """Return what the learning rate of this step is multiplied by.

        Raises:
            ValueError: ``total_steps`` is neither given nor filled.
        """
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if step == self.warmup_steps or not self.decays:
            return 1.0
        if self.total_steps is None:
            raise ValueError(
                f"{type(self).__name__}(total_steps=None) is not known at step {step}; give total_steps, as in "
                "init_args: {total_steps: 1000}, or limit the run with trainer.max_steps."
            )
        length = self.total_steps - self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / length) if length > 0 else 1.0
        return self.min_ratio + (1.0 - self.min_ratio) * self.decay(progress)

    @override
    def get_lr(self) -> list[Any]:
        factor = self.factor(self.last_epoch)
        return [base * factor for base in self.base_lrs]

    @override
    def state_dict(self) -> dict[str, Any]:
        shape = ("warmup_steps", "min_ratio", "total_steps")
        return {key: value for key, value in super().state_dict().items() if key not in shape}


class WarmupConstant(WarmupSchedule):
    """Linear warm-up, then the full rate; arguments as in :class:`WarmupSchedule`."""

    @property
    @override
    def decays(self) -> bool:
        return False

    @override
    def decay(self, progress: float) -> float:
        return 1.0


class WarmupLinear(WarmupSchedule):
    """Linear warm-up, then a straight line down to ``min_ratio``; arguments as in :class:`WarmupSchedule`."""

    @override
    def decay(self, progress: float) -> float:
        return 1.0 - progress


class WarmupCosine(WarmupSchedule):
    """Linear warm-up, then half a cosine down to ``min_ratio``; arguments as in :class:`WarmupSchedule`."""

    @override
    def decay(self, progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * progress))
