"""Attention of rows by its definition, and through torchtitan's context parallelism; workers import this file."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from lightning_rl_engines.models.titan.attention import PackedAttention, row_mask
from lightning_rl_engines.sequence import Experience, MicroBatch, pack_row
from lightning_rl_engines.sequence.context_parallel import row_order

LENGTHS = (9, 1, 17, 5)
"""Documents longer and shorter than the window, one of a single token; 8 tokens of padding make a row of 40."""

ROW = 40
BOUNDS = (0, 9, 10, 27, 32, 40)
WINDOW = 4

SHAPES = {
    "plain": (4, 4, 8, 8),
    "grouped": (4, 2, 8, 8),
    "one_kv": (4, 1, 8, 8),
    "mla": (4, 4, 12, 6),
}
"""Query heads, key/value heads, their head size, the values' head size."""


def micro_batch_of(balancer: str | None = None, size: int = 1, rank: int = 0, **arguments: Any) -> MicroBatch:
    experience = Experience.from_documents(
        input_ids=[[1] * length for length in LENGTHS], response_mask=[[1] * length for length in LENGTHS]
    )
    order = partial(row_order, balancer) if size > 1 else None
    return pack_row(experience, range(4), pad_to=ROW, sequence_size=size, sequence_rank=rank, order=order, **arguments)


def tensors_of(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys and values of the row, weights of a scalar loss, and a sink for each query head."""
    heads, kv_heads, size, value_size = shape
    generator = torch.Generator().manual_seed(3)
    sizes = [(1, ROW, heads, size), (1, ROW, kv_heads, size), (1, ROW, kv_heads, value_size)]
    sizes += [(1, ROW, heads, value_size), (heads,)]
    return [torch.randn(*each, dtype=torch.float64, generator=generator).to(dtype) for each in sizes]


def naive(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """``[1, S, N, V]``, one softmax per token and head; a sink is one more score, without a value."""
    rows = torch.zeros(1, ROW, query.shape[2], value.shape[3], dtype=query.dtype)
    outputs = []
    for start, end in pairwise(BOUNDS):
        for place in range(start, end):
            first = start if window is None else max(start, place - window + 1)
            for head in range(query.shape[2]):
                kv_head = head * key.shape[2] // query.shape[2]
                scores = key[0, first : place + 1, kv_head] @ query[0, place, head] * scale
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1]])
                shares = scores.softmax(0)[: place + 1 - first]
                outputs.append(shares @ value[0, first : place + 1, kv_head])
    return torch.stack(outputs).view(rows.shape)


def reference(shape: Sequence[int], *, window: int | None, with_sinks: bool) -> tuple[Tensor, list[Tensor]]:
    """Output of the whole row, and gradients of queries, keys, values and sinks."""
    *tensors, weights, sinks = tensors_of(shape)
    leaves = [x.requires_grad_() for x in (*tensors, sinks)]
    used = sinks if with_sinks else None
    output = naive(*leaves[:3], scale=0.3, window=window, sinks=used)
    (output * weights).sum().backward()
    return output.detach(), [x.grad for x in (leaves if with_sinks else leaves[:3])]


def sink_transform(sinks: Tensor | None) -> Callable[[Tensor, Tensor], Tensor] | None:
    """How torchtitan's gpt_oss uses the log-sum-exp."""
    from torchtitan.models.gpt_oss.model import apply_attention_sink_rescale

    return None if sinks is None else partial(apply_attention_sink_rescale, sinks=sinks)


def attend(
    micro_batch: MicroBatch,
    tensors: Sequence[Tensor],
    sinks: Tensor | None,
    *,
    window: int | None,
    kernel: str = "packed_sdpa",
    context_parallel: bool = False,
    module: PackedAttention | None = None,
) -> Tensor:
    mask = row_mask(micro_batch, kernel=kernel, context_parallel=context_parallel, window=window)
    module = PackedAttention.Config().build() if module is None else module
    grouped = tensors[0].shape[2] != tensors[1].shape[2]
    return module(*tensors, attention_masks=mask, scale=0.3, enable_gqa=grouped, out_transform=sink_transform(sinks))


def through_torchtitan(
    rank: int, size: int, balancer: str | None, shape: Sequence[int], *, window: int | None, with_sinks: bool
) -> tuple[Tensor, list[Tensor]]:
    """This rank's output and gradients; torchtitan gathers keys and values, under activation checkpointing."""
    from torchtitan.distributed.context_parallel import apply_cp_to_forward

    micro_batch = micro_batch_of(balancer, size, rank)
    assert micro_batch.row.order is not None
    here = micro_batch.row.order.chunk(size)[rank]
    *tensors, weights, sinks = tensors_of(shape)
    leaves = [x[:, here].requires_grad_() for x in tensors]
    used = sinks.requires_grad_() if with_sinks else None
    module = PackedAttention.Config().build()
    apply_cp_to_forward([module], init_device_mesh("cpu", (size,)))
    call = partial(attend, micro_batch, window=window, context_parallel=True, module=module)
    output = checkpoint(call, leaves, used, use_reentrant=False)
    (output * weights[:, here]).sum().backward()
    return output.detach(), [x.grad for x in ([*leaves, sinks] if with_sinks else leaves)]


def all_of_torchtitan(cases: Sequence[dict[str, Any]]) -> list[tuple[Tensor, list[Tensor]]]:
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    return [through_torchtitan(rank, size, **case) for case in cases]
