"""Rewards and groups of the global batch: advantages over all of it, and which documents are trained on."""

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_rl_engines.algorithms.filters import zero_variance_groups
from lightning_rl_engines.sequence.experience import Experience
from lightning_rl_engines.strategies.engine import Engine

MAX_SKIPPED_BATCHES = 100
"""Batches in a row without a signal after which a run is given up: it counts no steps, and would never end."""


class SkippedBatches:
    """Warns of batches whose groups all have equal rewards, and gives up after many in a row."""

    def __init__(self) -> None:
        self._count = 0

    def clear(self) -> None:
        """Note a batch with a signal."""
        self._count = 0

    def add(self) -> None:
        """Note a batch without one.

        Raises:
            RuntimeError: There have been ``MAX_SKIPPED_BATCHES`` of them in a row.
        """
        self._count += 1
        text = (
            "so nothing is left to train on; use more varied prompts, a higher temperature, or "
            "filter_zero_variance=False."
        )
        if self._count == MAX_SKIPPED_BATCHES:
            raise RuntimeError(f"No group of {MAX_SKIPPED_BATCHES} batches in a row has different rewards, {text}")
        rank_zero_warn(f"No group of this batch has different rewards, {text} The update is skipped.")


@dataclass(frozen=True, eq=False)
class GlobalColumns:
    """Per-document columns of all data ranks, in rank order; every rank holds the same.

    Attributes:
        rewards: ``[N]`` fp64 on the host.
        group_ids: ``[N]`` int64 on the host; a group may span ranks.
        response_lengths: ``[N]`` int64 on the host.
        counts: Documents of each data rank.
        rank: This data rank.
    """

    rewards: Tensor
    group_ids: Tensor
    response_lengths: Tensor
    counts: tuple[int, ...]
    rank: int

    @property
    def num_groups(self) -> int:
        """Number of different groups."""
        return len(self.group_ids.unique())

    def require(self, values: Any) -> Tensor:
        """Return what an advantage function made of the columns, or say what is wrong with it, on all ranks alike.

        Raises:
            ValueError: It is no tensor of one finite number for each document.
        """
        count = len(self.rewards)
        if not isinstance(values, Tensor) or values.shape != (count,):
            found = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"advantage returned {found}; return a Tensor of shape [{count}], a number per document.")
        bad = (~values.isfinite()).nonzero().flatten().tolist()
        if bad:
            raise ValueError(
                f"advantage returned {float(values[bad[0]])} for document {bad[0]} of {count} (reward "
                f"{float(self.rewards[bad[0]])}); return finite numbers, such as 0.0 where there is nothing to learn."
            )
        return values

    def own(self, values: Tensor) -> Tensor:
        """Return this rank's part of a global ``[N]`` column."""
        start = sum(self.counts[: self.rank])
        return values[start : start + self.counts[self.rank]]

    def keep(self, mask: Tensor) -> "GlobalColumns":
        """Return the columns of the documents under a global bool mask ``[N]``."""
        counts = tuple(int(part.sum()) for part in mask.split(list(self.counts)))
        return GlobalColumns(self.rewards[mask], self.group_ids[mask], self.response_lengths[mask], counts, self.rank)

    def signal(self, limit: int | None = None) -> Tensor:
        """Mark the documents of groups with different rewards.

        Args:
            limit: Keep at most this many groups, those with the smallest ids.

        Returns:
            Global bool mask ``[N]``.
        """
        mask = zero_variance_groups(self.rewards, self.group_ids)
        if limit is not None:
            mask &= torch.isin(self.group_ids, self.group_ids[mask].unique()[:limit])
        return mask


def gather_columns(engine: Engine, experience: Experience, needed: tuple[str, ...]) -> GlobalColumns:
    """Gather rewards, group ids and response lengths. Collective over the data group.

    Columns that are not needed and absent are gathered as zeros.

    Args:
        engine: The engine.
        experience: This data rank's documents.
        needed: Per-document columns that must be there.

    Raises:
        ValueError: On all ranks: a needed column is missing or per token, or the ranks' columns differ.
    """
    count = len(experience)
    columns = {
        name: experience[name].tolist() if name in experience.document_columns else [0] * count
        for name in ("rewards", "group_ids")
    }
    missing = [name for name in needed if name not in experience.document_columns]
    lengths = list(experience.response_lengths)
    gathered = engine.all_gather_objects((columns, lengths, missing, sorted(experience.column_names)), "data")
    for rank, (_, _, absent, names) in enumerate(gathered):
        if absent:
            raise ValueError(
                f"The experience of data rank {rank} has no per-document column {absent[0]!r}; it has {names}. Give "
                "one number per document in 'rewards' and 'group_ids' (equal for the responses to one prompt), or "
                "ready 'advantages'."
            )
        if names != gathered[0][3]:
            raise ValueError(
                f"The experience of data rank {rank} has the columns {names}, that of data rank 0 {gathered[0][3]}; "
                "all ranks need the same."
            )
    return GlobalColumns(
        rewards=torch.tensor([x for item in gathered for x in item[0]["rewards"]], dtype=torch.float64),
        group_ids=torch.tensor([x for item in gathered for x in item[0]["group_ids"]], dtype=torch.int64),
        response_lengths=torch.tensor([x for item in gathered for x in item[1]], dtype=torch.int64),
        counts=tuple(len(item[1]) for item in gathered),
        rank=engine.data_parallel_rank,
    )


def select_mask(experience: Experience, mask: Tensor) -> Experience:
    """Return the documents under a bool mask ``[N]``."""
    return experience.select(torch.nonzero(mask).flatten().tolist())
