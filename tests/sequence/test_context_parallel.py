from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rl_engines.sequence.context_parallel import (
    BALANCERS,
    attention_costs,
    inverse_order,
    row_multiple,
    row_order,
)


def cu_seqlens_of(lengths: list[int]) -> tuple[int, ...]:
    return (0, *accumulate(lengths))


def loads(order: torch.Tensor, cu_seqlens: tuple[int, ...], size: int) -> list[int]:
    """Keys that the queries of each rank see, counted document by document."""
    seen = [position + 1 for start, end in pairwise(cu_seqlens) for position in range(end - start)]
    return [sum(seen[place] for place in part.tolist()) for part in order.chunk(size)]


rows = st.tuples(st.lists(st.integers(1, 70), min_size=1, max_size=6), st.sampled_from([1, 2, 3, 4]))


@settings(max_examples=100, derandomize=True, deadline=None)
@given(rows, st.sampled_from(BALANCERS), st.integers(1, 40))
def test_an_order_is_a_permutation_in_equal_parts_that_depends_on_the_row_alone(row, balancer, block_size):
    lengths, size = row
    multiple = row_multiple(balancer, size)
    lengths = [*lengths, multiple - sum(lengths) % multiple]
    cu_seqlens = cu_seqlens_of(lengths)
    order = row_order(balancer, cu_seqlens, size, block_size=block_size)
    assert order.dtype == torch.int64
    assert order.device.type == "cpu"
    assert sorted(order.tolist()) == list(range(cu_seqlens[-1]))
    assert [len(part) for part in order.chunk(size)] == [cu_seqlens[-1] // size] * size
    torch.manual_seed(block_size)
    assert torch.equal(row_order(balancer, list(cu_seqlens), size, block_size=block_size), order)
    inverse = inverse_order(order)
    assert order[inverse].tolist() == inverse[order].tolist() == list(range(cu_seqlens[-1]))
    # A value per position that goes out in this order comes home by the inverse.
    values = torch.arange(cu_seqlens[-1]) * 3
    assert torch.equal(values[order][inverse], values)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("length", [8, 24, 80])
def test_head_and_tail_is_torchs_own(length, size):
    from torch.distributed.tensor.experimental._attention import _HeadTailLoadBalancer

    expected = _HeadTailLoadBalancer(length, size, "cpu")
    order = row_order("headtail", (0, 3, length), size)
    assert torch.equal(order, expected._generate_indices()[0].long())
    assert torch.equal(inverse_order(order), expected._generate_indices(restore=True)[0])


@pytest.mark.parametrize("size", [2, 4])
def test_round_robin_deals_like_torchs_own(size):
    from torch.distributed.tensor.experimental._attention import _PTRRLoadBalancer

    lengths = [37, 90, 5, 44, 80]  # 256 tokens: blocks of 8 are dealt out without a rest
    costs = torch.cat([torch.arange(1, length + 1) for length in lengths]).view(-1, 8).sum(1)
    blocks = _PTRRLoadBalancer.ptrr_scheduling(costs, size)
    expected = torch.arange(256).view(-1, 8)[blocks].flatten()
    assert torch.equal(row_order("ptrr", cu_seqlens_of(lengths), size, block_size=8), expected)


def test_orders_by_hand():
    assert row_order(None, (0, 4), 2).tolist() == [0, 1, 2, 3]
    assert row_order("headtail", (0, 8), 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    # Costs 1 to 5 and 1 to 3; one token is a block: 5 4 | 3 3 | 2 2 | 1 1, to and fro.
    assert attention_costs((0, 5, 8)).tolist() == [1, 2, 3, 4, 5, 1, 2, 3]
    assert row_order("ptrr", (0, 5, 8), 2).tolist() == [1, 4, 5, 7, 0, 2, 3, 6]


def test_the_rest_of_the_row_goes_to_those_who_have_least():
    # 34 tokens for each of 2 ranks: four blocks of 8 and a rest of 2.
    order = row_order("ptrr", (0, 68), 2, block_size=8)
    parts = [part.tolist() for part in order.chunk(2)]
    assert [[block for block in range(8) if 8 * block in part] for part in parts] == [[0, 3, 4, 7], [1, 2, 5, 6]]
    # Both have as much so far: the first of them takes the more expensive end.
    assert parts[0][32:] == [66, 67]
    assert parts[1][32:] == [64, 65]
    # Documents of 8 and 60: the blocks cost the first rank 848 and the second 784, so the second takes it.
    order = row_order("ptrr", (0, 8, 68), 2, block_size=8)
    assert [part.tolist()[32:] for part in order.chunk(2)] == [[64, 65], [66, 67]]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("balancer", ["headtail", "ptrr"])
def test_one_long_document_is_balanced(balancer, size):
    cu_seqlens = (0, 4096)
    contiguous = loads(row_order(None, cu_seqlens, size), cu_seqlens, size)
    balanced = loads(row_order(balancer, cu_seqlens, size), cu_seqlens, size)
    mean = sum(contiguous) / size
    assert sum(balanced) == sum(contiguous)
    assert max(contiguous) / mean > 1.45
    assert max(balanced) / mean < 1.001


@pytest.mark.parametrize("size", [2, 4])
def test_only_the_round_robin_balances_documents_of_any_length(size):
    lengths = [1500, 100, 300, 20, 900, 700, 50, 502, 24]
    cu_seqlens = cu_seqlens_of(lengths)
    most = {b: max(loads(row_order(b, cu_seqlens, size, block_size=32), cu_seqlens, size)) for b in BALANCERS}
    mean = int(attention_costs(cu_seqlens).sum()) / size
    assert most["ptrr"] < 1.01 * mean
    assert most[None] > 1.2 * mean
    assert most["headtail"] > 1.05 * mean


@settings(max_examples=60, derandomize=True, deadline=None)
@given(rows)
def test_the_round_robin_misses_balance_by_less_than_one_block(row):
    lengths, size = row
    lengths = [*lengths, size - sum(lengths) % size]
    cu_seqlens = cu_seqlens_of(lengths)
    block = min(8, max(1, sum(lengths) // size // 4))
    found = loads(row_order("ptrr", cu_seqlens, size, block_size=8), cu_seqlens, size)
    assert max(found) - min(found) < block * max(lengths)


def test_blocks_shrink_for_short_rows():
    # 64 tokens over 2 ranks: blocks of 8, though up to 128 are allowed.
    parts = row_order("ptrr", (0, 64), 2).view(2, 4, 8)
    assert torch.equal(parts, parts[:, :, :1] + torch.arange(8))
    assert (parts[:, :, 0] % 8 == 0).all()


def test_multiples_and_refusals():
    assert [row_multiple(balancer, 4) for balancer in (None, "headtail", "ptrr")] == [4, 8, 4]
    for arguments, words in (
        (("zigzag", (0, 8), 2), ["'zigzag'", "headtail", "ptrr"]),
        (("headtail", (0, 6), 2), ["6 tokens", "'headtail'", "multiple of 4", "8"]),
        (("ptrr", (0, 7), 2), ["7 tokens", "multiple of 2", "8"]),
        ((None, (0, 7), 2), ["7 tokens", "multiple of 2"]),
    ):
        with pytest.raises(ValueError) as error:
            row_order(*arguments)
        for word in words:
            assert word in str(error.value)
    with pytest.raises(ValueError, match="block_size=0"):
        row_order("ptrr", (0, 8), 2, block_size=0)
    with pytest.raises(ValueError, match="'zigzag'"):
        row_multiple("zigzag", 2)
