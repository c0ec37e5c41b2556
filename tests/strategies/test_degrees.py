"""Degrees multiply to the world, in torchtitan's order of ranks, and what does not is refused with the arithmetic."""

import itertools

import pytest

from lightning_rl_engines.strategies.degrees import ParallelDegrees


def test_the_world_leaves_the_shard_degree():
    assert ParallelDegrees(tensor=2, context=2).resolve(16).shard == 4
    assert ParallelDegrees(shard=2, replicate=2, pipeline=2).resolve(8).data == 4


@pytest.mark.parametrize(
    ("degrees", "world", "words"),
    [
        ({"tensor": 3}, 4, ["tensor_parallel_degree=3", "= 3 does not divide the 4 processes"]),
        ({"shard": 4, "tensor": 2}, 4, ["data_parallel_shard_degree=4", "needs 8 processes", "=2, or -1"]),
        ({"expert": 3}, 4, ["expert_parallel_degree=3", "= 4", "[1, 2, 4]"]),
        ({"pipeline": 2, "expert": 4}, 4, ["expert_parallel_degree=4", "[1, 2]"]),
    ],
)
def test_an_impossible_product_is_refused_with_its_arithmetic(degrees, world, words):
    with pytest.raises(ValueError, match="parallel") as caught:
        ParallelDegrees(**degrees).resolve(world)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("shard", "data_parallel_shard_degree"),
        ("replicate", "data_parallel_replicate_degree"),
        ("context", "context_parallel_degree"),
        ("tensor", "tensor_parallel_degree"),
        ("expert", "expert_parallel_degree"),
        ("pipeline", "pipeline_parallel_degree"),
    ],
)
@pytest.mark.parametrize("value", [0, -2, 1.5, True, "2"])
def test_a_degree_is_a_positive_integer(field, name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        ParallelDegrees(**{field: value})


@pytest.mark.parametrize("sizes", list(itertools.product((1, 2), (1, 2), (1, 2), (1, 3))))
def test_peers_share_a_data_rank_and_every_rank_has_one(sizes):
    pipeline, data, context, tensor = sizes
    world = pipeline * data * context * tensor
    degrees = ParallelDegrees(pipeline=pipeline, context=context, tensor=tensor).resolve(world)
    peers = degrees.peers()
    assert sorted(rank for group in peers for rank in group) == list(range(world))
    for data_rank, group in enumerate(peers):
        # Ranks lie as pipeline x data x context x tensor.
        assert {rank // (context * tensor) % data for rank in group} == {data_rank}
        assert group == sorted(group)


def test_the_layout_in_words():
    assert ParallelDegrees(tensor=2, expert=2).resolve(4).describe() == "2 shard x 2 tensor ranks, experts over 2"
    assert ParallelDegrees().resolve(1).describe() == "1 rank"
