"""torchtitan specifications of Hugging Face configurations: every dimension is read, nothing is looked up."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn
from torchtitan.models.common.attention import GQAttention, QKVLinear
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import MoE, RoutedExperts
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.protocols.module import Module

from lightning_rl_engines.models.titan.config_fields import check_fields
from lightning_rl_engines.models.titan.embedding import HFEmbedding
from lightning_rl_engines.models.titan.moe import ExactExperts, ExactRouter, Float32Linear
from lightning_rl_engines.models.titan.names import HFNames, NameRule
from lightning_rl_engines.models.titan.rotary import rotary_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class TitanSpec:
    """What torchtitan needs to build and shard a model.

    Attributes:
        model: The model's configuration; its ``lm_head`` is a plain ``Linear.Config``.
        parallelize: The family's function that shards a built model.
        names: Where each tensor of a Hugging Face save lies.
    """

    model: Decoder.Config
    parallelize: Callable[..., nn.Module]
    names: HFNames


def titan_spec(hf_config: "PretrainedConfig", *, attention: Module.Config, max_seq_len: int) -> TitanSpec:
    """Specify the torchtitan model that computes what the Hugging Face model of a configuration computes.

    Parameters are left as they are by torchtitan's own initialisation; they are to be loaded.

    Args:
        hf_config: The configuration.
        attention: The kernel between projections of queries, keys and values and the output projection.
        max_seq_len: Length of the longest document; rotary caches have as many positions.

    Raises:
        ValueError: The family is not supported, or a field of the configuration is not, naming what is.
    """
    builder = _BUILDERS.get(hf_config.model_type)
    if builder is None:
        raise ValueError(
            f"model_type={hf_config.model_type!r} is not supported by strategy='torchtitan', which has "
            f"{', '.join(sorted(_BUILDERS))}; use one of these, or strategy='fsdp_ulysses'."
        )
    return builder(hf_config, attention=attention, max_seq_len=max_seq_len)


def supported_model_types() -> tuple[str, ...]:
    """The Hugging Face model types that have a specification."""
    return tuple(sorted(_BUILDERS))


def llama_spec(hf_config: "PretrainedConfig", *, attention: Module.Config, max_seq_len: int) -> TitanSpec:
    """Specify a Llama model (Llama 2 and 3, SmolLM, ...); arguments and errors as of :func:`titan_spec`."""
    check_fields(hf_config, read=_READ, fixed={**_SILU, "attention_bias": [False], "mlp_bias": [False]})
    return _dense_spec(hf_config, attention, max_seq_len)


def qwen2_spec(hf_config: "PretrainedConfig", *, attention: Module.Config, max_seq_len: int) -> TitanSpec:
    """Specify a Qwen2 model, whose queries, keys and values have biases; as :func:`titan_spec`."""
    check_fields(hf_config, read={*_READ, *_WINDOW_FIELDS}, fixed=_SILU)
    _require_full_attention(hf_config)
    return _dense_spec(hf_config, attention, max_seq_len, qkv_bias=True)


def qwen3_spec(hf_config: "PretrainedConfig", *, attention: Module.Config, max_seq_len: int) -> TitanSpec:
    """Specify a Qwen3 model, dense or of experts; arguments and errors as of :func:`titan_spec`."""
    sparse = hf_config.model_type == "qwen3_moe"
    read = {*_READ, *_WINDOW_FIELDS, *(_MOE_FIELDS if sparse else ())}
    check_fields(hf_config, read=read, fixed={**_SILU, "attention_bias": [False]})
    _require_full_attention(hf_config)
    layers: list[TransformerBlock.Config] = [
        Qwen3TransformerBlock.Config(
            attention=gqa_config(hf_config, attention, max_seq_len, qk_norm=True),
            attention_norm=norm_config(hf_config),
            ffn_norm=norm_config(hf_config),
            moe=_moe_config(hf_config) if sparse and _is_sparse(hf_config, index) else None,
            feed_forward=None if sparse and _is_sparse(hf_config, index) else feed_forward_config(hf_config),
        )
        for index in range(hf_config.num_hidden_layers)
    ]
    return TitanSpec(Qwen3Model.Config(**decoder_fields(hf_config, layers)), parallelize_qwen3, _names(hf_config))


def _from(module: str, function: str) -> Callable[..., TitanSpec]:
    """A builder of a module that is imported when it is needed."""

    def build(hf_config: "PretrainedConfig", **kwargs: Any) -> TitanSpec:
        spec: TitanSpec = getattr(import_module(f"lightning_rl_engines.models.titan.{module}"), function)(
            hf_config, **kwargs
        )
        return spec

    return build


_BUILDERS: dict[str, Callable[..., TitanSpec]] = {
    "deepseek_v3": _from("deepseek", "deepseek_spec"),
    "gpt_oss": _from("gpt_oss", "gpt_oss_spec"),
    "llama": llama_spec,
    "qwen2": qwen2_spec,
    "qwen3": qwen3_spec,
    "qwen3_moe": qwen3_spec,
}

_READ = frozenset(
    {
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "pad_token_id",
        "rms_norm_eps",
        "rope_parameters",
        "tie_word_embeddings",
        "vocab_size",
    }
)
_WINDOW_FIELDS = frozenset({"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"})
_MOE_FIELDS = frozenset(
    {
        "decoder_sparse_step",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
    }
)
_SILU: dict[str, Collection[Any]] = {"hidden_act": ["silu", "swish"]}

LAYER_RULES = (
    NameRule("model.embed_tokens.weight", "tok_embeddings.weight"),
    NameRule("model.layers.{layer}.input_layernorm.weight", "layers.{layer}.attention_norm.weight"),
    NameRule("model.layers.{layer}.post_attention_layernorm.weight", "layers.{layer}.ffn_norm.weight"),
    NameRule("model.layers.{layer}.mlp.gate_proj.weight", "layers.{layer}.feed_forward.w1.weight"),
    NameRule("model.layers.{layer}.mlp.up_proj.weight", "layers.{layer}.feed_forward.w3.weight"),
    NameRule("model.layers.{layer}.mlp.down_proj.weight", "layers.{layer}.feed_forward.w2.weight"),
    NameRule("model.norm.weight", "norm.weight"),
    NameRule("lm_head.weight", "lm_head.weight"),
)
"""Names outside attention and experts, which all families share."""

GQA_RULES = (
    *(
        NameRule(f"model.layers.{{layer}}.self_attn.{hf}.{kind}", f"layers.{{layer}}.attention.qkv_linear.{own}.{kind}")
        for hf, own in (("q_proj", "wq"), ("k_proj", "wk"), ("v_proj", "wv"))
        for kind in ("weight", "bias")
    ),
    NameRule("model.layers.{layer}.self_attn.o_proj.weight", "layers.{layer}.attention.wo.weight"),
    NameRule("model.layers.{layer}.self_attn.q_norm.weight", "layers.{layer}.attention.q_norm.weight"),
    NameRule("model.layers.{layer}.self_attn.k_norm.weight", "layers.{layer}.attention.k_norm.weight"),
)

MOE_RULES = (
    NameRule("model.layers.{layer}.mlp.gate.weight", "layers.{layer}.moe.router.gate.weight"),
    *(
        NameRule(
            f"model.layers.{{layer}}.mlp.experts.{{expert}}.{hf}.weight",
            f"layers.{{layer}}.moe.routed_experts.inner_experts.{own}",
        )
        for hf, own in (("gate_proj", "w1_EFD"), ("up_proj", "w3_EFD"), ("down_proj", "w2_EDF"))
    ),
)


def _names(hf_config: "PretrainedConfig") -> HFNames:
    return HFNames([*LAYER_RULES, *GQA_RULES, *MOE_RULES], tied=hf_config.tie_word_embeddings)


def loaded(*names: str) -> dict[str, Callable[[nn.Parameter], None]]:
    """Initialisers that leave these parameters alone, since weights are loaded."""
    return dict.fromkeys(names, skip_param_init)


def linear_config(in_features: int, out_features: int, *, bias: bool = False) -> Linear.Config:
    """Configure a linear layer."""
    return Linear.Config(
        in_features=in_features, out_features=out_features, bias=bias, param_init=loaded("weight", "bias")
    )


def norm_config(hf_config: "PretrainedConfig", size: int | None = None) -> RMSNorm.Config:
    """Configure an RMS norm over ``size`` features, by default those of the hidden state."""
    return RMSNorm.Config(
        normalized_shape=size or hf_config.hidden_size, eps=hf_config.rms_norm_eps, param_init=loaded("weight")
    )


def feed_forward_config(hf_config: "PretrainedConfig", hidden_size: int | None = None) -> FeedForward.Config:
    """Configure a gated feed-forward layer, by default of ``intermediate_size``."""
    inner = hidden_size or hf_config.intermediate_size
    return FeedForward.Config(
        w1=linear_config(hf_config.hidden_size, inner),
        w2=linear_config(inner, hf_config.hidden_size),
        w3=linear_config(hf_config.hidden_size, inner),
    )


def gqa_config(
    hf_config: "PretrainedConfig",
    attention: Module.Config,
    max_seq_len: int,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> GQAttention.Config:
    """Configure grouped-query attention with separate projections, one for each Hugging Face module."""
    dim, heads = hf_config.hidden_size, hf_config.num_attention_heads
    kv_heads = hf_config.num_key_value_heads or heads
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}; "
            f"num_key_value_heads={heads} works."
        )
    head_dim = getattr(hf_config, "head_dim", None) or dim // heads
    return GQAttention.Config(
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        dim=dim,
        qkv_linear=QKVLinear.Config(
            head_dim=head_dim,
            wq=linear_config(dim, heads * head_dim, bias=qkv_bias),
            wkv=linear_config(dim, kv_heads * head_dim, bias=qkv_bias),
        ),
        wo=linear_config(heads * head_dim, dim),
        qk_norm=norm_config(hf_config, head_dim) if qk_norm else None,
        # A copy for each layer: sharding is written into it.
        inner_attention=replace(attention),
        rope=rotary_config(hf_config, head_dim=head_dim, max_seq_len=max_seq_len),
    )


def decoder_fields(hf_config: "PretrainedConfig", layers: Sequence[TransformerBlock.Config]) -> dict[str, Any]:
    """Return the arguments that all decoder configurations share."""
    return {
        "dim": hf_config.hidden_size,
        "vocab_size": hf_config.vocab_size,
        "tok_embeddings": HFEmbedding.Config(
            num_embeddings=hf_config.vocab_size,
            embedding_dim=hf_config.hidden_size,
            padding_token=hf_config.pad_token_id,
            param_init=loaded("weight"),
        ),
        "layers": list(layers),
        "norm": norm_config(hf_config),
        "lm_head": linear_config(hf_config.hidden_size, hf_config.vocab_size),
        "enable_weight_tying": bool(hf_config.tie_word_embeddings),
    }


def _dense_spec(
    hf_config: "PretrainedConfig", attention: Module.Config, max_seq_len: int, *, qkv_bias: bool = False
) -> TitanSpec:
    layers: list[TransformerBlock.Config] = [
        Llama3TransformerBlock.Config(
            attention=gqa_config(hf_config, attention, max_seq_len, qkv_bias=qkv_bias),
            attention_norm=norm_config(hf_config),
            ffn_norm=norm_config(hf_config),
            feed_forward=feed_forward_config(hf_config),
        )
        for _ in range(hf_config.num_hidden_layers)
    ]
    return TitanSpec(Llama3Model.Config(**decoder_fields(hf_config, layers)), parallelize_llama, _names(hf_config))


def _is_sparse(hf_config: "PretrainedConfig", layer: int) -> bool:
    """Whether a layer of Qwen3-MoE has experts."""
    step = hf_config.decoder_sparse_step
    return layer not in hf_config.mlp_only_layers and hf_config.num_experts > 0 and (layer + 1) % step == 0


def _moe_config(hf_config: "PretrainedConfig") -> MoE.Config:
    experts, top_k = hf_config.num_experts, hf_config.num_experts_per_tok
    if not 0 < top_k <= experts:
        raise ValueError(f"num_experts_per_tok={top_k} must lie between 1 and num_experts={experts}.")
    return MoE.Config(
        num_experts=experts,
        # Nothing but the loss trains the router, as in transformers; torchtitan's default would add a buffer.
        load_balance_coeff=None,
        router=ExactRouter.Config(
            num_experts=experts,
            gate=Float32Linear.Config(
                in_features=hf_config.hidden_size, out_features=experts, param_init=loaded("weight")
            ),
            top_k=top_k,
            score_func="softmax",
            route_norm=hf_config.norm_topk_prob,
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=ExactExperts.Config(
                dim=hf_config.hidden_size,
                hidden_dim=hf_config.moe_intermediate_size,
                num_experts=experts,
                param_init=loaded("w1_EFD", "w2_EDF", "w3_EFD"),
            ),
            token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=experts, top_k=top_k),
        ),
    )


def _require_full_attention(hf_config: "PretrainedConfig") -> None:
    kinds = getattr(hf_config, "layer_types", None)
    windowed = hf_config.sliding_window is not None if kinds is None else set(kinds) != {"full_attention"}
    if windowed:
        raise ValueError(
            f"use_sliding_window={hf_config.use_sliding_window} with sliding_window={hf_config.sliding_window} and "
            f"layer_types={kinds} is not supported by torchtitan models of {hf_config.model_type}; "
            "use_sliding_window=False with layer_types=None works, or strategy='fsdp_ulysses'."
        )
