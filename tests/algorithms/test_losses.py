import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser
from torch import Tensor

from lightning_rl_engines.algorithms import (
    CISPOLoss,
    GRPOAdvantage,
    GSPOLoss,
    PolicyLoss,
    PolicyLossBase,
    ReinforceLoss,
    SFTLoss,
    TokenOutputs,
    zero_variance_groups,
)
from lightning_rl_engines.algorithms.losses import TokenLoss
from lightning_rl_engines.sequence.experience import Experience
from lightning_rl_engines.sequence.packing import pack_row
from tests.algorithms.naive import (
    Batch,
    Result,
    combine,
    documents,
    gradients,
    make_batch,
    naive_mean,
    run,
    run_row,
)
from tests.support import run_workers

PACKINGS = [
    [[0, 1, 2, 3, 4, 5]],
    [[i] for i in range(6)],
    [[4, 0], [5], [], [3, 2, 1]],
]


def ppo_token(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None) -> Tensor:
    """Schulman et al. 2017, equation 7, and Ye et al. 2020, equation 5, for one token, as maxima of objectives."""
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if dual is not None and advantage < 0:
        objective = torch.maximum(objective, dual * advantage)
    return -objective


def ppo_terms(doc: dict[str, Tensor], low: float, high: float, dual: float | None = None) -> Tensor:
    ratios = (doc["log_probs"] - doc["old"]).exp()
    pairs = zip(ratios, doc["advantages"], strict=True)
    return torch.stack([ppo_token(ratio, advantage, low, high, dual) for ratio, advantage in pairs])


def gspo_terms(doc: dict[str, Tensor]) -> Tensor:
    """Zheng et al. 2025, equations 5 and 7: the sequence form, differentiated through the sequence ratio."""
    ratio = (doc["log_probs"] - doc["old"]).mean().exp()
    advantage = doc["advantages"][0]
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.97, 1.04) * advantage)
    return loss.expand(len(doc["log_probs"]))


def cispo_terms(doc: dict[str, Tensor]) -> Tensor:
    weight = (doc["log_probs"] - doc["old"]).exp().clamp(0.7, 1.4).detach()
    return -weight * doc["advantages"] * doc["log_probs"]


CASES = {
    "ppo": (PolicyLoss(), lambda doc: ppo_terms(doc, 0.2, 0.2)),
    "dapo": (PolicyLoss(clip_high=0.28), lambda doc: ppo_terms(doc, 0.2, 0.28)),
    "dual": (
        PolicyLoss(dual_clip=1.5, aggregation="seq-mean-token-sum"),
        lambda doc: ppo_terms(doc, 0.2, 0.2, 1.5),
    ),
    "gspo": (GSPOLoss(sequence_clip_low=0.03, sequence_clip_high=0.04), gspo_terms),
    "cispo": (CISPOLoss(is_weight_low=0.3, is_weight_high=0.4), cispo_terms),
    "reinforce": (
        ReinforceLoss(aggregation="seq-mean-token-mean"),
        lambda doc: -doc["advantages"] * doc["log_probs"],
    ),
}


def assert_same(result: Result, expected: Tensor, batch: Batch) -> None:
    assert result.loss == pytest.approx(expected.item(), rel=1e-6, abs=1e-12)
    log_prob_grad, entropy_grad = gradients(expected, batch)
    assert log_prob_grad.abs().max() > 1e-3
    torch.testing.assert_close(result.log_prob_grad, log_prob_grad, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(result.entropy_grad, entropy_grad, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("rows", PACKINGS)
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_equal_the_paper_however_packed(case: str, rows: list[list[int]]) -> None:
    loss, terms = CASES[case]
    batch = make_batch(seed=3)
    expected = naive_mean([terms(doc) for doc in documents(batch)], loss.aggregation)
    assert_same(run(loss, batch, rows), expected, batch)


@pytest.mark.parametrize("case", ["dapo", "dual", "cispo"])
def test_advantages_per_token(case: str) -> None:
    loss, terms = CASES[case]
    batch = make_batch(seed=4, per_token=True)
    expected = naive_mean([terms(doc) for doc in documents(batch)], loss.aggregation)
    assert_same(run(loss, batch, PACKINGS[2]), expected, batch)


def test_gspo_with_advantages_per_token() -> None:
    batch = make_batch(seed=4, per_token=True)
    loss, _ = CASES["gspo"]
    terms = []
    for doc in documents(batch):
        # Zheng et al. 2025, equations 13 and 14, written with the stop-gradients of the paper.
        sequence = (doc["log_probs"] - doc["old"]).mean().exp().detach()
        ratio = sequence * doc["log_probs"].exp() / doc["log_probs"].exp().detach()
        pairs = zip(ratio, doc["advantages"], strict=True)
        terms.append(torch.stack([ppo_token(r, a, 0.03, 0.04, None) for r, a in pairs]))
    assert_same(run(loss, batch, PACKINGS[2]), naive_mean(terms, loss.aggregation), batch)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_entropy_and_kl_terms(mode: str, estimator: str) -> None:
    loss = PolicyLoss(aggregation=mode, entropy_coef=0.3, kl_coef=0.7, kl_estimator=estimator)
    batch = make_batch(seed=5)
    docs = documents(batch)
    formulas = {
        "k1": lambda d: d,
        "k2": lambda d: d**2 / 2,
        "k3": lambda d: (-d).exp() - 1 + d,
        "abs": lambda d: d.abs(),
    }
    kls = [formulas[estimator](doc["log_probs"] - doc["ref"]) for doc in docs]
    entropies = [doc["entropy"] for doc in docs]
    expected = (
        naive_mean([ppo_terms(doc, 0.2, 0.2) for doc in docs], mode)
        - 0.3 * naive_mean(entropies, mode)
        + 0.7 * naive_mean(kls, mode)
    )
    result = run(loss, batch, PACKINGS[2])
    assert_same(result, expected, batch)
    assert result.entropy_grad.abs().max() > 1e-3
    assert result.metrics["entropy"] == pytest.approx(torch.cat(entropies).mean().item())
    assert result.metrics["kl_to_reference"] == pytest.approx(torch.cat(kls).mean().item())


@pytest.mark.parametrize("rows", PACKINGS)
def test_metrics_of_ppo(rows: list[list[int]]) -> None:
    batch = make_batch(seed=6)
    loss = PolicyLoss(clip_low=0.1, clip_high=0.3, dual_clip=1.5, entropy_coef=0.1, aggregation="seq-mean-token-mean")
    metrics = run(loss, batch, rows).metrics
    docs = documents(batch)
    ratios = torch.cat([(doc["log_probs"] - doc["old"]).exp() for doc in docs]).tolist()
    advantages = torch.cat([doc["advantages"] for doc in docs]).tolist()
    pairs = list(zip(ratios, advantages, strict=True))
    count = len(pairs)
    low = sum(r < 0.9 and a < 0 for r, a in pairs) / count
    high = sum(r > 1.3 and a > 0 for r, a in pairs) / count
    expected = {
        "policy_loss": naive_mean([ppo_terms(doc, 0.1, 0.3, 1.5) for doc in docs], "seq-mean-token-mean").item(),
        "approx_kl": sum(r - 1 - math.log(r) for r in ratios) / count,
        "ratio_mean": sum(ratios) / count,
        "ratio_max": max(ratios),
        "ratio_min": min(ratios),
        "clip_fraction": low + high,
        "clip_fraction_low": low,
        "clip_fraction_high": high,
        "dual_clip_fraction": sum(r > 1.5 and a < 0 for r, a in pairs) / count,
        "entropy": torch.cat([doc["entropy"] for doc in docs]).mean().item(),
        "kl_to_reference": torch.cat(
            [(doc["ref"] - doc["log_probs"]).exp() - 1 + doc["log_probs"] - doc["ref"] for doc in docs]
        )
        .mean()
        .item(),
    }
    assert min(low, high, expected["dual_clip_fraction"]) > 0
    assert metrics == pytest.approx(expected, rel=1e-6)


def test_metrics_of_gspo_count_documents() -> None:
    batch = make_batch(seed=6)
    loss, _ = CASES["gspo"]
    metrics = run(loss, batch, PACKINGS[2]).metrics
    docs = documents(batch)
    pairs = [((d["log_probs"] - d["old"]).mean().exp().item(), d["advantages"][0].item()) for d in docs]
    low = sum(r < 0.97 and a < 0 for r, a in pairs) / len(docs)
    high = sum(r > 1.04 and a > 0 for r, a in pairs) / len(docs)
    assert low + high > 0
    assert metrics["clip_fraction"] == pytest.approx(low + high)
    assert metrics["clip_fraction_low"] == pytest.approx(low)
    assert metrics["clip_fraction_high"] == pytest.approx(high)
    assert metrics["ratio_mean"] == pytest.approx(sum(r for r, _ in pairs) / len(docs), rel=1e-6)
    assert metrics["ratio_max"] == pytest.approx(max(r for r, _ in pairs))


def single_token(loss: PolicyLossBase, ratio: float, advantage: float) -> tuple[float, float]:
    """Loss of one response token, and its derivative with respect to the log-probability."""
    log_ratio = math.log(ratio)
    experience = Experience.from_documents(
        input_ids=[[1, 2]],
        response_mask=[[0, 1]],
        advantages=torch.tensor([advantage], dtype=torch.float64),
        old_log_probs=[torch.tensor([0.0, -2.0], dtype=torch.float64)],
    )
    log_probs = torch.tensor([-2.0 + log_ratio, math.nan], dtype=torch.float64, requires_grad=True)
    output = loss(TokenOutputs(log_probs=log_probs), pack_row(experience, [0]))
    output.total.backward()
    assert log_probs.grad[1] == 0
    return output.total.item(), log_probs.grad[0].item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.56, 0.0),  # above the range, and the advantage would push further: 1.28 * 2
        (0.5, 2.0, -1.0, -1.0),  # below the range, but the advantage pulls back
        (0.5, -2.0, 1.6, 0.0),  # below the range: 0.8 * 2
        (2.0, -2.0, 4.0, 4.0),  # above the range, but the advantage pulls back
        (3.5, -2.0, 6.0, 0.0),  # beyond the dual clip: 3 * 2
        (3.5, 2.0, -2.56, 0.0),  # the dual clip is for negative advantages
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_dual_clip_by_hand(ratio: float, advantage: float, value: float, slope: float) -> None:
    loss = PolicyLoss(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert single_token(loss, ratio, advantage) == pytest.approx((value, slope))


def test_no_dual_clip_by_default() -> None:
    assert single_token(PolicyLoss(), 3.5, -2.0) == pytest.approx((7.0, 7.0))


@pytest.mark.parametrize("loss", [PolicyLoss(), GSPOLoss(), CISPOLoss(), ReinforceLoss()])
@pytest.mark.parametrize("ratio", [1e-30, 1e30])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_extreme_ratios_stay_finite(loss: PolicyLossBase, ratio: float, advantage: float) -> None:
    assert all(math.isfinite(number) for number in single_token(loss, ratio, advantage))


def sharded(rank_count: int, names: list[str]) -> list[tuple[float, dict[str, float], Tensor, Tensor]]:
    """One row split over the sequence ranks of the default group; this rank's share of loss, metrics and gradients."""
    results = []
    for name in names:
        batch = make_batch(seed=3)
        output = run_row(
            CASES[name][0],
            batch,
            [4, 0, 5, 2, 1, 3],
            sequence_size=rank_count,
            sequence_rank=dist.get_rank(),
            group=dist.group.WORLD,
        )
        result = combine([output], batch)
        results.append((result.loss, result.metrics, result.log_prob_grad, result.entropy_grad))
    return results


@pytest.mark.parametrize("rank_count", [2, 4])
def test_sequence_shards_add_up_to_the_row(rank_count: int) -> None:
    names = ["gspo", "dual", "reinforce"]
    per_rank = run_workers(rank_count, sharded, rank_count, names)
    for index, name in enumerate(names):
        batch = make_batch(seed=3)
        whole = run(CASES[name][0], batch, [[4, 0, 5, 2, 1, 3]])
        parts = [results[index] for results in per_rank]
        assert sum(part[0] for part in parts) == pytest.approx(whole.loss, rel=1e-6)
        torch.testing.assert_close(sum(part[2] for part in parts), whole.log_prob_grad, rtol=1e-6, atol=1e-12)
        for metric, value in whole.metrics.items():
            combine_ranks = {"ratio_max": max, "ratio_min": min}.get(metric, sum)
            assert combine_ranks(part[1][metric] for part in parts) == pytest.approx(value, rel=1e-6), metric


ALL_LOSSES = [
    PolicyLoss(entropy_coef=0.1, kl_coef=0.1, dual_clip=3.0),
    GSPOLoss(entropy_coef=0.1, kl_coef=0.1, kl_estimator="k3+"),
    CISPOLoss(entropy_coef=0.1, kl_coef=0.1, kl_estimator="k1"),
    ReinforceLoss(entropy_coef=0.1, kl_coef=0.1, kl_estimator="k2", aggregation="seq-mean-token-mean"),
    SFTLoss(aggregation="seq-mean-token-mean"),
]


@pytest.mark.parametrize("loss", ALL_LOSSES, ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_garbage_changes_nothing(loss: TokenLoss, garbage: float) -> None:
    clean = run(loss, make_batch(), PACKINGS[2], garbage=0.0)
    dirty = run(loss, make_batch(), PACKINGS[2], garbage=garbage)
    assert dirty.loss == clean.loss and math.isfinite(clean.loss)
    assert dirty.metrics == clean.metrics
    assert torch.equal(dirty.log_prob_grad, clean.log_prob_grad)
    assert torch.equal(dirty.entropy_grad, clean.entropy_grad)
    assert not clean.log_prob_grad[~make_batch().experience["response_mask"]].any()


@pytest.mark.parametrize("loss", ALL_LOSSES, ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("row", [[], [5]])
def test_micro_batch_without_response_tokens(loss: TokenLoss, row: list[int]) -> None:
    batch = make_batch()
    output = run_row(loss, batch, row)
    assert output.total.item() == 0
    output.total.backward()
    assert torch.equal(batch.log_probs.grad, torch.zeros_like(batch.log_probs))
    neutral = {"max": -math.inf, "min": math.inf}
    assert all(value.item() == neutral.get(reduction, 0.0) for value, reduction in output.metrics.values())
    # Others are unaffected, whatever the order.
    alone = run(loss, make_batch(), [[0, 1, 2, 3, 4]])
    after = run(loss, make_batch(), [row, [0, 1, 2, 3, 4]])
    assert after.loss == alone.loss and after.metrics == alone.metrics
    assert torch.equal(after.log_prob_grad, alone.log_prob_grad)


def test_nan_of_a_response_token_is_not_hidden() -> None:
    batch = make_batch()
    with torch.no_grad():
        batch.log_probs[4] = math.nan
    assert math.isnan(run(PolicyLoss(), batch, PACKINGS[0]).loss)


def test_half_precision_columns_are_used_in_fp32() -> None:
    old = torch.tensor([0.0, -2.0], dtype=torch.bfloat16)
    experience = Experience.from_documents(
        input_ids=[[1, 2]], response_mask=[[0, 1]], advantages=[1.0], old_log_probs=[old]
    )
    log_probs = torch.tensor([-2.0 + 2**-12, 0.0], requires_grad=True)
    output = PolicyLoss()(TokenOutputs(log_probs=log_probs), pack_row(experience, [0]))
    assert output.total.dtype == torch.float32
    assert output.total.item() == pytest.approx(-math.exp(2**-12), rel=1e-7)


def test_reinforce_needs_no_old_log_probs() -> None:
    batch = make_batch(seed=3)
    expected = run(ReinforceLoss(), batch, PACKINGS[0])
    batch.experience = batch.experience.drop("old_log_probs", "ref_log_probs")
    result = run(ReinforceLoss(), batch, PACKINGS[0])
    assert result.loss == expected.loss and set(result.metrics) == {"policy_loss", "entropy"}
    assert ReinforceLoss().required_columns == ("response_mask", "advantages")


def test_declared_needs() -> None:
    assert PolicyLoss().required_columns == ("response_mask", "advantages", "old_log_probs")
    loss = GSPOLoss(kl_coef=0.1, entropy_coef=-0.1)
    assert loss.required_columns == ("response_mask", "advantages", "old_log_probs", "ref_log_probs")
    assert loss.needs_entropy and loss.needs_reference
    assert not PolicyLoss().needs_entropy and not PolicyLoss().needs_reference
    assert SFTLoss().required_columns == ("response_mask",)


def test_changing_the_class_on_the_command_line_does_not_carry_the_old_settings_over() -> None:
    class Module:
        def __init__(self, loss: PolicyLossBase | Callable = PolicyLoss()) -> None:  # noqa: B008
            self.loss = loss

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Module, "model")
    default = parser.instantiate(parser.parse_args([])).model.loss
    assert (type(default), default.aggregation, default.clip_high) == (PolicyLoss, "token-mean", 0.2)
    changed = parser.instantiate(parser.parse_args(["--model.loss=GSPOLoss"])).model.loss
    assert type(changed) is GSPOLoss
    assert (changed.aggregation, changed.sequence_clip_high) == ("seq-mean-token-mean", 4e-4)
    back = ["--model.loss=GSPOLoss", "--model.loss.sequence_clip_low=0.01", "--model.loss=PolicyLoss"]
    loss = parser.instantiate(parser.parse_args(back)).model.loss
    assert (type(loss), loss.aggregation, loss.clip_low) == (PolicyLoss, "token-mean", 0.2)


def test_missing_inputs_are_named() -> None:
    batch = make_batch()
    micro_batch = pack_row(batch.experience.drop("ref_log_probs"), [0])
    outputs = TokenOutputs(log_probs=torch.zeros(5))
    with pytest.raises(ValueError, match=r"PolicyLoss needs the column 'ref_log_probs'"):
        PolicyLoss(kl_coef=0.1)(outputs, micro_batch)
    with pytest.raises(ValueError, match=r"entropy_coef=0.1.*calculate_entropy=True"):
        PolicyLoss(entropy_coef=0.1)(outputs, micro_batch)
    with pytest.raises(ValueError, match=r"SFTLoss needs outputs.log_probs.*head='lm'"):
        SFTLoss()(TokenOutputs(values=torch.zeros(5)), micro_batch)


@pytest.mark.parametrize(
    ("loss_class", "arguments", "message"),
    [
        (PolicyLoss, {"clip_low": -0.1}, "clip_low=-0.1.*0.2"),
        (PolicyLoss, {"clip_low": 1.5}, "clip_low=1.5"),
        (PolicyLoss, {"clip_high": -0.1}, "clip_high=-0.1"),
        (PolicyLoss, {"clip_high": math.nan}, "clip_high=nan"),
        (PolicyLoss, {"dual_clip": 1.0}, "dual_clip=1.0.*3.0"),
        (PolicyLoss, {"kl_coef": -0.1}, "kl_coef=-0.1"),
        (PolicyLoss, {"entropy_coef": math.inf}, "entropy_coef=inf"),
        (PolicyLoss, {"kl_estimator": "k9"}, "kl_estimator='k9'.*k3"),
        (PolicyLoss, {"aggregation": "sum"}, "aggregation='sum'"),
        (GSPOLoss, {"sequence_clip_low": 2.0}, "sequence_clip_low=2.0.*0.0003"),
        (GSPOLoss, {"sequence_clip_high": -1.0}, "sequence_clip_high=-1.0"),
        (CISPOLoss, {"is_weight_low": -0.5}, "is_weight_low=-0.5"),
        (CISPOLoss, {"is_weight_high": math.inf}, "is_weight_high=inf"),
    ],
)
def test_values_out_of_range_are_refused(loss_class: type, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss_class(**arguments)


def test_group_without_signal_moves_the_policy_through_kl_until_it_is_filtered() -> None:
    batch = make_batch()
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    group_ids = torch.tensor([0, 0, 0, 1, 1, 1])
    advantages = GRPOAdvantage()(rewards, group_ids, torch.tensor(batch.experience.response_lengths))
    batch.experience = batch.experience.with_document_columns(advantages=advantages.double())
    loss = PolicyLoss(kl_coef=0.1)
    tokens_of_group_0 = slice(0, sum(batch.experience.lengths[:3]))
    assert not run(PolicyLoss(), batch, PACKINGS[0]).log_prob_grad[tokens_of_group_0].any()
    assert run(loss, batch, PACKINGS[0]).log_prob_grad[tokens_of_group_0].any()
    kept = zero_variance_groups(rewards, group_ids).nonzero().flatten().tolist()
    assert kept == [3, 4, 5]
    start = tokens_of_group_0.stop
    filtered = Batch(
        batch.experience.select(kept),
        batch.log_probs.detach()[start:].clone().requires_grad_(),
        batch.entropy.detach()[start:].clone().requires_grad_(),
    )
    docs = documents(filtered)
    expected = naive_mean([ppo_terms(doc, 0.2, 0.2) for doc in docs], "token-mean") + 0.1 * naive_mean(
        [(doc["ref"] - doc["log_probs"]).exp() - 1 - (doc["ref"] - doc["log_probs"]) for doc in docs], "token-mean"
    )
    assert_same(run(loss, filtered, [[0, 1, 2]]), expected, filtered)
