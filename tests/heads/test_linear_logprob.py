import itertools
import math

import pytest
import torch
from torch import Tensor

from lightning_rl_engines.heads import linear_log_prob
from tests.heads.reference import Case, make_case, plain_head, token_weights

SMALL = {"token_tile": 5, "vocabulary_tile": 10}
LARGE = {"token_tile": 64, "vocabulary_tile": 128}


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def check(case: Case, *, entropy: bool, tiles: dict[str, int]) -> None:
    log_probs, entropies = linear_log_prob(
        case.hidden, case.weight, case.labels, calculate_entropy=entropy, **case.options, **tiles
    )
    expected_log_probs, expected_entropies = plain_head(case)
    close(log_probs, expected_log_probs)
    g, e = token_weights(len(case.labels))
    loss, expected = (g * log_probs).sum(), (g * expected_log_probs).sum()
    if entropy:
        close(entropies, expected_entropies)
        loss, expected = loss + (e * entropies).sum(), expected + (e * expected_entropies).sum()
    else:
        assert entropies is None
    for actual, reference in zip(
        torch.autograd.grad(loss, case.leaves), torch.autograd.grad(expected, case.leaves), strict=True
    ):
        close(actual, reference)


GRID = list(itertools.product([None, 2.5], [1.0, 0.3], [False, True], [1.0, 0.7, "tokens"], [False, True]))


@pytest.mark.parametrize("tiles", [SMALL, LARGE, {"token_tile": 13, "vocabulary_tile": 96}], ids=str)
def test_values_and_gradients_equal_the_plain_head(tiles: dict[str, int]) -> None:
    for softcap, scale, bias, temperature, entropy in GRID:
        case = make_case(softcap=softcap, scale=scale, bias=bias, temperature=temperature)
        check(case, entropy=entropy, tiles=tiles)


@pytest.mark.parametrize(("tokens", "vocabulary"), [(0, 97), (1, 97), (5, 10), (3, 1), (16, 64)])
def test_sizes(tokens: int, vocabulary: int) -> None:
    single = {"token_tile": 1, "vocabulary_tile": 1}
    for entropy, tiles in itertools.product([False, True], [SMALL, LARGE, single]):
        case = make_case(tokens, vocabulary, bias=True, temperature="tokens", softcap=3.0, scale=0.5)
        check(case, entropy=entropy, tiles=tiles)


def test_default_tiles_and_a_second_use_in_one_graph() -> None:
    case, other = make_case(bias=True), make_case(seed=3)
    g, e = token_weights(13)
    for tiles in ({}, SMALL):
        first, _ = linear_log_prob(case.hidden, case.weight, case.labels, bias=case.bias, **tiles)
        second, entropy = linear_log_prob(other.hidden, case.weight, other.labels, calculate_entropy=True, **tiles)
        loss = (g * first).sum() + (e * second * first.detach()).sum() + (g * entropy).sum()
        plain_first, _ = plain_head(case)
        other.weight = case.weight
        plain_second, plain_entropy = plain_head(other)
        plain = (g * plain_first).sum() + (e * plain_second * plain_first.detach()).sum() + (g * plain_entropy).sum()
        inputs = [*case.leaves, other.hidden]
        retained = torch.autograd.grad(loss, inputs, retain_graph=True)
        for actual, again, reference in zip(
            retained, torch.autograd.grad(loss, inputs), torch.autograd.grad(plain, inputs), strict=True
        ):
            close(actual, reference)
            assert torch.equal(actual, again)


def test_only_the_entropy_has_an_upstream_gradient() -> None:
    case = make_case(bias=True, temperature="tokens", softcap=2.0)
    _, e = token_weights(13)
    _, entropy = linear_log_prob(case.hidden, case.weight, case.labels, calculate_entropy=True, **case.options, **SMALL)
    _, expected = plain_head(case)
    for actual, reference in zip(
        torch.autograd.grad((e * entropy).sum(), case.leaves),
        torch.autograd.grad((e * expected).sum(), case.leaves),
        strict=True,
    ):
        close(actual, reference)


def test_only_the_log_probs_have_an_upstream_gradient_though_entropy_was_computed() -> None:
    case = make_case()
    g, _ = token_weights(13)
    log_probs, _ = linear_log_prob(case.hidden, case.weight, case.labels, calculate_entropy=True, **SMALL)
    expected, _ = plain_head(case)
    for actual, reference in zip(
        torch.autograd.grad((g * log_probs).sum(), case.leaves),
        torch.autograd.grad((g * expected).sum(), case.leaves),
        strict=True,
    ):
        close(actual, reference)


def products_in_backward(case: Case) -> tuple[int, list[Tensor | None]]:
    log_probs, _ = linear_log_prob(case.hidden, case.weight, case.labels, bias=case.bias, **LARGE)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        log_probs.sum().backward()
    count = sum(event.name in ("aten::mm", "aten::addmm_") for event in profile.events())
    return count, [leaf.grad for leaf in case.leaves]


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_frozen_inputs_cost_nothing_and_leave_the_others_alone(frozen: str) -> None:
    whole, case = make_case(bias=True), make_case(bias=True)
    getattr(case, frozen).requires_grad_(False)
    whole_products, whole_grads = products_in_backward(whole)
    products, grads = products_in_backward(case)
    assert whole_products == 3
    assert products == (3 if frozen == "bias" else 2)
    for name, actual, reference in zip(("hidden", "weight", "bias"), grads, whole_grads, strict=True):
        if name == frozen:
            assert actual is None
        else:
            assert torch.equal(actual, reference)


def test_tied_weight_gets_both_halves() -> None:
    case = make_case()
    tokens = torch.arange(13) % 5
    g, _ = token_weights(13)

    def gradient(fused: bool) -> Tensor:
        weight = case.weight.detach().clone().requires_grad_()
        # The head sees a view, as under FSDP1.
        view = weight.view(-1)[: weight.numel()].view(97, 6)
        tied = Case(torch.tanh(weight[tokens]), view, case.labels, None, 1.0, None, 1.0)
        log_probs = linear_log_prob(tied.hidden, view, tied.labels, **SMALL)[0] if fused else plain_head(tied)[0]
        return torch.autograd.grad((g * log_probs).sum(), weight)[0]

    close(gradient(True), gradient(False))


def test_per_token_weights_with_masked_tokens_and_labels_outside_the_vocabulary() -> None:
    case = make_case()
    ignored = torch.tensor([0, 4, 12])
    mask = torch.ones(13, dtype=torch.float64)
    mask[ignored] = 0
    labels = case.labels.clone()
    labels[ignored] = torch.tensor([-100, 97, 2**40])
    g, e = token_weights(13)
    log_probs, entropy = linear_log_prob(case.hidden, case.weight, labels, calculate_entropy=True, **SMALL)
    assert torch.equal(log_probs[ignored], torch.zeros(3, dtype=torch.float64))
    plain_log_probs, plain_entropy = plain_head(case)
    close(log_probs * mask, plain_log_probs * mask)
    close(entropy, plain_entropy)
    # No mask on the fused side: a label outside the vocabulary has no gradient by itself.
    loss = (g * log_probs).sum() + (e * mask * entropy).sum()
    plain = (g * mask * plain_log_probs).sum() + (e * mask * plain_entropy).sum()
    actual = torch.autograd.grad(loss, case.leaves)
    for gradient, reference in zip(actual, torch.autograd.grad(plain, case.leaves), strict=True):
        close(gradient, reference)
    assert torch.count_nonzero(actual[0][ignored]) == 0


def test_a_bias_of_minus_infinity_removes_an_entry() -> None:
    case = make_case(vocabulary=12, bias=True, temperature=0.5)
    off = torch.tensor([0, 3, 4, 5, 11])
    kept = torch.tensor([1, 2, 6, 7, 8, 9, 10])
    case.labels = kept[case.labels % 7]
    bias = case.bias.detach().index_fill(0, off, -math.inf).requires_grad_()
    smaller = Case(case.hidden, case.weight[kept], torch.searchsorted(kept, case.labels), bias[kept], 2.0, None, 1.0)
    g, e = token_weights(13)
    outputs = linear_log_prob(
        case.hidden,
        case.weight,
        case.labels,
        bias=bias,
        inv_temperature=2.0,
        calculate_entropy=True,
        token_tile=5,
        vocabulary_tile=3,  # the tile of entries 3, 4, 5 is empty
    )
    expected = plain_head(smaller)
    leaves = [case.hidden, case.weight, bias]
    for actual, reference in zip(outputs, expected, strict=True):
        close(actual, reference)
    for actual, reference in zip(
        torch.autograd.grad(outputs, leaves, [g, e]), torch.autograd.grad(expected, leaves, [g, e]), strict=True
    ):
        close(actual, reference)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 1e3])
def test_invariants_hold_in_fp32_at_extremes(offset: float, spread: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 8, generator=generator)
    weight = torch.randn(97, 8, generator=generator) * spread
    labels = (hidden @ weight.t()).argmax(-1)
    labels[::2] = torch.randint(0, 97, (32,), generator=generator)
    bias = torch.full((97,), offset)
    hidden.requires_grad_()
    log_probs, entropy = linear_log_prob(hidden, weight, labels, bias=bias, calculate_entropy=True, **SMALL)
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert (log_probs <= 0).all()
    assert (entropy >= 0).all() and (entropy.double() <= math.log(97)).all()
    # At +-1e4 the logits themselves have four decimals; the statistics add next to nothing.
    reference = (hidden.detach() @ weight.t() + bias).double().log_softmax(-1)
    tolerance = {"atol": 5e-6 + 2e-6 * spread + 1e-3 * abs(offset) * 1e-3, "rtol": 1e-5}
    torch.testing.assert_close(log_probs.double(), reference.gather(1, labels[:, None])[:, 0], **tolerance)
    (gradient,) = torch.autograd.grad(log_probs.sum() + entropy.sum(), hidden)
    assert gradient.isfinite().all()


def test_clamping_does_not_stop_gradients() -> None:
    # Uniform: the entropy lies on its upper bound; a single entry far ahead: the log-probability lies on 0.
    case = make_case(vocabulary=8)
    case.weight = torch.zeros(8, 6, dtype=torch.float64, requires_grad=True)
    g, e = token_weights(13)
    outputs = linear_log_prob(case.hidden, case.weight, case.labels, calculate_entropy=True, **SMALL)
    close(outputs[1], torch.full((13,), math.log(8), dtype=torch.float64))
    (actual,) = torch.autograd.grad(outputs, [case.weight], [g, e])
    (expected,) = torch.autograd.grad(plain_head(case), [case.weight], [g, e])
    assert expected.abs().max() > 0.1
    close(actual, expected)


def test_probabilities_of_all_labels_sum_to_one() -> None:
    case = make_case(1, bias=True, temperature=0.7, softcap=3.0)
    hidden = case.hidden.detach().expand(97, -1)
    log_probs, _ = linear_log_prob(hidden, case.weight, torch.arange(97), **case.options, **SMALL)
    close(log_probs.exp().sum(), torch.tensor(1.0, dtype=torch.float64))


def test_bf16_rounds_results_once() -> None:
    case = make_case(512, width=16, dtype=torch.bfloat16, bias=True, temperature="tokens")
    case.inv_temperature = case.inv_temperature.float()
    exact = Case(
        *(leaf.detach().double().requires_grad_() for leaf in (case.hidden, case.weight)),
        case.labels,
        case.bias.detach().double().requires_grad_(),
        case.inv_temperature.double(),
        None,
        1.0,
    )
    # One heavy token in front, then many light ones: each alone is below half a bf16 step of the sum so far.
    g = torch.full((512,), 1e-3)
    g[0] = 1.0
    case.labels[:] = exact.labels[:] = 7
    log_probs, _ = linear_log_prob(
        case.hidden, case.weight, case.labels, token_tile=1, vocabulary_tile=40, **case.options
    )
    assert log_probs.dtype == torch.float32
    expected, _ = plain_head(exact)
    torch.testing.assert_close(log_probs.double(), expected, atol=1e-5, rtol=1e-5)
    actual = torch.autograd.grad((g * log_probs).sum(), case.leaves)
    reference = torch.autograd.grad((g.double() * expected).sum(), exact.leaves)
    for gradient, true in zip(actual, reference, strict=True):
        assert gradient.dtype == torch.bfloat16
        # Half a unit in the last of 8 bits, plus fp32 noise.
        assert ((gradient.double() - true).abs() <= true.abs() * 2**-8 + 1e-6).all()
    # The test can fail: a running sum in bf16 misses by far more.
    rounded = torch.zeros(97, 16, dtype=torch.bfloat16)
    for token in range(512):
        single = Case(exact.hidden[token : token + 1], exact.weight, case.labels[:1], exact.bias, 1.0, None, 1.0)
        single.inv_temperature = exact.inv_temperature[token : token + 1]
        rounded += torch.autograd.grad(g[token].double() * plain_head(single)[0].sum(), exact.weight)[0].bfloat16()
    assert ((rounded.double() - reference[1]).abs() > reference[1].abs() * 2**-8 + 1e-6).any()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_cuda_equals_the_plain_head_and_never_waits(dtype: torch.dtype) -> None:
    case = make_case(40, width=16, dtype=dtype, bias=True, softcap=5.0, temperature="tokens")
    exact = make_case(40, width=16, bias=True, softcap=5.0, temperature="tokens")
    for leaf, rounded in zip(exact.leaves, case.leaves, strict=True):
        leaf.data.copy_(rounded.data)
    g, e = token_weights(40)
    leaves = [leaf.detach().cuda().requires_grad_() for leaf in case.leaves]
    hidden, weight, bias = leaves
    labels, heat, upstream = case.labels.cuda(), case.inv_temperature.cuda(), [g.float().cuda(), e.float().cuda()]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = linear_log_prob(
            hidden,
            weight,
            labels,
            bias=bias,
            softcap=5.0,
            inv_temperature=heat,
            calculate_entropy=True,
            token_tile=16,
            vocabulary_tile=32,
        )
        actual = torch.autograd.grad(outputs, leaves, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = plain_head(exact)
    for output, reference in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output.double().cpu(), reference, atol=1e-4, rtol=1e-4)
    # 16-bit inputs: the gradient of the logits is rounded once before the product, and the result once after it.
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for gradient, reference in zip(actual, torch.autograd.grad(expected, exact.leaves, [g, e]), strict=True):
        torch.testing.assert_close(gradient.double().cpu(), reference, atol=tolerance, rtol=tolerance)


def test_precision_of_fp32_under_autocast() -> None:
    case = make_case(dtype=torch.float32)
    plain, _ = linear_log_prob(case.hidden, case.weight, case.labels, **SMALL)
    expected = torch.autograd.grad(plain.sum(), case.leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_probs, _ = linear_log_prob(case.hidden, case.weight, case.labels, **SMALL)
        actual = torch.autograd.grad(log_probs.sum(), case.leaves)
    assert torch.equal(log_probs, plain)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_no_tokens_keep_the_graph_connected() -> None:
    case = make_case(0)
    log_probs, entropy = linear_log_prob(case.hidden, case.weight, case.labels, calculate_entropy=True)
    (log_probs.sum() + entropy.sum()).backward()
    assert case.hidden.grad.shape == (0, 6)
    assert torch.equal(case.weight.grad, torch.zeros(97, 6, dtype=torch.float64))


def test_a_change_of_the_weight_before_backward_is_noticed() -> None:
    case = make_case()
    log_probs, _ = linear_log_prob(case.hidden, case.weight, case.labels)
    with torch.no_grad():
        case.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(97, 5)}, r"hidden \(13, 6\) and weight \(97, 5\)"),
        ({"weight": torch.zeros(97, 6, dtype=torch.bfloat16)}, "bfloat16"),
        ({"labels": torch.zeros(12, dtype=torch.int64)}, r"labels is torch.int64 \(12,\)"),
        ({"labels": torch.zeros(13, dtype=torch.int32)}, "labels is torch.int32"),
        ({"bias": torch.zeros(96)}, r"bias has shape \(96,\)"),
        ({"softcap": 0.0}, "softcap=0.0"),
        ({"scale": math.nan}, "scale=nan"),
        ({"inv_temperature": 0.0}, "inv_temperature=0.0"),
        ({"inv_temperature": torch.ones(12)}, r"inv_temperature has shape \(12,\)"),
        ({"inv_temperature": torch.ones(13, requires_grad=True)}, "pass it detached"),
        ({"token_tile": 0}, "token_tile=0"),
        ({"vocabulary_tile": -1}, "vocabulary_tile=-1"),
    ],
)
def test_errors_name_the_argument(change: dict, message: str) -> None:
    arguments = {"hidden": torch.zeros(13, 6), "weight": torch.zeros(97, 6), "labels": torch.zeros(13).long()}
    with pytest.raises(ValueError, match=message):
        linear_log_prob(**{**arguments, **change})
