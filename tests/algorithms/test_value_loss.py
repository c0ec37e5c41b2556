import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lightning_rl_engines.algorithms import LossOutput, TokenOutputs, ValueLoss
from lightning_rl_engines.sequence.experience import Experience
from lightning_rl_engines.sequence.packing import pack_row
from tests.algorithms.naive import LENGTHS, denominator, naive_mean

PACKINGS = [[[0, 1, 2, 3, 4, 5]], [[i] for i in range(6)], [[4, 0], [5], [], [3, 2, 1]]]


@dataclass
class Batch:
    experience: Experience
    values: Tensor


def make_batch(*, seed: int = 0, per_document: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def normal(n: int) -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    masks = [torch.rand(n, generator=generator) > 0.25 for n in LENGTHS]
    old = [normal(n) for n in LENGTHS]
    values = torch.cat([item + 0.4 * normal(len(item)) for item in old]).requires_grad_()
    returns = normal(len(LENGTHS)) if per_document else [normal(n) for n in LENGTHS]
    experience = Experience.from_documents(
        input_ids=[torch.arange(n) for n in LENGTHS], response_mask=masks, values=old, returns=returns
    )
    return Batch(experience, values)


def naive_terms(batch: Batch, clip: float | None) -> tuple[list[Tensor], list[Tensor]]:
    """Per document with a response the losses of its tokens, one by one, and whether the clip decides them."""
    experience = batch.experience
    starts = [0, *torch.tensor(experience.lengths).cumsum(0).tolist()]
    terms, decided = [], []
    for index in range(len(experience)):
        losses, clips = [], []
        for token in experience.documents("response_mask")[index].nonzero()[:, 0].tolist():
            value = batch.values[starts[index] + token]
            old = experience.documents("values")[index][token]
            shared = "returns" in experience.document_columns
            target = experience["returns"][index] if shared else experience.documents("returns")[index][token]
            error = (value - target) ** 2
            if clip is None:
                losses.append(0.5 * error)
                continue
            other = (torch.clamp(value, float(old) - clip, float(old) + clip) - target) ** 2
            losses.append(0.5 * torch.max(error, other))
            clips.append((other > error).double())
        if losses:
            terms.append(torch.stack(losses))
            decided += clips
    return terms, decided


def run(
    loss: ValueLoss, batch: Batch, rows: Sequence[Sequence[int]], garbage: float = math.nan
) -> tuple[float, dict[str, float], Tensor]:
    batch.values.grad = None
    total, metrics = 0.0, {}
    for row in rows:
        output = run_row(loss, batch, row, garbage)
        part = output.total / denominator(output.denominator, batch.experience)
        part.backward()
        total += part.item()
        for name, (value, reduction) in output.metrics.items():
            assert not value.requires_grad
            share = value.item() / denominator(reduction, batch.experience)
            metrics[name] = metrics.get(name, 0.0) + share
    return total, metrics, batch.values.grad.clone()


def run_row(loss: ValueLoss, batch: Batch, row: Sequence[int], garbage: float = math.nan) -> LossOutput:
    micro_batch = pack_row(batch.experience, row)
    mask = micro_batch["response_mask"]
    for name in ("values", "returns"):
        if name in micro_batch.token_columns:
            micro_batch[name][~mask] = garbage
    values = batch.values[micro_batch.token_indices.clamp(min=0)]
    return loss(TokenOutputs(values=values + torch.where(mask, 0.0, garbage)), micro_batch)


@pytest.mark.parametrize("rows", PACKINGS)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("clip", [None, 0.2, 0.5])
def test_value_gradient_and_metrics_equal_the_formula(rows: list[list[int]], mode: str, clip: float | None) -> None:
    batch = make_batch(seed=1)
    terms, decided = naive_terms(batch, clip)
    expected = naive_mean(terms, mode)
    (gradient,) = torch.autograd.grad(expected, batch.values)
    total, metrics, found = run(ValueLoss(value_clip=clip, aggregation=mode), batch, rows)
    assert total == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(found, gradient, rtol=1e-6, atol=1e-12)
    mask = batch.experience["response_mask"]
    wanted = {
        "value_loss": expected.item(),
        "value_mean": batch.values.detach()[mask].mean().item(),
        "return_mean": batch.experience["returns"][mask].mean().item(),
    }
    if clip is not None:
        wanted["value_clip_fraction"] = torch.stack(decided).mean().item()
        assert 0 < wanted["value_clip_fraction"] < 1
    assert metrics == pytest.approx(wanted, rel=1e-6)


def test_returns_per_document() -> None:
    batch = make_batch(seed=2, per_document=True)
    terms, _ = naive_terms(batch, 0.2)
    total, _, _ = run(ValueLoss(), batch, PACKINGS[2])
    assert total == pytest.approx(naive_mean(terms, "token-mean").item(), rel=1e-6)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [
        (1.0, 1.0, 3.0, 2.0, -2.0),
        (1.1, 1.0, 3.0, 1.805, -1.9),
        (1.5, 1.0, 3.0, 1.62, 0.0),  # moved towards the return, beyond the range: (1.2 - 3)^2 / 2
        (0.5, 1.0, 3.0, 3.125, -2.5),  # moved away from it: the plain error is larger
        (1.5, 1.0, 1.3, 0.02, 0.2),  # passed the return: |1.5 - 1.3| > |1.2 - 1.3|
        (-1.5, -1.0, -3.0, 1.62, 0.0),
    ],
)
def test_clip_by_hand(value: float, old: float, target: float, loss: float, slope: float) -> None:
    experience = Experience.from_documents(
        input_ids=[[1, 2]], response_mask=[[0, 1]], values=[[0.0, old]], returns=[[0.0, target]]
    )
    values = torch.tensor([value, math.nan], requires_grad=True)
    output = ValueLoss()(TokenOutputs(values=values), pack_row(experience, [0]))
    output.total.backward()
    assert (output.total.item(), values.grad[0].item()) == pytest.approx((loss, slope), abs=1e-6)
    assert values.grad[1] == 0


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_garbage_changes_nothing(garbage: float) -> None:
    clean = run(ValueLoss(), make_batch(), PACKINGS[2], garbage=0.0)
    dirty = run(ValueLoss(), make_batch(), PACKINGS[2], garbage=garbage)
    assert dirty[:2] == clean[:2] and math.isfinite(clean[0])
    assert torch.equal(dirty[2], clean[2])


def test_nan_of_a_response_token_is_not_hidden() -> None:
    for column in ("values", "returns"):
        batch = make_batch()
        index = int(batch.experience["response_mask"].nonzero()[0])
        batch.experience[column][index] = math.nan
        assert math.isnan(run(ValueLoss(), batch, PACKINGS[0])[0]), column


@pytest.mark.parametrize("row", [[], [5]])
def test_micro_batch_without_response_tokens(row: list[int]) -> None:
    batch = make_batch()
    output = run_row(ValueLoss(), batch, row)
    output.total.backward()
    assert output.total.item() == 0 and torch.equal(batch.values.grad, torch.zeros_like(batch.values))
    assert all(value.item() == 0 for value, _ in output.metrics.values())


def test_inputs_and_arguments_are_checked() -> None:
    assert ValueLoss().required_columns == ("response_mask", "returns", "values")
    assert ValueLoss(value_clip=None).required_columns == ("response_mask", "returns")
    batch = make_batch()
    outputs = TokenOutputs(values=torch.zeros(5))
    with pytest.raises(ValueError, match=r"needs the column 'returns'"):
        ValueLoss()(outputs, pack_row(batch.experience.drop("returns"), [0]))
    with pytest.raises(ValueError, match=r"needs the column 'values'"):
        ValueLoss()(outputs, pack_row(batch.experience.drop("values"), [0]))
    ValueLoss(value_clip=None)(outputs, pack_row(batch.experience.drop("values"), [0]))
    with pytest.raises(ValueError, match=r"needs outputs.values.*head='value'"):
        ValueLoss()(TokenOutputs(log_probs=torch.zeros(5)), pack_row(batch.experience, [0]))
    for clip in (0.0, -0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"value_clip=.*0.2"):
            ValueLoss(value_clip=clip)
