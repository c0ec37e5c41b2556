"""Ctrl-C without a lost run: all ranks agree, save a checkpoint, and leave together."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_rl_engines.callbacks.signals import SignalWatch
from lightning_rl_engines.strategies.checkpoints import ShardedCheckpoints

EXIT_CODE = 130
"""What a shell reports for a process that SIGINT ended."""


class RunInterrupted(SystemExit):
    """Raised by every rank after the checkpoint is written; uncaught, the process ends without a traceback.

    The exit code is 130 on rank 0 and 0 on the others: Lightning's launcher kills the main process as soon as one of
    its children ends with another code.

    Attributes:
        checkpoint: The checkpoint to go on from, or None if there was nothing to save yet.
    """

    def __init__(self, checkpoint: str | None, *, code: int) -> None:
        super().__init__(code)
        self.checkpoint = checkpoint


class GracefulInterrupt(Callback):
    """Ends `fit` at the next batch boundary after SIGINT or SIGTERM, with a checkpoint.

    The signal may reach one process or all: whether to stop is agreed by all ranks after every training batch and
    every validation, in one small all-reduce. All ranks then save ``last.ckpt`` next to the other checkpoints and, once
    the metrics of the batch are logged, raise :class:`RunInterrupted`; ``--ckpt_path last`` continues. A run whose last
    batch this was ends as usual. A second signal ends this process and those it launched at once, even while they wait
    in a collective.

    Args:
        dirpath: Where to save; by default the folder of the first ``ModelCheckpoint``, else
            ``default_root_dir/checkpoints``.
        grace_seconds: Within this time of the first signal a second one counts as the same.

    Raises:
        ValueError: ``grace_seconds`` is negative.
    """

    def __init__(self, *, dirpath: str | None = None, grace_seconds: float = 1.0) -> None:
        if grace_seconds < 0:
            raise ValueError(f"GracefulInterrupt(grace_seconds={grace_seconds}) must not be negative; use 1.0.")
        self.dirpath = dirpath
        self.grace_seconds = grace_seconds
        self._requested = threading.Event()
        self._stopping: RunInterrupted | None = None
        self._watch: SignalWatch | None = None

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self._requested.is_set()

    def request(self) -> None:
        """Ask for a stop at the next batch boundary, as a signal does; any thread of any rank may call it."""
        self._requested.set()

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._stopping is None and self._agreed(trainer):
            self._stopping = self._interruption(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._watch is not None and self._stopping is None and self._agreed(trainer):
            self._stopping = self._interruption(trainer)
            if trainer.sanity_checking:
                raise self._stopping

    # Lightning hands a batch's metrics to the loggers after its hooks, so the end of the run waits for the next hook.

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._stopping is not None:
            raise self._stopping

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._stopping is not None:
            raise self._stopping

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # No collective here: other ranks may be anywhere.
        self._remove()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._remove()

    def _install(self, trainer: Trainer) -> None:
        # Not earlier: Lightning installs a SIGTERM handler with a collective in it just before its loops start.
        if self._watch is not None:
            return
        self._requested.clear()
        self._stopping = None
        self._watch = SignalWatch(
            (signal.SIGINT, signal.SIGTERM),
            on_first=lambda: self._first(announce=trainer.is_global_zero),
            on_repeat=lambda: _kill(trainer),
            grace_seconds=self.grace_seconds,
        )
        self._watch.install()

    def _remove(self) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    def _first(self, *, announce: bool) -> None:
        self._requested.set()
        if announce:
            # Past the buffers of sys.stderr: the main thread may be writing to it.
            os.write(2, b"\nStopping after this update, with a checkpoint. Ctrl-C again stops at once.\n")

    def _agreed(self, trainer: Trainer) -> bool:
        return trainer.strategy.reduce_boolean_decision(self.requested, all=False)

    def _interruption(self, trainer: Trainer) -> RunInterrupted:
        """Save, and return what to raise. Collective over the world."""
        checkpoint = None
        if not trainer.sanity_checking and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            checkpoint = self._save(trainer)
        return RunInterrupted(checkpoint, code=EXIT_CODE if trainer.is_global_zero else 0)

    def _save(self, trainer: Trainer) -> str:
        """Save ``last.ckpt`` on every rank. Collective over the world."""
        callback = next((item for item in trainer.checkpoint_callbacks if isinstance(item, ModelCheckpoint)), None)
        directory = self.dirpath or (callback.dirpath if callback is not None else None)
        directory = directory or os.path.join(trainer.default_root_dir, "checkpoints")
        path = str(Path(directory) / f"{ModelCheckpoint.CHECKPOINT_NAME_LAST}{ModelCheckpoint.FILE_EXTENSION}")
        trainer.save_checkpoint(path, weights_only=False)
        if isinstance(trainer.strategy, ShardedCheckpoints):
            trainer.strategy.finish_checkpoints()
        rank_zero_info(f"Saved {path}; continue with --ckpt_path last, or Trainer.fit(ckpt_path={path!r}).")
        return path


def _kill(trainer: Trainer) -> None:
    """End the processes that this one launched, and this one, without any clean-up."""
    if trainer.strategy.launcher is not None:
        trainer.strategy.launcher.kill(signal.SIGKILL)
    os.write(2, b"\nStopped at once; the last checkpoint written is the one to continue from.\n")
    os._exit(EXIT_CODE)
