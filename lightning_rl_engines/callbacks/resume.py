"""A new learning rate for a resumed run."""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override


class ConfiguredLearningRate(Callback):
    """Makes a resumed `fit` train at the learning rates of its configuration.

    A checkpoint restores the optimizer, and with it the learning rate of the run that wrote it, whatever the new
    configuration says. This callback puts the configured rates back, scaled by what the schedule has made of the
    former ones by now: a run that stood at half its rate goes on at half the new rate. A run that is not resumed is
    left alone.
    """

    def __init__(self) -> None:
        self._configured: list[list[float]] = []

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The optimizers are built, and their state is not restored yet.
        self._configured = [
            [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is None:
            return
        for optimizer, rates in zip(trainer.optimizers, self._configured, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                former = float(group.get("initial_lr", group["lr"]))
                if former == rate:
                    continue
                group["lr"] = rate if former == 0.0 else float(group["lr"]) * rate / former
                if "initial_lr" in group:
                    group["initial_lr"] = rate
                rank_zero_info(f"Learning rate {former:g} of the checkpoint becomes {rate:g}.")
            for config in trainer.lr_scheduler_configs:
                scheduler = config.scheduler
                if isinstance(scheduler, LRScheduler) and scheduler.optimizer is optimizer:
                    scheduler.base_lrs = list(rates)
