import itertools

import pytest

from lightning_rl_engines.data.loader import ShardedLoader


def _loaders(ranks: int, *, size: int = 23, batch_size: int = 2, **options: object) -> list[ShardedLoader[list[int]]]:
    return [
        ShardedLoader(
            size=size, collate=list, batch_size=batch_size, num_replicas=ranks, rank=rank, **options  # type: ignore[arg-type]
        )
        for rank in range(ranks)
    ]  # fmt: skip


def _global_batches(loaders: list[ShardedLoader[list[int]]], count: int | None = None) -> list[list[int]]:
    per_rank = [list(itertools.islice(loader, count)) for loader in loaders]
    assert len({len(batches) for batches in per_rank}) == 1
    return [list(itertools.chain(*parts)) for parts in zip(*per_rank, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_evaluation_has_every_item_once_and_as_many_batches_everywhere(ranks: int) -> None:
    for size in (1, 2, 7, 8, 9, 23):
        loaders = _loaders(ranks, size=size)
        batches = _global_batches(loaders)
        assert list(itertools.chain(*batches)) == list(range(size))
        assert all(len(loader) == len(batches) for loader in loaders)
        for parts in zip(*loaders, strict=True):
            sizes = [len(part) for part in parts]
            assert max(sizes) - min(sizes) <= 1 and max(sizes) <= 2


def test_a_rank_may_get_an_empty_batch() -> None:
    assert [list(loader) for loader in _loaders(3, size=7)] == [[[0, 1], []], [[2, 3], []], [[4, 5], [6]]]


def test_training_drops_the_last_batch_and_shuffles_by_epoch_and_seed() -> None:
    options = {"shuffle": True, "drop_last": True}
    batches = _global_batches(_loaders(2, **options))
    assert [len(batch) for batch in batches] == [4] * 5
    assert len(set(itertools.chain(*batches))) == 20
    assert batches == _global_batches(_loaders(2, **options))
    assert batches != _global_batches(_loaders(2, seed=1, **options))
    second = _loaders(2, **options)
    for loader in second:
        loader.sampler.set_epoch(1)
    assert batches != _global_batches(second)
    # The order does not depend on the number of ranks.
    assert list(itertools.chain(*_global_batches(_loaders(1, **options))))[:20] == list(itertools.chain(*batches))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (2, 2), (1, 4)])
@pytest.mark.parametrize("epoch", [0, 2])
def test_resume_on_other_ranks_continues_with_the_next_item(before: int, after: int, epoch: int) -> None:
    options = {"shuffle": True, "drop_last": True, "size": 41}
    whole = _loaders(1, batch_size=1, **options)[0]
    whole.set_epoch(epoch)
    order = [item for batch in whole for item in batch]
    first = _loaders(before, **options)
    for loader in first:
        loader.set_epoch(epoch)
    seen = list(itertools.chain(*_global_batches(first, 3)))
    states = [loader.state_dict() for loader in first]
    assert all(state == states[0] for state in states)
    assert states[0]["position"] == 6 * before and states[0]["batches"] == 3
    second = _loaders(after, **options)
    for loader in second:
        loader.load_state_dict(states[0])
        assert loader.state_dict() == states[0]
        iter(loader)  # as Lightning does before it sets the epoch
        loader.set_epoch(epoch)
    done = second[0].resumed_batches()
    rest = _global_batches(second)
    assert done + len(rest) == len(second[0])
    together = seen + list(itertools.chain(*rest))
    assert together == order[: len(together)]
    assert 41 - len(together) < 2 * after
    for loader in second:
        loader.set_epoch(epoch + 1)
    assert len(_global_batches(second)) == len(second[0])


def test_a_finished_epoch_starts_the_next_one_from_its_beginning() -> None:
    loader = _loaders(1, drop_last=True)[0]
    assert len(list(loader)) == 11
    state = loader.state_dict()
    assert state["position"] == 23  # the item that was left over is not for a layout with smaller batches
    resumed = _loaders(1, drop_last=True, batch_size=1)[0]
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert len(list(resumed)) == 23


def test_a_batch_in_flight_comes_again() -> None:
    flying = [1]
    loader = _loaders(1, in_flight=lambda: flying[0], drop_last=True)[0]
    batches = iter(loader)
    assert [next(batches), next(batches)] == [[0, 1], [2, 3]]
    assert loader.state_dict()["position"] == 2
    flying[0] = 0
    assert loader.state_dict()["position"] == 4


def test_other_data_or_seed_is_refused() -> None:
    state = _loaders(1)[0].state_dict()
    with pytest.raises(ValueError, match="data of size 23, and this run has 24"):
        _loaders(1, size=24)[0].load_state_dict(state)
    with pytest.raises(ValueError, match="data of seed 0, and this run has 3"):
        _loaders(1, seed=3)[0].load_state_dict(state)
