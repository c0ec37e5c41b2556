"""A checkpoint every few updates, under one name."""

import os
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_rl_engines.modules.base import RLModule


class UpdateCheckpoint(ModelCheckpoint):
    """Saves ``last.ckpt`` every ``every_n_updates`` updates and at the end of training; the newest replaces the former.

    Lightning's own callback counts optimizer steps, of which an update takes several, and saves after validations; use
    it for checkpoints that are kept by a metric. ``ckpt_path="last"`` finds this one.

    Args:
        dirpath: The folder; by default ``checkpoints`` in the Trainer's ``default_root_dir``.
        every_n_updates: Updates from one checkpoint to the next.

    Raises:
        ValueError: ``every_n_updates`` is below 1.
    """

    def __init__(self, *, dirpath: str | None = None, every_n_updates: int = 20) -> None:
        if every_n_updates < 1:
            raise ValueError(f"UpdateCheckpoint(every_n_updates={every_n_updates}) must be at least 1.")
        # 0: the parent saves nothing of its own accord.
        super().__init__(dirpath=dirpath, save_top_k=0, enable_version_counter=False)
        self.every_n_updates = every_n_updates
        self._seen_updates = 0
        self._saved_updates: int | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(pl_module, RLModule):
            raise MisconfigurationException(
                f"UpdateCheckpoint counts updates, which {type(pl_module).__name__} does not have; use ModelCheckpoint."
            )
        if self.dirpath is None:
            self.dirpath = os.path.realpath(os.path.join(trainer.default_root_dir, "checkpoints"))
        super().setup(trainer, pl_module, stage)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen_updates = _updates(pl_module)
        self._saved_updates = None
        last = os.path.join(str(self.dirpath), f"{self.CHECKPOINT_NAME_LAST}{self.FILE_EXTENSION}")
        # Only now is it known where the run goes on from.
        if trainer.ckpt_path is None and not self._seen_updates and os.path.exists(last):
            rank_zero_warn(
                f"{last} is of an earlier run, and this run will replace it. To go on with that run, use "
                "ckpt_path='last' (--ckpt_path last); to keep it, choose another default_root_dir."
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        updates = _updates(pl_module)
        if updates != self._seen_updates and updates % self.every_n_updates == 0:
            self._save(trainer, updates)
        self._seen_updates = updates

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pass

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pass

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        updates = _updates(pl_module)
        if self._saved_updates != updates:
            self._save(trainer, updates)

    def _save(self, trainer: Trainer, updates: int) -> None:
        """Collective over the world."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        assert self.dirpath is not None
        self.last_model_path = os.path.join(self.dirpath, f"{self.CHECKPOINT_NAME_LAST}{self.FILE_EXTENSION}")
        trainer.save_checkpoint(self.last_model_path, weights_only=False)
        self._saved_updates = updates


def _updates(pl_module: LightningModule) -> int:
    assert isinstance(pl_module, RLModule)
    return pl_module.updates
