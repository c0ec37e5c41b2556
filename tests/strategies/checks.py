"""Comparisons and jobs that the engine tests share."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor

from lightning_rl_engines import Experience
from tests.support.engine import EngineModule
from tests.support.lightning_env import ExternalEnvironment
from tests.support.live import LiveTensors


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


def asked_of_torch(strategy: Any, lightning_module: ModuleType, processes: int = 2) -> dict[str, Any]:
    """What the process group would be made with, on the CPU.

    Args:
        strategy: A strategy that is not set up.
        lightning_module: Where Lightning's strategy of this kind looks up how to connect.
        processes: Of the run; one makes its group without Lightning, and asks no environment.
    """
    strategy.accelerator, strategy.parallel_devices = CPUAccelerator(), [torch.device("cpu")] * processes
    strategy.cluster_environment = strategy.cluster_environment or ExternalEnvironment()
    asked: dict[str, Any] = {}

    class Asked(Exception):
        pass

    def connect(environment: Any, backend: str, **options: Any) -> None:
        asked.update(options, environment=environment, backend=backend)
        raise Asked

    def start(backend: str, **options: Any) -> None:
        connect(None, backend, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lightning_module, "_init_dist_connection", connect)
        patch.setattr(dist, "is_initialized", lambda: False)
        patch.setattr(dist, "init_process_group", start)
        with pytest.raises(Asked):
            strategy.setup_environment()
    return asked


def soak_steps(
    module: EngineModule, optimizer: Any, experience: Experience, loss: Callable[..., Any], steps: int
) -> list[tuple[int, int, int]]:
    """Train on a rank: step, tensors made and kept, and resident bytes, every ten steps after an export."""
    engine, policy, process = module.engine, module.policy, psutil.Process()
    mode: Any = "full" if policy.adapter is None else "merged"
    seen = []
    with LiveTensors() as live:
        for step in range(1, steps + 1):
            engine.train_batch(policy, optimizer, experience, loss, max_grad_norm=1.0)
            if step % 10 == 0:
                stream = engine.get_per_tensor_param(policy, mode=mode)
                assert sum(tensor.numel() for _, tensor in stream) > 0
                seen.append((step, live.count(), process.memory_info().rss))
    return seen


def require_flat_memory(seen: list[tuple[int, int, int]], steps: int) -> None:
    """What :func:`soak_steps` saw stays where it was after the first twenty steps."""
    assert [step for step, _, _ in seen] == list(range(10, steps + 1, 10))
    settled = [item for item in seen if item[0] >= 20]
    counts = {alive for _, alive, _ in settled}
    # A few come and go; a tensor kept by each step would be some dozens, by each export a multiple of the weights.
    assert max(counts) - min(counts) < 10, sorted(counts)
    # A leak of one small tensor a step hides in the allocator, and shows in the count; one of a gradient does not.
    growth = settled[-1][2] - settled[0][2]
    assert growth < 8 * 2**20, f"{growth / 2**20:.1f} MiB"
