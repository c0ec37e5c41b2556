"""Tiny Hugging Face models by name, and the plain forward that everything else is compared with."""

import fcntl
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    # The default of 0.02 leaves such small models near uniform, and differences near rounding.
    "initializer_range": 0.2,
}

_VARIANTS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"num_key_value_heads": 4}),
    "llama_tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"hidden_size": 64}),
    "one_kv": (LlamaConfig, {"num_key_value_heads": 1}),
    "odd_vocab": (LlamaConfig, {"vocab_size": 97}),
    "mistral_window": (MistralConfig, {"sliding_window": 8}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
}

MODEL_NAMES = tuple(_VARIANTS)


def tiny_config(name: str, **changes: Any) -> PretrainedConfig:
    """A fresh configuration: 2 layers, 4 query heads of size 16, vocabulary 64 (``odd_vocab``: 97).

    Args:
        name: One of ``MODEL_NAMES``. ``llama`` (4 KV heads, untied), ``llama_tied``, ``qwen2`` (biased projections,
            tied), ``qwen3`` (QK norm), ``one_kv``, ``odd_vocab``, ``mistral_window`` (window 8) and ``qwen3_moe`` (4
            experts, 2 of them per token); 2 KV heads unless said otherwise.
        **changes: Fields to override.
    """
    config_class, fields = _VARIANTS[name]
    return config_class(**{**_SIZES, **fields, **changes})


def tiny_model(name: str, *, attn_implementation: str = "eager", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A randomly initialised fp32 model in eval mode, the same for the same arguments on every rank.

    Args:
        name: One of ``MODEL_NAMES``.
        attn_implementation: Name of the attention function.
        seed: Seed of the weights; the caller's random state is left alone.
        **changes: Fields of the configuration to override.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            tiny_config(name, **changes), attn_implementation=attn_implementation, dtype=torch.float32
        )
        # Biases start at zero and norms at one: a path that drops them would go unseen.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


@cache
def tiny_model_folder(name: str) -> Path:
    """Folder of a saved model with seed 0, written once per session and readable by all workers.

    Args:
        name: One of ``MODEL_NAMES``.
    """
    root = Path(os.environ["LRE_TEST_MODELS"])
    folder = root / name
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            tiny_model(name).save_pretrained(folder)
            (folder / "complete").touch()
    return folder


def reference_log_probs(
    model: PreTrainedModel, documents: Sequence[Tensor], temperature: float | Sequence[float] = 1.0
) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probabilities and entropies of each document on its own, from the model's whole logits; differentiable.

    Args:
        model: A plain model with eager attention.
        documents: 1-D int64 token ids.
        temperature: One number, or one per document.

    Returns:
        Two lists of fp32 tensors of the documents' lengths: index t describes token t, the first token holds 0.
    """
    temperatures = [float(temperature)] * len(documents) if isinstance(temperature, int | float) else list(temperature)
    log_probs, entropies = [], []
    for document, heat in zip(documents, temperatures, strict=True):
        logits = model(input_ids=document[None], use_cache=False).logits[0, :-1].float() / heat
        distribution = logits.log_softmax(-1)
        taken = distribution.gather(-1, document[1:, None])[:, 0]
        start = taken.new_zeros(1)
        log_probs.append(torch.cat([start, taken]))
        entropies.append(torch.cat([start, -(distribution.exp() * distribution).sum(-1)]))
    return log_probs, entropies


def random_documents(lengths: Sequence[int], *, vocabulary: int = 64, seed: int = 0) -> list[Tensor]:
    """Token ids of documents with these lengths, the same for the same arguments.

    Args:
        lengths: Tokens per document.
        vocabulary: Number of token ids.
        seed: Seed of the ids.
    """
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (length,), generator=generator) for length in lengths]
