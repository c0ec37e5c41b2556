"""DeepSeek V3 as Hugging Face computes it: latent attention, sigmoid routing with a correction bias, shared experts."""

import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.common.moe import MoE, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.deepseek_v3.model import Attention, DeepSeekV3Model, DeepSeekV3TransformerBlock
from torchtitan.models.deepseek_v3.parallelize import parallelize_deepseekv3
from torchtitan.protocols.module import Module
from typing_extensions import override

from lightning_rl_engines.models.titan.config_fields import check_fields, require_value
from lightning_rl_engines.models.titan.families import (
    LAYER_RULES,
    MOE_RULES,
    TitanSpec,
    decoder_fields,
    feed_forward_config,
    linear_config,
    loaded,
    norm_config,
)
from lightning_rl_engines.models.titan.moe import ExactExperts, ExactRouter, Float32Linear
from lightning_rl_engines.models.titan.names import HFNames, NameRule
from lightning_rl_engines.models.titan.rotary import HFRotary, rotary_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LATENT_NORM_EPS = 1e-6
"""Hugging Face leaves the norms of the latents at the default of its norm, whatever ``rms_norm_eps`` says."""

_READ = frozenset(
    {
        "attention_bias",
        "first_k_dense_replace",
        "hidden_size",
        "intermediate_size",
        "kv_lora_rank",
        "moe_intermediate_size",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "num_attention_heads",
        "num_experts_per_tok",
        "num_hidden_layers",
        "num_key_value_heads",
        "num_mtp_layers",  # only generation uses them, and no save of transformers holds them
        "pad_token_id",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "rms_norm_eps",
        "rope_interleave",
        "rope_parameters",
        "routed_scaling_factor",
        "tie_word_embeddings",
        "topk_group",
        "v_head_dim",
        "vocab_size",
    }
)
_FIXED: dict[str, Collection[Any]] = {"hidden_act": ["silu", "swish"]}

_ATTENTION = (
    ("q_proj", "wq"),
    ("q_a_proj", "wq_a"),
    ("q_a_layernorm", "q_norm"),
    ("q_b_proj", "wq_b"),
    ("kv_a_proj_with_mqa", "wkv_a"),
    ("kv_a_layernorm", "kv_norm"),
    ("kv_b_proj", "wkv_b"),
    ("o_proj", "wo"),
)
_BIASED = ("wq_a", "wkv_a", "wo")
"""Projections that ``attention_bias`` gives a bias."""

_RULES = (
    *LAYER_RULES,
    *MOE_RULES,
    NameRule("model.layers.{layer}.mlp.gate.e_score_correction_bias", "layers.{layer}.moe.expert_bias_E"),
    *(
        NameRule(f"model.layers.{{layer}}.self_attn.{hf}.weight", f"layers.{{layer}}.attention.{own}.weight")
        for hf, own in _ATTENTION
    ),
    *(
        NameRule(f"model.layers.{{layer}}.self_attn.{hf}.bias", f"layers.{{layer}}.attention.{own}.bias")
        for hf, own in _ATTENTION
        if own in _BIASED
    ),
    *(
        NameRule(
            f"model.layers.{{layer}}.mlp.shared_experts.{hf}.weight",
            f"layers.{{layer}}.moe.shared_experts.{own}.weight",
        )
        for hf, own in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
    ),
)


class InterleavedRotary(HFRotary):
    """Rotates pairs of neighbours, and sorts the result into halves as Hugging Face does."""

    @dataclass(kw_only=True, slots=True)
    class Config(HFRotary.Config):
        """Options of :class:`HFRotary`."""

    @staticmethod
    @override
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate ``query`` and ``key`` ``[batch, length, heads, width]``."""
        width = query.shape[-1]
        cosine, sine = rope_cache[..., : width // 2], rope_cache[..., width : width + width // 2]

        def rotated(tensor: Tensor) -> Tensor:
            even, odd = tensor.float()[..., 0::2], tensor.float()[..., 1::2]
            return torch.cat([even * cosine - odd * sine, odd * cosine + even * sine], dim=-1).type_as(tensor)

        return rotated(query), rotated(key)


class LatentAttention(Attention):
    """Multi-head latent attention with a scale of our choice; torchtitan's assumes its own rotary options."""

    @dataclass(kw_only=True, slots=True)
    class Config(Attention.Config):
        """Args: softmax_scale: Factor of the scores; ``mscale`` is not used."""

        softmax_scale: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.softmax_scale = config.softmax_scale


class CorrectedMoE(MoE):
    """Chooses experts with a correction bias that belongs to the weights: no load balancing updates it."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        """Args: load_balance_coeff: ``None``; the others as of torchtitan's ``MoE``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # Without load balancing torchtitan leaves a plain attribute, which a buffer cannot replace.
        del self.expert_bias_E
        self.register_buffer("expert_bias_E", torch.zeros(config.num_experts, dtype=torch.float32))

    @override
    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        super()._init_self_buffers(buffer_device=buffer_device)
        self.expert_bias_E = torch.zeros_like(self.tokens_per_expert_E)


class LatentDecoder(DeepSeekV3Model):
    """DeepSeek V3 whose projections into latents may have biases."""

    @dataclass(kw_only=True, slots=True)
    class Config(DeepSeekV3Model.Config):
        """Options of torchtitan's model."""

        @override
        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Fill in shardings; torchtitan's know no bias of the projections into latents."""
            DeepSeekV3Model.Config.update_from_config(self, config=config, **kwargs)
            for layer in self.layers:
                for projection in (layer.attention.wq_a, layer.attention.wkv_a):
                    if projection is None or not projection.bias:
                        continue
                    states = projection.sharding_config.state_shardings
                    projection.sharding_config = replace(
                        projection.sharding_config, state_shardings={**states, "bias": states["weight"]}
                    )


def deepseek_spec(hf_config: "PretrainedConfig", *, attention: Module.Config, max_seq_len: int) -> TitanSpec:
    """Specify a DeepSeek V3 model; arguments as of :func:`~lightning_rl_engines.models.titan.families.titan_spec`.

    Raises:
        ValueError: A field of the configuration is not supported, naming it, its value and one that works.
    """
    check_fields(hf_config, read=_READ, fixed=_FIXED)
    _check_sizes(hf_config)
    layers: list[TransformerBlock.Config] = []
    for index in range(hf_config.num_hidden_layers):
        dense = index < hf_config.first_k_dense_replace
        layers.append(
            DeepSeekV3TransformerBlock.Config(
                attention=_attention_config(hf_config, attention, max_seq_len),
                attention_norm=norm_config(hf_config),
                ffn_norm=norm_config(hf_config),
                feed_forward=feed_forward_config(hf_config) if dense else None,
                moe=None if dense else _moe_config(hf_config),
            )
        )
    names = HFNames(_RULES, tied=hf_config.tie_word_embeddings)
    return TitanSpec(LatentDecoder.Config(**decoder_fields(hf_config, layers)), parallelize_deepseekv3, names)


def _check_sizes(hf_config: "PretrainedConfig") -> None:
    heads, experts, groups = hf_config.num_attention_heads, hf_config.n_routed_experts, hf_config.n_group
    require_value(hf_config, "num_key_value_heads", [heads], "since every head has a latent key of its own")
    positive = {name: getattr(hf_config, name) for name in ("v_head_dim", "n_shared_experts", "n_group", "topk_group")}
    if hf_config.q_lora_rank is not None:
        positive["q_lora_rank"] = hf_config.q_lora_rank
    for name, value in positive.items():
        if value is None or value < 1:
            works = "None or 1" if name == "q_lora_rank" else "1"
            raise ValueError(
                f"{name}={value} is not supported by torchtitan models of deepseek_v3; {name}={works} works."
            )
    if hf_config.first_k_dense_replace is None:
        raise ValueError("first_k_dense_replace=None gives no number of dense layers; first_k_dense_replace=0 works.")
    if experts % groups or experts // groups < 2:
        raise ValueError(
            f"n_group={groups} does not divide n_routed_experts={experts} into groups of at least 2; n_group=1 works."
        )
    if hf_config.topk_group > groups:
        raise ValueError(f"topk_group={hf_config.topk_group} exceeds n_group={groups}; topk_group={groups} works.")
    chosen = hf_config.num_experts_per_tok
    if chosen is None or not 0 < chosen <= experts:
        raise ValueError(f"num_experts_per_tok={chosen} must lie between 1 and n_routed_experts={experts}.")


def _softmax_scale(hf_config: "PretrainedConfig") -> float:
    """The scale of the scores, to which scaled rotary embeddings contribute."""
    scale = float((hf_config.qk_nope_head_dim + hf_config.qk_rope_head_dim) ** -0.5)
    parameters = hf_config.rope_parameters
    weight = parameters.get("mscale_all_dim", 0)
    if parameters.get("rope_type", "default") == "default" or not weight:
        return scale
    factor = parameters["factor"]
    correction = 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
    return scale * correction * correction


def _attention_config(
    hf_config: "PretrainedConfig", attention: Module.Config, max_seq_len: int
) -> LatentAttention.Config:
    dim, heads, q_rank, kv_rank = (
        hf_config.hidden_size,
        hf_config.num_attention_heads,
        hf_config.q_lora_rank,
        hf_config.kv_lora_rank,
    )
    nope, rope, value = hf_config.qk_nope_head_dim, hf_config.qk_rope_head_dim, hf_config.v_head_dim
    bias = bool(hf_config.attention_bias)
    rotary = rotary_config(hf_config, head_dim=rope, max_seq_len=max_seq_len)
    if hf_config.rope_interleave:
        rotary = InterleavedRotary.Config(**{field.name: getattr(rotary, field.name) for field in fields(rotary)})
    return LatentAttention.Config(
        dim=dim,
        n_heads=heads,
        q_lora_rank=q_rank or 0,
        kv_lora_rank=kv_rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
        wq=None if q_rank else linear_config(dim, heads * (nope + rope)),
        wq_a=linear_config(dim, q_rank, bias=bias) if q_rank else None,
        wq_b=linear_config(q_rank, heads * (nope + rope)) if q_rank else None,
        # Not built without a rank, but required.
        q_norm=replace(norm_config(hf_config, q_rank or 1), eps=LATENT_NORM_EPS),
        wkv_a=linear_config(dim, kv_rank + rope, bias=bias),
        kv_norm=replace(norm_config(hf_config, kv_rank), eps=LATENT_NORM_EPS),
        wkv_b=linear_config(kv_rank, heads * (nope + value)),
        wo=linear_config(heads * value, dim, bias=bias),
        inner_attention=replace(attention),
        rope=rotary,
        softmax_scale=_softmax_scale(hf_config),
    )


def _moe_config(hf_config: "PretrainedConfig") -> CorrectedMoE.Config:
    experts, top_k = hf_config.n_routed_experts, hf_config.num_experts_per_tok
    width = hf_config.moe_intermediate_size
    limited = hf_config.n_group > 1
    return CorrectedMoE.Config(
        num_experts=experts,
        load_balance_coeff=None,
        router=ExactRouter.Config(
            num_experts=experts,
            gate=Float32Linear.Config(
                in_features=hf_config.hidden_size, out_features=experts, param_init=loaded("weight")
            ),
            num_expert_groups=hf_config.n_group if limited else None,
            num_limited_groups=hf_config.topk_group if limited else None,
            top_k=top_k,
            score_func="sigmoid",
            route_norm=bool(hf_config.norm_topk_prob),
            route_scale=hf_config.routed_scaling_factor,
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=ExactExperts.Config(
                dim=hf_config.hidden_size,
                hidden_dim=width,
                num_experts=experts,
                param_init=loaded("w1_EFD", "w2_EDF", "w3_EFD"),
            ),
            token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=experts, top_k=top_k),
        ),
        shared_experts=feed_forward_config(hf_config, width * hf_config.n_shared_experts),
    )
