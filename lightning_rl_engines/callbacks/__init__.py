"""Lightning callbacks: ending on Ctrl-C, what a run looks like, and what it leaves behind."""

from lightning_rl_engines.callbacks.interrupt import GracefulInterrupt, RunInterrupted

__all__ = ["GracefulInterrupt", "RunInterrupted"]
