"""Experts and routers beside plain loops and those of transformers."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("torchtitan")

from torchtitan.models.common.linear import Linear
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from lightning_rl_engines.models.titan.moe import (
    ExactExperts,
    ExactRouter,
    Float32Linear,
    expert_matmul,
    limit_to_groups,
)

COUNTS = (3, 0, 5, 1, 0)


def experts(dtype: torch.dtype) -> tuple[ExactExperts, torch.Tensor]:
    torch.manual_seed(0)
    module = ExactExperts.Config(dim=6, hidden_dim=10, num_experts=len(COUNTS)).build()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module.to(dtype), torch.randn(sum(COUNTS), 6, dtype=dtype, requires_grad=True)


def naive(module: ExactExperts, x: torch.Tensor) -> torch.Tensor:
    owner = torch.repeat_interleave(torch.arange(len(COUNTS)), torch.tensor(COUNTS))
    rows = []
    for row, expert in zip(x, owner.tolist(), strict=True):
        w1, w2, w3 = module.w1_EFD[expert], module.w2_EDF[expert], module.w3_EFD[expert]
        rows.append(w2 @ (F.silu(w1 @ row) * (w3 @ row)))
    return torch.stack(rows)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_experts_compute_in_the_type_of_their_input(dtype: torch.dtype, tolerance: float) -> None:
    module, x = experts(dtype)
    expected = naive(module, x)
    weights = torch.randn_like(expected)
    inputs = [x, *module.parameters()]
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    found = module(x, torch.tensor(COUNTS))
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(torch.autograd.grad((found * weights).sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=10 * tolerance)


def test_experts_of_bf16_stay_in_bf16() -> None:
    module, x = experts(torch.bfloat16)
    found = module(x, torch.tensor(COUNTS))
    assert found.dtype == torch.bfloat16
    exact, _ = experts(torch.float32)
    exact.load_state_dict(module.state_dict())
    torch.testing.assert_close(found.float(), naive(exact, x.float()), rtol=0.05, atol=0.3)


@pytest.mark.parametrize("counts", [COUNTS, (0,) * 5])
def test_experts_without_tokens_get_gradients_of_zero(counts: tuple[int, ...]) -> None:
    module, x = experts(torch.float32)
    module(x[: sum(counts)], torch.tensor(counts)).square().sum().backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
        busy = parameter.grad.flatten(1).abs().amax(1) > 0
        assert busy.tolist() == [count > 0 for count in counts]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [64, 60])
def test_the_grouped_kernel_computes_what_the_loop_computes(size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(sum(COUNTS), size, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(len(COUNTS), size, 32, device="cuda", dtype=torch.bfloat16)
    found = expert_matmul(x, weight, torch.tensor(COUNTS, device="cuda"))
    expected = torch.cat([block @ matrix for block, matrix in zip(x.split(COUNTS), weight, strict=True)])
    torch.testing.assert_close(found, expected)


def routers(normalised: bool, *, equal: bool = False) -> tuple[ExactRouter, Qwen3MoeTopKRouter]:
    torch.manual_seed(1)
    options = {"hidden_size": 12, "num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": normalised}
    theirs = Qwen3MoeTopKRouter(Qwen3MoeConfig(**options))
    gate = Float32Linear.Config(in_features=12, out_features=7)
    ours = ExactRouter.Config(num_experts=7, gate=gate, top_k=3, score_func="softmax", route_norm=normalised).build()
    with torch.no_grad():
        theirs.weight.normal_()
        if equal:
            theirs.weight[1:] = theirs.weight[0]
        ours.gate.weight.copy_(theirs.weight)
    return ours, theirs


@pytest.mark.parametrize("normalised", [True, False])
def test_weights_and_experts_are_those_of_transformers(normalised: bool) -> None:
    ours, theirs = routers(normalised)
    hidden = torch.randn(2, 50, 12)
    _, weights, chosen = theirs(hidden)
    found_weights, found, scores = ours(hidden)
    assert torch.equal(found.flatten(0, 1), chosen)
    torch.testing.assert_close(found_weights.flatten(0, 1), weights, rtol=1e-6, atol=1e-7)
    assert scores.shape == (2, 50, 7)
    assert (weights.sum(-1) - 1).abs().max() < 1e-6 if normalised else (weights.sum(-1) < 0.99).any()


def test_equal_scores_are_broken_as_by_transformers() -> None:
    ours, theirs = routers(True, equal=True)
    hidden = torch.randn(1, 20, 12)
    assert torch.equal(ours(hidden)[1][0], theirs(hidden)[2])


def test_the_gate_computes_in_fp32_for_bf16_models() -> None:
    ours, _ = routers(True)
    hidden = torch.randn(1, 20, 12).bfloat16()
    ours.gate.weight.data = ours.gate.weight.data.bfloat16()
    weights, _, scores = ours.to(torch.bfloat16)(hidden)
    assert (weights.dtype, scores.dtype) == (torch.float32, torch.float32)
    exact = (hidden.float() @ ours.gate.weight.float().T).softmax(-1)
    torch.testing.assert_close(scores, exact, rtol=1e-6, atol=1e-7)


def test_a_gate_without_fp32_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gate=Linear\.Config.*use Float32Linear\.Config"):
        ExactRouter.Config(num_experts=4, gate=Linear.Config(in_features=4, out_features=4))


def test_groups_count_by_their_two_best_experts() -> None:
    scores = torch.tensor([[[5.0, 0.0, 0.0, 3.0, 3.0, 1.0, 2.0, 2.0, 2.5]]])
    limited = limit_to_groups(scores, groups=3, limit=1)
    assert limited.tolist() == [[[-torch.inf] * 3 + [3.0, 3.0, 1.0] + [-torch.inf] * 3]]
    assert torch.equal(limit_to_groups(scores, groups=3, limit=3), scores)


def test_sigmoid_scores_with_a_bias_for_the_choice_only() -> None:
    gate = Float32Linear.Config(in_features=4, out_features=6)
    router = ExactRouter.Config(
        num_experts=6, gate=gate, top_k=2, num_expert_groups=3, num_limited_groups=2, route_norm=True, route_scale=1.5
    ).build()
    torch.manual_seed(0)
    hidden, bias = torch.randn(1, 40, 4), 2 * torch.randn(6)
    with torch.no_grad():
        weights, chosen, scores = router(hidden, bias)
    torch.testing.assert_close(scores, (hidden @ router.gate.weight.T).sigmoid().detach())
    for token in range(40):
        choice = scores[0, token] + bias
        groups = choice.view(3, 2).sum(-1).topk(2).indices.tolist()
        allowed = [expert for expert in range(6) if expert // 2 in groups]
        wanted = sorted(allowed, key=lambda expert: -float(choice[expert]))[:2]
        assert chosen[0, token].tolist() == wanted
        expected = scores[0, token, wanted] / scores[0, token, wanted].sum() * 1.5
        torch.testing.assert_close(weights[0, token], expected)
