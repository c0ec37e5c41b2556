"""Starts the processes of a run, sees that they end together, and that `last` finds what a crash left behind."""

import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightning_rl_engines._compat import (
    Launcher,
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    WorkerOutput,
    checkpoint_folder,
)
from lightning_rl_engines.checkpoint.folders import recover_checkpoints

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_LAUNCHER_PID = "LIGHTNING_RL_LAUNCHER_PID"
_WATCH = "launcher-watch"


class HereLauncher(Launcher):
    """Runs in this process: one device, or processes that something else has started."""

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: "Trainer | None" = None, **kwargs: Any) -> Any:
        _recover_last(trainer, [*args, *kwargs.values()])
        return function(*args, **kwargs)

    @override
    def kill(self, signum: Any) -> None:
        """There is no other process."""


class ScriptLauncher(SubprocessScriptLauncher):
    """Starts the script again for each further rank.

    Lightning ends this process when one of them dies; here they end when this one does, however it dies.
    """

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: "Trainer | None" = None, **kwargs: Any) -> Any:
        _recover_last(trainer, [*args, *kwargs.values()])
        return super().launch(function, *args, trainer=trainer, **kwargs)

    @override
    def _call_children_scripts(self) -> None:
        _require_no_group(
            self.num_processes * self.num_nodes,
            "call torch.distributed.destroy_process_group() when the models of that run are done with",
        )
        os.environ[_LAUNCHER_PID] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[_LAUNCHER_PID]


class ForkLauncher(MultiProcessingLauncher):
    """Forks one process per device; for notebooks, where a script cannot be started again.

    The sharded weights stay in the forked processes and end with them: results come back as checkpoints and exported
    folders. Metrics, the trainer's state and the result of the call come back to the notebook.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, start_method="fork")

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: "Trainer | None" = None, **kwargs: Any) -> Any:
        # autograd does not survive a fork, once it has run
        _require_no_group(cast(Any, self._strategy).num_processes, "restart the kernel of the notebook")
        _recover_last(trainer, [*args, *kwargs.values()])
        return super().launch(function, *args, trainer=trainer, **kwargs)

    @override
    def _collect_rank_zero_results(self, trainer: "Trainer", results: Any) -> WorkerOutput | None:
        if self._strategy.global_rank != 0:
            return None
        best = getattr(trainer.checkpoint_callback, "best_model_path", None)
        return WorkerOutput(best, None, trainer.state, results, self.get_extra_results(trainer))


def follow_launcher(period_seconds: float = 0.5) -> None:
    """End this process soon after the one whose :class:`ScriptLauncher` started it, if one did.

    Otherwise it would wait in a collective until a timeout, or train on.

    Args:
        period_seconds: How often to look.
    """
    # Taken away, so that what this process starts does not take itself for a rank.
    launcher = os.environ.pop(_LAUNCHER_PID, None)
    if launcher is not None:
        threading.Thread(target=_follow, args=(int(launcher), period_seconds), name=_WATCH, daemon=True).start()


def _follow(launcher: int, period_seconds: float) -> None:
    while os.getppid() == launcher:
        time.sleep(period_seconds)
    os.write(2, b"The process that started this rank is gone; it ends too.\n")
    os._exit(1)


def _require_no_group(num_processes: int, remedy: str) -> None:
    """Processes that start now would wait for this one to join them, and it never would."""
    if dist.is_initialized():
        raise RuntimeError(
            f"This process is in a process group of {dist.get_world_size()} from an earlier run, so it cannot start a "
            f"run of {num_processes}; {remedy}."
        )


def _recover_last(trainer: "Trainer | None", arguments: Iterable[Any]) -> None:
    """Before Lightning looks for `last`: it knows nothing of checkpoints without their names."""
    if trainer is not None and any(isinstance(item, str) and item == "last" for item in arguments):
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                recover_checkpoints(Path(checkpoint_folder(callback, trainer)))
