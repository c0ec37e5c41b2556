"""LightningModules that train through an engine."""

from lightning_rl_engines.modules.actor_critic import ActorCriticModule
from lightning_rl_engines.modules.base import RLModule
from lightning_rl_engines.modules.generation import GenerationModule
from lightning_rl_engines.modules.policy import PolicyModule
from lightning_rl_engines.modules.preference import DPOModule
from lightning_rl_engines.modules.reward import RewardModelModule
from lightning_rl_engines.modules.sft import SFTModule
from lightning_rl_engines.modules.supervised import DocumentModule

__all__ = [
    "ActorCriticModule",
    "DPOModule",
    "DocumentModule",
    "GenerationModule",
    "PolicyModule",
    "RLModule",
    "RewardModelModule",
    "SFTModule",
]
