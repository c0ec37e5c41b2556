"""Comparisons and jobs that the engine tests share."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from lightning_rl_engines import Experience
from tests.support.engine import EngineModule


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], case: Any = "") -> None:
    """Every parameter's gradient is the expected one within 1e-5 of its norm."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error, norm = float((found[name] - value).norm()), float(value.norm())
        # NaN must fail, so no "error > ...".
        assert error <= 1e-5 * norm, f"{case}: {name}: error {error:.2e} at norm {norm:.2e}"


def assert_number(found: float | None, expected: float, case: Any = "") -> None:
    """The same number on every rank's result within 1e-5."""
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), case


def backward(
    module: EngineModule, experience: Experience, loss: Callable[..., Any], **options: Any
) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """Loss, metrics and gradients of one batch through the engine of ``module.policy``."""
    engine = module.engine
    with engine.train_mode(module.policy):
        output = engine.forward_backward_batch(module.policy, experience, loss, **options)
        gradients = dict(engine.get_per_tensor_grad(module.policy))
    assert output.loss is not None
    return output.loss, output.metrics, gradients
