"""A module with everything that a checkpoint must hold, and what the workers run with it."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from typing_extensions import override

from lightning_rl_engines import FSDPUlyssesStrategy, ModelConfig, PolicyLoss, TorchTitanStrategy
from tests.strategies.reference import Documents
from tests.support.engine import share
from tests.support.lightning_env import make_trainer

ENGINES: dict[str, Any] = {"fsdp_ulysses": FSDPUlyssesStrategy, "torchtitan": TorchTitanStrategy}


class Everything(LightningModule):
    """AdamW with a schedule on one policy, a buffer and a metric of its own, random numbers in each step."""

    def __init__(self, policy: ModelConfig, documents: Documents, seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters({"policy": policy.to_dict()})
        self.automatic_optimization = False
        self.policy_config, self.documents, self.seed = policy, documents, seed
        self.register_buffer("total", torch.zeros(2))
        self.metric = MeanMetric()
        self.metric.persistent(True)
        self.steps: list[dict[str, Any]] = []

    @override
    def configure_model(self) -> None:
        if not hasattr(self, "policy"):
            self.policy = self.trainer.strategy.build_model(self.policy_config)  # type: ignore[attr-defined]

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.policy.parameters() if p.requires_grad], 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    @override
    def on_train_start(self) -> None:
        seed = self.seed + 10 * self.trainer.strategy.data_parallel_rank  # type: ignore[attr-defined]
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)

    def mine(self) -> Any:
        engine: Any = self.trainer.strategy
        return self.documents.experience(
            share(range(self.documents.size), engine.data_parallel_rank, engine.data_parallel_size)
        )

    @override
    def training_step(self, batch: Any, batch_idx: int) -> None:
        engine: Any = self.trainer.strategy
        drawn = (torch.rand(2).tolist(), random.random(), np.random.rand(2).tolist())
        optimizer: Any = self.optimizers()
        rate = optimizer.param_groups[0]["lr"]
        output = engine.train_batch(self.policy, optimizer, self.mine(), PolicyLoss(), max_grad_norm=1.0)
        self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]
        self.total += output.loss
        self.metric.update(output.loss)
        self.steps.append({
            "step": self.trainer.global_step, "drawn": drawn, "loss": output.loss, "rate": rate,
            "norm": output.metrics["grad_norm"], "total": self.total.tolist(), "mean": float(self.metric.compute()),
        })  # fmt: skip

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        engine: Any = self.trainer.strategy
        columns = engine.infer_batch(self.policy, self.mine()).columns
        self.sum_of_log_probs = sum(engine.all_gather_objects(float(columns["log_probs"].sum()), "data"))

    test_step = validation_step

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> float:
        self.validation_step(batch, batch_idx)
        return self.sum_of_log_probs


class SaveAfter(Callback):
    """Saves after a number of steps."""

    def __init__(self, step: int, path: Path | str) -> None:
        self.step, self.path = step, path

    @override
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def run(
    folder: str,
    documents: Documents,
    *,
    steps: int,
    save: tuple[int, str] | None = None,
    resume: str | None = None,
    seed: int = 0,
    kind: type[Everything] = Everything,
    trainer: dict[str, Any] | None = None,
    engine: str = "fsdp_ulysses",
    **strategy: Any,
) -> list[dict[str, Any]]:
    """Train up to a step and return what each step saw on this rank."""
    module = kind(ModelConfig(path=folder), documents, seed)
    callbacks = [SaveAfter(*save)] if save else []
    built = make_trainer(ENGINES[engine](**strategy), max_steps=steps, callbacks=callbacks, **(trainer or {}))
    built.fit(module, DataLoader(range(64)), ckpt_path=resume)
    return module.steps


def run_and_resume(folder: str, documents: Documents, path: str, **strategy: Any) -> tuple[Any, Any]:
    """Six steps, and the last three of them again from a checkpoint after the third."""
    whole = run(folder, documents, steps=6, save=(3, path), **strategy)
    return whole[3:], run(folder, documents, steps=6, resume=path, seed=777, **strategy)
