"""Which model log-probabilities are compared with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from lightning_rl_engines.models.config import ModelConfig
from lightning_rl_engines.models.token_model import TokenModel
from lightning_rl_engines.rollout.base import RolloutEngine
from lightning_rl_engines.strategies.engine import Engine


def find_reference(
    reference: Literal["auto"] | ModelConfig | None, policy: ModelConfig, rollout: RolloutEngine | None, *, needed: bool
) -> ModelConfig | Literal["base"] | None:
    """Return the configuration of the reference model, ``"base"`` for the policy without its adapter, or ``None``.

    Args:
        reference: What the user asked for.
        policy: What is trained.
        rollout: Where responses come from; recorded ones may bring ``ref_log_probs`` along.
        needed: Whether a KL term compares the policy with its reference.

    Raises:
        ValueError: ``reference`` is none of these, or is None where it is needed.
    """
    if reference == "auto":
        if not needed:
            return None
        return "base" if policy.has_adapter else policy
    if isinstance(reference, ModelConfig):
        return reference
    if reference is not None:
        raise ValueError(f"reference={reference!r} is unknown; use 'auto', a ModelConfig or None.")
    if needed and rollout is not None:
        # Recorded experiences may bring ref_log_probs along; sampled ones never do.
        raise ValueError("reference=None leaves the KL term without a reference; use 'auto', or kl_coef=0.")
    return None


@contextmanager
def reference_model(engine: Engine, policy: TokenModel, reference: TokenModel | None) -> Iterator[TokenModel]:
    """Give the reference: the model that was built for it, or else the policy without its adapter.

    Args:
        engine: The engine of both.
        policy: The policy, with an adapter where ``reference`` is ``None``.
        reference: A frozen model.
    """
    if reference is not None:
        yield reference
        return
    with engine.disable_adapter(policy):
        yield policy
