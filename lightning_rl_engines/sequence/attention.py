"""Packed attention for Hugging Face models: names in transformers' registry, groups bound to modules.

The names are registered for attention and not for masks: transformers then builds no mask, which under sequence
parallelism would be made from the local slice and be wrong. The model call carries ``packed_row=PackedRow`` as a
keyword; transformers hands it down to the attention function, also through gradient checkpointing. The sequence
group is an attribute of each attention module: thread-locals and context variables are not seen by the autograd
thread that recomputes a checkpoint, and two models of one process may differ in their groups.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from lightning_rl_engines.sequence import kernels
from lightning_rl_engines.sequence.kernels import BlockMasks, Kernel
from lightning_rl_engines.sequence.packing import PackedRow
from lightning_rl_engines.sequence.ulysses import check_head_counts, exchange_heads, return_heads

KERNELS: Final[Mapping[str, Kernel]] = MappingProxyType(
    {
        "packed_sdpa": kernels.sdpa,
        "packed_varlen": kernels.varlen,
        "packed_flash": kernels.flash,
        "packed_flex": kernels.flex,
    }
)
"""Kernels by the names under which they are registered."""

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, eq=False)
class AttentionBinding:
    """What an attention module needs to know beyond its weights; shared by copies of the module.

    Attributes:
        name: The module's name in the model.
        group: Sequence ranks, or ``None`` for one.
        window: Sliding window by the configuration; a ``sliding_window`` in the call has priority.
        block_masks: Cache of flex masks, one for the whole model.
    """

    name: str
    group: ProcessGroup | None
    window: int | None
    block_masks: BlockMasks

    def __deepcopy__(self, memo: dict[int, Any]) -> "AttentionBinding":
        """Process groups cannot be copied, and a copied module stays in its group."""
        return self


def select_kernel(requested: str, device: torch.device, *, dtype: torch.dtype | None = None) -> str:
    """Name of the kernel to use.

    Args:
        requested: ``"auto"`` or one of ``KERNELS``. ``"auto"`` is ``packed_varlen`` on CUDA in half precision and
            ``packed_sdpa`` everywhere else.
        device: Where the model computes.
        dtype: What the model computes in; ``None`` for half precision on accelerators.

    Returns:
        A key of ``KERNELS``.

    Raises:
        ValueError: If the name is unknown, or the device or the installation lacks the kernel.
    """
    half = dtype in (None, torch.float16, torch.bfloat16)
    if requested == "auto":
        return "packed_varlen" if device.type == "cuda" and half else "packed_sdpa"
    if requested not in KERNELS:
        raise ValueError(f"attn_implementation={requested!r} is not known; use 'auto' or one of {sorted(KERNELS)}")
    if requested in ("packed_varlen", "packed_flash"):
        if device.type != "cuda":
            raise ValueError(f"attn_implementation={requested!r} needs CUDA, not {device.type!r}; use 'packed_sdpa'")
        if not half:
            raise ValueError(f"attn_implementation={requested!r} computes in half precision, not {dtype}; use 'auto'")
    if requested == "packed_flash" and not kernels.flash_attn_installed():
        raise ValueError("attn_implementation='packed_flash' needs the package flash-attn; use 'packed_varlen'")
    return requested


def ensure_registered() -> None:
    """Register every kernel in transformers' ``AttentionInterface``; to call it again changes nothing."""
    for name, function in _FUNCTIONS.items():
        AttentionInterface.register(name, function)


def bind_sequence_parallel(model: nn.Module, group: ProcessGroup | None, *, kernel: str) -> None:
    """Make a Hugging Face causal LM attend by a packed kernel, over sequence slices when there is a group.

    Sets the attention implementation of the model, so its configuration must be its own. Every forward then needs
    ``packed_row=``. No collective; to be called on all ranks alike, before the model is sharded.

    Args:
        model: The model, or a module that holds one (a PEFT model).
        group: Sequence ranks that share each row, in row order; ``None`` for one rank.
        kernel: A key of ``KERNELS``.

    Raises:
        ValueError: If the kernel is unknown, the model holds layers that packed attention cannot serve (not causal,
            recurrent, chunked, with sinks or soft-cap), or heads do not split over the group.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r} is not known; use one of {sorted(KERNELS)}")
    found = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not found:
        raise ValueError(f"model={type(model).__name__} holds no transformers model; pass a PreTrainedModel")
    size = 1 if group is None else dist.get_world_size(group)
    config = found[0].config
    attentions = _attention_modules(model)
    _check_layers(found[0], len(attentions))
    block_masks: BlockMasks = WeakKeyDictionary()
    bindings = []
    for name, module in attentions.items():
        own_config = getattr(module, "config", config)
        _check_features(name, module, own_config)
        check_head_counts(name, *head_counts(module, own_config), size)
        bindings.append(
            AttentionBinding(name, group if size > 1 else None, _window_of(module, own_config), block_masks)
        )
    ensure_registered()
    found[0].set_attn_implementation(kernel)
    for module, binding in zip(attentions.values(), bindings, strict=True):
        # A plain attribute: neither a parameter nor a submodule, so absent from every state dict.
        module.packed_attention = binding  # type: ignore[assignment]


def head_counts(module: Any, config: PreTrainedConfig) -> tuple[int, int]:
    """Query heads and key/value heads that an attention module hands to its kernel.

    Args:
        module: An attention module of transformers: their classes share attributes, no base class.
        config: Its configuration, for modules without a ``k_proj`` of their own.

    Returns:
        ``(query heads, key/value heads)``.
    """
    groups = int(getattr(module, "num_key_value_groups", 1))
    if hasattr(module, "k_proj") and hasattr(module, "head_dim"):
        kv_heads = int(module.k_proj.out_features) // int(module.head_dim)
        return kv_heads * groups, kv_heads
    query_heads = int(config.num_attention_heads)
    return query_heads, query_heads // groups


def _attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "is_causal") and hasattr(module, "layer_idx")
    }


def _check_layers(model: PreTrainedModel, attentions: int) -> None:
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(item for item in rope.values() if isinstance(item, dict))):
        kind = str(parameters.get("rope_type", ""))
        if kind == "longrope" or "dynamic" in kind:
            raise ValueError(
                f"{type(model).__name__} has rope_type={kind!r}, which chooses frequencies by the longest document "
                "of a slice, so documents of a row would change each other; use a model with fixed frequencies, such "
                "as 'default', 'linear', 'yarn' or 'llama3'"
            )
    others = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        raise ValueError(f"{type(model).__name__} has layers of type {sorted(others)}; only {sorted(_LAYER_TYPES)} run")
    if attentions < config.num_hidden_layers:
        raise ValueError(
            f"{type(model).__name__} has {config.num_hidden_layers} layers but {attentions} attention modules with "
            f"transformers' attention interface; use a model whose layers all attend through it"
        )


def _check_features(name: str, module: nn.Module, config: PreTrainedConfig) -> None:
    if not module.is_causal:
        raise ValueError(f"attention module {name!r} is not causal; packed attention is: use a causal LM")
    if getattr(module, "sinks", None) is not None:
        raise ValueError(f"attention module {name!r} has sinks, which no packed kernel applies; use a model without")
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap is not None:
        raise ValueError(
            f"attn_logit_softcapping={softcap} of {name!r} is applied by no packed kernel; use a model with None"
        )


def _window_of(module: Any, config: PreTrainedConfig) -> int | None:
    """The window that transformers would put in the mask; some models pass it in no other way."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    slides = getattr(config, "use_sliding_window", True)
    if layer_types is not None:
        slides = layer_types[module.layer_idx] == "sliding_attention"
    return int(window) if slides and window is not None else None


def _check_call(
    binding: AttentionBinding, query: Tensor, key: Tensor, attention_mask: Tensor | None, options: Mapping[str, Any]
) -> None:
    name = binding.name
    if attention_mask is not None:
        raise ValueError(f"{name!r} got an attention mask; packed attention takes its documents from packed_row alone")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{name!r} got queries {tuple(query.shape)} and keys {tuple(key.shape)}; packed attention takes one row "
            f"and no cache: pass input_ids of shape [1, tokens] and use_cache=False"
        )
    if options.get("dropout"):
        raise ValueError(f"attention dropout {options['dropout']} of {name!r} is refused; set attention_dropout=0.0")
    if options.get("is_causal") is False:
        raise ValueError(f"{name!r} was called with is_causal=False; packed attention is causal")
    for option in ("softcap", "s_aux", "position_bias"):
        if options.get(option) is not None:
            raise ValueError(f"{name!r} was called with {option}=, which no packed kernel applies")


def _attend(
    kernel: Kernel,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_row: PackedRow | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers: ``[1, H, L, D]`` in, ``([1, L, Hq, Dv], None)`` out."""
    binding = getattr(module, "packed_attention", None)
    if not isinstance(binding, AttentionBinding):
        raise ValueError(f"{type(module).__name__} is not bound; call bind_sequence_parallel(model, group, kernel=...)")
    if packed_row is None:
        raise ValueError(f"{binding.name!r} got no packed_row; pass packed_row=micro_batch.row to the model")
    _check_call(binding, query, key, attention_mask, options)
    size = 1 if binding.group is None else dist.get_world_size(binding.group)
    if query.shape[2] * size != packed_row.cu_seqlens_host[-1]:
        raise ValueError(
            f"{binding.name!r} got {query.shape[2]} tokens on each of {size} sequence ranks, but packed_row has "
            f"{packed_row.cu_seqlens_host[-1]}; pass the row that input_ids were cut from"
        )
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if binding.group is not None:
        query, key, value = exchange_heads(query, key, value, binding.group)
    # After the exchange: only now is the row whole, and its documents as long as they are.
    window = options.get("sliding_window", binding.window)
    output = kernel(query, key, value, packed_row, scale=scaling, window=window, block_masks=binding.block_masks)
    if binding.group is not None:
        output = return_heads(output, binding.group)
    return output[None], None


def _function_of(kernel: Kernel) -> Callable[..., tuple[Tensor, None]]:
    # Outside the graphs of a compiled layer: a graph would hold the documents of one row.
    @torch.compiler.disable
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        return _attend(kernel, module, query, key, value, attention_mask, **options)

    return attend


_FUNCTIONS: Final = MappingProxyType({name: _function_of(kernel) for name, kernel in KERNELS.items()})
