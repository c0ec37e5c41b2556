import math

import torch

from lightning_rl_engines.rollout.sampling import StopRule, derive_seed, sample_tokens
from tests.rollout.stubs import character_tokenizer


def _support(logits: torch.Tensor, **options: float) -> set[int]:
    """Tokens that 4000 draws ever give."""
    generator = torch.Generator().manual_seed(0)
    arguments = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "greedy": False, **options}
    tokens, _ = sample_tokens(logits.expand(4000, -1), generator=generator, **arguments)
    return set(tokens.tolist())


def test_log_probs_cover_the_whole_vocabulary_under_truncation() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    tokens, log_probs = sample_tokens(
        logits, temperature=0.7, top_k=1, top_p=0.1, greedy=False, generator=torch.Generator()
    )
    total = sum(math.exp(x / 0.7) for x in logits[0].tolist())
    assert tokens.tolist() == [0]
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, torch.tensor([2.0 / 0.7 - math.log(total)]), rtol=0, atol=1e-6)


def test_top_k_and_top_p_keep_the_right_tokens() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log()
    assert _support(logits) == {0, 1, 2, 3}
    assert _support(logits, top_k=2) == {1, 2}
    assert _support(logits, top_k=9) == {0, 1, 2, 3}
    assert _support(logits, top_p=0.39) == {1}
    assert _support(logits, top_p=0.69) == {1, 2}
    assert _support(logits, top_p=0.71) == {1, 2, 3}
    # After top_k=2 the two tokens have 4/7 and 3/7.
    assert _support(logits, top_k=2, top_p=0.5) == {1}
    assert _support(logits, top_p=1e-9) == {1}


def test_samples_follow_the_tempered_distribution() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0]])
    tokens, _ = sample_tokens(
        logits.expand(40000, -1),
        temperature=0.5,
        top_k=0,
        top_p=1.0,
        greedy=False,
        generator=torch.Generator().manual_seed(1),
    )
    frequencies = torch.bincount(tokens, minlength=3) / 40000
    torch.testing.assert_close(frequencies, (logits[0] / 0.5).softmax(-1), rtol=0, atol=0.01)


def test_seeds_differ_between_neighbours() -> None:
    seeds = {
        derive_seed(seed, rank, peer, call) for seed in (0, 1) for rank in (0, 1) for peer in (0, 1) for call in (0, 1)
    }
    assert len(seeds) == 16
    assert derive_seed(1, 2) == derive_seed(1, 2)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_stop_rule_finds_strings_across_tokens_and_special_tokens() -> None:
    tokenizer = character_tokenizer()
    rule = StopRule(token_ids=[2], strings=["ab", "<s>"], tokenizer=tokenizer)
    response = tokenizer("xxb aab")["input_ids"]
    ends = [rule(response[: n + 1]) for n in range(len(response))]
    assert ends == [False] * 6 + [True]
    assert rule([7, 1])
    assert rule([7, 2])
    assert not rule([2, 7])
