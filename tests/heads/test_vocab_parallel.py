import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_rl_engines.heads import vocab_parallel_linear_log_prob
from lightning_rl_engines.heads.tiles import HeadInputs, HeadSpec, merge_statistics, vocabulary_statistics
from tests.heads.reference import Case, make_case, plain_head, token_weights
from tests.support import run_workers

TILES = {"token_tile": 5, "vocabulary_tile": 10}


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


class Collectives(TorchDispatchMode):
    """Names of the collectives, and the largest number of elements that one of them moved."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.__name__)
            self.largest = max(self.largest, sum(tensor.numel() for tensor in args[0]))
        return func(*args, **(kwargs or {}))


def run_shard(bounds: list[int], entropy: bool, tokens: int, options: dict) -> dict[str, Tensor]:
    """One rank: its rows of the weight, and the collectives it took part in."""
    case = make_case(tokens, **options)
    start, stop = bounds[dist.get_rank()], bounds[dist.get_rank() + 1]
    hidden = case.hidden.detach().requires_grad_()
    # Two rows of padding behind the vocabulary: never seen, gradient 0.
    padding = torch.full((2 if stop == len(case.weight) else 0, 6), 50.0, dtype=torch.float64)
    shard = torch.cat([case.weight.detach()[start:stop], padding]).requires_grad_()
    bias = None
    if case.bias is not None:
        bias = torch.cat([case.bias.detach()[start:stop], padding[:, 0]]).requires_grad_()
    with Collectives() as forward:
        log_probs, entropies = vocab_parallel_linear_log_prob(
            hidden,
            shard,
            case.labels,
            vocabulary_start=start,
            vocabulary_size=len(case.weight),
            group=dist.group.WORLD,
            calculate_entropy=entropy,
            **{**case.options, "bias": bias},
            **TILES,
        )
    assert len(forward.names) == (2 if tokens else 0), forward.names
    assert forward.largest == (3 if entropy else 2) * tokens
    g, e = token_weights(tokens)
    loss = (g * log_probs).sum()
    if entropies is not None:
        loss = loss + (e * entropies).sum()
    with Collectives() as backward:
        loss.backward()
    assert backward.names == []
    partial = hidden.grad.clone()
    dist.all_reduce(hidden.grad)
    result = {"log_probs": log_probs.detach(), "hidden": hidden.grad, "partial": partial, "weight": shard.grad}
    if entropies is not None:
        result["entropy"] = entropies.detach()
    if bias is not None:
        result["bias"] = bias.grad
    return result


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(
    ("bounds", "tokens"),
    [([0, 49, 97], 13), ([0, 97, 97], 13), ([0, 20, 97], 1), ([0, 49, 97], 0)],
    ids=["uneven", "empty shard", "one token", "no tokens"],
)
def test_two_ranks_equal_the_plain_head(bounds: list[int], tokens: int, entropy: bool) -> None:
    options = {"bias": True, "temperature": "tokens", "softcap": 3.0, "scale": 0.5}
    case = make_case(tokens, **options)
    log_probs, entropies = plain_head(case)
    g, e = token_weights(tokens)
    loss = (g * log_probs).sum() + ((e * entropies).sum() if entropy else 0.0)
    hidden_grad, weight_grad, bias_grad = torch.autograd.grad(loss, case.leaves)
    results = run_workers(2, run_shard, bounds, entropy, tokens, options)
    for result in results:
        close(result["log_probs"], log_probs.detach())
        close(result["hidden"], hidden_grad)
        if entropy:
            close(result["entropy"], entropies.detach())
        else:
            assert "entropy" not in result
    close(results[0]["partial"] + results[1]["partial"], hidden_grad)
    for name, expected in (("weight", weight_grad), ("bias", bias_grad)):
        together = torch.cat([result[name] for result in results])
        close(together[:97], expected)
        assert len(together) > 97
        assert torch.count_nonzero(together[97:]) == 0


@pytest.mark.parametrize("bounds", [[0, 97], [0, 24, 48, 73, 97], [0, 1, 1, 96, 97]])
def test_statistics_of_shards_merge_exactly(bounds: list[int]) -> None:
    case: Case = make_case()
    merged = None
    with torch.no_grad():
        for start, stop in itertools.pairwise(bounds):
            spec = HeadSpec(vocabulary_size=97, vocabulary_start=start, with_entropy=True, **TILES)
            inputs = HeadInputs(case.hidden, case.weight[start:stop], case.labels, None, None)
            shard = vocabulary_statistics(inputs, spec)
            merged = shard if merged is None else merge_statistics(merged, shard)
        logits = case.hidden @ case.weight.t()
        maximum = logits.amax(-1)
        shifted = logits - maximum[:, None]
        close(merged.maximum, maximum)
        close(merged.sum_exp, shifted.exp().sum(-1))
        close(merged.sum_exp_z, (shifted.exp() * shifted).sum(-1))
        close(merged.label_logit, logits.gather(1, case.labels[:, None])[:, 0])


def test_one_shard_needs_no_group() -> None:
    case = make_case(bias=True)
    log_probs, entropy = vocab_parallel_linear_log_prob(
        case.hidden,
        case.weight,
        case.labels,
        vocabulary_start=0,
        vocabulary_size=97,
        group=None,
        bias=case.bias,
        calculate_entropy=True,
    )
    expected_log_probs, expected_entropy = plain_head(case)
    close(log_probs, expected_log_probs)
    close(entropy, expected_entropy)


def test_a_negative_start_is_refused() -> None:
    case = make_case()
    with pytest.raises(ValueError, match="vocabulary_start=-1"):
        vocab_parallel_linear_log_prob(
            case.hidden, case.weight, case.labels, vocabulary_start=-1, vocabulary_size=97, group=None
        )
