from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rl_engines.sequence import Experience, pack_row
from lightning_rl_engines.sequence.context_parallel import BALANCERS, row_multiple, row_order
from tests.support import run_workers


def three_documents() -> Experience:
    return Experience.from_documents(
        input_ids=[[11, 12, 13], [21, 22], [31, 32, 33, 34]],
        response_mask=[[0, 1, 1], [1, 1], [0, 0, 1, 1]],
        number=[[1.0, 2.0, 3.0], [4.0, 5.0], [6.0, 7.0, 8.0, 9.0]],
        rewards=[0.5, 1.5, 2.5],
        group_ids=[3, 4, 5],
    )


# The row of the three documents padded to 12 tokens, by hand: slot p describes token p + 1.
ROW = {
    "input_ids": [11, 12, 13, 21, 22, 31, 32, 33, 34, 0, 0, 0],
    "position_ids": [0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 1, 2],
    "labels": [12, 13, 21, 22, 31, 32, 33, 34, 0, 0, 0, 11],
    "document_ids": [0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 0],
    "token_indices": [1, 2, 3, 4, 5, 6, 7, 8, -1, -1, -1, 0],
}
ROW_MASK = [True, True, False, True, False, False, True, True, False, False, False, False]
ROW_NUMBER = [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 0.0, 0.0, 0.0, 1.0]
ROW_LAST = [False, True, False, True, False, False, False, True, False, False, False, False]
PREDICTED = {1: [[0, 1, 3, 6, 7]], 2: [[0, 1, 3], [0, 1]], 4: [[0, 1], [0], [0, 1], []]}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_three_documents_by_hand(size):
    for rank in range(size):
        micro_batch = pack_row(three_documents(), [0, 1, 2], sequence_size=size, sequence_rank=rank, pad_to=12)
        here = slice(rank * 12 // size, (rank + 1) * 12 // size)
        for name, expected in ROW.items():
            value = getattr(micro_batch, name)
            assert value.dtype == torch.int64
            assert value.tolist() == expected[here], name
        assert micro_batch["response_mask"].tolist() == ROW_MASK[here]
        assert micro_batch.last_response.tolist() == ROW_LAST[here]
        assert micro_batch["number"].tolist() == ROW_NUMBER[here]
        assert micro_batch.predicted.tolist() == PREDICTED[size][rank]
        assert micro_batch.predicted.dtype == torch.int64
        # The row and the documents are the same on all sequence ranks, apart from who accounts for them.
        assert micro_batch.row.cu_seqlens_host == (0, 3, 5, 9, 12)
        assert micro_batch.row.cu_seqlens.tolist() == [0, 3, 5, 9, 12]
        assert micro_batch.row.cu_seqlens.dtype == torch.int32
        assert micro_batch.row.max_seqlen == 4
        assert micro_batch.documents == (0, 1, 2, -1)
        assert micro_batch.num_documents == 4
        assert micro_batch.owned_documents.tolist() == [rank == 0] * 3 + [False]
        assert micro_batch.response_lengths.tolist() == [2.0, 1.0, 2.0, 0.0]
        assert micro_batch.response_lengths.dtype == torch.float32
        assert micro_batch["rewards"].tolist() == [0.5, 1.5, 2.5, 0.0]
        assert micro_batch["group_ids"].tolist() == [3, 4, 5, 0]
        rewards = [[0.5, 1.5, 2.5, 0.0][document] for document in ROW["document_ids"]]
        assert micro_batch.per_token("rewards").tolist() == rewards[here]
        assert micro_batch.per_token("number") is micro_batch["number"]


def test_long_padding_is_cut_into_documents():
    """Each model has their positions, and attention costs little."""
    experience = three_documents()
    micro_batch = pack_row(experience, [0, 1], pad_to=300)
    assert micro_batch.row.cu_seqlens_host == (0, 3, 5, 133, 261, 300)
    assert micro_batch.documents == (0, 1, -1, -1, -1)
    assert micro_batch.position_ids.max() == 127
    assert micro_batch.row.max_seqlen == 128
    assert micro_batch.owned_documents.tolist() == [True, True, False, False, False]
    assert micro_batch.predicted.tolist() == [0, 1, 3]


def test_padding_is_no_longer_than_the_longest_document_of_a_model():
    micro_batch = pack_row(three_documents(), [0, 1, 2], pad_to=24, longest_document=6)
    assert micro_batch.row.cu_seqlens_host[3:] == (9, 15, 21, 24)
    assert int(micro_batch.position_ids.max()) == 5


def test_without_padding_the_last_slot_holds_the_first_token():
    micro_batch = pack_row(three_documents(), [1, 0])
    assert micro_batch.row.cu_seqlens_host == (0, 2, 5)
    assert micro_batch.input_ids.tolist() == [21, 22, 11, 12, 13]
    assert micro_batch.labels.tolist() == [22, 11, 12, 13, 21]
    assert micro_batch.documents == (1, 0)
    assert micro_batch.token_indices.tolist() == [4, 0, 1, 2, 3]
    assert micro_batch.predicted.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "length"),
    [
        ({}, 9),
        ({"sequence_size": 2}, 10),
        ({"sequence_size": 4}, 12),
        ({"sequence_size": 2, "multiple_of": 8}, 16),
        ({"pad_to": 9}, 9),
        ({"pad_to": 24, "multiple_of": 8, "sequence_size": 4}, 24),
    ],
)
def test_row_lengths(arguments, length):
    micro_batch = pack_row(three_documents(), [0, 1, 2], **arguments)
    assert micro_batch.row.cu_seqlens_host[-1] == length
    assert len(micro_batch.input_ids) == length // arguments.get("sequence_size", 1)
    assert len(micro_batch.row.cu_seqlens_host) == (4 if length == 9 else 5)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("experience", [three_documents(), three_documents().select([])])
def test_no_documents_make_a_masked_dummy(experience, size):
    for rank in range(size):
        micro_batch = pack_row(experience, [], sequence_size=size, sequence_rank=rank)
        assert micro_batch.documents == ((-1,) if size == 1 else (-1, -1))
        assert micro_batch.row.cu_seqlens_host == ((0, 1) if size == 1 else (0, 1, size))
        assert micro_batch.input_ids.tolist() == [0]
        assert micro_batch["response_mask"].tolist() == [False]
        assert micro_batch["response_mask"].dtype == torch.bool
        assert micro_batch["number"].tolist() == [0.0]
        assert micro_batch["rewards"].tolist() == [0.0] * micro_batch.num_documents
        assert micro_batch.token_indices.tolist() == [-1]
        assert micro_batch.predicted.tolist() == []
        assert not micro_batch.owned_documents.any()


@pytest.mark.parametrize(
    ("documents", "arguments", "words"),
    [
        ([3], {}, ["documents", "3"]),
        ([-1], {}, ["documents", "-1"]),
        ([0], {"sequence_size": 2, "sequence_rank": 2}, ["sequence_rank=2", "sequence_size=2"]),
        ([0], {"sequence_size": 2, "multiple_of": 3}, ["multiple_of=3", "sequence_size=2", "6"]),
        ([0, 1, 2], {"pad_to": 8}, ["pad_to=8", "9"]),
        ([0], {"sequence_size": 2, "pad_to": 5}, ["pad_to=5", "multiple of 2", "4"]),
    ],
)
def test_impossible_rows_are_refused(documents, arguments, words):
    with pytest.raises(ValueError) as error:
        pack_row(three_documents(), documents, **arguments)
    for word in words:
        assert word in str(error.value)


def test_unknown_columns_and_input_ids_are_key_errors():
    micro_batch = pack_row(three_documents(), [0])
    assert "number" in micro_batch
    assert "input_ids" not in micro_batch
    with pytest.raises(KeyError, match="labels"):
        micro_batch["input_ids"]
    with pytest.raises(KeyError, match="rewards"):
        micro_batch.per_token("nothing")


def test_a_micro_batch_cannot_be_changed():
    micro_batch = pack_row(three_documents(), [0])
    with pytest.raises(AttributeError):
        micro_batch.input_ids = micro_batch.labels
    with pytest.raises(TypeError):
        micro_batch.token_columns["x"] = micro_batch.labels


def build(lengths: list[int]) -> Experience:
    total = sum(lengths)
    flat = torch.arange(1, total + 1)
    mask = torch.arange(total) % 3 != 0
    experience = Experience.from_documents(input_ids=list(flat.split(lengths)), response_mask=list(mask.split(lengths)))
    return experience.with_token_columns(number=flat.double() / 7).with_document_columns(
        weight=torch.arange(1.0, len(lengths) + 1)
    )


rows = st.lists(st.integers(1, 9), min_size=1, max_size=6).flatmap(
    lambda lengths: st.tuples(st.just(lengths), st.permutations(range(len(lengths))), st.integers(0, len(lengths)))
)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(rows, st.sampled_from([1, 2, 3, 4]), st.integers(1, 3))
def test_slices_of_all_sequence_ranks_make_the_whole_row(row, size, factor):
    lengths, order, count = row
    documents = list(order)[:count]
    experience = build(lengths)
    arguments = {"sequence_size": size, "multiple_of": size * factor}
    slices = [pack_row(experience, documents, sequence_rank=rank, **arguments) for rank in range(size)]
    length = slices[0].row.cu_seqlens_host[-1]
    whole = pack_row(experience, documents, pad_to=length)
    for name in ("input_ids", "position_ids", "labels", "document_ids", "token_indices"):
        assert torch.equal(torch.cat([getattr(part, name) for part in slices]), getattr(whole, name)), name
    for name in ("response_mask", "number"):
        assert torch.equal(torch.cat([part[name] for part in slices]), whole[name]), name
    local = length // size
    predicted = [slot + rank * local for rank, part in enumerate(slices) for slot in part.predicted.tolist()]
    assert predicted == whole.predicted.tolist() == whole["response_mask"].nonzero().flatten().tolist()
    assert sum(part.owned_documents.long() for part in slices).tolist() == [int(d >= 0) for d in whole.documents]


@settings(max_examples=40, derandomize=True, deadline=None)
@given(rows, st.sampled_from([1, 2, 4]))
def test_every_slot_describes_the_token_after_it_and_results_return_in_order(row, multiple):
    lengths, order, count = row
    documents = list(order)[:count]
    experience = build(lengths)
    micro_batch = pack_row(experience, documents, multiple_of=multiple)
    length = micro_batch.row.cu_seqlens_host[-1]
    indices = micro_batch.token_indices
    real = indices >= 0
    # A bijection: each token of the row's documents has exactly one slot.
    expected = sorted(experience.token_indices(documents).tolist())
    assert sorted(indices[real].tolist()) == expected
    assert torch.equal(micro_batch.labels[real], experience["input_ids"][indices[real]])
    assert torch.equal(micro_batch.labels.roll(1), micro_batch.input_ids)
    # A result per slot goes back to the flat order by its token index.
    results = torch.zeros(experience.num_tokens, dtype=torch.float64)
    results[indices[real]] = micro_batch["number"][real]
    kept = torch.zeros(experience.num_tokens, dtype=torch.bool)
    kept[expected] = True
    assert torch.equal(results, torch.where(kept, experience["number"], 0))
    # Predicted slots stay within a document: the token before and the token described belong together.
    before = micro_batch.document_ids.roll(1)
    assert torch.equal(before[micro_batch.predicted], micro_batch.document_ids[micro_batch.predicted])
    assert len(micro_batch.position_ids) == length
    assert micro_batch.position_ids[list(micro_batch.row.cu_seqlens_host[:-1])].tolist() == [0] * len(
        micro_batch.documents
    )


def test_three_documents_dealt_out_by_hand():
    # Head and tail of 12 tokens for 2 ranks: every field is the row's, rolled by one first, then dealt out.
    places = [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]
    order = partial(row_order, "headtail")
    for rank in range(2):
        micro_batch = pack_row(
            three_documents(), [0, 1, 2], sequence_size=2, sequence_rank=rank, pad_to=12, order=order
        )
        for name, row in ROW.items():
            assert getattr(micro_batch, name).tolist() == [row[place] for place in places[rank]], name
        assert micro_batch["number"].tolist() == [ROW_NUMBER[place] for place in places[rank]]
        assert micro_batch["response_mask"].tolist() == [ROW_MASK[place] for place in places[rank]]
        assert micro_batch.last_response.tolist() == [ROW_LAST[place] for place in places[rank]]
        assert micro_batch.predicted.tolist() == [[0, 1], [0, 3, 4]][rank]
        assert micro_batch.sequence_rank == rank
        assert micro_batch.row.order.tolist() == places[0] + places[1]
        assert micro_batch.row.cu_seqlens_host == (0, 3, 5, 9, 12)
        assert micro_batch.response_lengths.tolist() == [2.0, 1.0, 2.0, 0.0]


@settings(max_examples=40, derandomize=True, deadline=None)
@given(rows, st.sampled_from([1, 2, 3, 4]), st.sampled_from(BALANCERS))
def test_slices_of_a_row_dealt_out_make_the_row_and_results_return_in_order(row, size, balancer):
    lengths, order, count = row
    documents = list(order)[:count]
    experience = build(lengths)
    arguments = {"sequence_size": size, "multiple_of": row_multiple(balancer, size)}
    slices = [
        pack_row(experience, documents, sequence_rank=rank, order=partial(row_order, balancer), **arguments)
        for rank in range(size)
    ]
    length = slices[0].row.cu_seqlens_host[-1]
    whole = pack_row(experience, documents, pad_to=length)
    assert whole.row.order is None
    places = slices[0].row.order
    for part in slices:
        assert torch.equal(part.row.order, places)
        assert part.row.cu_seqlens_host == whole.row.cu_seqlens_host
    for name in ("input_ids", "position_ids", "labels", "document_ids", "token_indices", "last_response"):
        assert torch.equal(torch.cat([getattr(part, name) for part in slices]), getattr(whole, name)[places]), name
    for name in ("response_mask", "number"):
        assert torch.equal(torch.cat([part[name] for part in slices]), whole[name][places]), name
    assert torch.equal(torch.cat([part.per_token("weight") for part in slices]), whole.per_token("weight")[places])
    for part in slices:
        assert part.predicted.tolist() == part["response_mask"].nonzero().flatten().tolist()
    sums = sum(part.segment_sum(part["number"]) for part in slices)
    torch.testing.assert_close(sums, whole.segment_sum(whole["number"]), rtol=1e-12, atol=1e-12)
    results = torch.full((experience.num_tokens,), torch.nan, dtype=torch.float64)
    for part in slices:
        real = part.token_indices >= 0
        results[part.token_indices[real]] = part["number"][real]
    kept = experience.token_indices(documents)
    assert torch.equal(results[kept], experience["number"][kept])
    assert results.isnan().sum() == experience.num_tokens - len(kept)


@pytest.mark.parametrize(
    "order",
    [
        lambda cu_seqlens, size: torch.arange(cu_seqlens[-1] - 1),
        lambda cu_seqlens, size: torch.zeros(cu_seqlens[-1], dtype=torch.int64),
        lambda cu_seqlens, size: torch.arange(1, cu_seqlens[-1] + 1),
        lambda cu_seqlens, size: torch.arange(cu_seqlens[-1], dtype=torch.int32),
    ],
)
def test_an_order_that_is_no_permutation_is_refused(order):
    with pytest.raises(ValueError, match=r"no permutation of the row's 9 positions.*0 to 8"):
        pack_row(three_documents(), [0, 1, 2], order=order)


def test_segment_sum_is_a_sum_per_document_in_fp32_or_fp64():
    micro_batch = pack_row(three_documents(), [0, 1, 2], pad_to=12)
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        sums = micro_batch.segment_sum(torch.arange(12).to(dtype))
        assert sums.dtype == expected
        assert sums.tolist() == [0 + 1 + 11, 2 + 3, 4 + 5 + 6 + 7, 8 + 9 + 10]


def test_segment_last_is_the_value_at_the_last_response_token_whatever_the_other_slots_hold():
    experience = three_documents().with_columns(response_mask=[[0, 1, 1], [0, 0], [0, 1, 0, 0]])
    micro_batch = pack_row(experience, [2, 1, 0], pad_to=12)
    # The row is document 2, 1, 0: its slots 0 and 7 describe the second token of 2 and the third of 0.
    values = torch.full((12,), torch.nan)
    values[0], values[7] = 5.0, 7.0
    last = micro_batch.segment_last(values.requires_grad_())
    assert last.tolist() == [5.0, 0.0, 7.0, 0.0]
    (gradient,) = torch.autograd.grad((last * torch.tensor([2.0, 3.0, 4.0, 5.0])).sum(), values)
    assert gradient.tolist() == [2.0, 0, 0, 0, 0, 0, 0, 4.0, 0, 0, 0, 0]


def sums_and_gradient(size: int, values: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank() if size > 1 else 0
    micro_batch = pack_row(
        three_documents(),
        [0, 1, 2],
        sequence_size=size,
        sequence_rank=rank,
        group=dist.group.WORLD if size > 1 else None,
        pad_to=12,
    )
    local = values.chunk(size)[rank].clone().requires_grad_()
    sums = micro_batch.segment_sum(local)
    # Each rank's loss holds its own slots, each of them a function of the whole document, as in GSPO.
    loss = (weights.chunk(size)[rank] * sums.square().index_select(0, micro_batch.document_ids)).sum()
    (gradient,) = torch.autograd.grad(loss, local)
    return sums.detach(), gradient


@pytest.mark.parametrize("size", [2, 4])
def test_segment_sum_over_sequence_ranks_equals_the_whole_row(size):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(12, dtype=torch.float64, generator=generator)
    weights = torch.randn(12, dtype=torch.float64, generator=generator)
    sums, gradient = sums_and_gradient(1, values, weights)
    ids = torch.tensor(ROW["document_ids"])
    expected = 2 * sums[ids] * torch.zeros(4, dtype=torch.float64).index_add(0, ids, weights)[ids]
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
    results = run_workers(size, sums_and_gradient, size, values, weights)
    for local_sums, _ in results:
        torch.testing.assert_close(local_sums, sums, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([part for _, part in results]), gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.cuda
def test_rows_on_a_device_equal_those_on_the_cpu_and_nothing_waits():
    experience = three_documents()
    on_device = experience.to("cuda")
    split = {"sequence_size": 2, "sequence_rank": 1, "pad_to": 12}
    for arguments in ({}, split, {**split, "order": partial(row_order, "headtail")}):
        expected = pack_row(experience, [2, 0], **arguments)
        torch.cuda.set_sync_debug_mode("error")
        try:
            micro_batches = [
                pack_row(on_device, [2, 0], **arguments),
                pack_row(experience, [2, 0], device="cuda", **arguments),
            ]
            sums = [part.segment_sum(part["number"]) for part in micro_batches]
            weights = [part.per_token("rewards") for part in micro_batches]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for micro_batch, total, weight in zip(micro_batches, sums, weights, strict=True):
            assert micro_batch.device.type == "cuda"
            fields = ("input_ids", "position_ids", "labels", "document_ids", "predicted")
            for name in (*fields, "owned_documents", "last_response"):
                assert torch.equal(getattr(micro_batch, name).cpu(), getattr(expected, name)), name
            for name in ("response_mask", "number", "rewards", "group_ids"):
                assert torch.equal(micro_batch[name].cpu(), expected[name]), name
            assert micro_batch.token_indices.device.type == "cpu"
            assert torch.equal(total.cpu(), expected.segment_sum(expected["number"]))
            assert torch.equal(weight.cpu(), expected.per_token("rewards"))
