"""What a run leaves behind: a picture of its curves, and a list of where everything is."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.panel import Panel
from typing_extensions import override

from lightning_rl_engines.callbacks.console import readable, show
from lightning_rl_engines.callbacks.interrupt import RunInterrupted
from lightning_rl_engines.callbacks.samples import FILE_NAME as SAMPLES
from lightning_rl_engines.callbacks.start_card import render
from lightning_rl_engines.callbacks.weight_export import WeightExport
from lightning_rl_engines.modules.base import RLModule

PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("train/reward", "val/reward")),
    ("loss", ("train/loss", "val/loss")),
    ("KL", ("train/kl", "train/approx_kl", "train/rollout_kl")),
    ("entropy", ("train/entropy",)),
)
"""Title -> metrics of each panel; the loss is drawn only where there is no reward."""

LABELS = {
    "train/kl": "to the reference",
    "train/approx_kl": "of the update",
    "train/rollout_kl": "sampler to trainer",
    "train/reward": "training, sampled",
    "val/reward": "validation, greedy",
    "train/loss": "training",
    "val/loss": "validation",
}


class RunReport(Callback):
    """Writes the curves of a run as a PNG when `fit` ends, is interrupted or fails, and prints where things are.

    The training curves are ``pl_module.history``, which checkpoints keep: the picture of a resumed run shows the whole
    run. Validation values are kept in this callback's own state.

    Args:
        path: The picture; by default ``report.png`` in the Trainer's ``default_root_dir``.
    """

    def __init__(self, *, path: str | None = None) -> None:
        self.path = path
        self.validations: list[dict[str, float]] = []
        self._places: list[tuple[str, str]] = []
        self._directory: str | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(pl_module, RLModule):
            raise MisconfigurationException(
                f"RunReport draws the history of this package's modules, which {type(pl_module).__name__} lacks; use "
                "PolicyModule or SFTModule, or leave the callback out."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Here and not at the end: the directory is broadcast, and at the end of a failed run ranks may be gone.
        self._directory = trainer.log_dir if trainer.loggers else None

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not isinstance(pl_module, RLModule):
            return
        values: dict[str, float] = {
            name: float(trainer.callback_metrics[name])
            for name in ("val/reward", "val/loss")
            if name in trainer.callback_metrics
        }
        self.validations.append({"rl/update": float(pl_module.updates), **values})

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # After every on_train_end: the last checkpoint and export are written.
        self._finish(trainer, pl_module)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        checkpoint = exception.checkpoint if isinstance(exception, RunInterrupted) else None
        if trainer.state.fn == TrainerFn.FITTING:
            self._finish(trainer, pl_module, checkpoint)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"validations": [dict(row) for row in self.validations]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.validations = [dict(row) for row in state_dict["validations"]]

    def _finish(self, trainer: Trainer, pl_module: LightningModule, checkpoint: str | None = None) -> None:
        """Write and print on rank 0; no communication."""
        if not trainer.is_global_zero or not isinstance(pl_module, RLModule) or pl_module.history.empty:
            return
        path = Path(self.path or os.path.join(trainer.default_root_dir, "report.png"))
        try:
            draw(pl_module.history, pd.DataFrame(self.validations), path)
        except OSError as error:  # a full disk, say; what ended the run must stay in sight
            rank_zero_warn(f"The report could not be written to {path}: {error}")
            with suppress(OSError):
                path.unlink()
        drawn = [("curves", readable(path))] if path.exists() else []
        rows = [*drawn, *self._outputs(trainer, checkpoint)]
        show(trainer, Panel(render(rows), title="written", expand=False))

    def _outputs(self, trainer: Trainer, checkpoint: str | None) -> list[tuple[str, str]]:
        rows = []
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger) and (path := Path(logger.experiment.metrics_file_path)).exists():
                rows.append(("metrics", readable(path)))
        if self._directory is not None and (samples := Path(self._directory, SAMPLES)).exists():
            rows.append(("samples", readable(samples)))
        saved = [item for item in trainer.checkpoint_callbacks if isinstance(item, ModelCheckpoint)]
        found = checkpoint or next((item.last_model_path or item.best_model_path for item in saved), "")
        if found:
            rows.append(("checkpoint", readable(found)))
        for item in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(item, WeightExport) and item.last_path is not None:
                rows.append(("Hugging Face folder", item.last_path))
        return rows


def draw(history: pd.DataFrame, validations: pd.DataFrame, path: Path) -> None:
    """Draw the panels that have data over updates into a PNG.

    Args:
        history: One row per update, with ``rl/update`` and ``train/...``.
        validations: One row per validation, with ``rl/update`` and ``val/...``; may be empty.
        path: The file; its folder is made.
    """
    panels: list[tuple[str, list[tuple[str, pd.DataFrame]]]] = []
    for title, names in PANELS:
        curves = [(name, frame) for name in names for frame in (history, validations) if name in frame]
        if curves and not (title == "loss" and panels):
            panels.append((title, curves))
    figure = Figure(figsize=(8.0, 2.2 * len(panels) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, curves) in zip(axes, panels, strict=True):
        for name, frame in curves:
            known = frame[["rl/update", name]].dropna()
            style = {"marker": "o", "markersize": 3.0} if name.startswith("val/") else {}
            axis.plot(known["rl/update"], known[name], linewidth=1.2, label=LABELS.get(name), **style)
        axis.set_ylabel(title)
        axis.grid(visible=True, alpha=0.3)
        if len(curves) > 1:
            axis.legend(fontsize="small", frameon=False)
    axes[-1].set_xlabel("update")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
