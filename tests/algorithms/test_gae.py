import pytest
import torch

from lightning_rl_engines.algorithms.gae import gae, kl_penalty_rewards, outcome_rewards

LENGTHS = (6, 1, 9, 4, 17)


def make(dtype=torch.float64, seed=0):
    """Ragged columns with holes in the responses (tools), a document without response, garbage outside the mask."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    mask = torch.rand(total, generator=generator) > 0.3
    mask[6] = False  # all of document 1
    rewards = torch.randn(total, generator=generator, dtype=torch.float64) * mask
    values = torch.randn(total, generator=generator, dtype=torch.float64)
    values[~mask] = torch.nan
    bootstrap = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    return rewards.to(dtype), values.to(dtype), mask, bootstrap.to(dtype)


def naive(rewards, values, mask, gamma, lam, bootstrap):
    """Schulman et al. 2016, equation 16, as the explicit double sum over the response tokens of each document."""
    advantages, returns = torch.zeros(len(rewards)).double(), torch.zeros(len(rewards)).double()
    start = 0
    for document, length in enumerate(LENGTHS):
        tokens = [t for t in range(start, start + length) if mask[t]]
        start += length
        value = [float(values[t]) for t in tokens] + [float(bootstrap[document])]
        deltas = [float(rewards[t]) + gamma * value[i + 1] - value[i] for i, t in enumerate(tokens)]
        for i, t in enumerate(tokens):
            advantages[t] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(tokens)))
            returns[t] = advantages[t] + value[i]
    return advantages, returns


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.0, 1.0), (0.9, 1.0)])
def test_the_paper_document_by_document(gamma, lam, truncated):
    rewards, values, mask, bootstrap = make()
    after = bootstrap if truncated else torch.zeros_like(bootstrap)
    found = gae(rewards, values, LENGTHS, mask, gamma=gamma, lam=lam, bootstrap_values=bootstrap if truncated else None)
    for result, expected in zip(found, naive(rewards, values, mask, gamma, lam, after), strict=True):
        assert result.dtype == torch.float64
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
        assert not result[~mask].any()


def test_by_hand():
    # gamma 1/2, lam 1/2. Tokens 1 and 3 respond; token 2 is a tool's.
    advantages, returns = gae(
        torch.tensor([0.0, 1.0, 0.0, 2.0]),
        torch.tensor([9.0, 4.0, 9.0, 8.0]),
        [4],
        torch.tensor([False, True, False, True]),
        gamma=0.5,
        lam=0.5,
    )
    # delta_3 = 2 - 8 = -6; delta_1 = 1 + 4 - 4 = 1, A_1 = 1 - 6 / 4.
    assert advantages.tolist() == [0.0, -0.5, 0.0, -6.0]
    assert returns.tolist() == [0.0, 3.5, 0.0, 2.0]


def test_with_lambda_one_and_no_discount_returns_are_the_rewards_to_come_whatever_the_critic_says():
    rewards, values, mask, _ = make()
    _, returns = gae(rewards, values, LENGTHS, mask)
    start = 0
    for length in LENGTHS:
        here = slice(start, start + length)
        start += length
        own = rewards[here][mask[here]]
        torch.testing.assert_close(returns[here][mask[here]], own.flip(0).cumsum(0).flip(0), rtol=1e-12, atol=1e-12)


def test_a_document_gets_the_same_bits_in_any_company():
    rewards, values, mask, bootstrap = make(torch.float32)
    together = gae(rewards, values, LENGTHS, mask, gamma=0.99, lam=0.95, bootstrap_values=bootstrap)
    start = 0
    for document, length in enumerate(LENGTHS):
        here = slice(start, start + length)
        start += length
        alone = gae(
            rewards[here],
            values[here],
            [length],
            mask[here],
            gamma=0.99,
            lam=0.95,
            bootstrap_values=bootstrap[document : document + 1],
        )
        for one, all_ in zip(alone, together, strict=True):
            assert one.dtype == torch.float32
            assert torch.equal(one, all_[here])


def test_nothing_of_nothing():
    empty = torch.zeros(0)
    for result in gae(empty, empty, [], torch.zeros(0, dtype=torch.bool)):
        assert result.shape == (0,)
    for result in gae(torch.zeros(3), torch.full((3,), torch.nan), [1, 2], torch.zeros(3, dtype=torch.bool)):
        assert result.tolist() == [0.0, 0.0, 0.0]


def test_outcome_rewards_go_to_the_last_response_token():
    mask = torch.tensor([0, 1, 1, 0, 0, 0, 1, 0, 1], dtype=torch.bool)
    column = outcome_rewards(torch.tensor([2.0, 5.0, -3.0]), [4, 1, 4], mask)
    assert column.tolist() == [0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, -3.0]
    assert column.dtype == torch.float32


def test_the_kl_penalty_is_charged_per_response_token():
    mask = torch.tensor([False, True, True])
    log_probs = torch.tensor([torch.nan, -1.0, -2.0], dtype=torch.float64)
    reference = torch.tensor([0.0, -1.5, -1.0], dtype=torch.float64)
    assert kl_penalty_rewards(log_probs, reference, mask, coef=0.5).tolist() == [0.0, -0.25, 0.5]
    assert kl_penalty_rewards(log_probs, reference, mask, coef=2.0, estimator="k2").tolist() == [0.0, -0.25, -1.0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gamma": 1.1}, ["gamma=1.1", "1.0"]),
        ({"lam": -0.1}, ["lam=-0.1"]),
        ({"lam": float("nan")}, ["lam=nan"]),
        ({"lengths": [3]}, ["(2,)", "sum to 3"]),
        ({"values": torch.zeros(3)}, ["values", "(3,)", "(2,)"]),
        ({"rewards": torch.tensor([1.0, 0.0])}, ["rewards[0]=1.0", "outside the response"]),
        ({"bootstrap_values": torch.zeros(2)}, ["bootstrap_values", "(2,)", "(1,)"]),
    ],
)
def test_gae_refuses(change, words):
    arguments = {
        "rewards": torch.zeros(2),
        "values": torch.zeros(2),
        "lengths": [2],
        "response_mask": torch.tensor([False, True]),
    }
    with pytest.raises(ValueError) as error:
        gae(**{**arguments, **change})
    for word in words:
        assert word in str(error.value)


def test_reward_helpers_refuse():
    mask = torch.tensor([False, True])
    with pytest.raises(ValueError, match=r"rewards of shape \(2,\)"):
        outcome_rewards(torch.zeros(2), [2], mask)
    with pytest.raises(ValueError, match=r"coef=-1"):
        kl_penalty_rewards(torch.zeros(2), torch.zeros(2), mask, coef=-1)
    with pytest.raises(ValueError, match=r"use 'k3'"):
        kl_penalty_rewards(torch.zeros(2), torch.zeros(2), mask, coef=1, estimator="k3+")
    with pytest.raises(ValueError, match=r"ref_log_probs of shape \(3,\)"):
        kl_penalty_rewards(torch.zeros(2), torch.zeros(3), mask, coef=1)
