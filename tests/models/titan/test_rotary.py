"""Rotary caches hold what transformers computes, and types that it cannot hold are refused."""

from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan")

from transformers import LlamaConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from lightning_rl_engines.models.titan.rotary import rotary_config

LENGTH = 150


def config_of(parameters: dict[str, Any], **changes: Any) -> LlamaConfig:
    options = {"hidden_size": 32, "num_attention_heads": 2, "head_dim": 12, "max_position_embeddings": 256}
    return LlamaConfig(**{**options, "rope_parameters": {"rope_theta": 500.0, **parameters}, **changes})


SCALED = {"factor": 8.0, "original_max_position_embeddings": 64}
TYPES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED},
    {"rope_type": "yarn", **SCALED},
    {"rope_type": "yarn", "beta_fast": 16.0, "truncate": False, "attention_factor": 1.3, **SCALED},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
]


@pytest.mark.parametrize("parameters", TYPES, ids=lambda item: item["rope_type"])
def test_queries_and_keys_are_rotated_bit_for_bit_as_by_transformers(parameters: dict[str, Any]) -> None:
    config = config_of(parameters)
    positions = torch.arange(LENGTH)[None]
    queries, keys = torch.randn(1, LENGTH, 4, 12), torch.randn(1, LENGTH, 2, 12)
    cosine, sine = LlamaRotaryEmbedding(config)(queries, positions)
    expected = apply_rotary_pos_emb(queries, keys, cosine, sine, unsqueeze_dim=2)
    rotary = rotary_config(config, head_dim=12, max_seq_len=LENGTH).build()
    for found, wanted in zip(rotary(queries, keys, positions), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert (expected[0] - queries)[:, 1:].abs().max() > 0.1


def test_scaling_of_cosines_takes_part() -> None:
    # Without it yarn would pass a comparison of frequencies and fail in a model.
    config = rotary_config(config_of(TYPES[3]), head_dim=12, max_seq_len=4)
    assert config.attention_scaling > 1.1
    assert config.build().cache[0, 0] == pytest.approx(config.attention_scaling)


def test_the_cache_is_built_anew_on_the_device_after_meta() -> None:
    config = rotary_config(config_of(TYPES[2]), head_dim=12, max_seq_len=20)
    with torch.device("meta"):
        rotary = config.build()
    assert rotary.cache.is_meta
    rotary.to_empty(device="cpu").init_states(buffer_device=None)
    assert torch.equal(rotary.cache, config.build().cache)
    assert rotary.cache.dtype == torch.float32
    assert rotary.state_dict() == {}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type='dynamic'.*longest document.*'default', 'linear'"),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 6,
                "long_factor": [2.0] * 6,
                "original_max_position_embeddings": 64,
            },
            "rope_type='longrope'.*longest document",
        ),
        ({"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5.*=1.0 works"),
    ],
)
def test_what_no_cache_can_hold_is_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotary_config(config_of(parameters), head_dim=12, max_seq_len=8)


def test_frequencies_for_another_head_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"6 frequencies for heads of 16 dimensions; 8 work"):
        rotary_config(config_of(TYPES[1]), head_dim=16, max_seq_len=8)


def test_one_rope_per_kind_of_layer_is_refused() -> None:
    config = Qwen2Config(num_hidden_layers=2)
    config.rope_parameters = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(ValueError, match="one dictionary for all layers works"):
        rotary_config(config, head_dim=12, max_seq_len=8)
