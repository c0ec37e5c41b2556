"""Runs a function against an engine inside a real Trainer, on the ranks of the worker pool."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_rl_engines import Engine, EnginePrecision, FSDPUlyssesStrategy, ModelConfig, TorchTitanStrategy
from tests.support.lightning_env import ExternalEnvironment, make_trainer

_ENGINES: dict[str, Any] = {"fsdp_ulysses": FSDPUlyssesStrategy, "torchtitan": TorchTitanStrategy}
_SPLITS: dict[str, tuple[Any, str]] = {
    "sp": (FSDPUlyssesStrategy, "ulysses_sp_size"),
    "tp": (TorchTitanStrategy, "tensor_parallel_degree"),
    "cp": (TorchTitanStrategy, "context_parallel_degree"),
    "pp": (TorchTitanStrategy, "pipeline_parallel_degree"),
}


def sharing_strategy(peers: int, split: str = "sp") -> Any:
    """An engine on which so many ranks share their rows.

    Args:
        peers: Ranks that share rows; with 1 the split only names the engine.
        split: ``"sp"`` for ``fsdp_ulysses``; ``"tp"``, ``"cp"`` or ``"pp"`` for ``torchtitan``.
    """
    strategy, name = _SPLITS[split]
    return strategy(**{name: peers})


class EngineModule(LightningModule):
    """One model per configuration, SGD on all of them, and a body that is called in each training step."""

    def __init__(self, configs: dict[str, ModelConfig], body: Callable[["EngineModule"], Any], lr: float) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.configs, self.body, self.lr = configs, body, lr
        self.result: Any = None

    @property
    def engine(self) -> Engine:
        strategy = self.trainer.strategy
        assert isinstance(strategy, Engine)
        return strategy

    @override
    def configure_model(self) -> None:
        for name, config in self.configs.items():
            if not hasattr(self, name):
                setattr(self, name, self.engine.build_model(config))

    @override
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(getattr(self, name).parameters(), self.lr) for name in self.configs]

    @override
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.result = self.body(self)


def with_engine(
    body: Callable[[EngineModule], Any],
    configs: ModelConfig | dict[str, ModelConfig],
    *,
    lr: float = 0.1,
    precision: str = "32-true",
    steps: int = 1,
    trainer: dict[str, Any] | None = None,
    engine: str = "fsdp_ulysses",
    **strategy: Any,
) -> Any:
    """Return what ``body`` returned in the last of ``steps`` training steps; call it on every rank of a pool.

    Args:
        body: Called with the module; ``module.engine`` is the engine, ``module.policy`` the model.
        configs: Model configurations by attribute name; one alone is called ``policy``.
        lr: Learning rate of SGD.
        precision: The Trainer's precision; fp16 through a plugin where Lightning knows it for FSDP1 only.
        steps: Number of training steps.
        trainer: Further arguments of the Trainer.
        engine: ``"fsdp_ulysses"`` or ``"torchtitan"``.
        **strategy: Arguments of the engine.
    """
    named = configs if isinstance(configs, dict) else {"policy": configs}
    module = EngineModule(named, body, lr)
    named_here = engine == "torchtitan" and precision == "16-mixed"
    given: Any = {"plugins": [ExternalEnvironment(), EnginePrecision("16-mixed")]} if named_here else {}
    built: Trainer = make_trainer(
        _ENGINES[engine](**strategy),
        **(given or {"precision": precision}),
        max_steps=-1,
        max_epochs=1,
        limit_train_batches=steps,  # sequence peers share samples, so a data rank has more of them than it needs
        **(trainer or {}),
    )
    built.fit(module, DataLoader(range(steps * built.world_size)))
    return module.result


def share(items: Sequence[Any], rank: int, size: int) -> list[Any]:
    """The part of ``items`` that data rank ``rank`` of ``size`` holds: neighbours, unequally many."""
    bounds = [len(items) * index * (index + 1) // (size * (size + 1)) for index in range(size + 1)]
    return list(items[bounds[rank] : bounds[rank + 1]])
