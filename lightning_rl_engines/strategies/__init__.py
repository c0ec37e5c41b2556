"""Engines: the contract, and Lightning strategies that implement it."""

from lightning_rl_engines.strategies.engine import BatchOutput, Engine, LossFunction
from lightning_rl_engines.strategies.fsdp_ulysses import FSDPUlyssesStrategy

__all__ = ["BatchOutput", "Engine", "FSDPUlyssesStrategy", "LossFunction"]
