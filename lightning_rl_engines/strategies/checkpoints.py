"""The part of a strategy that saves and loads, for engines whose models are sharded."""

from abc import ABC
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from typing_extensions import override

from lightning_rl_engines.checkpoint.module_state import load_own_state
from lightning_rl_engines.checkpoint.random_state import RandomState, random_state, restore_rank
from lightning_rl_engines.checkpoint.saver import CheckpointSaver
from lightning_rl_engines.checkpoint.training import (
    load_training_checkpoint,
    module_state,
    optimizer_state,
    split_checkpoint,
)
from lightning_rl_engines.models.agreement import on_rank_zero
from lightning_rl_engines.strategies.engine import Engine
from lightning_rl_engines.strategies.offload import Offloader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning.pytorch import Trainer

RANDOM_STATES = "random_states"
"""Where a checkpoint keeps random number generators, by data rank and sequence rank."""


class ShardedCheckpoints(Engine, Strategy, ABC):
    """Checkpoints as folders of ``torch.distributed.checkpoint``; comes before Lightning's own strategy in the bases.

    Set ``async_checkpoint`` and ``checkpoint_timeout`` at construction.
    """

    async_checkpoint: bool
    checkpoint_timeout: timedelta
    _offloader: Offloader
    _saver: CheckpointSaver | None = None
    _random_states: list[list[RandomState]] | None = None
    _failed: bool = False

    # ---- what a checkpoint holds ----

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        self._offloader.load_all()  # the state dict views live tensors until it is written or copied
        return module_state(self.lightning_module, self.all_gather_objects)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.lightning_module is not None
        return optimizer_state(self.lightning_module, optimizer, self.all_gather_objects)

    def _all_random_states(self) -> list[list[RandomState]]:
        found = self.all_gather_objects((self.data_parallel_rank, self.sequence_parallel_rank, random_state()))
        # Ranks that share data rank and place in the row, such as tensor-parallel peers, draw the same numbers.
        states = {(data_rank, sequence_rank): state for data_rank, sequence_rank, state in reversed(found)}
        return [
            [states[data_rank, sequence_rank] for sequence_rank in range(self.sequence_parallel_size)]
            for data_rank in range(self.data_parallel_size)
        ]

    # ---- saving ----

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError(f"storage_options={storage_options!r} is not supported: checkpoints are folders.")
        module = self.lightning_module
        assert module is not None
        state, metadata = split_checkpoint(module, checkpoint, self.all_gather_objects)
        if "optimizer_states" in checkpoint:  # not with save_weights_only
            metadata[RANDOM_STATES] = self._all_random_states()
        running = module.trainer.state.status == TrainerStatus.RUNNING  # else nobody would wait for the end
        path = Path(self.broadcast(filepath))
        try:
            self._require_saver().save(state, metadata, path, background=self.async_checkpoint and running)
        finally:
            self._offloader.offload_again()
            if not running:
                self._require_saver().close()

    def _require_saver(self) -> CheckpointSaver:
        if self._saver is None:
            self._saver = CheckpointSaver(
                self.all_gather_objects, is_writer=self.is_global_zero, timeout=self.checkpoint_timeout
            )
        return self._saver

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if not self._require_saver().remove(Path(filepath)):
            rank_zero_warn(f"{str(filepath)!r} is no finished checkpoint of this strategy, and is left alone.")

    def finish_checkpoints(self) -> None:
        """Wait for a checkpoint that is being written; collective over the world.

        Raises:
            RuntimeError: On all ranks, what failed on any of them.
        """
        if self._saver is not None:
            self._saver.wait()

    # ---- loading ----

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        path = Path(self.broadcast(checkpoint_path))
        self.finish_checkpoints()
        self._offloader.load_all()
        metadata = load_training_checkpoint(module, self.optimizers if fitting else [], path, self.all_gather_objects)
        self._offloader.offload_again()
        states = metadata.pop(RANDOM_STATES, None)
        self._random_states = states if fitting else None
        return metadata

    @override
    def load_model_state_dict(self, checkpoint: "Mapping[str, Any]", strict: bool = True) -> None:
        # The models are loaded; Lightning's hooks may have changed the rest.
        assert self.lightning_module is not None
        load_own_state(self.lightning_module, checkpoint.get("state_dict", {}), strict=strict)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._restore_random_state()
        super().on_train_batch_start(batch, batch_idx)

    def _restore_random_state(self) -> None:
        # With the first batch: Lightning and data loaders draw numbers while they set up, in a resumed run again.
        states, self._random_states = self._random_states, None
        if states is not None:
            restore_rank(states, self.data_parallel_rank, self.sequence_parallel_rank)

    # ---- the ends of a run ----

    @override
    def setup(self, trainer: "Trainer") -> None:
        self._failed = False
        linked = [item for item in trainer.checkpoint_callbacks if getattr(item, "save_last", None) == "link"]
        if self.async_checkpoint and linked:
            raise MisconfigurationException(
                "ModelCheckpoint(save_last='link') with async_checkpoint=True would link to a checkpoint that is not "
                "there yet; use save_last=True."
            )
        if trainer.state.fn == TrainerFn.FITTING:
            folders = (getattr(item, "dirpath", None) for item in trainer.checkpoint_callbacks)
            self._claim([Path(folder) for folder in folders if folder is not None])
        super().setup(trainer)

    def _claim(self, folders: list[Path]) -> None:
        """Refuse folders of another run that writes checkpoints; those that are missing are seen at the first save."""

        def claim() -> None:
            for folder in folders:
                if folder.is_dir():
                    self._require_saver().claim(folder)

        on_rank_zero(claim, self.is_global_zero, self.all_gather_objects)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        try:
            if not self._failed:
                self.finish_checkpoints()
        finally:
            # After an error other ranks may be anywhere, so each waits for its own thread alone.
            error = self._saver.close() if self._saver is not None else None
            if error is not None:
                rank_zero_warn(f"The last checkpoint could not be written: {error}")
            super().teardown()
