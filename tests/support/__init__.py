"""What tests share: worker processes, tiny models and an environment for Lightning inside the workers."""

from tests.support.pool import RankFailure, WorkerError, WorkerTimeout, run_workers, shutdown_workers

__all__ = ["RankFailure", "WorkerError", "WorkerTimeout", "run_workers", "shutdown_workers"]
