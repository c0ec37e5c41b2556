import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
)

from lightning_rl_engines.export import ExportEntry, ExportPlan, plan_from_hf_model
from tests.export.support import assert_same, make_model, save
from tests.support.models import MODEL_NAMES

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": 2,
    "pad_token_id": None,
}
FURTHER: dict[str, PretrainedConfig] = {
    "gemma2": Gemma2Config(**SIZES),
    "gemma3": Gemma3TextConfig(**SIZES),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=3),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=4),
    "deepseek_v3": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
}


def pieces(plan: ExportPlan, model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {name: piece for source in plan.by_source for name, piece in plan.pieces(source, state[source])}


@pytest.mark.parametrize("name", [*MODEL_NAMES, "qwen3_moe", *FURTHER])
def test_the_plan_holds_what_hugging_face_saves(name: str, tmp_path: Path) -> None:
    if name in FURTHER:
        model = AutoModelForCausalLM.from_config(FURTHER[name], dtype=torch.float32)
    else:
        model = make_model(name)
    plan = plan_from_hf_model(model)
    reference = save(model, tmp_path)
    assert {e.name: (e.shape, e.dtype) for e in plan.entries} == {
        key: (tuple(t.shape), t.dtype) for key, t in reference.items()
    }
    assert_same(pieces(plan, model), reference)
    assert plan.num_parameters == model.num_parameters()
    assert plan.architecture == json.loads((tmp_path / "config.json").read_text())["architectures"][0]


@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "qwen3_moe"])
def test_the_order_is_that_of_hugging_face_shards(name: str, tmp_path: Path) -> None:
    # One tensor per shard: file numbers tell the order in which Hugging Face walks its state.
    model = make_model(name)
    model.save_pretrained(tmp_path, max_shard_size=1)
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert [e.name for e in plan_from_hf_model(model).entries] == sorted(weight_map, key=weight_map.get)


@pytest.mark.parametrize("name", ["llama_tied", "qwen3", "qwen3_moe"])
def test_a_meta_model_gives_the_same_plan(name: str) -> None:
    model = make_model(name)
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=torch.float32)
    assert plan_from_hf_model(meta).entries == plan_from_hf_model(model).entries
    assert plan_from_hf_model(meta).fused == plan_from_hf_model(model).fused


def test_a_loaded_model_gives_the_same_plan(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plan_from_hf_model(loaded).entries == plan_from_hf_model(model).entries


def test_tied_heads_are_dropped_and_untied_ones_are_not() -> None:
    names = {name: {e.name for e in plan_from_hf_model(make_model(name)).entries} for name in ("llama", "llama_tied")}
    assert names["llama"] - names["llama_tied"] == {"lm_head.weight"}
    assert names["llama_tied"] <= names["llama"]


def test_non_persistent_buffers_stay_out_and_persistent_ones_come_in() -> None:
    model = make_model("llama")
    assert "model.rotary_emb.inv_freq" in dict(model.named_buffers())
    model.model.register_buffer("counter", torch.tensor([3]))
    plan = plan_from_hf_model(model)
    assert not any("inv_freq" in e.name for e in plan.entries)
    assert ExportEntry("model.counter", (1,), torch.int64) in plan.entries


def test_experts_are_taken_apart_one_at_a_time() -> None:
    model = make_model("qwen3_moe")
    plan = plan_from_hf_model(model)
    source = "model.layers.0.mlp.experts.gate_up_proj"
    stack = model.state_dict()[source]
    stream = plan.pieces(source, stack)
    name, first = next(stream)
    assert name == "model.layers.0.mlp.experts.0.gate_proj.weight"
    # A copy would be of one expert at most; here it is a view.
    assert first.untyped_storage().nbytes() == stack.untyped_storage().nbytes()
    assert torch.equal(first, stack[0, : stack.shape[1] // 2])
    assert len(list(stream)) == 2 * 4 - 1


def test_metadata_is_plain_and_follows_the_cast() -> None:
    entries = (ExportEntry("a", (2, 3), torch.float32), ExportEntry("b", (1,), torch.int64))
    assert ExportPlan(entries).metadata(dtype=torch.bfloat16) == {
        "names": ["a", "b"],
        "dtype_names": ["bfloat16", "int64"],
        "shapes": [[2, 3], [1]],
    }
    assert ExportPlan(entries).metadata()["dtype_names"] == ["float32", "int64"]
    assert [e.num_bytes for e in entries] == [24, 8]


def test_a_model_whose_save_merges_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import conversion_mapping
    from transformers.core_model_loading import Chunk, WeightConverter

    # A save that concatenates k and v: in memory they are chunks of what the checkpoint holds.
    rule = WeightConverter("self_attn.kv.weight", ["self_attn.k_proj.weight", "self_attn.v_proj.weight"], [Chunk(0)])
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model, add_legacy: [rule])
    with pytest.raises(ValueError, match=r"model_type='llama' combines several parameters.*torchtitan"):
        plan_from_hf_model(make_model("llama"))


def test_a_wrong_shape_is_an_error() -> None:
    plan = ExportPlan((ExportEntry("a", (2, 3), torch.float32),))
    with pytest.raises(RuntimeError, match=r"a gave a of shape \(3,\); the plan says \(2, 3\)"):
        list(plan.pieces("a", torch.zeros(3)))


def test_names_are_unique() -> None:
    entry = ExportEntry("a", (1,), torch.float32)
    with pytest.raises(ValueError, match=r"\['a'\] more than once"):
        ExportPlan((entry, entry))
