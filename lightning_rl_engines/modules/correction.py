"""Applies an off-policy correction to the experience of an update."""

from lightning_rl_engines.algorithms.corrections import RolloutCorrection
from lightning_rl_engines.modules.metrics import Tally
from lightning_rl_engines.sequence.experience import Experience
from lightning_rl_engines.strategies.engine import Engine


def require_two_policies(correction: RolloutCorrection | None, recompute_old_log_probs: bool) -> None:
    """Refuse a correction that would compare the sampler's log-probabilities with themselves.

    Raises:
        ValueError: A correction with ``recompute_old_log_probs=False``.
    """
    if correction is not None and not recompute_old_log_probs:
        raise ValueError(
            "recompute_old_log_probs=False takes the sampler's log-probabilities for the trainer's, so correction="
            f"{correction!r} would weigh every token with 1; use recompute_old_log_probs=True, or correction=None."
        )


def correct(engine: Engine, correction: RolloutCorrection | None, experience: Experience, tally: Tally) -> Experience:
    """Add the column ``rollout_weights`` and take rejected documents out of the loss. Collective over the data group.

    Args:
        engine: The engine of the run.
        correction: What to apply; ``None`` changes nothing.
        experience: This data rank's documents, with ``rollout_log_probs`` and ``old_log_probs``.
        tally: The correction's metrics are added to it.
    """
    if correction is None:
        return experience
    experience, sums = correction.apply(experience)
    for name, value in correction.metrics(engine.all_gather_objects(sums, "data")).items():
        tally.add(name, [value])  # global already: every rank adds the same number
    return experience
