from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan")

from transformers import DeepseekV3Config

from lightning_rl_engines.models.titan.attention import PackedAttention
from lightning_rl_engines.models.titan.deepseek import deepseek_spec
from tests.models.titan.exactness import assert_exact, build, hugging_face_model

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8,
    "beta_slow": 1,
}


def config_of(**changes: Any) -> DeepseekV3Config:
    options: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 2,
        "n_routed_experts": 4,
        "routed_scaling_factor": 1.7,
        "kv_lora_rank": 20,
        "q_lora_rank": 28,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 10,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-3,
    }
    return DeepseekV3Config(**{**options, **changes})


def spec_of(config: DeepseekV3Config, max_seq_len: int = 128) -> Any:
    return deepseek_spec(config, attention=PackedAttention.Config(), max_seq_len=max_seq_len)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False},
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}, "n_group": 1},
        {"rope_parameters": YARN | {"truncate": False}, "rope_interleave": False, "topk_group": 2},
        {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 1},
        {"attention_bias": True, "first_k_dense_replace": 0, "pad_token_id": 5},
        {"attention_bias": True, "q_lora_rank": None, "tie_word_embeddings": True},
    ],
    ids=["plain", "no q rank", "mscale", "yarn halves", "groups", "biases", "tied"],
)
def test_equals_hugging_face(changes: dict[str, Any]) -> None:
    config = config_of(**changes)
    assert_exact(hugging_face_model(config), spec_of(config))


def test_correction_bias_changes_the_choice_of_experts() -> None:
    config = config_of()
    reference = hugging_face_model(config)
    tokens = torch.arange(97)[None]
    with torch.no_grad():
        biased = reference(tokens).logits
        reference.model.layers[1].mlp.gate.e_score_correction_bias.zero_()
        assert not torch.allclose(biased, reference(tokens).logits, rtol=1e-3)


def test_correction_bias_is_a_buffer_that_training_leaves_alone() -> None:
    model = build(spec_of(config_of()))
    moe = model.layers["1"].moe
    assert dict(model.named_buffers())["layers.1.moe.expert_bias_E"] is moe.expert_bias_E
    assert "layers.1.moe.expert_bias_E" not in dict(model.named_parameters())
    # torchtitan's hook updates the bias of layers with a coefficient.
    assert moe.load_balance_coeff is None
    assert torch.equal(moe.expert_bias_E, torch.zeros(4))
    assert spec_of(config_of()).names.pieces("layers.1.moe.tokens_per_expert_E", (4,)) == ()


def test_layers_have_configurations_of_their_own() -> None:
    attention = PackedAttention.Config()
    spec = deepseek_spec(config_of(), attention=attention, max_seq_len=64)
    inner = [layer.attention.inner_attention for layer in spec.model.layers]
    assert len({id(own) for own in (attention, *inner)}) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, r"num_key_value_heads=2 .*num_key_value_heads=4 works"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' .*hidden_act='silu'"),
        ({"attention_dropout": 0.1}, r"attention_dropout=0\.1 .*attention_dropout=0\.0"),
        ({"n_shared_experts": 0}, r"n_shared_experts=0 .*n_shared_experts=1 works"),
        ({"q_lora_rank": 0}, r"q_lora_rank=0 .*q_lora_rank=None or 1 works"),
        ({"n_group": 4}, r"n_group=4 .*n_routed_experts=4 .*n_group=1 works"),
        ({"n_group": 3}, r"n_group=3 .*n_routed_experts=4 .*n_group=1 works"),
        ({"n_group": None}, r"n_group=None .*n_group=1 works"),
        ({"topk_group": 3}, r"topk_group=3 exceeds n_group=2; topk_group=2 works"),
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok=5 must lie between 1 and n_routed_experts=4"),
        ({"first_k_dense_replace": None}, r"first_k_dense_replace=None .*first_k_dense_replace=0 works"),
        ({"v_head_dim": None}, r"v_head_dim=None .*v_head_dim=1 works"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, r"rope_type='dynamic'"),
    ],
)
def test_refuses_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_of(config_of(**changes))
