"""What a document costs a model, as planners of rows balance it."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from lightning_rl_engines.export.plan import ExportPlan

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")


def document_cost(config: "PretrainedConfig", plan: "ExportPlan") -> tuple[float, float]:
    """Return linear and quadratic coefficient of a document's cost in its length, in multiply-adds of a forward pass.

    Args:
        config: The Hugging Face configuration.
        plan: The tensors of the model's save.
    """
    text = config.get_text_config()
    linear = sum(
        math.prod(entry.shape)
        for entry in plan.entries
        if len(entry.shape) > 1 and not any(entry.name.endswith(name) for name in _EMBEDDINGS)
    )
    # Sizes may differ between layers (Gemma 4).
    layers = getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers
    # Scores and values over a causal triangle: two products of n^2 / 2 per head and layer.
    quadratic = sum(
        layer.num_attention_heads * (getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)
        for layer in layers
    )
    return float(linear), float(quadratic)
