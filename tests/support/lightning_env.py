"""Lightning inside the worker pool: processes exist already, so nothing is launched and no setter has an effect."""

import os
from typing import Any

from lightning import Trainer
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import Strategy
from typing_extensions import override


class ExternalEnvironment(ClusterEnvironment):
    """The rank and world size of the running pool; outside it, a world of one process."""

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    @override
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", "1"))

    @override
    def set_world_size(self, size: int) -> None:
        pass

    @override
    def global_rank(self) -> int:
        return int(os.environ.get("RANK", "0"))

    @override
    def set_global_rank(self, rank: int) -> None:
        pass

    @override
    def local_rank(self) -> int:
        return self.global_rank()

    @override
    def node_rank(self) -> int:
        return 0


def make_trainer(strategy: Strategy | str, **kwargs: Any) -> Trainer:
    """A quiet CPU trainer over the ranks of the running pool.

    Args:
        strategy: The strategy, an instance of its own for each trainer.
        **kwargs: Further arguments of ``Trainer``; they win over the defaults here.

    Returns:
        The trainer. Several may follow one another in the same processes.
    """
    environment = ExternalEnvironment()
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": environment.world_size(),
        "plugins": [environment],
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(strategy=strategy, **{**defaults, **kwargs})
