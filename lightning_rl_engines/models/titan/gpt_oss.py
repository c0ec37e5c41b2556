"""GPT-OSS as Hugging Face computes it: attention sinks, sliding windows, biases, experts of a clamped SwiGLU.

Shapes are torchtitan's: B rows, L tokens of a row, D model dimension, E experts, K experts of a token, R routed tokens
sorted by expert, F hidden dimension of an expert, G its gate and up projections, which take turns (2F).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear
from torchtitan.models.common.moe import MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.gpt_oss.model import Attention, GptOssModel, GptOssTransformerBlock
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, GptOssMoE, ScaleBiasForward
from torchtitan.models.gpt_oss.parallelize import parallelize_gptoss
from torchtitan.protocols.module import Module
from typing_extensions import override

from lightning_rl_engines.models.titan.config_fields import check_fields
from lightning_rl_engines.models.titan.families import (
    GQA_RULES,
    LAYER_RULES,
    TitanSpec,
    decoder_fields,
    gqa_config,
    loaded,
    norm_config,
)
from lightning_rl_engines.models.titan.moe import expert_matmul
from lightning_rl_engines.models.titan.names import HFNames, NameRule

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_READ = frozenset(
    {
        "attention_bias",
        "head_dim",
        "hidden_act",  # transformers' experts have an activation of their own
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "num_attention_heads",
        "num_experts_per_tok",
        "num_hidden_layers",
        "num_key_value_heads",
        "num_local_experts",
        "pad_token_id",
        "rms_norm_eps",
        "rope_parameters",
        "sliding_window",
        "swiglu_alpha",
        "swiglu_limit",
        "tie_word_embeddings",
        "vocab_size",
    }
)

_ROUTER, _EXPERTS = "layers.{layer}.moe.router.gate", "layers.{layer}.moe.routed_experts.inner_experts"
_RULES = (
    *LAYER_RULES,
    *GQA_RULES,
    NameRule("model.layers.{layer}.self_attn.o_proj.bias", "layers.{layer}.attention.wo.bias"),
    NameRule("model.layers.{layer}.self_attn.sinks", "layers.{layer}.attention.sinks"),
    NameRule("model.layers.{layer}.mlp.router.weight", f"{_ROUTER}.weight"),
    NameRule("model.layers.{layer}.mlp.router.bias", f"{_ROUTER}.bias"),
    # Both sides hold all experts in one tensor, with gate and up taking turns; only the matrices are transposed.
    NameRule("model.layers.{layer}.mlp.experts.gate_up_proj", f"{_EXPERTS}.mlp1_weight_EGD", transposed=True),
    NameRule("model.layers.{layer}.mlp.experts.gate_up_proj_bias", f"{_EXPERTS}.mlp1_bias_EG"),
    NameRule("model.layers.{layer}.mlp.experts.down_proj", f"{_EXPERTS}.mlp2_weight_EDF", transposed=True),
    NameRule("model.layers.{layer}.mlp.experts.down_proj_bias", f"{_EXPERTS}.mlp2_bias_ED"),
)


class RowwiseLinear(ScaledBiasRowwiseLinear):
    """An output projection whose bias is optional and has its whole gradient under tensor parallelism.

    torchtitan divides the bias by the number of ranks, whose results are summed; each rank then sees that part of the
    gradient only, and nothing sums it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledBiasRowwiseLinear.Config):
        """Args: in_features, out_features, bias: As of torchtitan's ``Linear``."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's summand of ``input @ weight.T + bias``."""
        weight = _local(self.weight)
        if self.bias is None:
            return F.linear(input, weight)
        return F.linear(input, weight, _summand(_local(self.bias), self.tp_degree, self.bias.dtype))


class ChosenSoftmaxRouter(TokenChoiceTopKRouter):
    """Weighs experts by a softmax over the logits of the chosen ones, in the type of the hidden states."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        """Args: num_experts, gate, top_k: As of torchtitan's router; its other options are not used."""

    @override
    def forward(self, x_BLD: Tensor, expert_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights ``[B, L, K]``, int64 expert ids ``[B, L, K]`` and logits ``[B, L, E]``; there is no bias."""
        logits_BLE = self.gate(x_BLD)
        chosen_BLK, ids_BLK = logits_BLE.topk(self.top_k, dim=-1)
        return chosen_BLK.softmax(-1), ids_BLK, logits_BLE


class ClampedExperts(GptOssGroupedExperts):
    """Experts with biases and a clamped SwiGLU, in the type of their input; torchtitan's cast to bf16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        """Args: swiglu_alpha: Factor inside the sigmoid; the others as of torchtitan's ``GptOssGroupedExperts``."""

        swiglu_alpha: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.swiglu_alpha = config.swiglu_alpha

    @override
    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Apply expert e to its tokens, which follow those of expert e - 1.

        Args:
            x_RD: Routed tokens.
            num_tokens_per_expert_E: int64 counts with sum R.

        Returns:
            ``[R, D]`` in the type of ``x_RD``; under tensor parallelism this rank's summand.
        """
        counts = num_tokens_per_expert_E

        def of_rows(bias: Tensor) -> Tensor:
            return _local(bias).to(x_RD.dtype).repeat_interleave(counts, dim=0, output_size=len(x_RD))

        gate_up_RG = expert_matmul(x_RD, _local(self.mlp1_weight_EGD).mT, counts) + of_rows(self.mlp1_bias_EG)
        gate_RF = gate_up_RG[..., ::2].clamp(max=self.swiglu_limit)
        up_RF = gate_up_RG[..., 1::2].clamp(min=-self.swiglu_limit, max=self.swiglu_limit)
        hidden_RF = (up_RF + 1) * gate_RF * torch.sigmoid(gate_RF * self.swiglu_alpha)
        out_RD = expert_matmul(hidden_RF, _local(self.mlp2_weight_EDF).mT, counts)
        return out_RD + _summand(of_rows(self.mlp2_bias_ED), _tensor_parallel_size(self.mlp2_bias_ED), x_RD.dtype)


def gpt_oss_spec(hf_config: "PretrainedConfig", *, attention: Module.Config, max_seq_len: int) -> TitanSpec:
    """Specify a GPT-OSS model; arguments as of :func:`~lightning_rl_engines.models.titan.families.titan_spec`.

    Layers take their mask from a dictionary: those with a sliding window ``"sliding_window_mask"``, the others
    ``"basic_mask"``. The kernel must hand out the log-sum-exp of the scores and carry its gradient.

    Raises:
        ValueError: A field of the configuration is not supported, naming it, its value and one that works.
    """
    check_fields(hf_config, read=_READ)
    layers: list[TransformerBlock.Config] = [
        GptOssTransformerBlock.Config(
            attention=_attention_config(hf_config, attention, max_seq_len, window),
            attention_norm=norm_config(hf_config),
            ffn_norm=norm_config(hf_config),
            moe=_moe_config(hf_config),
        )
        for window in _windows(hf_config)
    ]
    names = HFNames(_RULES, tied=hf_config.tie_word_embeddings)
    return TitanSpec(GptOssModel.Config(**decoder_fields(hf_config, layers)), parallelize_gptoss, names)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part, whose gradient has the placements of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _summand(bias: Tensor, ranks: int, dtype: torch.dtype) -> Tensor:
    """This rank's part of a bias that the sum over ranks adds; its gradient is whole on each of them."""
    summand: Tensor = ScaleBiasForward.apply(bias, ranks, dtype)
    return summand


def _tensor_parallel_size(parameter: Tensor) -> int:
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index("tp")) if "tp" in names else 1


def _windows(hf_config: "PretrainedConfig") -> list[int | None]:
    """The sliding window of each layer; ``None`` where a layer sees all."""
    layers, kinds, window = hf_config.num_hidden_layers, hf_config.layer_types, hf_config.sliding_window
    if len(kinds) != layers:
        raise ValueError(
            f"layer_types has {len(kinds)} entries for num_hidden_layers={layers}; layer_types=None works."
        )
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise ValueError(
                f"layer_types has {kind!r}, which is not supported by torchtitan models of gpt_oss; "
                "'sliding_attention' and 'full_attention' work."
            )
    if "sliding_attention" in kinds and (window is None or window < 1):
        raise ValueError(
            f"sliding_window={window} gives layers of sliding_attention no window; sliding_window=128 works."
        )
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _attention_config(
    hf_config: "PretrainedConfig", attention: Module.Config, max_seq_len: int, window: int | None
) -> Attention.Config:
    bias = bool(hf_config.attention_bias)
    plain = gqa_config(hf_config, attention, max_seq_len, qkv_bias=bias)
    return Attention.Config(
        n_heads=plain.n_heads,
        n_kv_heads=plain.n_kv_heads,
        head_dim=plain.head_dim,
        dim=plain.dim,
        qkv_linear=plain.qkv_linear,
        wo=RowwiseLinear.Config(
            in_features=plain.wo.in_features,
            out_features=plain.wo.out_features,
            bias=bias,
            param_init=loaded("weight", "bias"),
        ),
        inner_attention=plain.inner_attention,
        sliding_window_size=window,
        rope=plain.rope,
        param_init=loaded("sinks"),
    )


def _moe_config(hf_config: "PretrainedConfig") -> MoE.Config:
    experts, top_k = hf_config.num_local_experts, hf_config.num_experts_per_tok
    if not 0 < top_k <= experts:
        raise ValueError(f"num_experts_per_tok={top_k} must lie between 1 and num_local_experts={experts}.")
    return GptOssMoE.Config(
        num_experts=experts,
        # Nothing but the loss trains the router, as in transformers; torchtitan's default would add a buffer.
        load_balance_coeff=None,
        router=ChosenSoftmaxRouter.Config(
            num_experts=experts,
            gate=Linear.Config(
                in_features=hf_config.hidden_size,
                out_features=experts,
                bias=True,
                param_init=loaded("weight", "bias"),
            ),
            top_k=top_k,
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=ClampedExperts.Config(
                dim=hf_config.hidden_size,
                hidden_dim=hf_config.intermediate_size,
                num_experts=experts,
                swiglu_alpha=hf_config.swiglu_alpha,
                swiglu_limit=hf_config.swiglu_limit,
                param_init=loaded("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED"),
            ),
            token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=experts, top_k=top_k),
        ),
    )
