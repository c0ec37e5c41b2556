import math
import random
import threading

import pytest
import torch

from lightning_rl_engines.algorithms.whitening import exact_sum, global_moments, whiten


def over_ranks(function, parts):
    """Run ``function(values, mask, gather)`` on one thread per rank, with a gather that returns items in rank order."""
    barrier, items, results = threading.Barrier(len(parts)), [None] * len(parts), [None] * len(parts)

    def run(rank):
        def gather(item):
            items[rank] = item
            barrier.wait(timeout=10)
            gathered = list(items)
            barrier.wait(timeout=10)
            return gathered

        results[rank] = function(*parts[rank], gather)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def make(seed=0, size=200):
    generator = torch.Generator().manual_seed(seed)
    # Different magnitudes, so that ordinary sums depend on their order.
    values = torch.randn(size, generator=generator) * torch.logspace(-6, 6, size)
    mask = torch.rand(size, generator=generator) > 0.3
    values[~mask] = torch.nan
    return values, mask


def test_a_plain_mean_and_variance():
    values, mask = make()
    moments = global_moments(values, mask)
    kept = values[mask].double()
    assert moments.count == len(kept)
    assert moments.mean == pytest.approx(kept.mean().item(), rel=1e-12)
    assert moments.variance == pytest.approx(kept.var().item(), rel=1e-12)
    whitened = whiten(values, mask, eps=1e-3)
    expected = (kept - kept.mean()) / (kept.var() + 1e-3).sqrt()
    assert whitened.dtype == torch.float32
    torch.testing.assert_close(whitened[mask], expected.float(), rtol=1e-6, atol=1e-12)
    assert not whitened[~mask].any()
    scaled = whiten(values, mask, center=False)
    torch.testing.assert_close(scaled[mask], (kept / kept.std()).float(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_every_split_and_order_gives_the_same_bits(ranks):
    values, mask = make()
    expected_moments, expected = global_moments(values, mask), whiten(values, mask)
    shuffler = random.Random(ranks)
    order = list(range(len(values)))
    shuffler.shuffle(order)
    owners = [shuffler.randrange(1, ranks) for _ in order]  # rank 0 holds nothing
    shares = [
        torch.tensor([i for i, owner in zip(order, owners, strict=True) if owner == r]).long() for r in range(ranks)
    ]
    parts = [(values[share], mask[share]) for share in shares]
    assert over_ranks(global_moments, parts) == [expected_moments] * ranks
    for share, found in zip(shares, over_ranks(whiten, parts), strict=True):
        assert torch.equal(found, expected[share])


def test_exact_sums_are_exact():
    values = torch.tensor([1e16, 1.0, -1e16, 2.0**-60], dtype=torch.float64)
    assert sum(values.tolist()) != 1.0 + 2.0**-60
    assert exact_sum(values) == (1.0, 2.0**-60)
    assert exact_sum(torch.zeros(0)) == ()


@pytest.mark.parametrize("number", [0.1, 3.7, 1e-30])
@pytest.mark.parametrize("count", [1, 3, 10])
def test_equal_values_become_exact_zeros(number, count):
    values = torch.full((count,), number, dtype=torch.float64)
    assert whiten(values, torch.ones(count, dtype=torch.bool)).tolist() == [0.0] * count


def test_no_token_at_all():
    nothing = whiten(torch.full((3,), torch.nan), torch.zeros(3, dtype=torch.bool))
    assert nothing.tolist() == [0.0, 0.0, 0.0]


def test_a_value_that_is_not_finite_reaches_every_rank():
    mask = torch.ones(2, dtype=torch.bool)
    parts = [(torch.tensor([1.0, 2.0]), mask), (torch.tensor([math.inf, 2.0]), mask)]
    for found in over_ranks(whiten, parts):
        assert found.isnan().all()


def test_refusals():
    with pytest.raises(ValueError, match=r"eps=0"):
        whiten(torch.zeros(2), torch.ones(2, dtype=torch.bool), eps=0.0)
    with pytest.raises(ValueError, match=r"\(2,\) do not match mask of shape \(3,\)"):
        whiten(torch.zeros(2), torch.ones(3, dtype=torch.bool))
