"""Small random models of many architectures of transformers."""

import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCABULARY = 97

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "initializer_range": 0.2,
    "init_std": 0.2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "sliding_window": 6,
    "num_key_value_heads": 2,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(
        ("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts", "first_k_dense_replace"), 1
    ),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
}
"""Sizes by all the names that configurations have for them."""


def small_config(model_type: str, **changes: Any) -> dict[str, Any]:
    """A configuration with small sizes for every field that its class has."""
    declared: set[str] = set()
    for base in CONFIG_MAPPING[model_type].__mro__:
        declared |= {*inspect.get_annotations(base), *inspect.signature(base.__init__).parameters}
    fields = {name: value for name, value in _SMALL.items() if name in declared}
    return {"model_type": model_type, **fields, **changes}


def save_small_model(folder: Path, model_type: str, **changes: Any) -> str:
    """Save a random model whose biases are not 0 and whose norms are not 1."""
    fields = small_config(model_type, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return str(folder)
