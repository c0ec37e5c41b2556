"""From prompts and their generations to scored documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_rl_engines.data.rewards import Reward, compute_rewards
from lightning_rl_engines.rollout.base import Generation, Prompt, RolloutEngine
from lightning_rl_engines.sequence.experience import Experience
from lightning_rl_engines.strategies.engine import Engine


@dataclass(frozen=True)
class Samples:
    """The generations of this data rank's prompts, flat: all those of the first prompt, then of the second.

    Attributes:
        prompts: The prompt of each generation.
        generations: The generations.
        groups: For each generation the position of its prompt in the batch.
    """

    prompts: list[Prompt]
    generations: list[Generation]
    groups: list[int]

    @classmethod
    def flatten(cls, prompts: Sequence[Prompt], generations: Sequence[Sequence[Generation]]) -> "Samples":
        """Flatten what ``RolloutEngine.generate`` returned for these prompts."""
        index = [(group, one) for group, several in enumerate(generations) for one in several]
        return cls([prompts[group] for group, _ in index], [one for _, one in index], [group for group, _ in index])

    def __len__(self) -> int:
        return len(self.generations)


@dataclass(frozen=True)
class Scores:
    """Rewards of samples.

    Attributes:
        total: Weighted sum, one number per sample.
        named: One list per reward; ``None`` where it does not apply.
    """

    total: list[float]
    named: dict[str, list[float | None]]


def raise_on_all_ranks(engine: Engine, failure: Exception | None, what: str) -> None:
    """Raise what failed on any rank: on the others they would wait for it. Collective over the world.

    Args:
        engine: The engine of the run.
        failure: What failed on this rank, if anything.
        what: Names it in the message of the other ranks.

    Raises:
        Exception: This rank's failure; a ``RuntimeError`` that quotes another rank's.
    """
    reports = engine.all_gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}", "world")
    if failure is not None:
        raise failure
    for rank, report in enumerate(reports):
        if report is not None:
            raise RuntimeError(f"{what} failed on rank {rank}: {report}")


def score(engine: Engine, rewards: dict[str, Reward], samples: Samples) -> Scores:
    """Score samples on one rank of each data rank and share the result. Collective over the world.

    One rank only, because a reward may be random, slow, or paid for, and peers must agree on it. A reward function
    that raises on one rank raises on all of them.

    Raises:
        RuntimeError: On the ranks whose reward functions did not fail themselves.
    """
    outcome: Scores | None = None
    failure: Exception | None = None
    if engine.peer_rank == 0:
        try:
            outcome = Scores(*compute_rewards(rewards, samples.prompts, samples.generations))
        except Exception as error:
            failure = error
    raise_on_all_ranks(engine, failure, "A reward function")
    shared: Scores = engine.all_gather_objects(outcome, "peers")[0]
    return shared


def build_experience(
    samples: Samples,
    rewards: Sequence[float],
    group_ids: Sequence[int],
    *,
    temperature: float,
    mask_truncated: bool = False,
) -> Experience:
    """Build the documents (prompt and response) of samples.

    Args:
        samples: What was sampled; may be empty.
        rewards: One per sample.
        group_ids: One per sample, equal for samples of one prompt.
        temperature: What they were sampled with.
        mask_truncated: Take responses that hit the length limit out of the loss.

    Returns:
        Columns ``input_ids``, ``response_mask``, ``rollout_log_probs`` (fp32) per token, ``rewards``, ``temperature``
        (fp32) and ``group_ids`` (int64) per document.
    """
    ids: list[int] = []
    mask: list[bool] = []
    log_probs: list[float] = []
    lengths: list[int] = []
    for prompt, generation in zip(samples.prompts, samples.generations, strict=True):
        before, after = len(prompt.token_ids), len(generation.token_ids)
        trained = not (mask_truncated and generation.finish_reason == "length")
        ids += [*prompt.token_ids, *generation.token_ids]
        mask += [False] * before + [trained] * after
        log_probs += [0.0] * before + list(generation.log_probs)
        lengths.append(before + after)
    return Experience(
        lengths=lengths,
        token_columns={
            "input_ids": torch.tensor(ids, dtype=torch.int64),
            "response_mask": torch.tensor(mask, dtype=torch.bool),
            "rollout_log_probs": torch.tensor(log_probs, dtype=torch.float32),
        },
        document_columns={
            "rewards": torch.tensor(list(rewards), dtype=torch.float32),
            "group_ids": torch.tensor(list(group_ids), dtype=torch.int64),
            "temperature": torch.full((len(lengths),), temperature, dtype=torch.float32),
        },
    )


def sample_rows(samples: Samples, scores: Scores | None) -> list[dict[str, Any]]:
    """Return ``prompt``, ``response``, ``finish_reason``, ``tokens`` and rewards of each sample, for a table."""
    rows = []
    for index, (prompt, generation) in enumerate(zip(samples.prompts, samples.generations, strict=True)):
        row: dict[str, Any] = {
            "prompt": prompt.text,
            "response": generation.text,
            "tokens": len(generation.token_ids),
            "finish_reason": generation.finish_reason,
        }
        if scores is not None:
            row["reward"] = scores.total[index]
            row |= {f"reward_{name}": values[index] for name, values in scores.named.items()}
        rows.append(row)
    return rows


def shared_temperature(temperature: float | None, rollout: RolloutEngine | None) -> float:
    """Return what the policy divides its logits by.

    Args:
        temperature: What the user asked for; ``None`` takes the rollout's.
        rollout: Where responses come from.

    Raises:
        ValueError: The temperature is not positive, or differs from that of the rollout.
    """
    # A user's rollout engine may have no temperature, or one per prompt.
    sampled: float | None = getattr(rollout, "temperature", None)
    if temperature is None:
        return 1.0 if sampled is None else float(sampled)
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be positive, for instance 1.0.")
    if sampled is not None and sampled != temperature:
        raise ValueError(
            f"temperature={temperature} differs from that of the rollout, {sampled}: importance ratios would compare "
            f"two distributions; leave it out, or use temperature={sampled}."
        )
    return float(temperature)
