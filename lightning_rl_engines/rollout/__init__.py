"""Where responses come from."""

from lightning_rl_engines.rollout.base import Generation, Prompt, RolloutEngine, RolloutStrategy
from lightning_rl_engines.rollout.huggingface import HFRollout
from lightning_rl_engines.rollout.vllm import VLLMRollout

__all__ = ["Generation", "HFRollout", "Prompt", "RolloutEngine", "RolloutStrategy", "VLLMRollout"]
