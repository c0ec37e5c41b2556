"""Merged weights and adapters: what peft computes and loads, from every layout, without touching live weights."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_rl_engines import FSDPUlyssesStrategy, HFFolderSink, ModelConfig, WeightExport
from lightning_rl_engines.models.huggingface import HFTokenModel, load_hf_model
from lightning_rl_engines.models.lora import inject_adapter, load_adapter
from lightning_rl_engines.models.weights import stream_weights
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import assert_same, copies, mine, plain_model, score_loss
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.lightning_env import make_trainer
from tests.support.lora import load_adapter_folder, lora, noise, plain_adapter
from tests.support.models import random_documents, reference_log_probs, tiny_config, tiny_model_folder

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "two": (2, {"ulysses_sp_size": 2}),
    "four": (4, {"fsdp_size": 2}),
}


def built(model: str, options: LoraConfig, dtype: torch.dtype = torch.float32) -> HFTokenModel:
    """A plain token model with an adapter that does something."""
    config = ModelConfig(path=str(tiny_model_folder(model)), lora=options)
    hf = load_hf_model(config, dtype=dtype)
    adapter = inject_adapter(hf, config, options)
    state = hf.state_dict()
    start = {entry.name: state[entry.source].clone() for entry in adapter.plan.entries}
    load_adapter(hf, adapter.plan, noise(start), "noise")
    return HFTokenModel(hf, config, adapter)


def streamed(model: HFTokenModel, mode: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return copies(stream_weights(model, model, mode, dtype))


def merged_by_peft(model: HFTokenModel, folder: Any) -> dict[str, Tensor]:
    assert model.adapter is not None and isinstance(model.model_config.lora, LoraConfig)
    plain = plain_adapter(plain_model(folder), model.model_config.lora, streamed(model, "adapter"))
    return {name: item.detach() for name, item in plain.merge_and_unload().state_dict().items()}


KINDS = {
    "all-linear": ("llama", lora()),
    "rslora": ("qwen3", lora(target_modules=["q_proj", "down_proj"], use_rslora=True)),
    "regex-tied": ("qwen2", lora(target_modules=r".*layers\.0.*(v_proj|gate_proj)")),
    "patterns": ("one_kv", lora(rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 16})),
    "head": ("odd_vocab", lora(target_modules=["lm_head", "q_proj"])),
    "trained": ("llama", lora(modules_to_save=["lm_head", "norm"])),
}


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_those_of_merge_and_unload(kind: str) -> None:
    name, options = KINDS[kind]
    folder = tiny_model_folder(name)
    model = built(name, options)
    found, expected = streamed(model, "merged"), merged_by_peft(model, folder)
    index = load_file(folder / "model.safetensors")
    assert found.keys() == index.keys()
    assert_same(found, {key: expected[key] for key in index})


def test_merged_minus_base_is_the_scaled_product_and_zero_elsewhere() -> None:
    model = built("llama", lora(r=4, lora_alpha=10, target_modules=["q_proj", "up_proj"]))
    base = {name: item.detach() for name, item in plain_model(tiny_model_folder("llama")).state_dict().items()}
    adapter, found = streamed(model, "adapter"), streamed(model, "merged")
    targeted = 0
    for name, value in found.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" not in adapter:
            assert torch.equal(value, base[name]), name
            continue
        targeted += 1
        delta = 2.5 * adapter[f"{key}.lora_B.weight"] @ adapter[f"{key}.lora_A.weight"]
        torch.testing.assert_close(value - base[name], delta, rtol=1e-4, atol=1e-6)
        assert delta.norm() > 0.1 * value.norm() * 0.05
    assert targeted == 4


def test_sums_over_a_bf16_base_are_made_in_fp32_and_rounded_once() -> None:
    model = built("llama", lora(lora_alpha=1), torch.bfloat16)
    state = model.hf.state_dict()
    weight = "model.layers.0.self_attn.q_proj"
    delta = state[f"{weight}.lora_B.default.weight"] @ state[f"{weight}.lora_A.default.weight"] * 0.25
    exact = state[f"{weight}.base_layer.weight"].float() + delta
    assert torch.equal(streamed(model, "merged")[f"{weight}.weight"], exact)
    assert torch.equal(streamed(model, "merged", torch.bfloat16)[f"{weight}.weight"], exact.to(torch.bfloat16))
    assert {item.dtype for item in streamed(model, "merged").values()} == {torch.float32}


def test_modes_that_a_model_has_not_are_refused() -> None:
    model = built("llama", lora())
    with pytest.raises(ValueError, match="would leave it out"):
        stream_weights(model, model, "full", None)
    with pytest.raises(ValueError, match="unknown"):
        stream_weights(model, model, "all", None)
    with model.disable_adapter():
        base = streamed(model, "full")
    assert_same(base, dict(plain_model(tiny_model_folder("llama")).state_dict()))
    config = ModelConfig(path=str(tiny_model_folder("llama")))
    plain = HFTokenModel(load_hf_model(config), config)
    for mode in ("merged", "adapter"):
        with pytest.raises(ValueError, match="needs a model with an adapter"):
            stream_weights(plain, plain, mode, None)


def run_stream(config: ModelConfig, documents: Documents, layout: dict[str, Any]) -> dict[str, Any]:
    """Merge, also half-way, and look at live weights before, during and after; train on."""

    def body(module: EngineModule) -> dict[str, Any]:
        engine, policy = module.engine, module.policy

        def live() -> list[Tensor]:
            return [item.detach().clone() for item in policy.parameters()]

        def step() -> float | None:
            with engine.train_mode(policy, module.optimizers()):
                return engine.train_batch(policy, module.optimizers(), mine(engine, documents), score_loss).loss

        step()
        before = live()
        merged = copies(engine.get_per_tensor_param(policy, mode="merged"))
        after = live()
        during = []
        stream = engine.get_per_tensor_param(policy, mode="merged")
        for _ in range(len(merged) // 2):
            next(stream)[1].zero_()
            # A unit that is gathered shows whole weights, the others their shards.
            during.append(
                all(torch.equal(now, old) for now, old in zip(live(), before, strict=False) if now.shape == old.shape)
            )
        stream.close()
        stopped = live()
        again = copies(engine.get_per_tensor_param(policy, mode="merged"))
        with engine.disable_adapter(policy):
            base = copies(engine.get_per_tensor_param(policy, mode="full"))
        return {
            "adapter": copies(engine.get_per_tensor_param(policy, mode="adapter")),
            "merged": merged,
            "same": [all(torch.equal(a, b) for a, b in zip(before, x, strict=True)) for x in (after, stopped)],
            "during": all(during),
            "again": all(torch.equal(again[name], merged[name]) for name in merged),
            "base": base,
            "loss": step(),
        }

    return with_engine(body, config, lr=0.5, **layout)


def test_live_weights_do_not_change_while_merging_also_when_it_stops_half_way() -> None:
    folder = tiny_model_folder("llama")
    documents = make_documents(folder, vocabulary=64)
    config = ModelConfig(path=str(folder), lora=lora(modules_to_save=["lm_head"]))
    adapters, losses = [], []
    for world, layout in LAYOUTS.values():
        for result in run_workers(world, run_stream, config, documents, layout):
            assert result["same"] == [True, True] and result["during"] and result["again"]
            # Bit for bit what peft makes of the same adapter.
            plain = plain_adapter(plain_model(folder), lora(modules_to_save=["lm_head"]), result["adapter"])
            expected = plain.merge_and_unload().state_dict()
            assert_same(result["merged"], {name: expected[name].detach() for name in result["merged"]})
            assert_same(result["base"], dict(plain_model(folder).state_dict()))
            adapters.append(result["adapter"])
            losses.append(result["loss"])
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)


def train_and_export(config: ModelConfig, documents: Documents, path: str, weights: str, **layout: Any) -> Any:
    """One step, then the callback's export; log-probabilities of what was exported."""

    class Exporting(EngineModule):
        updates = 0

    def body(module: EngineModule) -> Any:
        engine, policy = module.engine, module.policy
        with engine.train_mode(policy, module.optimizers()):
            engine.train_batch(policy, module.optimizers(), mine(engine, documents), score_loss)
        with engine.eval_mode(policy):
            log_probs = engine.infer_batch(policy, documents.experience(list(range(documents.size)))).columns[
                "log_probs"
            ]
        module.updates += 1  # type: ignore[operator]
        return log_probs

    module = Exporting({"policy": config}, body, 0.5)
    callback = WeightExport(sink=HFFolderSink(path=path, max_shard_size=4000), weights=weights)  # type: ignore[arg-type]
    trainer = make_trainer(
        FSDPUlyssesStrategy(**layout), max_steps=-1, max_epochs=1, limit_train_batches=1, callbacks=[callback]
    )
    trainer.fit(module, DataLoader(range(trainer.world_size)))
    return module.result, callback.last_path


def assert_log_probs(found: Tensor, model: Any, documents: Documents) -> None:
    with torch.no_grad():
        expected, _ = reference_log_probs(model, documents.input_ids)
    for index, mask in enumerate(documents.response_mask):
        start = sum(len(item) for item in documents.input_ids[:index])
        torch.testing.assert_close(found[start : start + len(mask)][mask], expected[index][mask], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("targets", [["q_proj", "up_proj"], r".*\.(q|up)_proj", "all-linear"])
def test_stock_peft_loads_an_exported_adapter(tmp_path: Path, targets: Any) -> None:
    folder = tiny_model_folder("llama")
    documents = make_documents(folder, vocabulary=64)
    config = ModelConfig(path=str(folder), lora=lora(target_modules=targets, modules_to_save=["lm_head"]))
    texts = set()
    for world, layout in LAYOUTS.values():
        path = tmp_path / f"adapter-{world}"
        results = run_workers(world, train_and_export, config, documents, str(path), "adapter", **layout)
        files = sorted(item.name for item in path.iterdir())
        assert files == ["adapter_config.json", "adapter_model.safetensors"]
        model = load_adapter_folder(folder, path)
        for found, place in results:
            assert place == str(path)
            assert_log_probs(found, model, documents)
        text = (path / "adapter_config.json").read_text()
        texts.add(text)
        assert json.loads(text)["modules_to_save"] == ["lm_head"]
    assert len(texts) == 1, "the same at every world size"


@pytest.mark.parametrize("kind", ["all-linear", "head"])
def test_a_merged_folder_is_a_plain_model(tmp_path: Path, kind: str) -> None:
    name, options = KINDS[kind]
    folder = tiny_model_folder(name)
    documents = make_documents(folder, vocabulary=97 if name == "odd_vocab" else 64)
    config = ModelConfig(path=str(folder), lora=options, gradient_checkpointing=True)
    ((found, _), _) = run_workers(2, train_and_export, config, documents, str(tmp_path / "hf"), "merged")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == load_file(folder / "model.safetensors").keys()
    assert not (tmp_path / "hf" / "adapter_config.json").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    assert_log_probs(found, model, documents)


def test_weight_export_of_a_model_with_an_adapter_says_what_there_is(tmp_path: Path) -> None:
    folder = tiny_model_folder("llama")
    documents = make_documents(folder, vocabulary=64)
    with pytest.raises(WorkerError, match="mode='merged' or mode='adapter'"):
        run_workers(2, train_and_export, ModelConfig(path=str(folder), lora=lora()), documents, str(tmp_path), "full")
    with pytest.raises(WorkerError, match="needs a model with an adapter"):
        run_workers(2, train_and_export, ModelConfig(path=str(folder)), documents, str(tmp_path), "adapter")


def first_step(config: ModelConfig, documents: Documents) -> dict[str, Any]:
    def body(module: EngineModule) -> Any:
        engine, policy = module.engine, module.policy
        with engine.eval_mode(policy):
            whole = documents.experience(list(range(documents.size)))
            log_probs = engine.infer_batch(policy, whole).columns["log_probs"]
        return {
            "log_probs": log_probs,
            "state": len(module.optimizers().optimizer.state),
            "trained": sum(item.requires_grad for item in policy.parameters()),
            "adapter": copies(engine.get_per_tensor_param(policy, mode="adapter")),
        }

    return with_engine(body, config)


def test_a_new_run_starts_from_an_adapter_that_another_world_wrote(tmp_path: Path) -> None:
    folder = tiny_model_folder("llama")
    documents = make_documents(folder, vocabulary=64)
    path = str(tmp_path / "adapter")
    config = ModelConfig(path=str(folder), lora=lora(use_rslora=True, modules_to_save=["norm"]))
    ((found, _), _) = run_workers(2, train_and_export, config, documents, path, "adapter")
    written = load_file(Path(path) / "adapter_model.safetensors")
    for world in (1, 4):
        for result in run_workers(world, first_step, ModelConfig(path=str(folder), adapter=path), documents):
            torch.testing.assert_close(result["log_probs"], found, rtol=1e-5, atol=1e-5)
            assert_same(result["adapter"], written)
            assert result["state"] == 0
            assert result["trained"] == len(written)
    other = ModelConfig(path=str(tiny_model_folder("qwen3")), adapter=path)
    with pytest.raises(WorkerError, match="does not fit the model"):
        run_workers(2, first_step, other, documents)


def test_rank_zero_alone_reads_the_adapter(tmp_path: Path) -> None:
    folder = tiny_model_folder("llama")
    documents = make_documents(folder, vocabulary=64)
    path = str(tmp_path / "adapter")
    run_workers(1, train_and_export, ModelConfig(path=str(folder), lora=lora()), documents, path, "adapter")
    results = run_workers(2, read_hidden_on_rank_one, str(folder), path, documents)
    assert_same(results[0]["adapter"], results[1]["adapter"])


def read_hidden_on_rank_one(folder: str, path: str, documents: Documents) -> dict[str, Any]:
    """Rank 1 is given a path where nothing is."""
    where = path if os.environ["RANK"] == "0" else "/nowhere"
    return first_step(ModelConfig(path=folder, adapter=where), documents)


def test_experts_in_stacks_are_refused_and_attention_of_the_same_model_is_merged() -> None:
    from transformers import Qwen3MoeConfig

    config = tiny_config("qwen3").to_dict()
    config |= {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    assert Qwen3MoeConfig(**config).num_experts == 4
    with pytest.raises(ValueError, match="target_parameters"):
        ModelConfig(from_config=config, lora=lora(target_parameters=["mlp.experts.gate_up_proj"]))
    stacked = ModelConfig(from_config=config, lora=lora())
    with pytest.raises(ValueError, match="stacked experts"):
        inject_adapter(load_hf_model(stacked), stacked, stacked.lora)  # type: ignore[arg-type]
    attention = lora(target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    built_from = ModelConfig(from_config=config, lora=attention)
    hf = load_hf_model(built_from, attn_implementation="eager")
    plain = load_hf_model(built_from, attn_implementation="eager")
    adapter = inject_adapter(hf, built_from, built_from.lora)  # type: ignore[arg-type]
    model = HFTokenModel(hf, built_from, adapter)
    assert len(adapter.plan.entries) == 2 * 2 * 2
    merged = streamed(model, "merged")
    assert any("experts.3.down_proj" in name for name in merged)
    state = plain.state_dict()
    with torch.no_grad():
        for name, tensor in merged.items():
            if "experts." not in name:
                state[name].copy_(tensor)
        ids = random_documents([12])[0][None]
        torch.testing.assert_close(hf(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(hf(ids).logits, load_hf_model(built_from, attn_implementation="eager")(ids).logits)
