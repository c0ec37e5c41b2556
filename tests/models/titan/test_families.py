"""Specifications compute what the Hugging Face model computes, hold each of its tensors once, and refuse the rest."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan")

from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lightning_rl_engines.models.titan import config_fields
from lightning_rl_engines.models.titan.attention import PackedAttention
from lightning_rl_engines.models.titan.embedding import HFEmbedding
from lightning_rl_engines.models.titan.families import TitanSpec, supported_model_types, titan_spec
from lightning_rl_engines.models.titan.names import HFNames, NameRule
from tests.models.titan.exactness import assert_exact, hugging_face_model

SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
CLASSES: dict[str, Any] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
}


def config_of(family: str, **changes: Any) -> PretrainedConfig:
    options: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-3,
        "tie_word_embeddings": False,
    }
    if family == "qwen3_moe":
        options |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return CLASSES[family](**{**options, **changes})


def spec_of(config: PretrainedConfig, max_seq_len: int = 128) -> TitanSpec:
    return titan_spec(config, attention=PackedAttention.Config(), max_seq_len=max_seq_len)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("llama", {"rope_parameters": {**SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
    ("llama", {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0}}),
    ("llama", {"rope_parameters": {**SCALED, "rope_type": "yarn"}}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    ("qwen3", {"pad_token_id": 3}),
    ("qwen3", {"tie_word_embeddings": True, "pad_token_id": -1}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": True, "decoder_sparse_step": 2, "num_experts_per_tok": 6}),
    ("qwen3_moe", {"mlp_only_layers": [0], "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_logits_and_gradients_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    config = config_of(family, **changes)
    assert_exact(hugging_face_model(config), spec_of(config), tolerance=1e-5)


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_every_saved_tensor_lies_in_the_model_once(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(family, **changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        saved = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    spec = spec_of(config)
    with torch.device("meta"):
        state = spec.model.build().state_dict()
    found = []
    for fqn, tensor in state.items():
        for piece in spec.names.pieces(fqn, tuple(tensor.shape)):
            found.append(piece.name)
            assert saved[piece.name] == piece.shape_in(tuple(tensor.shape))
            assert spec.names.locate(piece.name) == (fqn, piece.expert, piece.transposed)
    assert sorted(found) == sorted(saved)


def test_names_know_what_they_do_not_hold() -> None:
    untied, tied = (spec_of(config_of("llama", tie_word_embeddings=tie)).names for tie in (False, True))
    assert [piece.name for piece in untied.pieces("lm_head.weight", (97, 32))] == ["lm_head.weight"]
    assert tied.pieces("lm_head.weight", (97, 32)) == ()
    assert tied.locate("lm_head.weight") is None
    assert untied.locate("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    assert untied.pieces("layers.0.moe.tokens_per_expert_E", (4,)) == ()
    # Dots of patterns are dots, and numbers are whole.
    assert untied.locate("model.layers.0x.input_layernorm.weight") is None
    assert untied.locate("modelXnormXweight") is None


def test_names_of_a_critic() -> None:
    names = spec_of(config_of("qwen3", tie_word_embeddings=True)).names.for_value_head()
    assert [piece.name for piece in names.pieces("lm_head.weight", (1, 32))] == ["score.weight"]
    assert [piece.name for piece in names.pieces("lm_head.bias", (1,))] == ["score.bias"]
    assert names.locate("score.weight") == ("lm_head.weight", None, False)
    assert names.locate("lm_head.weight") is None
    assert names.for_value_head().rules == names.rules


def test_transposed_stacks() -> None:
    names = HFNames([NameRule("mlp.{layer}.experts.{expert}.up", "moe.{layer}.up_EFD", transposed=True)])
    pieces = names.pieces("moe.11.up_EFD", (2, 3, 5))
    assert [(piece.name, piece.shape_in((2, 3, 5))) for piece in pieces] == [
        ("mlp.11.experts.0.up", (5, 3)),
        ("mlp.11.experts.1.up", (5, 3)),
    ]
    assert names.locate("mlp.11.experts.1.up") == ("moe.11.up_EFD", 1, True)


def test_every_family_is_listed_for_an_unknown_one() -> None:
    assert {"deepseek_v3", "gpt_oss", *CLASSES} == set(supported_model_types())
    with pytest.raises(ValueError, match=r"model_type='gemma'.*deepseek_v3, gpt_oss, llama, qwen2, qwen3, qwen3_moe"):
        spec_of(GemmaConfig())


@pytest.mark.parametrize("family", CLASSES)
def test_defaults_of_transformers_are_supported(family: str) -> None:
    spec = spec_of(CLASSES[family](num_hidden_layers=1, max_position_embeddings=8))
    assert len(spec.model.layers) == 1


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'.*hidden_act='silu'"),
        ("llama", {"attention_bias": True}, "attention_bias=True.*attention_bias=False works"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True.*mlp_bias=False works"),
        ("llama", {"attention_dropout": 0.1}, r"attention_dropout=0\.1.*attention_dropout=0\.0"),
        ("llama", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30\.0.*=None works"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*=None works"),
        (
            "llama",
            {"per_layer_config": {1: {"intermediate_size": 64}}},
            "per_layer_config .*per_layer_config=None works",
        ),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads=4 .*num_key_value_heads=3; num_key_value_heads=4"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window=True.*=False"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "layer_types=.*sliding_attention.*layer_types=None"),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, "sliding_window=4096.*fsdp_ulysses"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True.*attention_bias=False works"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=True with sliding_window=4096"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok=7 .*num_experts=6"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
    ],
)
def test_what_would_change_results_is_refused_by_name(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_of(config_of(family, **changes))


def test_a_field_that_nobody_knows_must_have_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    known = config_fields._WITHOUT_EFFECT - {"initializer_range"}
    monkeypatch.setattr(config_fields, "_WITHOUT_EFFECT", known)
    spec_of(config_of("qwen3", initializer_range=0.02))
    with pytest.raises(ValueError, match=r"initializer_range=0\.5.*initializer_range=0\.02 works"):
        spec_of(config_of("qwen3", initializer_range=0.5))


def test_remote_code_under_a_known_name_is_refused() -> None:
    class Custom(LlamaConfig):
        pass

    with pytest.raises(ValueError, match=r"Custom calls itself model_type='llama'.*LlamaConfig.*fsdp_ulysses"):
        spec_of(Custom())


def test_the_padding_token_gets_no_gradient_as_an_input() -> None:
    embedding = HFEmbedding.Config(num_embeddings=5, embedding_dim=3, padding_token=-2).build()
    reference = torch.nn.Embedding(5, 3, padding_idx=-2, _weight=embedding.weight.detach().clone())
    tokens = torch.tensor([[3, 1, 3, 4]])
    for module in (embedding, reference):
        module(tokens).square().sum().backward()
    assert torch.equal(embedding(tokens), reference(tokens))
    assert torch.equal(embedding.weight.grad, reference.weight.grad)
    assert embedding.weight.grad[3].abs().max() == 0
