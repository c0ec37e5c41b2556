from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from lightning_rl_engines.sequence import Experience, pack_row
from lightning_rl_engines.sequence.block_mask import make_block_mask
from lightning_rl_engines.sequence.context_parallel import BALANCERS, row_multiple, row_order


@settings(max_examples=12, derandomize=True, deadline=None)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=5),
    st.sampled_from([None, 1, 64, 200]),
    st.sampled_from(BALANCERS),
    st.sampled_from([1, 2, 3]),
)
def test_blocks_of_flex_attention_are_those_of_torch(lengths, window, balancer, size):
    experience = Experience.from_documents(
        input_ids=[[1] * length for length in lengths], response_mask=[[1] * length for length in lengths]
    )
    for rank in range(size):
        micro_batch = pack_row(
            experience,
            range(len(lengths)),
            multiple_of=row_multiple(balancer, size),
            sequence_size=size,
            sequence_rank=rank,
            order=partial(row_order, balancer),
        )
        order = micro_batch.row.order
        mask = make_block_mask(micro_batch.row, order.chunk(size)[rank], order, window=window)
        expected = create_block_mask(mask.mask_mod, None, None, *mask.seq_lengths, device="cpu")
        assert mask.shape == expected.shape == (1, 1, *mask.seq_lengths)
        ours, theirs = blocks_of(mask), blocks_of(expected)
        # Blocks seen as a whole skip the mask, so they must be right; others may be too many, in ragged places.
        assert not (ours["full"] & ~theirs["full"]).any()
        assert not (theirs["some"] & ~ours["some"]).any()
        assert not (ours["full"] & ours["partial"]).any()
        if balancer is None:
            assert torch.equal(ours["full"], theirs["full"])


def blocks_of(mask: BlockMask) -> dict[str, Tensor]:
    def dense(numbers: Tensor, indices: Tensor) -> Tensor:
        blocks = torch.zeros(indices.shape[-2:], dtype=torch.bool)
        for row, (number, places) in enumerate(zip(numbers[0, 0].tolist(), indices[0, 0].tolist(), strict=True)):
            blocks[row, places[:number]] = True
        return blocks

    partial_blocks = dense(mask.kv_num_blocks, mask.kv_indices)
    full = dense(mask.full_kv_num_blocks, mask.full_kv_indices)
    return {"partial": partial_blocks, "full": full, "some": partial_blocks | full}


@pytest.mark.parametrize("window", [None, 3])
def test_the_mask_within_blocks_by_hand(window):
    experience = Experience.from_documents(input_ids=[[1] * 5, [2] * 7], response_mask=[[1] * 5, [1] * 7])
    row = pack_row(experience, [0, 1]).row
    order = row_order("headtail", row.cu_seqlens_host, 2)[6:].contiguous(), row_order("ptrr", row.cu_seqlens_host, 2)
    mask = make_block_mask(row, *order, window=window)
    found = create_mask(mask.mask_mod, 1, 1, 6, 12, device="cpu")[0, 0]
    for query, place in enumerate(order[0].tolist()):
        (start, _), *_ = [bounds for bounds in pairwise(row.cu_seqlens_host) if bounds[0] <= place < bounds[1]]
        first = start if window is None else max(start, place - window + 1)
        assert found[query].tolist() == [first <= seen <= place for seen in order[1].tolist()]
