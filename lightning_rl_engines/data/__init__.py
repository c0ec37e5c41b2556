"""What to train on: prompts, recorded experience and rewards."""

from lightning_rl_engines.data.experience import ExperienceDataModule
from lightning_rl_engines.data.preferences import PreferenceDataModule
from lightning_rl_engines.data.prompts import PromptDataModule
from lightning_rl_engines.data.reasoning_gym import ReasoningGymDataModule, ReasoningGymReward
from lightning_rl_engines.data.reward_functions import LengthPenalty, OverlongPenalty, exact_match, last_number_match
from lightning_rl_engines.data.rewards import Reward, RewardFunction, compute_rewards

__all__ = [
    "ExperienceDataModule",
    "LengthPenalty",
    "OverlongPenalty",
    "PreferenceDataModule",
    "PromptDataModule",
    "ReasoningGymDataModule",
    "ReasoningGymReward",
    "Reward",
    "RewardFunction",
    "compute_rewards",
    "exact_match",
    "last_number_match",
]
