"""Checks that a Hugging Face configuration asks for nothing that its torchtitan model does not do."""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Without effect on log-probabilities or their gradients, or set by the engine: tokens of text, caches, outputs that
# nobody asks for, auxiliary losses, labels, the start of random weights.
_WITHOUT_EFFECT = frozenset(
    {
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "max_position_embeddings",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "tie_last_hidden_states",
        "transformers_version",
        "use_cache",
    }
)

# What some family computes and ours do not, also where a class does not declare it: it would change results unseen.
_REFUSED: dict[str, Any] = {
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "is_encoder_decoder": False,
    "logit_scale": None,
    "logits_scaling": None,
    "quantization_config": None,
}


def require_plain_class(hf_config: "PretrainedConfig") -> None:
    """Check that a configuration is of transformers' own class for its model type.

    Raises:
        ValueError: It comes from code of a folder or of the hub, whose mathematics is unknown.
    """
    from transformers import CONFIG_MAPPING

    expected = CONFIG_MAPPING[hf_config.model_type]
    if type(hf_config) is not expected:
        raise ValueError(
            f"{type(hf_config).__module__}.{type(hf_config).__name__} calls itself model_type="
            f"{hf_config.model_type!r}, which is {expected.__name__} of transformers; torchtitan computes only the "
            "latter. Use strategy='fsdp_ulysses' for remote code."
        )


def require_value(hf_config: "PretrainedConfig", name: str, allowed: Collection[Any], hint: str = "") -> None:
    """Check that a field of a configuration has one of these values.

    Args:
        hf_config: The configuration.
        name: The field; an absent one passes.
        allowed: Values that work, the one to recommend first.
        hint: What else to say.

    Raises:
        ValueError: It has another one.
    """
    absent = object()
    value = getattr(hf_config, name, absent)
    if value is absent or any(value == item for item in allowed):
        return
    works = " or ".join(f"{name}={item!r}" for item in allowed)
    raise ValueError(
        f"{name}={value!r} of a {hf_config.model_type} configuration is not supported by torchtitan models; "
        f"{works} works{', ' + hint if hint else ''}; strategy='fsdp_ulysses' computes what transformers does."
    )


def check_fields(
    hf_config: "PretrainedConfig", *, read: Collection[str], fixed: Mapping[str, Collection[Any]] | None = None
) -> None:
    """Check every field of a configuration: it is read, or fixed, or without effect, or at its default.

    Args:
        hf_config: The configuration, of transformers' own class.
        read: Fields that the specification follows.
        fixed: Fields and the values that they may have, the one to recommend first.

    Raises:
        ValueError: A field would change the mathematics, naming it, its value and one that works.
    """
    require_plain_class(hf_config)
    if getattr(hf_config, "is_heterogeneous", False):
        raise ValueError(
            f"per_layer_config of a {hf_config.model_type} configuration makes layers differ, which is not supported "
            "by torchtitan models; per_layer_config=None works."
        )
    for name, value in _REFUSED.items():
        if name not in read:
            require_value(hf_config, name, [value] if value is None else [value, None])
    for name, allowed in (fixed or {}).items():
        require_value(hf_config, name, allowed)
    known = {*_WITHOUT_EFFECT, *_REFUSED, *read, *(fixed or {}), "per_layer_config"}
    for field in fields(type(hf_config)):
        if field.name in known:
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        # Newer releases of transformers may add fields; at their defaults they change nothing.
        require_value(hf_config, field.name, [default])
