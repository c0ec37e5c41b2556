"""In which order the ranks of a pipeline compute, send and receive; plain Python, the same on every rank.

A rank knows the length of every row, so rows may differ in length, and a schedule does not depend on lengths.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from lightning_rl_engines.strategies.degrees import Schedule


class Kind(Enum):
    """What a rank does."""

    COMPUTE = "compute"
    SEND = "send"
    RECEIVE = "receive"


class Action(NamedTuple):
    """One thing that a rank does.

    Attributes:
        kind: Run a pass, send what it gave, or receive what it needs.
        stage: The stage whose pass it is.
        row: The row.
        backward: Whether it is the backward pass.
    """

    kind: Kind
    stage: int
    row: int
    backward: bool


def stages_per_rank(schedule: Schedule) -> int:
    """Number of stages that each rank of a pipeline holds; stage ``s`` is on rank ``s`` modulo the ranks."""
    return 2 if schedule == "Interleaved1F1B" else 1


def rows_multiple_of(schedule: Schedule, ranks: int) -> int:
    """What the number of rows must be a multiple of."""
    return ranks if schedule == "Interleaved1F1B" else 1


def pipeline_order(schedule: Schedule, ranks: int, rows: int, *, forward_only: bool = False) -> list[list[Action]]:
    """Return what each rank does.

    All lists are parts of one common sequence, in which a message is sent and received at one point. So no rank ever
    waits for something that another one would do only later, even if sends and receives were to block.

    Args:
        schedule: ``"1F1B"`` starts backward passes as early as it can, ``"GPipe"`` after all forward passes,
            ``"Interleaved1F1B"`` has two stages per rank and fewer idle ranks.
        ranks: Ranks of the pipeline.
        rows: Number of rows.
        forward_only: Leave out backward passes.

    Raises:
        ValueError: The schedule cannot run this number of rows.
    """
    multiple = rows_multiple_of(schedule, ranks)
    if rows % multiple:
        raise ValueError(f"{schedule!r} on {ranks} ranks needs a multiple of {multiple} rows, not {rows}.")
    computing = [_passes(schedule, ranks, rank, rows) for rank in range(ranks)]
    if forward_only:
        computing = [[action for action in actions if not action.backward] for actions in computing]
    return _with_messages(computing, ranks * stages_per_rank(schedule))


def _passes(schedule: Schedule, ranks: int, rank: int, rows: int) -> list[Action]:
    """Forward passes to fill the pipeline, then forward and backward in turns, then what is left of backward."""
    chunks = stages_per_rank(schedule)
    total = chunks * rows
    filling = {
        "1F1B": ranks - 1 - rank,
        "GPipe": total,
        "Interleaved1F1B": (chunks - 1) * ranks + 2 * (ranks - 1 - rank),
    }[schedule]
    filling = min(filling, total)

    def nth(index: int, *, backward: bool) -> Action:
        # Each stage of a rank takes as many rows in turn as there are ranks.
        turn = index // ranks % chunks if chunks > 1 else 0
        row = index // (ranks * chunks) * ranks + index % ranks if chunks > 1 else index
        chunk = chunks - 1 - turn if backward else turn
        return Action(Kind.COMPUTE, chunk * ranks + rank, row, backward)

    actions = [nth(index, backward=False) for index in range(filling)]
    for index in range(total - filling):
        actions += [nth(filling + index, backward=False), nth(index, backward=True)]
    return actions + [nth(index, backward=True) for index in range(total - filling, total)]


def _with_messages(computing: Sequence[Sequence[Action]], stages: int) -> list[list[Action]]:
    """Let a clock run: passes stand where they start, messages where the pass that they come from ends."""
    ranks = len(computing)
    # Time; messages before the passes that may need them; rank, so that no two are alike.
    events: list[tuple[int, Kind, int, Action]] = []
    ends: dict[tuple[int, int, bool], int] = {}
    position, free = [0] * ranks, [0] * ranks
    for _ in range(sum(len(actions) for actions in computing)):
        starts = []
        for rank, actions in enumerate(computing):
            if position[rank] < len(actions):
                action = actions[position[rank]]
                source = action.stage + 1 if action.backward else action.stage - 1
                ready = ends.get((source, action.row, action.backward)) if 0 <= source < stages else 0
                if ready is not None:
                    starts.append((max(free[rank], ready), rank))
        start, rank = min(starts)
        action = computing[rank][position[rank]]
        position[rank] += 1
        free[rank] = start + (2 if action.backward else 1)  # a backward pass takes about twice as long
        ends[action.stage, action.row, action.backward] = free[rank]
        events.append((start, Kind.COMPUTE, rank, action))
        target = action.stage - 1 if action.backward else action.stage + 1
        if 0 <= target < stages:
            events.append((free[rank], Kind.SEND, rank, action))
    programs: list[list[Action]] = [[] for _ in computing]
    for _, kind, rank, action in sorted(events, key=lambda event: (event[0], event[1] is Kind.COMPUTE, event[2])):
        programs[rank].append(action._replace(kind=kind))
        if kind is Kind.SEND:
            target = action.stage - 1 if action.backward else action.stage + 1
            programs[target % ranks].append(action._replace(kind=Kind.RECEIVE, stage=target))
    return programs
