"""Models: what to build, and the one interface every engine's model has."""

from lightning_rl_engines.models.config import ModelConfig
from lightning_rl_engines.models.token_model import TokenModel

__all__ = ["ModelConfig", "TokenModel"]
