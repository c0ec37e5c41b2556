"""Which model log-probabilities are compared with."""

from typing import Literal

from lightning_rl_engines.models.config import ModelConfig
from lightning_rl_engines.rollout.base import RolloutEngine


def find_reference(
    reference: Literal["auto"] | ModelConfig | None, policy: ModelConfig, rollout: RolloutEngine | None, *, needed: bool
) -> ModelConfig | None:
    """Return the configuration of the reference model, or ``None`` for no such model.

    Args:
        reference: What the user asked for.
        policy: What is trained.
        rollout: Where responses come from; recorded ones may bring ``ref_log_probs`` along.
        needed: Whether a KL term compares the policy with its reference.

    Raises:
        ValueError: ``reference`` is none of these, or is None where it is needed.
    """
    if reference == "auto":
        return policy if needed else None
    if isinstance(reference, ModelConfig):
        return reference
    if reference is not None:
        raise ValueError(f"reference={reference!r} is unknown; use 'auto', a ModelConfig or None.")
    if needed and rollout is not None:
        # Recorded experiences may bring ref_log_probs along; sampled ones never do.
        raise ValueError("reference=None leaves the KL term without a reference; use 'auto', or kl_coef=0.")
    return None
