"""A progress bar with what an RL run is watched for."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from typing_extensions import override

METRICS = {
    "train/reward": "reward",
    "train/loss": "loss",
    "train/kl": "kl",
    "train/tokens_per_second": "tok/s",
    "val/reward": "val",
}
"""Logged name -> name in the bar, in the order of the bar."""


class RunProgressBar(TQDMProgressBar):
    """Lightning's bar with reward, loss, KL, tokens per second and validation reward, where they are logged.

    Further values that a module logs with ``prog_bar=True`` are shown as they are, those of validations left out.
    """

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        further = super().get_metrics(trainer, pl_module)
        shown: dict[str, Any] = {}
        for name, label in METRICS.items():
            further.pop(name, None)
            if name in trainer.callback_metrics:
                shown[label] = short(float(trainer.callback_metrics[name]))
        hidden = ("v_num", "val/", "test/")
        return {**shown, **{name: value for name, value in further.items() if not name.startswith(hidden)}}


def short(value: float) -> str:
    """Three digits that tell: 0.512, 12.3, 4.6k, 1.2M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.3g}"
