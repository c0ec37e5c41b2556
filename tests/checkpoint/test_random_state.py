"""Generators are restored to the last number."""

import io
import random

import numpy as np
import pytest
import torch

from lightning_rl_engines.checkpoint.random_state import random_state, restore_rank, set_random_state


def draw(device: str = "cpu") -> tuple[list[float], ...]:
    return (
        torch.rand(3, device=device).tolist(),
        [random.random(), random.gauss(0.0, 1.0)],
        [*np.random.rand(2).tolist(), np.random.standard_normal()],  # the second normal number is a cached one
    )


@pytest.fixture(autouse=True)
def _leave_alone():
    before = random_state()
    yield
    set_random_state(before)


def stored(state):
    """As a checkpoint stores it: loaded as plain data."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_stored_state_continues_all_generators():
    draw()
    state = stored(random_state())
    expected = [draw(), draw()]
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    set_random_state(state)
    assert [draw(), draw()] == expected


@pytest.mark.cuda
def test_a_stored_state_continues_the_accelerator():
    draw("cuda")
    state = stored(random_state())
    expected = draw("cuda")
    torch.cuda.manual_seed(1)
    set_random_state(state)
    assert draw("cuda") == expected


def test_known_ranks_continue_and_new_ones_agree_along_a_row():
    table = []
    for data_rank in range(2):
        table.append([])
        for sequence_rank in range(2):
            torch.manual_seed(10 * data_rank + sequence_rank)
            table[-1].append(random_state())

    def first(data_rank: int, sequence_rank: int):
        restore_rank(table, data_rank, sequence_rank)
        return draw()[0]

    known = [first(data, sequence) for data in range(2) for sequence in range(2)]
    assert len({str(item) for item in known}) == 4
    torch.manual_seed(10)
    assert known[2] == torch.rand(3).tolist()
    assert first(1, 3) == first(1, 0)  # a longer row
    new = [first(2, 0), first(3, 0)]
    assert new == [first(2, 1), first(3, 0)]
    assert len({str(item) for item in [*known, *new]}) == 6
    table[0][0] = {**table[0][0], "torch": table[1][1]["torch"]}
    assert first(2, 0) != new[0]  # another checkpoint
