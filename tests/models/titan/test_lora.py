"""Adapters of torchtitan models: peft's own choice of modules, split as the base is, the base known by its samples."""

import contextlib
import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan")

import spmd_types as spmd
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torchtitan.models.common.decoder_sharding import colwise_config, dense_param_placement, rowwise_config
from transformers import PretrainedConfig

from lightning_rl_engines import ModelConfig
from lightning_rl_engines._compat import sharding_of
from lightning_rl_engines.export.plan import ExportEntry, ExportPlan, plan_from_hf_model
from lightning_rl_engines.models.huggingface import load_hf_model
from lightning_rl_engines.models.lora import fresh_weights, inject_adapter, lora_layers
from lightning_rl_engines.models.titan.attention import PackedAttention
from lightning_rl_engines.models.titan.families import titan_spec
from lightning_rl_engines.models.titan.lora import (
    AdaptedLinear,
    LowRank,
    TitanAdapter,
    TrainedCopy,
    adapt,
    adapters_are_disabled,
    adapters_disabled,
    plan_adapter,
)
from lightning_rl_engines.models.titan.lora_weights import base_fingerprint
from tests.models.titan import test_deepseek, test_gpt_oss
from tests.models.titan.exactness import build, hugging_face_model, load, saved
from tests.support.lora import adapter_state, lora
from tests.support.models import tiny_config


def config_of(model: str) -> PretrainedConfig:
    if model == "deepseek_v3":
        return test_deepseek.config_of(attention_bias=True)
    return test_gpt_oss.config_of() if model == "gpt_oss" else tiny_config(model)


def planned(model: str, options: LoraConfig, **config: Any) -> tuple[TitanAdapter, Any, Any]:
    """The plan of an adapter, the specification of its model, and peft's model on meta."""
    built = ModelConfig(from_config=config_of(model).to_dict(), lora=options, **config)
    hf = load_hf_model(built, device="meta", attn_implementation="eager", empty=True)
    spec = titan_spec(hf.config, attention=PackedAttention.Config(), max_seq_len=64)
    names = spec.names.for_value_head() if built.head == "value" else spec.names
    entries = [
        ExportEntry(entry.name, entry.shape, entry.dtype, names.locate(entry.name)[0])  # type: ignore[index]
        for entry in plan_from_hf_model(hf).entries
    ]
    return plan_adapter(hf, built, options, names, ExportPlan(tuple(entries))), spec, hf


def on_meta(spec: Any) -> Any:
    with torch.device("meta"):
        return spec.model.build()


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {"target_modules": "all-linear"}),
        ("llama", {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]}),
        ("llama", {"target_modules": r".*layers\.0.*(v_proj|gate_proj)"}),
        ("llama", {"target_modules": "all-linear", "exclude_modules": ["k_proj", "down_proj"]}),
        ("llama", {"target_modules": ["lm_head", "o_proj"]}),
        ("qwen2", {"target_modules": ["q_proj"], "rank_pattern": {"layers.1.self_attn.q_proj": 2}, "use_rslora": True}),
        (
            "qwen3",
            {"target_modules": ATTENTION, "alpha_pattern": {"v_proj": 16}, "modules_to_save": ["norm", "q_norm"]},
        ),
        ("qwen3_moe", {"target_modules": ATTENTION}),
        ("qwen3_moe", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "gate"]}),
        ("deepseek_v3", {"target_modules": ["q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}),
        ("deepseek_v3", {"target_modules": ["q_b_proj"], "modules_to_save": ["kv_a_layernorm", "shared_experts"]}),
        ("gpt_oss", {"target_modules": "all-linear"}),
        ("gpt_oss", {"target_modules": ATTENTION, "modules_to_save": ["router"]}),
    ],
)
def test_peft_chooses_the_modules_and_each_lies_beside_its_base(model: str, options: dict[str, Any]) -> None:
    plan, spec, hf = planned(model, lora(**options))
    plain = load_hf_model(
        ModelConfig(from_config=config_of(model).to_dict()), device="meta", attn_implementation="eager", empty=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_peft = get_peft_model(plain, lora(**options))
    shapes = {name: tuple(item.shape) for name, item in adapter_state(by_peft).items()}
    assert {entry.name: entry.shape for entry in plan.adapter.plan.entries} == shapes
    module = on_meta(spec)
    bare = {name: tuple(item.shape) for name, item in module.state_dict().items()}
    adapt(module, plan)
    state = module.state_dict()
    by_name = dict(lora_layers(hf))
    assert len(plan.layers) == len(by_name)
    for place, (rank, scaling) in plan.layers.items():
        (piece,) = spec.names.pieces(f"{place}.weight", bare[f"{place}.weight"])
        layer = by_name[piece.name.removesuffix(".weight")]
        assert (rank, scaling) == (layer.r["default"], layer.scaling["default"])
        rows, columns = bare[f"{place}.weight"]
        assert tuple(state[f"{place}.lora.a"].shape) == (rank, columns)
        assert tuple(state[f"{place}.lora.b"].shape) == (rows, rank)
    for entry in plan.adapter.plan.entries:
        assert tuple(state[entry.source].shape) == entry.shape
    # What is left is the base, all of it, under names that lead back.
    kept = {plan.plain_name(name) for name in state} - {None}
    assert kept == bare.keys()
    assert plan.places == {name for name in state if plan.plain_name(name) is None}


def test_only_the_adapter_is_trained_in_fp32_over_a_bf16_base() -> None:
    plan, spec, _ = planned("llama", lora(target_modules=["q_proj", "lm_head"], modules_to_save=["norm"]))
    module = on_meta(spec).to(torch.bfloat16)
    adapt(module, plan)
    trained = {name: item.dtype for name, item in module.named_parameters() if item.requires_grad}
    assert trained.keys() == plan.places
    assert set(trained.values()) == {torch.float32}
    assert {item.dtype for item in module.parameters() if not item.requires_grad} == {torch.bfloat16}


def test_a_stage_gets_its_part_alone() -> None:
    plan, spec, _ = planned("llama", lora(modules_to_save=["norm", "embed_tokens"]))
    module = on_meta(spec)
    del module.layers["0"]
    module.tok_embeddings = None
    adapt(module, plan)
    trained = {name for name, item in module.named_parameters() if item.requires_grad}
    assert trained == {name for name in plan.places if not name.startswith(("layers.0.", "tok_embeddings."))}


@pytest.mark.parametrize(
    ("sharding", "a", "b"),
    [
        (colwise_config(), spmd.R, spmd.S(0)),
        (rowwise_config(output_sp=True), spmd.S(1), spmd.R),
    ],
)
def test_factors_are_split_as_the_base_is(sharding: Any, a: Any, b: Any) -> None:
    layer = AdaptedLinear.Config(in_features=6, out_features=4, rank=2, scaling=0.5, sharding_config=sharding).build()
    states = sharding_of(layer.lora).state_shardings
    assert states == {"a": dense_param_placement(tp=a), "b": dense_param_placement(tp=b)}
    assert sharding_of(AdaptedLinear.Config(in_features=6, out_features=4, rank=2, scaling=0.5).build().lora) is None


def test_an_adapted_layer_adds_the_scaled_product_unless_it_is_disabled() -> None:
    torch.manual_seed(0)
    layer = AdaptedLinear.Config(in_features=6, out_features=4, bias=True, rank=2, scaling=0.5).build()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    x = torch.randn(3, 6)
    plain = F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), plain + 0.5 * x @ layer.lora.a.T @ layer.lora.b.T)
    copied = TrainedCopy(nn.Linear(6, 4))
    with torch.no_grad():
        copied.original.weight.add_(1)
    both = nn.ModuleList([layer, copied])
    assert not adapters_are_disabled(both)
    with contextlib.suppress(KeyError), adapters_disabled(both):
        assert torch.equal(layer(x), plain)
        with adapters_disabled(both):
            pass
        assert adapters_are_disabled(both)
        assert torch.equal(copied(x), copied.original(x))
        raise KeyError
    assert not adapters_are_disabled(both)
    assert torch.equal(copied(x), copied.trained(x))
    copied.start_from_original()
    assert torch.equal(copied(x), copied.original(x))


@pytest.mark.parametrize("init", [True, False, "gaussian"])
def test_weights_drawn_on_meta_are_those_of_a_model_on_the_host(init: Any) -> None:
    options = lora(init_lora_weights=init, target_modules=["q_proj", "lm_head"])
    config = ModelConfig(from_config=config_of("llama").to_dict(), lora=options, seed=5)
    hf = load_hf_model(config)
    inject_adapter(hf, config, options)
    expected = {name: item for name, item in hf.state_dict().items() if ".lora_" in name}
    plan, _, meta = planned("llama", options)
    torch.manual_seed(3)
    before, found = torch.get_rng_state(), {}
    for name, item in fresh_weights(meta, plan.adapter.config, 5):
        assert torch.equal(torch.get_rng_state(), before), "the caller's generator"
        found[name] = item.clone()
    assert found.keys() == expected.keys() == plan.sources.keys()
    assert all(torch.equal(found[name], item) for name, item in expected.items())
    assert all(parameter.is_meta for parameter in meta.parameters())


@pytest.mark.parametrize("model", ["llama_tied", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_the_base_has_the_fingerprint_of_the_other_engine(model: str) -> None:
    targets = ["o_proj"]
    hf = hugging_face_model(config_of(model))
    plan, spec, _ = planned(model, lora(target_modules=targets))
    module = build(spec)
    load(module, spec.names, saved(plan_from_hf_model(hf), hf.state_dict().items()))
    found = base_fingerprint(module.state_dict(), plan.adapter.base_plan, spec.names)
    config = ModelConfig(from_config=config_of(model).to_dict(), lora=lora(target_modules=targets))
    expected = inject_adapter(hf, config, lora(target_modules=targets)).fingerprint
    assert found == expected != ""
    with torch.no_grad():
        module.get_parameter("layers.1.attention.wo.weight").mul_(1.5)
    assert base_fingerprint(module.state_dict(), plan.adapter.base_plan, spec.names) != expected


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("llama", {"target_modules": ["embed_tokens"]}, "Embedding"),
        ("llama_tied", {"target_modules": ["lm_head"]}, "tied"),
        ("llama_tied", {"modules_to_save": ["embed_tokens"]}, "tied"),
        ("llama", {"modules_to_save": ["nowhere"]}, "nowhere"),
        ("qwen3_moe", {"target_modules": ["q_proj"], "modules_to_save": ["experts"]}, "no module of its own"),
        ("gpt_oss", {"target_modules": ["q_proj"], "modules_to_save": ["experts"]}, "no module of its own"),
        ("qwen3_moe", {"target_modules": "all-linear"}, "stacked experts"),
        ("deepseek_v3", {"target_modules": "all-linear"}, "stacked experts"),
    ],
)
def test_what_is_not_exact_is_refused(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned(model, lora(**options))


@pytest.mark.parametrize(("model", "name"), [("llama", "self_attn"), ("deepseek_v3", "gate")])
def test_copies_of_more_than_a_layer_are_refused(model: str, name: str) -> None:
    plan, spec, _ = planned(
        model, lora(target_modules=["o_proj" if name == "gate" else "up_proj"], modules_to_save=[name])
    )
    with pytest.raises(ValueError, match="more than a layer"):
        adapt(on_meta(spec), plan)


def test_a_value_head_is_trained_beside_the_frozen_one() -> None:
    plan, _, _ = planned("llama", lora(), head="value")
    sources = {entry.name: entry.source for entry in plan.adapter.plan.entries if "score" in entry.name}
    assert sources == {
        "base_model.model.score.weight": "lm_head.trained.weight",
        "base_model.model.score.bias": "lm_head.trained.bias",
    }
    assert plan.adapter.base_names["lm_head.original.weight"] == "lm_head.weight"
    assert plan.adapter.merged_names["lm_head.trained.weight"] == "lm_head.weight"
    assert not any(isinstance(item, LowRank) for item in plan.adapter.merged_names)
