"""Causal attention over the documents of a whole packed row, by four kernels with one signature.

Shapes: S tokens of the row, Hq query heads, Hkv key/value heads, D and Dv head sizes. A window of W lets a token see
W tokens, itself included, as in transformers.
"""

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from lightning_rl_engines.sequence.block_mask import make_block_mask
from lightning_rl_engines.sequence.packing import PackedRow

BlockMasks = WeakKeyDictionary[PackedRow, dict[int | None, BlockMask]]
"""Flex masks by row and window, shared by the layers of one model and gone with the row."""


class Kernel(Protocol):
    """Attention of a whole row: ``[S, Hq, D], [S, Hkv, D], [S, Hkv, Dv] -> [S, Hq, Dv]``."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        row: PackedRow,
        *,
        scale: float | None,
        window: int | None,
        block_masks: BlockMasks,
    ) -> Tensor:
        """Attend within each document, causally.

        Args:
            query: ``[S, Hq, D]``.
            key: ``[S, Hkv, D]``, ``Hq`` a multiple of ``Hkv``.
            value: ``[S, Hkv, Dv]``.
            row: The documents of the row.
            scale: Factor on the scores; ``None`` for one over the root of D.
            window: Tokens that a token sees at most, itself included.
            block_masks: Cache for flex masks.

        Returns:
            ``[S, Hq, Dv]``.
        """


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: PackedRow,
    *,
    scale: float | None,
    window: int | None,
    block_masks: BlockMasks,
) -> Tensor:
    """One ``scaled_dot_product_attention`` per document: exact, on every device, no mask, no host sync.

    A mask is built only for a document that is longer than the window.
    """
    outputs = []
    for start, end in pairwise(row.cu_seqlens_host):
        length = end - start
        mask = _window_mask(length, window, query.device) if window is not None and length > window else None
        document_q, document_k, document_v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
        output = F.scaled_dot_product_attention(
            document_q,
            document_k,
            document_v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: PackedRow,
    *,
    scale: float | None,
    window: int | None,
    block_masks: BlockMasks,
) -> Tensor:
    """Torch's own ``varlen_attn``: CUDA, half precision."""
    _check_half("packed_varlen", query)
    width = value.shape[-1]
    query, key, value, scale = same_head_size(query, key, value, scale)
    output = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        row.cu_seqlens,
        row.cu_seqlens,
        row.max_seqlen,
        row.max_seqlen,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)
    return output[..., :width]


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: PackedRow,
    *,
    scale: float | None,
    window: int | None,
    block_masks: BlockMasks,
) -> Tensor:
    """``flash_attn_varlen_func`` of the flash-attn package: CUDA, half precision."""
    _check_half("packed_flash", query)
    width = value.shape[-1]
    query, key, value, scale = same_head_size(query, key, value, scale)
    output = _flash_attn_varlen()(
        query,
        key,
        value,
        cu_seqlens_q=row.cu_seqlens,
        cu_seqlens_k=row.cu_seqlens,
        max_seqlen_q=row.max_seqlen,
        max_seqlen_k=row.max_seqlen,
        softmax_scale=scale,
        causal=True,
        window_size=(-1 if window is None else window - 1, 0 if window is not None else -1),
    )
    return output[..., :width]


def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: PackedRow,
    *,
    scale: float | None,
    window: int | None,
    block_masks: BlockMasks,
) -> Tensor:
    """``flex_attention`` with one block mask per row and window; compiled on accelerators, no backward on the CPU."""
    on_cpu = query.device.type == "cpu"
    if on_cpu and torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        raise ValueError(
            "attn_implementation='packed_flex' has no backward on the CPU; use 'packed_sdpa' to train there"
        )
    masks = block_masks.setdefault(row, {})
    if window not in masks:
        positions = torch.arange(row.cu_seqlens_host[-1], device=query.device)
        masks[window] = make_block_mask(row, positions, positions, window=window)
    attend: Any = flex_attention if on_cpu else compiled_flex()
    output: Tensor = attend(
        *(x.transpose(0, 1)[None] for x in (query, key, value)),
        block_mask=masks[window],
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[0].transpose(0, 1)


def flash_attn_installed() -> bool:
    """Whether the flash-attn package can be imported."""
    return importlib.util.find_spec("flash_attn") is not None


def same_head_size(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Pad head sizes with zeros, which change nothing: flash kernels want one size, a multiple of 8, up to 256."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    size = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
    if size > 256:
        raise ValueError(
            f"attention heads of size {size} are beyond flash kernels (256); use attn_implementation='sdpa'"
        )
    query, key, value = (F.pad(item, (0, size - item.shape[-1])) for item in (query, key, value))
    return query, key, value, scale


def _check_half(name: str, query: Tensor) -> None:
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"attn_implementation={name!r} computes in bfloat16 or float16, not {query.dtype}; use 'packed_sdpa', or "
            f"precision='bf16-mixed'"
        )


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Boolean ``[length, length]``, True where the query (row) sees the key (column)."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


@cache
def compiled_flex() -> Callable[..., Any]:
    """Return ``flex_attention``, compiled once for rows of any length and without tuning itself for each."""
    return torch.compile(flex_attention, dynamic=True)


@cache
def _flash_attn_varlen() -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = importlib.import_module("flash_attn").flash_attn_varlen_func
    return function
