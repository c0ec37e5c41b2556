"""Dynamic loss scaling for fp16, decided by the global gradient norm, so that all ranks agree without a word."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class LossScale:
    """Scale of the loss that keeps fp16 gradients in range; the rule and the defaults are those of torch's GradScaler.

    Gradients are scaled only while backward passes run: outside :meth:`applied` they are the true ones. The scale is a
    power of two, so scaling rounds nothing.

    Args:
        value: First scale.
        growth_interval: Finite steps in a row after which the scale doubles.
    """

    def __init__(self, value: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.value = value
        self.growth_interval = growth_interval
        self._finite_steps = 0

    @contextmanager
    def applied(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Context of backward passes through a loss that is multiplied by :attr:`value`."""
        chosen = list(parameters)
        self._multiply(chosen, self.value)
        try:
            yield
        finally:
            self._multiply(chosen, 1.0 / self.value)

    def _multiply(self, parameters: list[Tensor], factor: float) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def update(self, finite: bool) -> None:
        """Note whether the global gradient norm of a step was finite: halve the scale if not, double it in time."""
        if not finite:
            self.value, self._finite_steps = max(self.value / 2, 1.0), 0
            return
        self._finite_steps += 1
        if self._finite_steps == self.growth_interval:
            self.value, self._finite_steps = self.value * 2, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"value": self.value, "finite_steps": self._finite_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.value, self._finite_steps = state["value"], state["finite_steps"]
