import pytest
import torch

from lightning_rl_engines.modules.selection import GlobalColumns, gather_columns, select_mask
from lightning_rl_engines.sequence import Experience


class Ranks:
    """Stands for an engine: the other ranks' objects are prepared."""

    def __init__(self, others, rank=0):
        self.others = others
        self.data_parallel_rank = rank

    def all_gather_objects(self, item, group="world"):
        assert group == "data"
        return [item, *self.others]


def columns(rank=0):
    # Groups: 3 (0, 1), 5 (1, 1), 7 (0, 0, 2) over two ranks; group 7 spans them.
    return GlobalColumns(
        rewards=torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 2.0], dtype=torch.float64),
        group_ids=torch.tensor([3, 3, 7, 7, 5, 5, 7]),
        response_lengths=torch.tensor([1, 2, 3, 4, 5, 6, 7]),
        counts=(4, 3),
        rank=rank,
    )


def documents(**more):
    return Experience.from_documents(input_ids=[[1, 2], [3, 4, 5]], response_mask=[[0, 1], [0, 1, 1]], **more)


def test_signal_is_that_of_the_whole_group_also_over_ranks():
    assert columns().signal().tolist() == [True, True, True, True, False, False, True]


def test_signal_with_a_limit_keeps_the_oldest_groups():
    assert columns().signal(limit=1).tolist() == [True, True, False, False, False, False, False]


def test_keep_and_own_follow_the_ranks():
    kept = columns(rank=1).keep(columns().signal())
    assert kept.counts == (4, 1)
    assert kept.num_groups == 2
    assert kept.own(kept.response_lengths).tolist() == [7]


def test_gather_joins_the_ranks_in_order():
    mine = documents(rewards=[0.5, 1.0], group_ids=[4, 4])
    other = ({"rewards": [2.0], "group_ids": [4]}, [9], [], sorted(mine.column_names))
    gathered = gather_columns(Ranks([other]), mine, ("rewards", "group_ids"))
    assert gathered.rewards.tolist() == [0.5, 1.0, 2.0]
    assert gathered.group_ids.tolist() == [4, 4, 4]
    assert gathered.response_lengths.tolist() == [1, 2, 9]
    assert gathered.counts == (2, 1)


def test_a_column_that_another_rank_lacks_is_an_error_here_too():
    mine = documents(rewards=[0.5, 1.0], group_ids=[4, 4])
    other = ({"rewards": [2.0], "group_ids": [0]}, [9], ["group_ids"], ["input_ids", "response_mask", "rewards"])
    with pytest.raises(ValueError, match="data rank 1 has no per-document column 'group_ids'"):
        gather_columns(Ranks([other]), mine, ("rewards", "group_ids"))


def test_columns_that_differ_between_ranks_are_refused():
    other = ({"rewards": [0], "group_ids": [0]}, [1], [], ["advantages", "input_ids", "response_mask"])
    with pytest.raises(ValueError, match="data rank 1 has the columns"):
        gather_columns(Ranks([other]), documents(), ())


def test_select_mask_may_leave_nothing():
    mine = documents(rewards=[0.5, 1.0])
    assert select_mask(mine, torch.tensor([False, True])).lengths == (3,)
    empty = select_mask(mine, torch.tensor([False, False]))
    assert len(empty) == 0
    assert empty.column_names == mine.column_names
