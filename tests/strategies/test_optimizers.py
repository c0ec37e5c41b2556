"""Optimizers and callbacks that would train sharded parameters otherwise than whole ones are refused."""

import re
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_rl_engines import FSDPUlyssesStrategy, ModelConfig, TorchTitanStrategy
from lightning_rl_engines.strategies.optimizer_check import require_exact_optimizer
from tests.support import run_workers
from tests.support.engine import EngineModule
from tests.support.lightning_env import make_trainer
from tests.support.models import tiny_model_folder

LAYOUTS: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "fsdp": (2, FSDPUlyssesStrategy, {}),
    "titan": (4, TorchTitanStrategy, {"tensor_parallel_degree": 2}),
}
ONE_STEP: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 1, "max_steps": -1}


class Trust(Optimizer):
    """Steps as long as the parameter is, as LARS and LAMB take them; a sharded one is shorter."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * group["lr"] * parameter.square().sum().sqrt())


class NamedTrust(Trust):
    """Cannot be made from its options alone."""

    def __init__(self, parameters: Any, *, names: list[str]) -> None:
        super().__init__(parameters)
        self.names = names


class Named(torch.optim.SGD):
    """The same, element by element."""

    def __init__(self, parameters: Any, *, names: list[str]) -> None:
        super().__init__(parameters, lr=0.1)
        self.names = names


class NormalisedAdamW(torch.optim.AdamW):
    """Where a group says so, and after ten steps, steps of a matrix have length 1."""

    @override
    def step(self, closure: Any = None) -> None:
        self.count = getattr(self, "count", 0) + 1
        super().step(closure)
        for group in self.param_groups:
            if group.get("normalised") and self.count > 10:
                for parameter in group["params"]:
                    parameter.data.div_(parameter.data.square().sum().sqrt())


class Broken(Trust):
    """Cannot step at all."""

    @override
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("not here")


class Module(EngineModule):
    """Trains its model with an optimizer of the test's choice."""

    def __init__(self, make: Any) -> None:
        super().__init__({"policy": ModelConfig(path=str(tiny_model_folder("llama")))}, lambda module: "stepped", 0.1)
        self.make = make

    @override
    def configure_optimizers(self) -> Any:
        return self.make(self.policy.parameters())


OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam-fused": lambda parameters: torch.optim.Adam(parameters, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.0, momentum=0.9, nesterov=True),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "radam": torch.optim.RAdam,
    "named": lambda parameters: Named(parameters, names=["all"]),
    "named-trust": lambda parameters: NamedTrust(parameters, names=["all"]),
    "normalised": lambda parameters: NormalisedAdamW([{"params": list(parameters), "normalised": True}]),
    "not-normalised": NormalisedAdamW,
    "adafactor": torch.optim.Adafactor,
    "lbfgs": torch.optim.LBFGS,
    "trust": Trust,
}
REFUSED = {
    "fsdp": {
        "adafactor": "Adafactor takes other steps on sharded parameters",
        "lbfgs": "LBFGS evaluates the loss within its steps; use one without, such as AdamW",
        "named-trust": "NamedTrust takes other steps",
        "normalised": "NormalisedAdamW takes other steps",
        "trust": "Trust takes other steps on sharded parameters.* depend on the number of ranks",
    },
    # DTensor sums the squares of all shards, and does not know what Adafactor does in place.
    "titan": {"adafactor": "Adafactor cannot step on sharded parameters .*pow_", "lbfgs": "LBFGS evaluates the loss"},
}


def outcomes(layout: str) -> dict[str, str]:
    """On a rank: what becomes of each optimizer."""
    _, strategy, options = LAYOUTS[layout]
    found = {}
    for name, make in OPTIMIZERS.items():
        module = Module(make)
        try:
            make_trainer(strategy(**options), **ONE_STEP).fit(module, DataLoader(range(4)))
            found[name] = "" if module.result == "stepped" else "no step"
        except ValueError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimizer_takes_the_steps_of_whole_parameters_or_is_refused(layout: str) -> None:
    for found in run_workers(LAYOUTS[layout][0], outcomes, layout):
        for name, message in found.items():
            assert re.search(REFUSED[layout].get(name, "^$"), message, re.DOTALL), (name, message)


def test_an_optimizer_that_cannot_be_tried_is_warned_about() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.warns(
        UserWarning, match=r"Broken takes the same steps .* could not be tried \(RuntimeError: not here\)"
    ):
        require_exact_optimizer(Broken([parameter]), lambda matrix: [matrix], torch.device("cpu"))


class Bringing(Module):
    """Brings the callback itself."""

    def __init__(self, callback: Callback) -> None:
        super().__init__(torch.optim.SGD)
        self.callback = callback

    @override
    def configure_callbacks(self) -> list[Callback]:
        return [self.callback]


def with_callback(callback: Callback, layout: str) -> None:
    _, strategy, options = LAYOUTS[layout]
    make_trainer(strategy(**options), **ONE_STEP, callbacks=[callback]).fit(
        Module(torch.optim.SGD), DataLoader(range(4))
    )


@pytest.mark.parametrize(
    "callback",
    [EMAWeightAveraging(), StochasticWeightAveraging(1e-3), ModelPruning("l1_unstructured")],
    ids=lambda callback: type(callback).__name__,
)
def test_a_callback_on_whole_parameters_is_refused(callback: Callback) -> None:
    for layout in LAYOUTS:
        with pytest.raises(MisconfigurationException, match=f"the callback {type(callback).__name__} works on whole"):
            with_callback(callback, layout)
        with pytest.raises(MisconfigurationException, match=f"the callback {type(callback).__name__} works on whole"):
            make_trainer(LAYOUTS[layout][1](), **ONE_STEP).fit(Bringing(callback), DataLoader(range(4)))
