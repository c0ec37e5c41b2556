"""What a model configuration says of a Hugging Face configuration that it cannot follow."""

import warnings
from typing import Any

import pytest

from lightning_rl_engines import ModelConfig
from tests.support.models import tiny_config


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1 .* is set to 0"),
        ("llama", {"embd_pdrop": 0.1}, "embd_pdrop=0.1 .* is set to 0"),
        ("llama", {"layerdrop": 1}, "layerdrop=1 .* is set to 0"),
        ("qwen3_moe", {"output_router_logits": True}, "output_router_logits=True .* not added"),
    ],
)
def test_what_is_left_out_is_warned_about(model: str, changes: dict[str, Any], words: str) -> None:
    with pytest.warns(UserWarning, match=words):
        config = ModelConfig(from_config=tiny_config(model, **changes).to_dict()).load_hf_config()
    assert config.attention_dropout == 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ModelConfig(from_config=tiny_config(model).to_dict()).load_hf_config()
