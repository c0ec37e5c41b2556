import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_rl_engines.algorithms import (
    DPOLoss,
    LossOutput,
    RewardModelLoss,
    RewardRegressionLoss,
    TokenOutputs,
)
from lightning_rl_engines.sequence.experience import Experience
from lightning_rl_engines.sequence.packing import pack_row

LENGTHS = (5, 2, 9, 3, 14, 4)
GROUPS = (7, 3, 3, 5, 7, 5)
PREFERRED = (True, False, True, True, False, False)
# Every row holds whole pairs; the second puts the rejected one first, the third has a dummy.
PACKINGS = [[[0, 1, 2, 3, 4, 5]], [[4, 0], [5, 3], [1, 2]], [[2, 5, 1, 3], [], [0, 4]]]


class Batch:
    """Flat fp64 leaves for what a model would return, and the experience."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        masks = [torch.rand(n, generator=generator) > 0.4 for n in LENGTHS]
        for mask in masks:
            mask[0], mask[1] = False, True
        self.mask = torch.cat(masks)
        self.log_probs, self.values = normal(sum(LENGTHS)) - 2, normal(sum(LENGTHS))
        reference = self.log_probs + 0.5 * normal(sum(LENGTHS))
        reference[~self.mask] = torch.nan
        self.experience = Experience.from_documents(
            input_ids=[torch.arange(n) for n in LENGTHS],
            response_mask=masks,
            ref_log_probs=list(reference.split(LENGTHS)),
            group_ids=list(GROUPS),
            preferred=list(PREFERRED),
            targets=normal(len(LENGTHS)),
        )
        self.log_probs.requires_grad_()
        self.values.requires_grad_()

    def responses(self, column: Tensor) -> list[Tensor]:
        parts = zip(column.split(LENGTHS), self.mask.split(LENGTHS), strict=True)
        return [part[mask] for part, mask in parts]


def run(loss, batch: Batch, rows: Sequence[Sequence[int]]) -> tuple[float, dict[str, float], Tensor, Tensor]:
    """Value, metrics and gradients as the engine combines them; the model returns NaN outside the response."""
    batch.log_probs.grad = batch.values.grad = None
    counts = {"groups": 3, "sequences": 6}
    total, metrics = 0.0, {}
    for row in rows:
        output = run_row(loss, batch, row)
        assert output.total.dtype == torch.float64 and output.total.requires_grad
        (output.total / counts[output.denominator]).backward()
        total += output.total.item() / counts[output.denominator]
        for name, (value, reduction) in output.metrics.items():
            assert not value.requires_grad
            metrics[name] = metrics.get(name, 0.0) + value.item() / counts[reduction]
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in (batch.log_probs, batch.values)]
    return total, metrics, grads[0], grads[1]


def run_row(loss, batch: Batch, row: Sequence[int]) -> LossOutput:
    micro_batch = pack_row(batch.experience, row, multiple_of=4)
    mask = micro_batch["response_mask"]
    outputs = {}
    for name in ("log_probs", "values"):
        column = getattr(batch, name)[micro_batch.token_indices.clamp(min=0)]
        outputs[name] = column + torch.where(mask, 0.0, torch.nan).double()
    return loss(TokenOutputs(**outputs), micro_batch)


def pair_indices() -> list[tuple[int, int]]:
    return [
        (
            next(i for i in range(6) if GROUPS[i] == group and PREFERRED[i]),
            next(i for i in range(6) if GROUPS[i] == group and not PREFERRED[i]),
        )
        for group in sorted(set(GROUPS))
    ]


def dpo_reference(batch: Batch, term, average: bool) -> tuple[Tensor, dict[str, float]]:
    policy, reference = batch.responses(batch.log_probs), batch.responses(batch.experience["ref_log_probs"])
    ratios = [(p - r).mean() if average else (p - r).sum() for p, r in zip(policy, reference, strict=True)]
    pairs = pair_indices()
    total = torch.stack([term(ratios[c] - ratios[r]) for c, r in pairs]).mean()
    gaps = [float((ratios[c] - ratios[r]).detach()) for c, r in pairs]
    metrics = {
        "preference_loss": float(total.detach()),
        "reward_margin": 0.3 * sum(gaps) / 3,
        "reward_accuracy": sum(gap > 0 for gap in gaps) / 3,
        "chosen_reward": 0.3 * sum(float(ratios[c].detach()) for c, _ in pairs) / 3,
        "rejected_reward": 0.3 * sum(float(ratios[r].detach()) for _, r in pairs) / 3,
        "chosen_log_prob": sum(float(policy[c].detach().sum()) for c, _ in pairs) / 3,
        "rejected_log_prob": sum(float(policy[r].detach().sum()) for _, r in pairs) / 3,
    }
    return total, metrics


DPO_CASES = {
    "dpo": (DPOLoss(beta=0.3), lambda h: -torch.log(1 / (1 + (-0.3 * h).exp()))),
    "smoothed": (
        DPOLoss(beta=0.3, label_smoothing=0.1),
        lambda h: -0.9 * torch.log(torch.sigmoid(0.3 * h)) - 0.1 * torch.log(torch.sigmoid(-0.3 * h)),
    ),
    "ipo": (DPOLoss(beta=0.3, kind="ipo"), lambda h: (h - 1 / 0.6) ** 2),
    "average": (DPOLoss(beta=0.3, kind="ipo", average_log_probs=True), lambda h: (h - 1 / 0.6) ** 2),
}


@pytest.mark.parametrize("rows", PACKINGS)
@pytest.mark.parametrize("case", DPO_CASES)
def test_dpo_equals_the_paper_however_packed(case: str, rows: list[list[int]]) -> None:
    loss, term = DPO_CASES[case]
    batch = Batch()
    expected, metrics = dpo_reference(batch, term, case == "average")
    (gradient,) = torch.autograd.grad(expected, batch.log_probs)
    assert gradient.abs().max() > 1e-3
    found, found_metrics, found_gradient, _ = run(loss, batch, rows)
    assert found == pytest.approx(expected.item(), rel=1e-9)
    torch.testing.assert_close(found_gradient, gradient, rtol=1e-6, atol=1e-9)
    assert found_metrics == {name: pytest.approx(value, rel=1e-6) for name, value in metrics.items()}


@pytest.mark.parametrize("rows", PACKINGS)
@pytest.mark.parametrize("center", [0.0, 0.2])
def test_reward_model_loss_is_the_bradley_terry_likelihood_of_last_values(center: float, rows: list[list[int]]) -> None:
    batch = Batch(seed=1)
    scores = [values[-1] for values in batch.responses(batch.values)]
    pairs = pair_indices()
    terms = [torch.log(1 + (scores[r] - scores[c]).exp()) + center * (scores[c] + scores[r]) ** 2 for c, r in pairs]
    expected = torch.stack(terms).mean()
    (gradient,) = torch.autograd.grad(expected, batch.values)
    assert (gradient != 0).sum() == 6
    found, metrics, _, found_gradient = run(RewardModelLoss(center_coef=center), batch, rows)
    assert found == pytest.approx(expected.item(), rel=1e-9)
    torch.testing.assert_close(found_gradient, gradient, rtol=1e-9, atol=1e-12)
    gaps = [float((scores[c] - scores[r]).detach()) for c, r in pairs]
    assert metrics["preference_loss"] == pytest.approx(found)
    assert metrics["reward_margin"] == pytest.approx(sum(gaps) / 3)
    assert metrics["reward_accuracy"] == pytest.approx(sum(gap > 0 for gap in gaps) / 3)
    assert metrics["chosen_reward"] == pytest.approx(sum(float(scores[c].detach()) for c, _ in pairs) / 3)
    assert metrics["rejected_reward"] == pytest.approx(sum(float(scores[r].detach()) for _, r in pairs) / 3)


@pytest.mark.parametrize("rows", [*PACKINGS, [[0], [1, 2, 3], [5, 4]]])
def test_regression_is_the_squared_error_of_last_values(rows: list[list[int]]) -> None:
    batch = Batch(seed=2)
    scores = torch.stack([values[-1] for values in batch.responses(batch.values)])
    targets = batch.experience["targets"]
    expected = (scores - targets).square().mean()
    (gradient,) = torch.autograd.grad(expected, batch.values, retain_graph=True)
    found, metrics, _, found_gradient = run(RewardRegressionLoss(), batch, rows)
    assert found == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(found_gradient, gradient, rtol=1e-12, atol=1e-12)
    assert metrics == {
        "regression_loss": pytest.approx(expected.item()),
        "score_mean": pytest.approx(scores.mean().item()),
        "target_mean": pytest.approx(targets.mean().item()),
        "absolute_error": pytest.approx((scores - targets).abs().mean().item()),
    }


def test_at_the_reference_the_loss_is_log_two_and_large_margins_stay_finite() -> None:
    batch = Batch()
    batch.experience = batch.experience.with_token_columns(ref_log_probs=batch.log_probs.detach().clone())
    assert run(DPOLoss(), batch, PACKINGS[0])[0] == pytest.approx(math.log(2))
    batch.experience = batch.experience.with_token_columns(ref_log_probs=1e4 * batch.log_probs.detach())
    found, _, gradient, _ = run(DPOLoss(beta=1.0), batch, PACKINGS[0])
    assert math.isfinite(found) and gradient.isfinite().all()


@pytest.mark.parametrize("loss", [DPOLoss(), RewardModelLoss()])
def test_rows_without_whole_pairs_are_never_trained_on(loss) -> None:
    batch = Batch()
    with pytest.raises(ValueError, match="a row of 3 documents holds no whole pairs"):
        run_row(loss, batch, [0, 4, 1])
    assert run_row(loss, batch, [0, 1]).total.isnan()  # two halves
    batch.experience = batch.experience.with_document_columns(preferred=torch.ones(6, dtype=torch.bool))
    assert run_row(loss, batch, [0, 4]).total.isnan()  # two chosen ones


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"group_ids": [1, 1, 2, 1]}, ["group_ids=1 has 3 documents, 1 of them preferred"]),
        ({"group_ids": [1, 1, 2, 3]}, ["group_ids=2 has 1 documents, 1 of them preferred"]),
        ({"preferred": [True, True, True, False]}, ["group_ids=1 has 2 documents, 2 of them preferred"]),
        ({"preferred": [True, False, False, False]}, ["group_ids=2 has 2 documents, 0 of them preferred"]),
        ({"response_lengths": [3, 1, 0, 1]}, ["document 2", "no response token"]),
    ],
)
def test_global_batches_that_are_refused(change, words) -> None:
    documents = {"group_ids": [1, 1, 2, 2], "preferred": [True, False, True, False], "response_lengths": [3, 1, 2, 1]}
    for loss in (DPOLoss(), RewardModelLoss()):
        assert set(loss.checked_columns) < documents.keys()
        loss.check_documents(documents)
        with pytest.raises(ValueError) as error:
            loss.check_documents(documents | change)
        for word in (*words, type(loss).__name__):
            assert word in str(error.value)


def test_missing_columns_and_outputs_are_named() -> None:
    batch = Batch()
    micro_batch = pack_row(batch.experience.drop("ref_log_probs", "targets"), [0, 4])
    outputs = TokenOutputs(log_probs=torch.zeros(19))
    for loss, name in ((DPOLoss(), "ref_log_probs"), (RewardRegressionLoss(), "targets")):
        with pytest.raises(ValueError, match=f"needs the column '{name}'"):
            loss(outputs, micro_batch)
    with pytest.raises(ValueError, match=r"RewardModelLoss needs outputs.values"):
        RewardModelLoss()(outputs, micro_batch)
    with pytest.raises(ValueError, match=r"DPOLoss needs outputs.log_probs"):
        DPOLoss()(TokenOutputs(values=torch.zeros(19)), pack_row(batch.experience, [0, 4]))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"beta": 0.0}, ["beta=0.0", "0.1"]),
        ({"beta": math.inf}, ["beta=inf"]),
        ({"kind": "hinge"}, ["kind='hinge'", "sigmoid, ipo"]),
        ({"label_smoothing": 0.5}, ["label_smoothing=0.5"]),
        ({"kind": "ipo", "label_smoothing": 0.1}, ["label_smoothing=0.1", "ipo"]),
    ],
)
def test_dpo_configurations_that_are_refused(arguments, words) -> None:
    with pytest.raises(ValueError) as error:
        DPOLoss(**arguments)
    for word in words:
        assert word in str(error.value)


def test_reward_model_configurations_that_are_refused() -> None:
    with pytest.raises(ValueError, match="center_coef=-1"):
        RewardModelLoss(center_coef=-1)
