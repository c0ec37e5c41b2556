"""Schedules of pipelines: complete, free of deadlock, as early and as lean as their names say."""

import itertools

import pytest

from lightning_rl_engines.strategies.pipeline_order import (
    Action,
    Kind,
    pipeline_order,
    rows_multiple_of,
    stages_per_rank,
)

CASES = [
    (schedule, ranks, rows, forward_only)
    for schedule, ranks, rows, forward_only in itertools.product(
        ("1F1B", "GPipe", "Interleaved1F1B"), (2, 3, 4, 8), (1, 2, 3, 4, 6, 8, 16), (False, True)
    )
    if rows % rows_multiple_of(schedule, ranks) == 0  # type: ignore[arg-type]
]


def passes(program: list[Action]) -> list[Action]:
    return [action for action in program if action.kind is Kind.COMPUTE]


def needs(action: Action, stages: int) -> Action | None:
    """The pass of another stage that a pass takes its input from."""
    stage = action.stage + 1 if action.backward else action.stage - 1
    return action._replace(stage=stage) if 0 <= stage < stages else None


@pytest.mark.parametrize(("schedule", "ranks", "rows", "forward_only"), CASES)
def test_every_rank_makes_each_pass_of_its_stages_once_and_rows_in_order(schedule, ranks, rows, forward_only):
    order = pipeline_order(schedule, ranks, rows, forward_only=forward_only)
    for rank, program in enumerate(order):
        stages = range(rank, ranks * stages_per_rank(schedule), ranks)
        for stage, backward in itertools.product(stages, (False,) if forward_only else (False, True)):
            made = [item.row for item in passes(program) if (item.stage, item.backward) == (stage, backward)]
            assert made == list(range(rows)), "gradients are added in the order of rows, on each data rank alike"
        assert len(passes(program)) == len(stages) * rows * (1 if forward_only else 2)


@pytest.mark.parametrize(("schedule", "ranks", "rows", "forward_only"), CASES)
def test_it_ends_even_where_every_message_blocks_both_ranks(schedule, ranks, rows, forward_only):
    programs = [list(program) for program in pipeline_order(schedule, ranks, rows, forward_only=forward_only)]
    stages = ranks * stages_per_rank(schedule)
    done: set[Action] = set()
    while any(programs):
        before = sum(len(program) for program in programs)
        for program in programs:
            while program and program[0].kind is Kind.COMPUTE:
                action = program.pop(0)
                source = needs(action, stages)
                assert source is None or action._replace(kind=Kind.RECEIVE) in done
                assert not action.backward or action._replace(backward=False) in done
                done.add(action)
        for program in programs:
            if program and program[0].kind is Kind.SEND:
                sent = program[0]
                target = sent.stage - 1 if sent.backward else sent.stage + 1
                received = sent._replace(kind=Kind.RECEIVE, stage=target)
                assert sent._replace(kind=Kind.COMPUTE) in done
                peer = programs[target % ranks]
                if peer and peer[0] == received:
                    done |= {program.pop(0), peer.pop(0)}
        assert sum(len(program) for program in programs) < before, "every rank waits for another one"


@pytest.mark.parametrize(("schedule", "ranks", "rows", "forward_only"), CASES)
def test_how_many_rows_are_in_flight(schedule, ranks, rows, forward_only):
    order = pipeline_order(schedule, ranks, rows)
    for rank, program in enumerate(order):
        count = most = 0
        for action in passes(program):
            count += -1 if action.backward else 1
            most = max(most, count)
        if schedule == "1F1B":
            assert most == min(rows, ranks - rank)
        elif schedule == "GPipe":
            assert most == rows
        else:
            assert most <= 3 * ranks, "bounded whatever the number of rows"


def idle(schedule: str, ranks: int, rows: int) -> float:
    """Time in which ranks wait, in the time that a rank's share of all layers takes for one row in forward."""
    order = pipeline_order(schedule, ranks, rows)  # type: ignore[arg-type]
    chunks = stages_per_rank(schedule)  # type: ignore[arg-type]
    stages, ends, free, position = ranks * chunks, {}, [0.0] * ranks, [0] * ranks
    computing = [passes(program) for program in order]
    while any(position[rank] < len(computing[rank]) for rank in range(ranks)):
        for rank in range(ranks):
            while position[rank] < len(computing[rank]):
                action = computing[rank][position[rank]]
                source = needs(action, stages)
                if source is not None and source not in ends:
                    break
                start = max(free[rank], ends.get(source, 0.0))
                ends[action] = free[rank] = start + (2 if action.backward else 1) / chunks
                position[rank] += 1
    return max(free) - 3 * rows


@pytest.mark.parametrize(("ranks", "rows"), [(2, 8), (4, 8), (8, 16)])
def test_ranks_wait_as_long_as_the_literature_says(ranks: int, rows: int):
    assert idle("1F1B", ranks, rows) == 3 * (ranks - 1)
    assert idle("GPipe", ranks, rows) == 3 * (ranks - 1)
    assert idle("Interleaved1F1B", ranks, rows) == 3 * (ranks - 1) / 2


def test_a_number_of_rows_that_interleaving_cannot_run_is_refused():
    with pytest.raises(ValueError, match=r"'Interleaved1F1B' on 4 ranks needs a multiple of 4 rows, not 6"):
        pipeline_order("Interleaved1F1B", 4, 6)
