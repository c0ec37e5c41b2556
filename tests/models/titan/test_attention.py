import dataclasses
import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchtitan")

from lightning_rl_engines.models.titan.attention import PackedAttention, row_mask, select_titan_kernel
from lightning_rl_engines.sequence import Experience, pack_row
from lightning_rl_engines.sequence.context_parallel import BALANCERS, row_order
from tests.models.titan.attention_cases import (
    ROW,
    SHAPES,
    WINDOW,
    all_of_torchtitan,
    attend,
    micro_batch_of,
    reference,
    tensors_of,
)
from tests.support import run_workers

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EVERY = pytest.mark.parametrize(
    ("name", "window", "with_sinks"),
    [(name, window, with_sinks) for name in SHAPES for window in (None, WINDOW) for with_sinks in (False, True)],
)


def leaves_of(name: str, with_sinks: bool) -> tuple[list[Tensor], Tensor | None, Tensor]:
    *tensors, weights, sinks = tensors_of(SHAPES[name])
    return [x.requires_grad_() for x in tensors], sinks.requires_grad_() if with_sinks else None, weights


def assert_same(found: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]], **tolerance: Any) -> None:
    tolerance = tolerance or {"rtol": 1e-11, "atol": 1e-12}
    torch.testing.assert_close(found[0], expected[0], **tolerance)
    assert len(found[1]) == len(expected[1])
    for ours, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


@EVERY
def test_a_whole_row_equals_attention_by_its_definition(name, window, with_sinks):
    tensors, sinks, weights = leaves_of(name, with_sinks)
    output = attend(micro_batch_of(), tensors, sinks, window=window)
    (output * weights).sum().backward()
    gradients = [x.grad for x in (*tensors, sinks) if x is not None]
    assert_same((output, gradients), reference(SHAPES[name], window=window, with_sinks=with_sinks))


@EVERY
@pytest.mark.parametrize("size", [2, 4])
def test_a_row_dealt_out_equals_the_whole_row(name, window, with_sinks, size):
    expected = reference(SHAPES[name], window=window, with_sinks=with_sinks)
    for balancer in BALANCERS:
        tensors, sinks, weights = leaves_of(name, with_sinks)
        outputs, total = [], torch.zeros((), dtype=torch.float64)
        for rank in range(size):
            micro_batch = micro_batch_of(balancer, size, rank)
            order = micro_batch.row.order
            here = order.chunk(size)[rank]
            part = [tensors[0][:, here], tensors[1][:, order], tensors[2][:, order]]
            outputs.append(attend(micro_batch, part, sinks, window=window, context_parallel=True))
            total = total + (outputs[-1] * weights[:, here]).sum()
        total.backward()
        whole = torch.empty_like(expected[0])
        whole[:, order] = torch.cat(outputs, 1).detach()
        assert_same((whole, [x.grad for x in (*tensors, sinks) if x is not None]), expected)


@pytest.mark.parametrize("size", [2, 4])
def test_torchtitans_context_parallelism_gives_the_gradients_of_one_process(size):
    cases = [
        {"balancer": balancer, "shape": SHAPES[name], "window": window, "with_sinks": with_sinks}
        for balancer, name, window, with_sinks in (
            (None, "plain", None, False),
            ("headtail", "grouped", None, False),
            ("ptrr", "mla", None, False),
            ("headtail", "mla", WINDOW, False),
            ("ptrr", "grouped", WINDOW, True),
            (None, "one_kv", None, True),
        )
    ]
    results = run_workers(size, all_of_torchtitan, cases)
    for case, *parts in zip(cases, *results, strict=True):
        arguments = {key: value for key, value in case.items() if key != "balancer"}
        output, gradients = reference(**arguments)
        order = row_order(case["balancer"], micro_batch_of().row.cu_seqlens_host, size)
        found = torch.cat([part[0] for part in parts], 1)
        summed = [torch.cat([part[1][index] for part in parts], 1) for index in range(3)]
        expected = [x[:, order] for x in gradients[:3]]
        if case["with_sinks"]:
            summed.append(sum(part[1][3] for part in parts))
            expected.append(gradients[3])
        assert_same((found, summed), (output[:, order], expected))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@EVERY
def test_flex_attention_without_gradients_equals_the_definition(name, window, with_sinks):
    expected, _ = reference(SHAPES[name], window=window, with_sinks=with_sinks)
    *tensors, _, sinks = tensors_of(SHAPES[name])
    run = partial(attend, sinks=sinks if with_sinks else None, window=window, kernel="packed_flex")
    torch.testing.assert_close(run(micro_batch_of(), tensors), expected, rtol=1e-11, atol=1e-12)
    for rank in range(2):
        micro_batch = micro_batch_of("ptrr", 2, rank)
        order = micro_batch.row.order
        here = order.chunk(2)[rank]
        part = [tensors[0][:, here], tensors[1][:, order], tensors[2][:, order]]
        output = run(micro_batch, part, context_parallel=True)
        torch.testing.assert_close(output, expected[:, here], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("context_parallel", [False, True])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_half_precision_keeps_its_dtype_and_a_log_sum_exp_in_fp32(context_parallel, with_sinks):
    tensors = tensors_of(SHAPES["grouped"], torch.bfloat16)[:3]
    seen = []

    def look(output: Tensor, log_sum_exp: Tensor) -> Tensor:
        seen.append(log_sum_exp)
        return output

    mask = row_mask(micro_batch_of(), kernel="packed_sdpa", context_parallel=context_parallel)
    module = PackedAttention.Config().build()
    output = module(*tensors, attention_masks=mask, scale=0.3, out_transform=look if with_sinks else None)
    assert output.dtype == torch.bfloat16
    assert [(x.dtype, x.shape) for x in seen] == [(torch.float32, (1, ROW, 4))] * with_sinks
    expected, _ = reference(SHAPES["grouped"], window=None, with_sinks=False)
    torch.testing.assert_close(output.double(), expected, rtol=0.03, atol=0.03)


def test_the_default_scale_is_that_of_the_head_size():
    tensors = tensors_of(SHAPES["mla"])[:3]
    module = PackedAttention.Config().build()
    for context_parallel in (False, True):
        mask = row_mask(micro_batch_of(), kernel="packed_sdpa", context_parallel=context_parallel)
        for transform in (None, lambda output, log_sum_exp: output):
            call = partial(module, *tensors, attention_masks=mask, out_transform=transform)
            torch.testing.assert_close(call(), call(scale=12**-0.5), rtol=1e-12, atol=1e-12)


def test_padding_is_neither_seen_nor_sees():
    # What padding holds moves no real token, and no gradient of a real token reaches it; the same the other way round.
    for balancer in BALANCERS:
        *tensors, weights, _ = tensors_of(SHAPES["grouped"])
        micro_batch = micro_batch_of(balancer, 2, 1)
        order = micro_batch.row.order
        padding = order >= 32
        leaves = [x[:, order].requires_grad_() for x in tensors]
        changed = [torch.where(padding[None, :, None, None], 9.0, x) for x in leaves]
        parts = [
            attend(micro_batch, [x[0][:, 20:], *x[1:]], None, window=None, context_parallel=True)
            for x in (leaves, changed)
        ]
        real = ~padding[20:]
        assert torch.equal(parts[0][:, real], parts[1][:, real])
        assert not torch.equal(parts[0], parts[1]) or bool(real.all())
        (parts[0] * weights[:, order[20:]])[:, real].sum().backward()
        assert all(not x.grad[:, padding].any() for x in leaves)
        assert all(x.grad.any() for x in leaves)


def test_torchtitan_knows_the_module_and_the_names_of_its_tensors():
    from torchtitan.models.common.attention import FlexAttention

    module = PackedAttention.Config().build()
    assert isinstance(module, FlexAttention)
    assert isinstance(PackedAttention.Config(), FlexAttention.Config)
    parameters = inspect.signature(PackedAttention.forward).parameters.values()
    positional = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert positional == ["self", "q_BLNH", "k_BLNH", "v_BLNH"]
    assert not list(module.parameters()) and not module.state_dict()


def test_fsdp2_hands_a_mask_to_every_layer_as_it_is():
    # FSDP2 copies dataclasses, field by field, when it casts the inputs of a layer.
    from torch.distributed.utils import _apply_to_tensors

    mask = row_mask(micro_batch_of("ptrr", 2, 1), kernel="packed_sdpa", context_parallel=True)
    assert dataclasses.is_dataclass(mask.row)
    assert _apply_to_tensors(torch.Tensor.half, {"basic_mask": mask})["basic_mask"] is mask


def test_documents_that_a_rank_has_no_token_of_are_left_out():
    experience = Experience.from_documents(input_ids=[[1] * 4, [2] * 4], response_mask=[[1] * 4] * 2)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 8, 2, 4, dtype=torch.float64, generator=generator) for _ in range(3)]
    whole = row_mask(pack_row(experience, [0, 1]), kernel="packed_sdpa", context_parallel=False)
    module = PackedAttention.Config().build()
    expected = module(*tensors, attention_masks=whole)
    for rank in range(2):
        micro_batch = pack_row(experience, [0, 1], sequence_size=2, sequence_rank=rank)
        mask = row_mask(micro_batch, kernel="packed_sdpa", context_parallel=True)
        here = slice(4 * rank, 4 * rank + 4)
        leaves = [tensors[0][:, here], *(x.clone().requires_grad_() for x in tensors[1:])]
        output = module(*leaves, attention_masks=mask)
        torch.testing.assert_close(output, expected[:, here], rtol=1e-12, atol=1e-12)
        output.sum().backward()
        elsewhere = slice(4 - 4 * rank, 8 - 4 * rank)
        assert not leaves[2].grad[:, elsewhere].any() and leaves[2].grad[:, here].any()


def test_kernels_are_chosen_by_what_they_can_do():
    half = torch.bfloat16
    for device, dtype, needs, expected in (
        (CPU, torch.float32, {}, "packed_sdpa"),
        (CPU, torch.float32, {"context_parallel": True, "sinks": True}, "packed_sdpa"),
        (CUDA, half, {}, "packed_varlen"),
        (CUDA, torch.float32, {}, "packed_sdpa"),
        (CUDA, half, {"context_parallel": True}, "packed_flex"),
        (CUDA, torch.float32, {"context_parallel": True}, "packed_flex"),
        (CUDA, half, {"sinks": True}, "packed_flex"),
    ):
        assert select_titan_kernel("auto", device, dtype=dtype, **needs) == expected
    assert select_titan_kernel("packed_sdpa", CUDA, context_parallel=True) == "packed_sdpa"
    assert select_titan_kernel("packed_varlen", CUDA) == "packed_varlen"


@pytest.mark.parametrize(
    ("requested", "device", "needs", "message"),
    [
        ("sdpa", CPU, {}, "'sdpa' is not known"),
        ("packed_flex", CPU, {}, "'packed_flex' has no backward pass on the CPU; use 'packed_sdpa'"),
        ("packed_varlen", CPU, {"context_parallel": True}, "needs CUDA"),
        (
            "packed_varlen",
            CUDA,
            {"context_parallel": True},
            "'packed_varlen' knows only whole rows.*context parallelism",
        ),
        ("packed_varlen", CUDA, {"sinks": True}, "'packed_varlen' drops the gradient of the log-sum-exp.*packed_flex"),
    ],
)
def test_kernels_that_cannot_are_refused(requested, device, needs, message):
    with pytest.raises(ValueError, match=message):
        select_titan_kernel(requested, device, **needs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernel": "sdpa"}, "kernel='sdpa' is not known"),
        ({"window": 0}, "window=0 must be positive"),
        ({"kernel": "packed_varlen", "context_parallel": True}, "'packed_varlen' knows only whole rows"),
        ({"kernel": "packed_flash", "context_parallel": True}, "'packed_flash' knows only whole rows"),
    ],
)
def test_impossible_masks_are_refused(arguments, message):
    defaults = {"kernel": "packed_sdpa", "context_parallel": False}
    with pytest.raises(ValueError, match=message):
        row_mask(micro_batch_of(), **{**defaults, **arguments})


def test_a_row_that_is_split_or_dealt_out_needs_context_parallelism():
    with pytest.raises(ValueError, match=r"20 of 40 tokens.*context_parallel=True"):
        row_mask(micro_batch_of(None, 2, 0), kernel="packed_sdpa", context_parallel=False)
    dealt = micro_batch_of(multiple_of=4)
    dealt = dataclasses.replace(dealt, row=dataclasses.replace(dealt.row, order=torch.arange(ROW).flip(0)))
    with pytest.raises(ValueError, match="dealt out: True"):
        row_mask(dealt, kernel="packed_sdpa", context_parallel=False)


def test_impossible_calls_are_refused():
    tensors = tensors_of(SHAPES["plain"])[:3]
    module = PackedAttention.Config().build()
    mask = row_mask(micro_batch_of(), kernel="packed_sdpa", context_parallel=False)
    with pytest.raises(ValueError, match="type NoneType; pass row_mask"):
        module(*tensors, attention_masks=None)
    with pytest.raises(ValueError, match="score_mod"):
        module(*tensors, attention_masks=mask, score_mod=lambda *_: 0)
    for wrong in ([x[:, :20] for x in tensors], [x.expand(2, -1, -1, -1) for x in tensors]):
        with pytest.raises(ValueError, match=r"takes \[1, 40, \.\.\.\] and \[1, 40, \.\.\.\]"):
            module(*wrong, attention_masks=mask)
    split = row_mask(micro_batch_of(None, 2, 1), kernel="packed_sdpa", context_parallel=True)
    with pytest.raises(ValueError, match=r"takes \[1, 20, \.\.\.\] and \[1, 40, \.\.\.\]"):
        module(*tensors, attention_masks=split)
    with pytest.raises(ValueError, match="block_size=64"):
        PackedAttention.Config(block_size=64).build()
    varlen = row_mask(micro_batch_of(), kernel="packed_varlen", context_parallel=False)
    with pytest.raises(ValueError, match="'packed_varlen' drops the gradient"):
        module(*tensors, attention_masks=varlen, out_transform=lambda output, log_sum_exp: output)
    with pytest.raises(ValueError, match="'packed_varlen' computes in bfloat16"):
        module(*tensors, attention_masks=varlen)
    flex = row_mask(micro_batch_of(), kernel="packed_flex", context_parallel=False)
    with pytest.raises(ValueError, match="no backward pass on the CPU"):
        module(*(x.requires_grad_() for x in tensors), attention_masks=flex)


@pytest.mark.cuda
@EVERY
def test_flex_attention_on_a_device_equals_the_definition(name, window, with_sinks):
    tolerance = {"rtol": 2e-3, "atol": 2e-3}
    output, gradients = reference(SHAPES[name], window=window, with_sinks=with_sinks)
    for balancer, size in ((None, 1), ("ptrr", 2)):
        *tensors, weights, sinks = (x.float().cuda() for x in tensors_of(SHAPES[name]))
        leaves = [x.requires_grad_() for x in tensors]
        sinks = sinks.requires_grad_() if with_sinks else None
        outputs = []
        for rank in range(size):
            micro_batch = micro_batch_of(balancer, size, rank, device="cuda")
            order = torch.arange(ROW) if size == 1 else micro_batch.row.order
            here = order.chunk(size)[rank]
            part = [leaves[0][:, here], leaves[1][:, order], leaves[2][:, order]]
            run = partial(attend, kernel="packed_flex", context_parallel=size > 1)
            outputs.append(run(micro_batch, part, sinks, window=window))
        found = torch.cat(outputs, 1)
        (found * weights[:, order]).sum().backward()
        found_gradients = [x.grad.cpu().double() for x in (*leaves, sinks) if x is not None]
        assert_same((found.cpu().double(), found_gradients), (output[:, order], gradients), **tolerance)


@pytest.mark.cuda
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("window", [None, WINDOW])
def test_varlen_on_a_device_equals_the_definition(name, window):
    tensors, _, weights = leaves_of(name, False)
    leaves = [x.detach().bfloat16().cuda().requires_grad_() for x in tensors]
    output = attend(micro_batch_of(device="cuda"), leaves, None, window=window, kernel="packed_varlen")
    (output * weights.cuda()).sum().backward()
    found = (output.cpu().double(), [x.grad.cpu().double() for x in leaves])
    assert_same(found, reference(SHAPES[name], window=window, with_sinks=False), rtol=0.05, atol=0.05)
