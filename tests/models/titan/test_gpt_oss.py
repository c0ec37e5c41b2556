from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan")

from transformers import GptOssConfig

from lightning_rl_engines.models.titan.attention import PackedAttention
from lightning_rl_engines.models.titan.gpt_oss import gpt_oss_spec
from lightning_rl_engines.models.titan.names import HFPiece
from tests.models.titan.exactness import assert_exact, hugging_face_model

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}


def config_of(**changes: Any) -> GptOssConfig:
    options: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 40,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "max_position_embeddings": 256,
        "rope_parameters": YARN,
    }
    return GptOssConfig(**{**options, **changes})


def spec_of(config: GptOssConfig, max_seq_len: int = 128) -> Any:
    return gpt_oss_spec(config, attention=PackedAttention.Config(), max_seq_len=max_seq_len)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"swiglu_alpha": 1.3, "swiglu_limit": 0.6, "num_experts_per_tok": 3},
        {"attention_bias": False, "num_key_value_heads": 4, "num_experts_per_tok": 4},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 1},
        {"layer_types": ["full_attention"] * 2, "pad_token_id": 5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}, "tie_word_embeddings": True},
        {"rope_parameters": YARN | {"truncate": True, "attention_factor": 1.2}, "num_key_value_heads": 1},
    ],
    ids=["plain", "clamp", "no biases", "window of 1", "no window", "tied", "yarn"],
)
def test_equals_hugging_face(changes: dict[str, Any]) -> None:
    config = config_of(**changes)
    assert_exact(hugging_face_model(config), spec_of(config))


def test_sinks_windows_and_limits_matter_in_the_reference() -> None:
    """What the comparison above would not notice if the tiny model did not depend on it."""
    tokens = torch.arange(97)[None]
    base = hugging_face_model(config_of())
    with torch.no_grad():
        logits = base(tokens).logits
        for changes in ({"sliding_window": 80}, {"swiglu_limit": 0.6}, {"swiglu_alpha": 1.0}):
            assert not torch.allclose(logits, hugging_face_model(config_of(**changes))(tokens).logits, rtol=1e-3)
        base.model.layers[1].self_attn.sinks.zero_()
        assert not torch.allclose(logits, base(tokens).logits, rtol=1e-3)


def test_windows_follow_the_types_of_layers() -> None:
    spec = spec_of(config_of(num_hidden_layers=3))
    assert [layer.attention.sliding_window_size for layer in spec.model.layers] == [16, None, 16]


def test_stacks_of_experts_are_saved_whole() -> None:
    names = spec_of(config_of()).names
    experts = "layers.1.moe.routed_experts.inner_experts"
    saved = "model.layers.1.mlp.experts"
    assert names.pieces(f"{experts}.mlp1_weight_EGD", (4, 48, 40)) == (HFPiece(f"{saved}.gate_up_proj", None, True),)
    assert names.pieces(f"{experts}.mlp2_bias_ED", (4, 40)) == (HFPiece(f"{saved}.down_proj_bias"),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_dropout": 0.1}, r"attention_dropout=0\.1 .*attention_dropout=0\.0"),
        ({"sliding_window": None}, r"sliding_window=None .*sliding_window=128 works"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, r"layer_types has 'chunked_attention'"),
        ({"num_key_value_heads": 3}, r"num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok=5 must lie between 1 and num_local_experts=4"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"quantization_config=.*quantization_config=None works"),
    ],
)
def test_refuses_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_of(config_of(**changes))


def test_refuses_layers_without_a_type() -> None:
    config = config_of()
    config.num_hidden_layers = 3
    with pytest.raises(ValueError, match=r"layer_types has 2 entries for num_hidden_layers=3; layer_types=None works"):
        spec_of(config)
