"""What a module holds besides engine models goes to the device, and nothing of a model does."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_rl_engines import FSDPUlyssesStrategy, ModelConfig, TorchTitanStrategy
from lightning_rl_engines.strategies.placing import move_around_models
from tests.support import run_workers
from tests.support.engine import EngineModule
from tests.support.lightning_env import make_trainer
from tests.support.models import tiny_model_folder

STRATEGIES: dict[str, Any] = {"fsdp_ulysses": FSDPUlyssesStrategy, "torchtitan": TorchTitanStrategy}
META = torch.device("meta")


class Module(EngineModule):
    """Has a frozen layer and a buffer of its own, and a model one level down."""

    def __init__(self) -> None:
        super().__init__({}, place, 0.1)
        self.projection = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("running", torch.zeros(3))
        self.actor = nn.Module()
        self.actor.gain = nn.Parameter(torch.ones(1), requires_grad=False)

    @override
    def configure_model(self) -> None:
        self.actor.policy = self.engine.build_model(ModelConfig(path=str(tiny_model_folder("llama"))))

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.actor.policy.parameters(), lr=0.1)


def place(module: EngineModule) -> dict[str, Any]:
    """Pretend that the device is another one; the optimizer and the off-load must not notice."""
    stored = {name: parameter.data_ptr() for name, parameter in module.named_parameters() if "policy" in name}
    move_around_models(module, META)
    return {
        "device": module.device,
        "devices": {
            name: tensor.device
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
            if "policy" not in name
        },
        "kept": stored == {name: item.data_ptr() for name, item in module.named_parameters() if "policy" in name},
        "models": len(stored),
    }


def fit(engine: str, offload: bool) -> Any:
    module = Module()
    strategy = STRATEGIES[engine](offload_param=offload)
    make_trainer(strategy, max_epochs=1, max_steps=-1, limit_train_batches=1).fit(module, DataLoader(range(2)))
    return module.result


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("engine", STRATEGIES)
def test_models_stay_and_the_rest_moves(engine: str, offload: bool) -> None:
    for found in run_workers(2, fit, engine, offload):
        assert found["device"] == META
        assert set(found["devices"]) == {"projection.weight", "projection.bias", "running", "actor.gain"}
        assert set(found["devices"].values()) == {META}
        assert found["kept"]
        assert found["models"] > 10
