import itertools
import math

import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_rl_engines.algorithms import CISPOLoss, GSPOLoss, PolicyLoss, ReinforceLoss
from lightning_rl_engines.algorithms.corrections import CorrectionSums, RolloutCorrection
from lightning_rl_engines.sequence.experience import Experience
from tests.algorithms.naive import denominator, documents, gradients, make_batch, naive_mean, run

LENGTHS = (5, 2, 9, 3, 14, 1)


def make(seed=0, spread=0.8) -> Experience:
    """fp64 columns; garbage outside the response; two response tokens without a probability."""
    generator = torch.Generator().manual_seed(seed)

    def normal(n):
        return torch.randn(n, generator=generator, dtype=torch.float64)

    masks = [torch.rand(n, generator=generator) > 0.25 for n in LENGTHS]
    masks[1][1] = masks[4][3] = masks[2][8] = True
    sampler = [-2 + 0.5 * normal(n) for n in LENGTHS]
    # Documents drift by different amounts, so that sequence ratios differ.
    trainer = [x + spread * (normal(len(x)) + normal(1)) for x in sampler]
    for mask, column in zip(masks, sampler, strict=True):
        mask[0] = False
        column[~mask] = torch.nan
    sampler[4][3], trainer[2][8] = -torch.inf, torch.nan
    return Experience.from_documents(
        input_ids=[torch.arange(n) for n in LENGTHS],
        response_mask=masks,
        rollout_log_probs=sampler,
        old_log_probs=trainer,
        advantages=normal(len(LENGTHS)),
    )


def naive(experience, kind, level, lower, upper, reject=None, threshold=None, negative=False):
    """Weights and mask by loops over tokens, and what the metrics are made of."""
    weights, kept, gaps, ratios, seen = [], [], [], [], []
    for index in range(len(experience)):
        mask = experience.documents("response_mask")[index].tolist()
        sampler = experience.documents("rollout_log_probs")[index].tolist()
        trainer = experience.documents("old_log_probs")[index].tolist()
        usable = [m and math.isfinite(a) and math.isfinite(b) for m, a, b in zip(mask, sampler, trainer, strict=True)]
        own = [b - a for u, a, b in zip(usable, sampler, trainer, strict=True) if u]
        mean = sum(own) / len(own) if own else 0.0
        kls = {"k1": -mean, "k3": sum(math.exp(x) - 1 - x for x in own) / len(own) if own else 0.0, None: 0.0}
        out = reject is not None and kls[reject] > threshold
        out = out and (not negative or float(experience["advantages"][index]) < 0)
        seen.append((bool(own), out, mean))
        for u, a, b in zip(usable, sampler, trainer, strict=True):
            kept.append(u and not out)
            if not u:
                weights.append(0.0)
                continue
            ratio = math.exp({"token": b - a, "sequence": sum(own), "geometric": mean}[level])
            gaps.append(b - a)
            ratios.append(ratio)
            weight = {
                "none": 1.0,
                "is": ratio,
                "tis": min(ratio, upper or math.inf),
                "mis": ratio if (lower or 0) <= ratio <= (upper or math.inf) else 0.0,
            }[kind]
            weights.append(0.0 if out else weight)
    return weights, kept, gaps, ratios, seen


CASES = [
    ("none", None, None),
    ("is", None, None),
    ("tis", None, 1.3),
    ("mis", 0.6, 1.5),
    ("mis", 0.0, 1.5),
]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("kind", "lower", "upper"), CASES)
@pytest.mark.parametrize(
    ("reject", "threshold", "negative"), [(None, None, False), ("k1", 0.1, True), ("k3", 0.3, False)]
)
def test_weights_mask_and_metrics_token_by_token(kind, lower, upper, level, reject, threshold, negative):
    experience = make()
    correction = RolloutCorrection(
        kind=kind,
        level=level,
        lower=lower,
        upper=upper,
        reject_kl=reject,
        reject_threshold=threshold,
        reject_negative_only=negative,
    )
    corrected, sums = correction.apply(experience)
    weights, kept, gaps, ratios, seen = naive(experience, kind, level, lower, upper, reject, threshold, negative)
    assert corrected["response_mask"].tolist() == kept
    assert corrected.response_lengths == tuple(int(x.sum()) for x in corrected.documents("response_mask"))
    if kind == "none":
        assert "rollout_weights" not in corrected
    else:
        assert corrected["rollout_weights"].dtype == torch.float32
        torch.testing.assert_close(corrected["rollout_weights"], torch.tensor(weights), rtol=1e-6, atol=0)

    metrics = correction.metrics([sums])
    used = torch.tensor([w for w, k in zip(weights, kept, strict=True) if k], dtype=torch.float64)
    documents_seen = [item for item in seen if item[0]]
    unusable = int(experience["response_mask"].sum()) - len(gaps)
    assert unusable == 2
    expected = {
        "rollout_ratio_mean": sum(ratios) / len(ratios),
        "rollout_ratio_min": min(ratios),
        "rollout_ratio_max": max(ratios),
        "rollout_weight_mean": float(used.mean()),
        "rollout_ess": float(used.sum() ** 2 / (len(used) * used.square().sum())),
        "rollout_rejected_fraction": sum(item[1] for item in documents_seen) / len(documents_seen),
        "rollout_unusable_fraction": unusable / (len(gaps) + unusable),
        "rollout_kl_k1": -sum(gaps) / len(gaps),
        "rollout_kl_k3": sum(math.exp(x) - 1 - x for x in gaps) / len(gaps),
        "rollout_log_prob_gap_max": max(abs(x) for x in gaps),
        "rollout_perplexity_ratio": sum(math.exp(-item[2]) for item in documents_seen) / len(documents_seen),
    }
    beyond = [r for r in ratios if r > (upper or math.inf) or r < (lower or 0.0)]
    if kind in ("tis", "mis"):
        assert 0 < len(beyond) < len(ratios)
        expected[{"tis": "rollout_truncated_fraction", "mis": "rollout_masked_fraction"}[kind]] = len(beyond) / len(
            ratios
        )
    assert metrics == {name: pytest.approx(value, rel=1e-9) for name, value in expected.items()}
    if reject is not None:
        assert 0 < metrics["rollout_rejected_fraction"] < 1


def test_metrics_do_not_depend_on_who_holds_which_document():
    experience = make(seed=3)
    correction = RolloutCorrection(kind="mis", level="geometric", reject_kl="k3", reject_threshold=0.3)
    whole, sums = correction.apply(experience)
    expected = correction.metrics([sums])
    for shares in ([[5, 0, 3], [4, 2, 1]], [[], [1, 2, 3, 4, 5, 0]], [[i] for i in range(6)]):
        results = [correction.apply(experience.select(share)) for share in shares]
        for order in (results, results[::-1]):
            found = correction.metrics([item for _, item in order])
            assert found == {name: pytest.approx(value, rel=1e-12) for name, value in expected.items()}
        for share, (part, _) in zip(shares, results, strict=True):
            if share:
                assert torch.equal(part["rollout_weights"], whole.select(share)["rollout_weights"])


def test_equal_log_probs_change_nothing():
    experience = make()
    mask = experience["response_mask"]
    same = torch.where(mask, torch.full_like(experience["old_log_probs"], -1.5), torch.nan)
    experience = experience.with_token_columns(old_log_probs=same, rollout_log_probs=same)
    for kind, level in itertools.product(("is", "tis", "mis"), ("token", "sequence", "geometric")):
        correction = RolloutCorrection(kind=kind, level=level, reject_kl="k3", reject_threshold=1e-9)
        corrected, sums = correction.apply(experience)
        assert torch.equal(corrected["rollout_weights"], mask.float())
        assert torch.equal(corrected["response_mask"], mask)
        metrics = correction.metrics([sums])
        assert metrics["rollout_ess"] == 1.0 and metrics["rollout_kl_k3"] == 0.0


def test_importance_sampling_recovers_expectations_under_the_trainer():
    # Exact expectations over a vocabulary of four: sum_x p(x) w(x) f(x) = sum_x q(x) f(x).
    sampler = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    trainer = torch.tensor([0.4, 0.1, 0.25, 0.25], dtype=torch.float64)
    result = RolloutCorrection(kind="is")(
        rollout_log_probs=sampler.log(),
        old_log_probs=trainer.log(),
        response_mask=torch.ones(4, dtype=torch.bool),
        lengths=[4],
    )
    torch.testing.assert_close(sampler * result.weights, trainer, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [[[0, 1, 2, 3, 4, 5]], [[4, 0], [5], [], [3, 2, 1]]])
@pytest.mark.parametrize("case", ["decoupled_ppo", "cispo", "reinforce", "gspo"])
def test_losses_multiply_their_policy_term(case, rows):
    batch = make_batch(seed=7)
    generator = torch.Generator().manual_seed(1)
    old = batch.experience["old_log_probs"]
    behaviour = old + 0.6 * torch.randn(old.shape, generator=generator, dtype=torch.float64)
    experience = batch.experience.with_token_columns(rollout_log_probs=behaviour)
    corrected, _ = RolloutCorrection(kind="tis", upper=1.4).apply(experience)
    batch.experience = corrected
    weights = [
        (o - b).exp().clamp(max=1.4)[mask]
        for o, b, mask in zip(
            experience.documents("old_log_probs"),
            experience.documents("rollout_log_probs"),
            experience.documents("response_mask"),
            strict=True,
        )
        if mask.any()
    ]

    def policy_term(doc):
        ratio = (doc["log_probs"] - doc["old"]).exp()
        if case == "decoupled_ppo":
            # Hilton et al. 2021, equation 5: ratios are clipped around the proximal policy.
            clipped = ratio.clamp(0.8, 1.2)
            return -torch.minimum(ratio * doc["advantages"], clipped * doc["advantages"])
        if case == "cispo":
            return -ratio.detach().clamp(0.0, 5.0) * doc["advantages"] * doc["log_probs"]
        if case == "reinforce":
            return -doc["advantages"] * doc["log_probs"]
        sequence = (doc["log_probs"] - doc["old"]).mean().exp()
        sequence = sequence.detach() * (doc["log_probs"] - doc["log_probs"].detach()).exp()
        return -torch.minimum(sequence * doc["advantages"], sequence.clamp(0.7, 1.3) * doc["advantages"])

    loss = {
        "decoupled_ppo": PolicyLoss(entropy_coef=0.3, kl_coef=0.1, kl_estimator="k2"),
        "cispo": CISPOLoss(),
        "reinforce": ReinforceLoss(),
        "gspo": GSPOLoss(sequence_clip_low=0.3, sequence_clip_high=0.3),
    }[case]
    docs = documents(batch)
    expected = naive_mean([policy_term(doc) * w for doc, w in zip(docs, weights, strict=True)], loss.aggregation)
    if case == "decoupled_ppo":  # neither entropy nor KL is weighted
        expected = expected - 0.3 * naive_mean([doc["entropy"] for doc in docs], "token-mean")
        kls = [0.5 * (doc["log_probs"] - doc["ref"]) ** 2 for doc in docs]
        expected = expected + 0.1 * naive_mean(kls, "token-mean")
    result = run(loss, batch, rows)
    assert result.loss == pytest.approx(expected.item(), rel=1e-6)
    log_prob_grad, entropy_grad = gradients(expected, batch)
    assert log_prob_grad.abs().max() > 1e-3
    torch.testing.assert_close(result.log_prob_grad, log_prob_grad, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(result.entropy_grad, entropy_grad, rtol=1e-6, atol=1e-9)
    assert result.metrics["policy_loss"] == pytest.approx(
        naive_mean([policy_term(doc) * w for doc, w in zip(docs, weights, strict=True)], loss.aggregation).item(),
        rel=1e-6,
    )


def test_rejected_documents_leave_the_denominators_and_masked_tokens_stay():
    experience = make()
    before = denominator("sequences", experience)
    rejecting, _ = RolloutCorrection(kind="none", reject_kl="k3", reject_threshold=0.3).apply(experience)
    assert 0 < denominator("sequences", rejecting) < before
    masking, sums = RolloutCorrection(kind="mis", lower=0.6, upper=1.5).apply(experience)
    assert sums.bounded > 0
    assert denominator("tokens", masking) == denominator("tokens", experience) - 2  # those without a probability


def test_no_documents_and_no_tokens():
    correction = RolloutCorrection()
    empty = Experience.from_documents(input_ids=[[1, 2]], response_mask=[[0, 1]]).select([])
    assert correction.apply(empty) == (empty, CorrectionSums())
    metrics = correction.metrics([CorrectionSums(), CorrectionSums()])
    assert metrics["rollout_ess"] == 0.0
    assert "rollout_ratio_max" not in metrics and all(map(math.isfinite, metrics.values()))
    silent = make().with_columns(response_mask=[[0] * n for n in LENGTHS])
    corrected, sums = correction.apply(silent)
    assert sums == CorrectionSums()
    assert not corrected["rollout_weights"].any()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": "icepop"}, ["kind='icepop'", "mis"]),
        ({"level": "group"}, ["level='group'", "geometric"]),
        ({"kind": "is", "upper": 2.0}, ["upper=2.0", "kind='is'"]),
        ({"kind": "tis", "lower": 0.5}, ["lower=0.5", "kind='mis'"]),
        ({"kind": "none", "lower": 0.5}, ["lower=0.5"]),
        ({"upper": 0.0}, ["upper=0.0", "above lower=0"]),
        ({"upper": math.inf}, ["upper=inf", "finite"]),
        ({"upper": math.nan}, ["upper=nan"]),
        ({"kind": "mis", "lower": -1.0}, ["lower=-1.0"]),
        ({"kind": "mis", "lower": 6.0}, ["above lower=6.0"]),
        ({"reject_kl": "k2", "reject_threshold": 1.0}, ["reject_kl='k2'"]),
        ({"reject_kl": "k1"}, ["reject_threshold=None", "0.05"]),
        ({"reject_kl": "k1", "reject_threshold": 0.0}, ["reject_threshold=0.0"]),
        ({"reject_threshold": 0.1}, ["reject_threshold=0.1", "reject_kl"]),
        ({"reject_negative_only": True}, ["reject_negative_only=True", "reject_kl"]),
    ],
)
def test_configurations_that_are_refused(arguments, words):
    with pytest.raises(ValueError) as error:
        RolloutCorrection(**arguments)
    for word in words:
        assert word in str(error.value)


def test_experiences_that_are_refused():
    experience = make()
    correction = RolloutCorrection(reject_kl="k1", reject_threshold=0.1, reject_negative_only=True)
    for name in ("rollout_log_probs", "old_log_probs", "advantages"):
        with pytest.raises(ValueError, match=f"needs the column '{name}'"):
            correction.apply(experience.drop(name))
    corrected, _ = correction.apply(experience)
    with pytest.raises(ValueError, match="once per update"):
        correction.apply(corrected)
    columns = {name: experience[name] for name in correction.required_columns}
    with pytest.raises(ValueError, match="advantages=None"):
        correction(**columns, lengths=LENGTHS)
    with pytest.raises(ValueError, match="sum to 5"):
        correction(**columns, lengths=[5])


def test_advantages_per_token_count_by_their_mean_over_the_response():
    experience = make()
    mask, ids = experience["response_mask"], torch.repeat_interleave(torch.arange(6), torch.tensor(LENGTHS))
    per_token = torch.where(mask, experience["advantages"][ids], torch.nan)
    correction = RolloutCorrection(reject_kl="k1", reject_threshold=0.1, reject_negative_only=True)
    expected, sums = correction.apply(experience)
    assert sums.rejected > 0
    found, _ = correction.apply(experience.with_token_columns(advantages=per_token))
    assert torch.equal(found["response_mask"], expected["response_mask"])


def test_constructed_from_plain_data():
    parser = ArgumentParser()
    parser.add_argument("--correction", type=RolloutCorrection)
    found = parser.parse_args(["--correction.kind=mis", "--correction.level=sequence", "--correction.upper=3"])
    correction = parser.instantiate(found).correction
    assert (correction.kind, correction.level, correction.lower, correction.upper) == ("mis", "sequence", 0.5, 3.0)
