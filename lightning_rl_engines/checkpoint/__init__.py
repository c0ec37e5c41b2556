"""Checkpoints: training state that resumes on another layout, and its export to Hugging Face folders."""

from lightning_rl_engines.checkpoint.export import export_checkpoint
from lightning_rl_engines.checkpoint.folders import recover_checkpoints
from lightning_rl_engines.checkpoint.training import read_metadata

__all__ = ["export_checkpoint", "read_metadata", "recover_checkpoints"]
