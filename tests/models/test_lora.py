"""LoRA options: what is refused by name, their plain form, injection into plain models."""

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from lightning_rl_engines import ModelConfig
from lightning_rl_engines.models.huggingface import HFTokenModel, load_hf_model
from lightning_rl_engines.models.lora import Adapter, adapter_units, inject_adapter
from lightning_rl_engines.models.lora_config import adapter_config_dict
from tests.support.lora import adapter_state, lora
from tests.support.models import tiny_model_folder


def build(model: str = "llama", options: LoraConfig | None = None, **config: Any) -> tuple[Any, Adapter]:
    built = ModelConfig(path=str(tiny_model_folder(model)), lora=options or lora(), **config)
    hf = load_hf_model(built)
    return hf, inject_adapter(hf, built, built.lora)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"lora_dropout": 0.1}, "importance ratio"),
        ({"bias": "all"}, "bias='all'"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"init_lora_weights": "pissa_niter_16"}, "pissa_niter_16"),
        ({"init_lora_weights": "olora"}, "olora"),
        ({"init_lora_weights": "orthogonal"}, "orthogonal"),
        ({"init_lora_weights": "eva"}, "eva"),
        ({"init_lora_weights": "corda"}, "corda"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [1, 2]}, "modules_to_save"),
        ({"layer_replication": [(0, 2)]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying"),
        ({"inference_mode": True}, "inference_mode"),
        ({"target_modules": None}, "all-linear"),
    ],
)
def test_options_that_are_not_exact_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own advice on some of them
        config = lora(**options)
        with pytest.raises(ValueError, match=message):
            ModelConfig(path="model", lora=config)


def test_lora_excludes_what_it_contradicts() -> None:
    with pytest.raises(ValueError, match="freeze"):
        ModelConfig(path="model", lora=lora(), freeze=["lm_head.*"])
    with pytest.raises(ValueError, match="compile=True"):
        ModelConfig(path="model", lora=lora(), compile=True)
    with pytest.raises(ValueError, match="leave lora out"):
        ModelConfig(path="model", lora=lora(), adapter="folder")
    with pytest.raises(ValueError, match="no LoraConfig"):
        ModelConfig(path="model", lora=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank"):
        ModelConfig(path="model", lora={"rank": 4})
    with pytest.raises(ValueError, match="'LOHA'"):
        ModelConfig(path="model", lora={"peft_type": "LOHA"})


def test_plain_form_holds_what_differs_from_defaults_and_builds_the_same() -> None:
    options = lora(
        target_modules=["v_proj", "q_proj"], use_rslora=True, rank_pattern={"q_proj": 2}, task_type="CAUSAL_LM"
    )
    config = ModelConfig(path="model", lora=options)
    plain = config.to_dict()
    assert plain == {
        "path": "model",
        "lora": {
            "r": 4,
            "target_modules": ["q_proj", "v_proj"],
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2},
            "task_type": "CAUSAL_LM",
        },
    }
    assert ModelConfig(**json.loads(json.dumps(plain))) == config
    # Every field, as a configuration that LightningCLI saved has them.
    with_all = {**options.to_dict(), "runtime_config": {"ephemeral_gpu_offload": False}}
    assert ModelConfig(path="model", lora=with_all).to_dict() == plain
    assert "lora" not in ModelConfig(path="model").to_dict()
    assert ModelConfig(**ModelConfig(path="model", lora=False).to_dict()).has_adapter is False


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"r": 16, "target_modules": ["q_proj"]}),
        (["--policy.lora.r", "4"], {"r": 4, "target_modules": ["q_proj"]}),
        (["--policy.lora.use_rslora", "true"], {"r": 16, "target_modules": ["q_proj"], "use_rslora": True}),
        (["--policy.lora.target_modules", "all-linear"], {"r": 16, "target_modules": "all-linear"}),
        (['--policy.lora={"target_modules": "all-linear"}'], {"target_modules": "all-linear"}),
        (["--policy.lora", "null"], None),
        (["--policy.lora", "false"], False),
    ],
)
def test_a_command_line_changes_the_adapter_of_a_file(tmp_path: Path, arguments: list[str], expected: Any) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("policy: {path: model, lora: {r: 16, target_modules: [q_proj]}}")
    parser = ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_argument("--policy", type=ModelConfig)
    given = parser.parse_args(["--config", str(file), *arguments])
    # What is saved beside a run holds what was written, and no other field of the installed peft.
    saved = parser.dump(given)
    for parsed in (given, parser.parse_string(saved)):
        config = parser.instantiate(parsed).policy
        assert config.to_dict() == {"path": "model", **({} if expected is None else {"lora": expected})}
        assert config.has_adapter == bool(expected)
    assert "loftq" not in saved


def test_the_class_form_of_a_configuration_file() -> None:
    form = {"class_path": "peft.LoraConfig", "init_args": {"r": 4, "target_modules": ["q_proj"]}}
    config = ModelConfig(path="model", lora=form)
    assert config.to_dict()["lora"] == {"r": 4, "target_modules": ["q_proj"]}
    with pytest.raises(ValueError, match="another class"):
        ModelConfig(path="model", lora={"class_path": "peft.LoHaConfig", "init_args": {}})


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("llama_tied", {"target_modules": ["lm_head"]}, "tied"),
        ("llama_tied", {"modules_to_save": ["lm_head"]}, "tied"),
        ("llama_tied", {"modules_to_save": ["embed_tokens"]}, "tied"),
        ("llama", {"target_modules": ["embed_tokens"]}, "Embedding"),
        ("llama", {"target_modules": ["nowhere"]}, "nowhere"),
        ("llama", {"modules_to_save": ["nowhere"]}, "nowhere"),
        ("llama", {"modules_to_save": ["mlp"], "target_modules": ["up_proj"]}, "No modules were targeted"),
        ("llama", {"modules_to_save": ["layers.0"], "target_modules": r".*layers\.1.*_proj"}, "whole layer"),
        ("llama", {"task_type": "SEQ_CLS"}, "task_type"),
    ],
)
def test_targets_that_are_not_exact_are_refused(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(model, lora(**options))


def test_only_the_adapter_is_trained_in_fp32_over_a_base_of_any_type() -> None:
    config = ModelConfig(path=str(tiny_model_folder("llama")), lora=lora(modules_to_save=["lm_head", "norm"]))
    fp32, bf16 = load_hf_model(config), load_hf_model(config, dtype=torch.bfloat16)
    adapters = [inject_adapter(hf, config, config.lora) for hf in (fp32, bf16)]  # type: ignore[arg-type]
    for hf, adapter in zip((fp32, bf16), adapters, strict=True):
        trained = {name: item for name, item in hf.named_parameters() if item.requires_grad}
        assert trained.keys() == {entry.source for entry in adapter.plan.entries}
        assert {item.dtype for item in trained.values()} == {torch.float32}
        units = [item for unit in adapter_units(hf) for item in unit.parameters()]
        assert {id(item) for item in units} == {id(item) for item in trained.values()}
    assert {item.dtype for item in bf16.parameters() if not item.requires_grad} == {torch.bfloat16}
    # The same draw whatever the base is stored in, and the same base to know again.
    assert adapters[0].fingerprint == adapters[1].fingerprint != ""
    state, other = fp32.state_dict(), bf16.state_dict()
    for entry in adapters[0].plan.entries:
        if ".lora_" in entry.source:
            assert torch.equal(state[entry.source], other[entry.source])
            assert bool(state[entry.source].any()) == (".lora_A." in entry.source)


def test_draws_follow_the_seed_and_leave_the_callers_generator_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, _ = build(seed=1)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(4)
    second, third = build(seed=1)[0], build(seed=2)[0]
    name = "model.layers.1.mlp.up_proj.lora_A.default.weight"
    assert torch.equal(first.state_dict()[name], second.state_dict()[name])
    assert not torch.equal(first.state_dict()[name], third.state_dict()[name])


@pytest.mark.parametrize("init", [True, False, "gaussian"])
def test_inits(init: Any) -> None:
    hf, _ = build(options=lora(init_lora_weights=init, target_modules=["q_proj"], r=64))
    state = hf.state_dict()
    a = state["model.layers.0.self_attn.q_proj.lora_A.default.weight"]
    b = state["model.layers.0.self_attn.q_proj.lora_B.default.weight"]
    assert bool(b.any()) == (init is False)
    # Uniform within 1 / sqrt(in), or normal with deviation 1 / r.
    assert float(a.std()) == pytest.approx(1 / 64 if init == "gaussian" else 32**-0.5 / 3**0.5, rel=0.1)


@pytest.mark.parametrize("targets", [["q_proj", "up_proj"], r".*\.(q|up)_proj", "all-linear"])
def test_names_are_those_of_stock_peft(targets: Any) -> None:
    options = lora(target_modules=targets, modules_to_save=["lm_head"])
    _, adapter = build(options=copy.deepcopy(options))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(load_hf_model(ModelConfig(path=str(tiny_model_folder("llama")))), options)
    assert {entry.name: entry.shape for entry in adapter.plan.entries} == {
        name: tuple(item.shape) for name, item in adapter_state(model).items()
    }
    saved = adapter_config_dict(adapter.config)
    assert saved["task_type"] == "CAUSAL_LM" and saved["inference_mode"] is True
    if isinstance(targets, list):
        assert saved["target_modules"] == sorted(targets)
    assert json.loads(json.dumps(saved)) == saved


def test_a_value_head_is_trained_and_not_adapted() -> None:
    _, adapter = build(head="value")
    names = [entry.name for entry in adapter.plan.entries if "score" in entry.name]
    assert names == ["base_model.model.score.weight", "base_model.model.score.bias"]
    assert len(adapter.plan.entries) == 2 * 7 * 2 + 2


def test_base_names_lead_back_to_the_plain_model() -> None:
    hf, adapter = build(options=lora(modules_to_save=["lm_head"]))
    plain, state = load_hf_model(ModelConfig(path=str(tiny_model_folder("llama")))).state_dict(), hf.state_dict()
    for names in (adapter.base_names, adapter.merged_names):
        found = {target: source for source, target in names.items()}
        for name, value in plain.items():
            assert torch.equal(state[found[name]], value), name
    assert adapter.merged_names["lm_head.modules_to_save.default.weight"] == "lm_head.weight"
    assert adapter.base_names["lm_head.original_module.weight"] == "lm_head.weight"
    assert [entry.name for entry in adapter.base_plan.entries] == list(plain)


def test_the_fingerprint_tells_bases_apart() -> None:
    config = ModelConfig(path=str(tiny_model_folder("llama")), lora=lora())
    hf = load_hf_model(config)
    with torch.no_grad():
        hf.get_parameter("model.layers.1.mlp.down_proj.weight").mul_(1.5)
    changed = inject_adapter(hf, config, config.lora)  # type: ignore[arg-type]
    assert changed.fingerprint != build()[1].fingerprint
    meta = load_hf_model(config, device="meta", empty=True)
    assert inject_adapter(meta, config, config.lora).fingerprint == ""  # type: ignore[arg-type]


def test_a_model_without_an_adapter_cannot_disable_it() -> None:
    config = ModelConfig(path=str(tiny_model_folder("llama")))
    model = HFTokenModel(load_hf_model(config), config)
    assert model.adapter is None
    with pytest.raises(ValueError, match="needs a model with an adapter"):
        model.disable_adapter()


@pytest.mark.parametrize("content", ["embedding", "equal", "different"])
def test_ties_follow_the_configuration(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder("llama_tied"), folder)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    if content != "embedding":
        tensors["lm_head.weight"] = embedding.clone() if content == "equal" else embedding + 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hf = load_hf_model(ModelConfig(path=str(folder)))
    texts = [str(item.message) for item in caught]
    assert any("the configuration is followed" in text for text in texts) == (content == "different")
    assert hf.get_output_embeddings().weight is hf.get_input_embeddings().weight
    assert torch.equal(hf.get_input_embeddings().weight, embedding)
