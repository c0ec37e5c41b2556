"""LightningModules that train through an engine."""

from lightning_rl_engines.modules.actor_critic import ActorCriticModule
from lightning_rl_engines.modules.base import RLModule
from lightning_rl_engines.modules.generation import GenerationModule
from lightning_rl_engines.modules.policy import PolicyModule
from lightning_rl_engines.modules.sft import SFTModule

__all__ = ["ActorCriticModule", "GenerationModule", "PolicyModule", "RLModule", "SFTModule"]
