"""Attention of torchtitan's models over packed rows: our kernels in the place of its flex attention.

Without context parallelism the kernels are those of the other engine. With it, torchtitan gathers keys and values of
the whole row, in the order in which the row was dealt out, and queries are this rank's part; who sees whom then follows
from documents and positions of both.

Shapes: B = 1 row, L tokens of this rank, S of the whole row, N query heads, M key/value heads, H and V head sizes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torchtitan.models.common.attention import FlexAttention
from typing_extensions import override

from lightning_rl_engines.sequence.attention import KERNELS, select_kernel
from lightning_rl_engines.sequence.block_mask import BLOCK_SIZE, make_block_mask
from lightning_rl_engines.sequence.context_parallel import inverse_order
from lightning_rl_engines.sequence.kernels import compiled_flex
from lightning_rl_engines.sequence.packing import MicroBatch, PackedRow, to_device

_SPLITTABLE = ("packed_flex", "packed_sdpa")
"""Kernels whose queries may be any tokens of a row, and whose log-sum-exp has a gradient."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Split:
    """How this rank's queries and the whole row's keys come back into row order, document by document.

    Attributes:
        query_order: int64 ``[L]``, this rank's places sorted by their positions in the row.
        query_inverse: int64 ``[L]``, its inverse.
        query_positions: int64 ``[L]``, positions in the row, sorted.
        key_order: int64 ``[S]``, the sharded place of each position of the row.
        query_bounds: Where the queries of each document start among the sorted ones, and their number.
    """

    query_order: Tensor
    query_inverse: Tensor
    query_positions: Tensor
    key_order: Tensor
    query_bounds: tuple[int, ...]


class RowMask:
    """Who sees whom in a packed row: what torchtitan hands to its layers as ``attention_masks``.

    Made by :func:`row_mask` once per micro-batch and not changed. No dataclass: FSDP2 makes copies of those, field by
    field, in front of every layer.

    Attributes:
        row: The documents of the whole row.
        kernel: A key of ``KERNELS``.
        window: Tokens that a token sees at most, itself included.
        queries: Tokens of this rank.
        split: With context parallelism and ``packed_sdpa``: the way back into row order.
        block_mask: With ``packed_flex``: the mask.
    """

    __slots__ = ("block_mask", "kernel", "queries", "row", "split", "window")

    def __init__(
        self,
        *,
        row: PackedRow,
        kernel: str,
        window: int | None,
        queries: int,
        split: _Split | None,
        block_mask: BlockMask | None,
    ) -> None:
        self.row = row
        self.kernel = kernel
        self.window = window
        self.queries = queries
        self.split = split
        self.block_mask = block_mask


def select_titan_kernel(
    requested: str,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    context_parallel: bool = False,
    sinks: bool = False,
) -> str:
    """Name of the kernel to use; to be called when a model is built, before any collective.

    Args:
        requested: ``"auto"`` or a key of ``KERNELS``. ``"auto"`` is the choice of the other engine, and
            ``"packed_flex"`` on accelerators where that choice lacks what is needed.
        device: Where the model computes.
        dtype: What the model computes in; ``None`` for half precision on accelerators.
        context_parallel: Whether rows are split over ranks.
        sinks: Whether layers transform the output by the log-sum-exp of the scores, as attention sinks do.

    Raises:
        ValueError: If the name is unknown, or the device, the installation or the kernel lacks what is needed.
    """
    special = context_parallel or sinks
    if requested == "auto" and special:
        return "packed_sdpa" if device.type == "cpu" else "packed_flex"
    kernel = select_kernel(requested, device, dtype=dtype)
    if kernel == "packed_flex" and device.type == "cpu":
        raise ValueError(
            "attn_implementation='packed_flex' has no backward pass on the CPU; use 'packed_sdpa' or 'auto'"
        )
    if special:
        _check_splittable(kernel, "context parallelism" if context_parallel else "attention sinks")
    return kernel


def row_mask(micro_batch: MicroBatch, *, kernel: str, context_parallel: bool, window: int | None = None) -> RowMask:
    """Make what every attention layer needs to know of a micro-batch; no collective.

    Layers that differ in their windows take a mask each; torchtitan's gpt_oss takes a dict of them,
    ``{"basic_mask": ..., "sliding_window_mask": ...}``.

    Args:
        micro_batch: The row and this rank's part of it.
        kernel: A key of ``KERNELS``.
        context_parallel: Whether attention gets this rank's queries, and keys and values of the whole row.
        window: Tokens that a token sees at most, itself included; ``None`` for all before it.

    Raises:
        ValueError: If the kernel is unknown or cannot do this, the window is not positive, or the row is split or
            dealt out without context parallelism.
    """
    row, queries = micro_batch.row, len(micro_batch.input_ids)
    length = row.cu_seqlens_host[-1]
    if kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r} is not known; use one of {sorted(KERNELS)}")
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be positive, or None for no window")
    if context_parallel:
        _check_splittable(kernel, "context parallelism")
    elif queries != length or row.order is not None:
        raise ValueError(
            f"the micro-batch holds {queries} of {length} tokens, dealt out: {row.order is not None}; a row that is "
            f"split or dealt out needs context_parallel=True"
        )
    order = torch.arange(length) if row.order is None else row.order
    here = order[micro_batch.sequence_rank * queries :][:queries]
    split, block_mask = None, None
    if kernel == "packed_flex":
        queries_here, keys = (to_device(x, micro_batch.device) for x in (here, order))
        block_mask = make_block_mask(row, queries_here, keys, window=window)
    elif context_parallel:
        split = _split_of(row, here, order, micro_batch.device)
    return RowMask(row=row, kernel=kernel, window=window, queries=queries, split=split, block_mask=block_mask)


class PackedAttention(FlexAttention):
    """Causal attention within the documents of a packed row, by one of our kernels.

    A subclass of torchtitan's flex attention, which is how torchtitan knows a module whose keys and values it may
    gather for context parallelism. Takes a :class:`RowMask` for a mask. Compilers do not look into it: a graph would
    hold the documents of one row.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """Configuration: ``kernel_options`` are those of flex attention, and matter to ``packed_flex`` alone."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.block_size != BLOCK_SIZE:
            raise ValueError(f"block_size={config.block_size} is not supported by packed attention; use {BLOCK_SIZE}")

    @override
    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: RowMask,
        score_mod: None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Attend; torchtitan wraps this method and knows the tensors by these names.

        Args:
            q_BLNH: ``[1, L, N, H]``, this rank's queries.
            k_BLNH: ``[1, S, M, H]``, keys of the whole row; ``N`` a multiple of ``M``.
            v_BLNH: ``[1, S, M, V]``.
            attention_masks: The row.
            score_mod: Not supported.
            scale: Factor on the scores; ``None`` for one over the root of H.
            enable_gqa: Whether ``N`` and ``M`` differ; follows from the shapes.
            out_transform: Makes the output from attention's, ``[1, L, N, V]``, and the log-sum-exp of the scores,
                ``[1, L, N]`` in fp32 or fp64. Gradients flow through both.

        Returns:
            ``[1, L, N, V]``.

        Raises:
            ValueError: If there is no row, tensors are not of its length, or the kernel cannot do what is asked.
        """
        if not isinstance(attention_masks, RowMask):
            raise ValueError(
                f"packed attention got attention_masks of type {type(attention_masks).__name__}; pass row_mask(...)"
            )
        if score_mod is not None:
            raise ValueError("packed attention has no score_mod; use score_mod=None")
        needed = (1, attention_masks.queries, 1, attention_masks.row.cu_seqlens_host[-1])
        if needed != (*q_BLNH.shape[:2], *k_BLNH.shape[:2]):
            raise ValueError(
                f"packed attention got queries {tuple(q_BLNH.shape)} and keys {tuple(k_BLNH.shape)}; this row takes "
                f"[1, {needed[1]}, ...] and [1, {needed[3]}, ...]"
            )
        tensors = (q_BLNH[0], k_BLNH[0], v_BLNH[0])
        if out_transform is None:
            return _attend(*tensors, attention_masks, scale, self.kernel_options, False)[0][None]
        output, log_sum_exp = _attend(*tensors, attention_masks, scale, self.kernel_options, True)
        return out_transform(output[None], log_sum_exp[None])


def _check_splittable(kernel: str, feature: str) -> None:
    if kernel not in _SPLITTABLE:
        why = "knows only whole rows" if feature == "context parallelism" else "drops the gradient of the log-sum-exp"
        raise ValueError(f"attn_implementation={kernel!r} {why}, so it cannot do {feature}; use one of {_SPLITTABLE}")


def _split_of(row: PackedRow, here: Tensor, order: Tensor, device: torch.device) -> _Split:
    positions, query_order = here.sort()
    ends = torch.tensor(row.cu_seqlens_host[1:])
    return _Split(
        query_order=to_device(query_order, device),
        query_inverse=to_device(inverse_order(query_order), device),
        query_positions=to_device(positions, device),
        key_order=to_device(inverse_order(order), device),
        query_bounds=(0, *torch.searchsorted(positions, ends).tolist()),
    )


@torch.compiler.disable
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: RowMask,
    scale: float | None,
    kernel_options: dict[str, Any],
    log_sum_exp: bool,
) -> tuple[Tensor, Tensor]:
    """``[L, N, H], [S, M, H], [S, M, V] -> [L, N, V]`` and ``[L, N]``, which is empty where it is not asked for."""
    if log_sum_exp:
        _check_splittable(mask.kernel, "attention sinks")
    if mask.block_mask is not None:
        return _flex(query, key, value, mask.block_mask, scale, kernel_options, log_sum_exp)
    if mask.split is not None:
        split = mask.split
        # Keys and values come back into the row's order, so that each document is compared with itself alone.
        key, value = (x.index_select(0, split.key_order) for x in (key, value))
        query = query.index_select(0, split.query_order)
        results = _documents(query, key, value, mask, scale, log_sum_exp)
        output, sums = (x.index_select(0, split.query_inverse) if len(x) else x for x in results)
        return output, sums
    if log_sum_exp:
        return _documents(query, key, value, mask, scale, log_sum_exp)
    kernel = KERNELS[mask.kernel]
    output = kernel(query, key, value, mask.row, scale=scale, window=mask.window, block_masks=WeakKeyDictionary())
    return output, output.new_empty(0)


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask,
    scale: float | None,
    kernel_options: dict[str, Any],
    log_sum_exp: bool,
) -> tuple[Tensor, Tensor]:
    on_cpu = query.device.type == "cpu"
    if on_cpu and torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        raise ValueError("attn_implementation='packed_flex' has no backward pass on the CPU; use 'packed_sdpa'")
    attend: Any = flex_attention if on_cpu else compiled_flex()
    output, auxiliary = attend(
        *(x.transpose(0, 1)[None] for x in (query, key, value)),
        block_mask=block_mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=kernel_options or None,
        return_aux=AuxRequest(lse=log_sum_exp),
    )
    sums = auxiliary.lse[0].T if log_sum_exp else output.new_empty(0)
    return output[0].transpose(0, 1), sums


def _documents(
    query: Tensor, key: Tensor, value: Tensor, mask: RowMask, scale: float | None, log_sum_exp: bool
) -> tuple[Tensor, Tensor]:
    """One attention per document, in row order: memory grows with the documents' squares, not with the row's."""
    bounds = mask.row.cu_seqlens_host if mask.split is None else mask.split.query_bounds
    positions = torch.arange(len(key), device=key.device)
    query_positions = positions if mask.split is None else mask.split.query_positions
    results = []
    for (start, end), (first, last) in zip(pairwise(mask.row.cu_seqlens_host), pairwise(bounds), strict=True):
        if first == last:
            continue
        distance = query_positions[first:last, None] - positions[None, start:end]
        visible = (distance >= 0) if mask.window is None else (distance >= 0) & (distance < mask.window)
        part = (query[first:last], key[start:end], value[start:end], visible, scale)
        results.append(_with_log_sum_exp(*part) if log_sum_exp else (_masked(*part), query.new_empty(0)))
    return torch.cat([output for output, _ in results]), torch.cat([sums for _, sums in results])


def _masked(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float | None) -> Tensor:
    query_, key_, value_ = (x.transpose(0, 1)[None] for x in (query, key, value))
    output = F.scaled_dot_product_attention(
        query_, key_, value_, attn_mask=visible, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output[0].transpose(0, 1)


def _with_log_sum_exp(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention by its definition, in fp32 or fp64: torch's own kernels keep their log-sum-exp to themselves."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    repeats = query.shape[1] // key.shape[1]
    query_, key_, value_ = (x.transpose(0, 1).to(dtype) for x in (query, key, value))
    key_, value_ = (x.repeat_interleave(repeats, 0) for x in (key_, value_))
    scores = query_ @ key_.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~visible, -torch.inf)
    sums = scores.logsumexp(-1)
    output = (scores - sums[..., None]).exp() @ value_
    return output.transpose(0, 1).to(query.dtype), sums.T
