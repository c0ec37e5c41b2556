"""What all ranks must know of a batch before the first forward pass: the plan, the denominators, the errors.

Every rank describes its documents in a few numbers; one all-gather of these descriptions gives every rank the same
plan and the same global counts, and every error is raised by all ranks together.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroup

from lightning_rl_engines.algorithms.outputs import Denominator
from lightning_rl_engines.sequence import Experience, exchange_documents, plan_rows


@dataclass(frozen=True)
class Description:
    """One rank's documents in numbers; ``error`` is set when the rank found them unusable."""

    data_rank: int
    lengths: tuple[int, ...] = ()
    response_lengths: tuple[int, ...] = ()
    group_ids: tuple[int, ...] | None = None
    checked: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    fingerprints: tuple[int, ...] = ()
    settings: str = ""
    error: str | None = None


@dataclass(frozen=True)
class Denominators:
    """Global counts that losses and metrics are divided by, each at least 1."""

    tokens: int
    sequences: int
    groups: int | None

    def __getitem__(self, name: Denominator) -> float:
        """Return the count of this name, or the constant itself.

        Raises:
            ValueError: An unknown name, a constant that is not positive, or groups without a ``group_ids`` column.
        """
        if name == "tokens":
            return max(self.tokens, 1)
        if name == "sequences":
            return max(self.sequences, 1)
        if name == "groups":
            if self.groups is None:
                raise ValueError(
                    "denominator='groups' needs a per-document column 'group_ids'; add it with "
                    "experience.with_document_columns(group_ids=...)."
                )
            return max(self.groups, 1)
        if isinstance(name, int | float) and name > 0:
            return float(name)
        raise ValueError(f"denominator={name!r} is unknown; use 'tokens', 'sequences', 'groups' or a positive number.")


@dataclass(frozen=True)
class Journey:
    """How documents changed their data rank, so that results find the way home.

    Attributes:
        origin: Where each received document came from, as (data rank, index).
        destinations: The data rank that runs each document of this rank.
        lengths: Lengths of this rank's own documents.
    """

    origin: tuple[tuple[int, int], ...]
    destinations: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's part of a batch that all ranks planned together.

    Attributes:
        experience: The documents this data rank works on, after the exchange.
        rows: For each micro-batch the documents in it, as indices into ``experience``.
        denominators: Counts over the whole global batch.
        budget: The most tokens of a row, padding included; ``None`` for no limit.
        journey: How documents changed their data rank; ``None`` when none did.
    """

    experience: Experience
    rows: tuple[tuple[int, ...], ...]
    denominators: Denominators
    budget: int | None = None
    journey: Journey | None = None

    def row_tokens(self, row: tuple[int, ...]) -> int:
        """Tokens of a row's documents; one for the dummy of a row without any."""
        return sum(self.experience.lengths[index] for index in row) or 1

    @contextmanager
    def explaining_memory(self) -> Iterator[None]:
        """Context of the passes: an out-of-memory error tells how long the rows are and what would shorten them."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            longest = max(map(self.row_tokens, self.rows))
            document = max((self.experience.lengths[index] for row in self.rows for index in row), default=0)
            error.add_note(
                f"The longest of this rank's {len(self.rows)} rows has {longest} tokens (max_tokens_per_micro_batch="
                f"{self.budget}), its longest document {document}. A smaller max_tokens_per_micro_batch makes shorter "
                "rows, down to one document each; more ranks to a row, ModelConfig(gradient_checkpointing=True) and "
                "off-load leave more memory for it."
            )
            raise


def describe(
    experience: Experience,
    *,
    data_rank: int,
    vocab_size: int,
    temperature: float | str,
    required_columns: Sequence[str],
    settings: str,
    checked_columns: Sequence[str] = (),
    longest: int | None = None,
) -> Description:
    """Check this rank's documents and put them into numbers; never raises for bad data, since peers wait.

    ``checked_columns`` are per-document columns among the required ones that a loss wants to see of all ranks, and
    ``longest`` the most tokens that the model has positions for.
    """
    error = _find_error(experience, vocab_size, temperature, required_columns, ("group_ids", *checked_columns))
    error = error or _find_too_long(experience, longest)
    if error is not None:
        return Description(data_rank=data_rank, error=error)
    groups = tuple(experience["group_ids"].tolist()) if "group_ids" in experience else None
    return Description(
        data_rank=data_rank,
        lengths=experience.lengths,
        response_lengths=experience.response_lengths,
        group_ids=groups,
        checked={name: tuple(experience[name].tolist()) for name in checked_columns},
        columns=tuple(sorted(experience.column_names)),
        fingerprints=tuple(_fingerprint(experience[name]) for name in sorted(experience.column_names)),
        settings=settings,
    )


def _fingerprint(column: torch.Tensor) -> int:
    # A copy, since an expanded column of one element counts as contiguous and still cannot be viewed as bytes.
    dense = column.detach().cpu().clone(memory_format=torch.contiguous_format)
    return zlib.crc32(dense.view(torch.uint8).numpy().data)


def _find_error(
    experience: Experience,
    vocab_size: int,
    temperature: float | str,
    required_columns: Sequence[str],
    document_columns: Sequence[str],
) -> str | None:
    for name in ("response_mask", *required_columns):
        if name not in experience:
            return f"the experience has no column {name!r}, which is needed here; it has {experience.column_names}"
    for name in document_columns:
        if name in experience.token_columns:
            return (
                f"column {name!r} has a number per token and needs one per document; replace it by "
                f"experience.drop({name!r}).with_document_columns({name}=...)"
            )
    if isinstance(temperature, str):
        if temperature not in experience:
            return f"temperature={temperature!r} names no column of the experience; it has {experience.column_names}"
        if len(experience) and not bool((experience[temperature] > 0).all()):
            return f"column {temperature!r} holds a temperature that is not positive"
    elif not temperature > 0:
        return f"temperature={temperature} must be positive, such as 1.0"
    if experience.num_tokens:
        largest = int(experience["input_ids"].max())
        if largest >= vocab_size:
            flat = int(experience["input_ids"].argmax())
            ends = torch.tensor(experience.lengths).cumsum(0)
            document = int(torch.searchsorted(ends, flat, right=True))
            return f"document {document} holds token id {largest}, but the vocabulary ends at {vocab_size - 1}"
    return None


def _find_too_long(experience: Experience, longest: int | None) -> str | None:
    for document, length in enumerate(experience.lengths):
        if longest is not None and length > longest:
            return (
                f"document {document} has {length} tokens, and the model has max_position_embeddings={longest}; drop "
                "it, or cut prompts and responses"
            )
    return None


def _check(descriptions: Sequence[Description]) -> dict[int, Description]:
    """Return one description per data rank.

    Raises:
        ValueError: On every rank alike: an error that a rank reported, or ranks that do not fit together.
    """
    errors = [f"rank {rank}: {item.error}" for rank, item in enumerate(descriptions) if item.error is not None]
    if errors:
        raise ValueError("; ".join(errors) + ".")
    by_rank: dict[int, Description] = {}
    # A rank without documents may lack columns, so it is no reference for them.
    filled = next((rank for rank, item in enumerate(descriptions) if item.lengths), 0)
    for rank, item in enumerate(descriptions):
        first = by_rank.setdefault(item.data_rank, item)
        if (first.lengths, first.columns, first.fingerprints) != (item.lengths, item.columns, item.fingerprints):
            mine = dict(zip(item.columns, item.fingerprints, strict=True))
            theirs = dict(zip(first.columns, first.fingerprints, strict=True))
            other = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
            raise ValueError(
                f"rank {rank} passed other documents than its sequence peers of data rank {item.data_rank}: columns "
                f"{other} differ; ranks that share a data rank must work on the same experience (use "
                "strategy.distributed_sampler_kwargs)."
            )
        reference = descriptions[0]
        if item.settings != reference.settings:
            raise ValueError(f"ranks disagree on the call: rank 0 {reference.settings}, rank {rank} {item.settings}.")
        if item.lengths and item.columns != descriptions[filled].columns:
            raise ValueError(
                f"ranks disagree on the columns: rank {filled} {descriptions[filled].columns}, rank {rank} "
                f"{item.columns}."
            )
    return by_rank


def _denominators(by_rank: dict[int, Description]) -> Denominators:
    responses = [length for item in by_rank.values() for length in item.response_lengths]
    groups: int | None = None
    filled = [item for item in by_rank.values() if item.lengths]
    if all(item.group_ids is not None for item in filled):
        groups = len(
            {
                group
                for item in filled
                for group, length in zip(item.group_ids or (), item.response_lengths, strict=True)
                if length
            }
        )
    return Denominators(tokens=sum(responses), sequences=sum(1 for length in responses if length), groups=groups)


def plan_batch(
    experience: Experience,
    description: Description,
    gather: Callable[[Any], list[Any]],
    *,
    data_group: ProcessGroup | None,
    data_size: int,
    budget: int | None,
    multiple_of: int,
    rows_multiple_of: int = 1,
    move: bool,
    cost: tuple[float, float],
    groups_share_rows: bool = False,
    check: Callable[[Mapping[str, Sequence[Any]]], None] | None = None,
) -> GlobalBatch:
    """Agree on the plan and bring the documents to where it wants them.

    Collective over the world, and over the data group when documents move.

    Args:
        experience: This data rank's documents.
        description: What :func:`describe` said of them.
        gather: All-gathers a host object over the world, in rank order.
        data_group: The ranks that hold different documents.
        data_size: The number of data ranks.
        budget: The most tokens of a row, counted over the whole sequence group; ``None`` for one row per rank.
        multiple_of: Rows are padded to a multiple of this.
        rows_multiple_of: The number of rows of each data rank is a multiple of this.
        move: Let documents change their data rank to balance the load.
        cost: Linear and quadratic cost of a document in its length.
        groups_share_rows: Keep the documents of equal ``group_ids`` in one row.
        check: Called with the checked columns and ``response_lengths`` of the global batch, to refuse it.

    Raises:
        ValueError: On all ranks: unusable documents, ranks that do not fit together, a document over the budget, a
            group that cannot share a row.
    """
    by_rank = _check(gather(description))
    ordered = [by_rank[rank] for rank in range(data_size)]
    if check is not None:
        names = description.checked
        documents = {name: [value for item in ordered for value in item.checked[name]] for name in names}
        check({**documents, "response_lengths": [length for item in ordered for length in item.response_lengths]})
    try:
        plan = plan_rows(
            [item.lengths for item in ordered],
            budget=budget,
            multiple_of=multiple_of,
            rows_multiple_of=rows_multiple_of,
            move=move,
            units=[item.group_ids or () for item in ordered] if groups_share_rows else None,
            linear_cost=cost[0],
            quadratic_cost=cost[1],
        )
    except ValueError as error:
        if not groups_share_rows:
            raise
        raise ValueError(
            f"{error}. A unit is a group of equal group_ids here, and balance=True is move=True."
        ) from None
    rank = description.data_rank
    denominators = _denominators(by_rank)
    if not plan.moves:
        rows = tuple(tuple(index for _, index in row) for row in plan.rows[rank])
        return GlobalBatch(experience, rows, denominators, budget)
    destinations = plan.destinations(rank)
    received, origin = exchange_documents(experience, destinations, data_group)
    journey = Journey(origin, destinations, experience.lengths)
    return GlobalBatch(received, plan.local_rows(rank), denominators, budget, journey)
