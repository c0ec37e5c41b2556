"""Engines: the contract, and Lightning strategies that implement it."""

from lightning_rl_engines.strategies.engine import BatchOutput, Engine, LossFunction
from lightning_rl_engines.strategies.fsdp_ulysses import FSDPUlyssesStrategy
from lightning_rl_engines.strategies.precision import EnginePrecision
from lightning_rl_engines.strategies.torchtitan import TorchTitanStrategy

__all__ = ["BatchOutput", "Engine", "EnginePrecision", "FSDPUlyssesStrategy", "LossFunction", "TorchTitanStrategy"]
