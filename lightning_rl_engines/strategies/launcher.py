"""Starts the processes of a multi-process run from a notebook."""

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_rl_engines._compat import MultiProcessingLauncher, WorkerOutput

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class ForkLauncher(MultiProcessingLauncher):
    """Forks one process per device; for notebooks, where a script cannot be started again.

    The sharded weights stay in the forked processes and end with them: results come back as checkpoints and exported
    folders. Metrics, the trainer's state and the result of the call come back to the notebook.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, start_method="fork")

    @override
    def _collect_rank_zero_results(self, trainer: "Trainer", results: Any) -> WorkerOutput | None:
        if self._strategy.global_rank != 0:
            return None
        best = getattr(trainer.checkpoint_callback, "best_model_path", None)
        return WorkerOutput(best, None, trainer.state, results, self.get_extra_results(trainer))
