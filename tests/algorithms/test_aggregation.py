import math

import pytest
import torch

from lightning_rl_engines.algorithms import SFTLoss, aggregate
from lightning_rl_engines.sequence.experience import Experience
from lightning_rl_engines.sequence.packing import pack_row
from tests.algorithms.naive import Batch, documents, gradients, make_batch, naive_mean, run

MODES = {
    "token-mean": {},
    "seq-mean-token-mean": {},
    "seq-mean-token-sum": {},
    "seq-mean-token-sum-norm": {"loss_scale_factor": 7.0},
    "token-sum-over-constant": {"constant": 11.0},
}
PACKINGS = [
    [[0, 1, 2, 3, 4, 5]],
    [[i] for i in range(6)],
    [[4, 0], [5], [], [3, 2, 1]],
]


@pytest.mark.parametrize("rows", PACKINGS)
@pytest.mark.parametrize("mode", MODES)
def test_equals_per_document_reference_however_packed(mode: str, rows: list[list[int]]) -> None:
    batch = make_batch()
    result = run(SFTLoss(aggregation=mode, **MODES[mode]), batch, rows)
    number = next(iter(MODES[mode].values()), None)
    expected = naive_mean([-d["log_probs"] for d in documents(batch)], mode, number)
    assert result.loss == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(result.log_prob_grad, gradients(expected, batch)[0], rtol=1e-6, atol=0)
    assert result.metrics["nll"] == pytest.approx(torch.cat([-d["log_probs"] for d in documents(batch)]).mean().item())


def all_response(lengths: tuple[int, ...], log_probs: torch.Tensor) -> Batch:
    experience = Experience.from_documents(
        input_ids=[torch.arange(n + 1) for n in lengths], response_mask=[torch.ones(n + 1) for n in lengths]
    )
    return Batch(experience, log_probs.requires_grad_(), torch.zeros_like(log_probs))


def test_micro_batches_of_3_and_17_tokens_add_up_to_the_batch() -> None:
    log_probs = -torch.arange(1.0, 23.0, dtype=torch.float64)
    batch = all_response((3, 17), log_probs)
    result = run(SFTLoss(), batch, [[0], [1]])
    # Tokens 1..3 of the first and 5..21 of the second document are predicted.
    assert result.loss == pytest.approx((2 + 3 + 4 + sum(range(6, 23))) / 20)
    mask = batch.experience["response_mask"]
    torch.testing.assert_close(result.log_prob_grad, mask.double() / -20, rtol=1e-12, atol=0)


def test_token_mean_does_not_move_when_every_document_is_repeated() -> None:
    log_probs = -torch.rand(10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    once = run(SFTLoss(), all_response((3, 5), log_probs.clone()), [[0, 1]])
    # Three copies of one token share one parameter, so the gradient is summed over copies.
    thrice = run(SFTLoss(), all_response((3, 5) * 3, log_probs.repeat(3)), [[0, 1, 2], [3, 4], [5]])
    assert thrice.loss == pytest.approx(once.loss)
    torch.testing.assert_close(thrice.log_prob_grad.view(3, -1).sum(0), once.log_prob_grad)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_outside_the_mask_does_not_leak(mode: str, garbage: float) -> None:
    experience = Experience.from_documents(input_ids=[[1, 2, 3], [4]], response_mask=[[0, 0, 1], [0]])
    micro_batch = pack_row(experience, [0, 1], pad_to=6)
    values = torch.full((6,), garbage, dtype=torch.float64)
    values[1] = 2.0
    values.requires_grad_()
    total, _ = aggregate(values, micro_batch, mode, **MODES[mode])
    total.backward()
    weight = 1 / 7 if mode == "seq-mean-token-sum-norm" else 1.0
    assert total.item() == pytest.approx(2 * weight)
    torch.testing.assert_close(values.grad, torch.tensor([0, weight, 0, 0, 0, 0], dtype=torch.float64))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", [[], [0]])
def test_without_response_tokens_a_zero_connected_to_the_graph(mode: str, row: list[int]) -> None:
    experience = Experience.from_documents(input_ids=[[1, 2, 3]], response_mask=[[0, 0, 0]])
    micro_batch = pack_row(experience, row)
    values = torch.full((len(micro_batch.labels),), math.nan, requires_grad=True)
    total, _ = aggregate(values, micro_batch, mode, **MODES[mode])
    assert total.item() == 0
    total.backward()
    assert torch.equal(values.grad, torch.zeros_like(values))


def test_half_precision_is_summed_in_fp32() -> None:
    experience = Experience.from_documents(input_ids=[range(4001)], response_mask=[[1] * 4001])
    values = torch.ones(4001, dtype=torch.bfloat16)
    total, denominator = aggregate(values, pack_row(experience, [0]), "token-mean")
    assert (total.dtype, total.item(), denominator) == (torch.float32, 4000.0, "tokens")


def test_lengths_are_those_of_the_whole_row() -> None:
    # The second of two slices holds one of the document's three response tokens, the first the other two.
    experience = Experience.from_documents(input_ids=[[1, 2, 3, 4]], response_mask=[[0, 1, 1, 1]])
    sums = []
    for rank in range(2):
        micro_batch = pack_row(experience, [0], sequence_size=2, sequence_rank=rank)
        sums.append(aggregate(torch.full((2,), 3.0), micro_batch, "seq-mean-token-mean")[0].item())
    assert sums == [2.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"aggregation": "mean"}, r"aggregation='mean'.*token-mean, seq-mean-token-mean"),
        ({"aggregation": "seq-mean-token-sum-norm"}, r"loss_scale_factor=None.*1024"),
        ({"aggregation": "seq-mean-token-sum-norm", "loss_scale_factor": 0.0}, r"loss_scale_factor=0.0"),
        ({"aggregation": "token-sum-over-constant"}, r"constant=None.*1024"),
        ({"aggregation": "token-sum-over-constant", "constant": math.inf}, r"constant=inf"),
        ({"constant": 3.0}, r"constant=3.0 has no effect.*token-sum-over-constant"),
        ({"loss_scale_factor": 3.0}, r"loss_scale_factor=3.0 has no effect.*seq-mean-token-sum-norm"),
    ],
)
def test_impossible_aggregation_is_refused_at_construction(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SFTLoss(**arguments)
