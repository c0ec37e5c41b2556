import itertools
import math
import statistics

import pytest
import torch
from torch import Tensor

from lightning_rl_engines.algorithms import (
    Advantage,
    DrGRPOAdvantage,
    GRPOAdvantage,
    ReinforcePlusPlusAdvantage,
    RLOOAdvantage,
    zero_variance_groups,
)

REWARDS = [0.1, 1.0, -2.5, 0.7, 0.7, 0.7, 3.0, 0.2, 0.9]
GROUPS = [7, 7, 7, 3, 3, 3, 100, -5, -5]
LENGTHS = [3, 17, 1, 4, 5, 6, 2, 8, 0]


def columns(rewards: list[float] = REWARDS) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(GROUPS), torch.tensor(LENGTHS)


def groups() -> list[list[int]]:
    return [[i for i, g in enumerate(GROUPS) if g == group] for group in dict.fromkeys(GROUPS)]


def naive_grpo(normalize: bool, eps: float = 1e-6) -> list[float]:
    result = [0.0] * len(REWARDS)
    for members in groups():
        rewards = [REWARDS[i] for i in members]
        if len(set(rewards)) == 1:
            continue
        scale = statistics.stdev(rewards) + eps if normalize else 1.0
        for i in members:
            result[i] = (REWARDS[i] - statistics.fmean(rewards)) / scale
    return result


def naive_rloo() -> list[float]:
    result = [0.0] * len(REWARDS)
    for members in groups():
        for i in members:
            others = [REWARDS[j] for j in members if j != i]
            if others:
                result[i] = REWARDS[i] - statistics.fmean(others)
    return result


def naive_whitened(rewards: list[float], eps: float = 1e-8) -> list[float]:
    """Write every response out as its tokens and whiten those."""
    tokens = [r for r, n in zip(rewards, LENGTHS, strict=True) for _ in range(n)]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    return [(r - mean) / math.sqrt(variance + eps) for r in rewards]


ESTIMATORS = {
    "grpo": (GRPOAdvantage(), naive_grpo(True)),
    "grpo_eps": (GRPOAdvantage(eps=0.5), naive_grpo(True, 0.5)),
    "grpo_no_eps": (GRPOAdvantage(eps=0.0), naive_grpo(True, 0.0)),
    "grpo_no_std": (GRPOAdvantage(normalize_std=False), naive_grpo(False)),
    "dr_grpo": (DrGRPOAdvantage(), naive_grpo(False)),
    "rloo": (RLOOAdvantage(), naive_rloo()),
    "reinforce++": (ReinforcePlusPlusAdvantage(), naive_whitened(REWARDS)),
    "reinforce++-baseline": (ReinforcePlusPlusAdvantage(baseline=True), naive_whitened(naive_grpo(False))),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equals_the_formula(name: str) -> None:
    estimator, expected = ESTIMATORS[name]
    advantages = estimator(*columns())
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_follows_a_permutation_to_the_bit(name: str) -> None:
    estimator, _ = ESTIMATORS[name]
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(400, generator=generator)
    group_ids = torch.randint(0, 40, (400,), generator=generator)
    lengths = torch.randint(0, 50, (400,), generator=generator)
    expected = estimator(rewards, group_ids, lengths)
    for _ in range(5):
        order = torch.randperm(400, generator=generator)
        assert torch.equal(estimator(rewards[order], group_ids[order], lengths[order]), expected[order])
        # The names of the groups mean nothing either.
        assert torch.equal(estimator(rewards, 1000 - 3 * group_ids, lengths), expected)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_order_of_documents_does_not_decide_what_rounding_loses(name: str) -> None:
    # Summed from left to right, 1 and 3 survive or vanish next to 1e17 depending on their place.
    rewards = torch.tensor([1e17, 1.0, -1e17, 3.0], dtype=torch.float64)
    group_ids, lengths = torch.zeros(4, dtype=torch.int64), torch.tensor([2, 1, 2, 3])
    expected = ESTIMATORS[name][0](rewards, group_ids, lengths)
    for order in itertools.permutations(range(4)):
        taken = list(order)
        assert torch.equal(ESTIMATORS[name][0](rewards[taken], group_ids, lengths[taken]), expected[taken])


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("value", [0.0, 0.1, -1e6 / 3])
@pytest.mark.parametrize("group_ids", [[0], [5] * 7, [0, 1, 2], [1, 1, 1, 2, 2]])
def test_without_signal_exactly_zero(name: str, value: float, group_ids: list[int]) -> None:
    estimator, _ = ESTIMATORS[name]
    count = len(group_ids)
    rewards = torch.full((count,), value)
    advantages = estimator(rewards, torch.tensor(group_ids), torch.arange(3, 3 + count))
    assert torch.equal(advantages, torch.zeros(count))


@pytest.mark.parametrize("name", ["grpo", "grpo_no_eps", "grpo_no_std", "dr_grpo", "rloo"])
def test_groups_of_one_among_others_are_exactly_zero(name: str) -> None:
    estimator, _ = ESTIMATORS[name]
    advantages = estimator(torch.tensor([5.0, 0.0, 1.0, -3.0]), torch.tensor([0, 1, 1, 2]), torch.ones(4))
    assert advantages[0] == 0 and advantages[3] == 0
    assert advantages[1] < 0 < advantages[2]


def test_reinforce_plus_plus_ignores_the_reward_of_an_empty_response_in_the_statistics() -> None:
    with_outlier = [*REWARDS[:-1], 1e9]
    estimator = ReinforcePlusPlusAdvantage()
    assert torch.equal(estimator(*columns(with_outlier))[:-1], estimator(*columns())[:-1])
    zeros = estimator(torch.tensor([0.0, 1.0]), torch.tensor([0, 0]), torch.tensor([0, 0]))
    assert torch.equal(zeros, torch.zeros(2))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_large_offsets_do_not_cost_digits(name: str) -> None:
    # In fp32 the spread of these rewards would be gone after squaring or summing them.
    rewards = torch.tensor([1e6, 1e6 + 1, 1e6 + 2, 1e6 + 3])
    estimator, _ = ESTIMATORS[name]
    lengths = torch.full((4,), 5)
    shifted = estimator(rewards, torch.zeros(4, dtype=torch.int64), lengths)
    plain = estimator(rewards - 1e6, torch.zeros(4, dtype=torch.int64), lengths)
    torch.testing.assert_close(shifted, plain, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_empty_batch(name: str) -> None:
    empty = torch.zeros(0)
    advantages = ESTIMATORS[name][0](empty, empty.long(), empty)
    assert advantages.shape == (0,) and advantages.dtype == torch.float32


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_reward_that_is_no_number_is_named(bad: float) -> None:
    rewards, group_ids, lengths = columns()
    rewards[4] = bad
    with pytest.raises(ValueError, match=rf"rewards\[4\]={bad}"):
        GRPOAdvantage()(rewards, group_ids, lengths)
    with pytest.raises(ValueError, match=r"rewards\[4\]"):
        zero_variance_groups(rewards, group_ids)


def test_columns_that_do_not_match_are_refused() -> None:
    rewards, group_ids, lengths = columns()
    with pytest.raises(ValueError, match=r"group_ids of shape \(3,\)"):
        GRPOAdvantage()(rewards, group_ids[:3], lengths)
    with pytest.raises(ValueError, match=r"response_lengths of shape \(3,\)"):
        GRPOAdvantage()(rewards, group_ids, lengths[:3])
    with pytest.raises(ValueError, match=r"response_lengths\[1\]=-17"):
        GRPOAdvantage()(rewards, group_ids, torch.where(lengths == 17, -17, lengths))


@pytest.mark.parametrize("estimator_class", [GRPOAdvantage, ReinforcePlusPlusAdvantage])
def test_negative_eps_is_refused(estimator_class: type[Advantage]) -> None:
    with pytest.raises(ValueError, match=r"eps=-1\.0"):
        estimator_class(eps=-1.0)
