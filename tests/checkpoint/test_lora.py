"""Checkpoints of adapters: resumed on other layouts, without the base, on the right base, exported."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_rl_engines import FSDPUlyssesStrategy, ModelConfig
from lightning_rl_engines.checkpoint import export_checkpoint, read_metadata
from tests.checkpoint.test_training import TrainedModule
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import assert_same, copies
from tests.support import WorkerError, run_workers
from tests.support.lightning_env import make_trainer
from tests.support.lora import load_adapter_folder, lora
from tests.support.models import tiny_model, tiny_model_folder

OPTIONS: dict[str, Any] = {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["norm"], "r": 2}


def train(
    config: ModelConfig, documents: Documents, steps: int, save: str | None, resume: str | None, **strategy: Any
) -> dict[str, Any]:
    """Losses, weights, bytes of the optimizer's state over all ranks."""
    module = TrainedModule(config, documents)
    trainer = make_trainer(FSDPUlyssesStrategy(**strategy), max_steps=steps)
    trainer.fit(module, DataLoader(range(64)), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    engine: Any = trainer.strategy
    states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
    mode = "merged" if config.has_adapter else "full"
    return {
        "losses": module.losses,
        "merged": copies(engine.get_per_tensor_param(module.policy, mode=mode)),
        "adapter": copies(engine.get_per_tensor_param(module.policy, mode="adapter")) if config.has_adapter else {},
        "state": sum(item.nbytes for item in states if item.dim()),
    }


@pytest.mark.parametrize(
    ("model", "saved_on", "resumed_on"),
    [
        ("qwen2", (2, {}), (1, {})),
        ("llama_tied", (1, {}), (4, {"ulysses_sp_size": 2, "fsdp_size": 2})),
        ("llama_tied", (4, {"fsdp_size": 2}), (2, {})),
    ],
)
def test_a_resumed_run_continues_on_another_layout(
    tmp_path: Path, model: str, saved_on: tuple[int, Any], resumed_on: tuple[int, Any]
) -> None:
    folder = str(tiny_model_folder(model))
    documents = make_documents(folder, vocabulary=64)
    config = ModelConfig(path=folder, lora=lora(**OPTIONS))
    path = str(tmp_path / "run.ckpt")
    straight = run_workers(1, train, config, documents, 4, None, None)[0]["losses"]
    world, layout = saved_on
    before = run_workers(world, train, config, documents, 2, path, None, **layout)[0]
    world, layout = resumed_on
    after = run_workers(world, train, config, documents, 4, None, path, **layout)[0]
    assert before["losses"] + after["losses"] == pytest.approx(straight, rel=2e-5)


def test_a_checkpoint_holds_the_adapter_and_not_the_base(tmp_path: Path) -> None:
    folder = str(tiny_model_folder("llama_tied"))
    documents = make_documents(folder, vocabulary=64)
    path = tmp_path / "run.ckpt"
    config = ModelConfig(path=folder, lora=lora(r=1, target_modules=["q_proj"]))
    results = run_workers(2, train, config, documents, 1, str(path), None)
    adapter = sum(item.nbytes for item in results[0]["adapter"].values())
    state = sum(item["state"] for item in results)
    assert state == 2 * adapter
    stored = torch.distributed.checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata
    names = {name.split(".", 1)[1] for name in stored if name.startswith("model.")}
    assert len(names) == 4 and all(".lora_" in name for name in names)
    states = {name for name in stored if name.startswith("optimizer_0.state.")}
    assert states and all(".lora_" in name for name in states)
    tensors = sum(
        item.size.numel() * 4 for item in stored.values() if isinstance(getattr(item, "size", None), torch.Size)
    )
    assert tensors <= 3.05 * adapter
    described = read_metadata(path)["adapters"]["policy"]
    assert described["lora"]["r"] == 1 and len(described["base"]) == 64


def test_the_wrong_base_or_adapter_is_refused(tmp_path: Path) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    path = str(tmp_path / "run.ckpt")
    config = ModelConfig(path=folder, lora=lora(**OPTIONS))
    run_workers(2, train, config, documents, 1, path, None)
    tiny_model("llama", seed=7).save_pretrained(tmp_path / "other")
    for wrong, message in (
        (ModelConfig(path=str(tmp_path / "other"), lora=lora(**OPTIONS)), "another base"),
        (ModelConfig(path=folder, lora=lora(**{**OPTIONS, "r": 3})), "r=2"),
        (ModelConfig(path=folder), "holds an adapter of 'policy' and the model has none"),
    ):
        with pytest.raises(WorkerError, match=message) as caught:
            run_workers(2, train, wrong, documents, 2, None, path)
        assert len(caught.value.errors) == 2
    run_workers(2, train, ModelConfig(path=folder), documents, 1, str(tmp_path / "full.ckpt"), None)
    with pytest.raises(WorkerError, match="holds whole weights"):
        run_workers(2, train, config, documents, 2, None, str(tmp_path / "full.ckpt"))


def test_exports_are_what_the_run_had(tmp_path: Path) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    path = tmp_path / "run.ckpt"
    config = ModelConfig(path=folder, lora=lora(use_rslora=True, modules_to_save=["lm_head"]))
    result = run_workers(2, train, config, documents, 2, str(path), None)[0]
    merged = AutoModelForCausalLM.from_pretrained(export_checkpoint(path, tmp_path / "hf"))
    assert_same(dict(merged.state_dict()), {name: result["merged"][name] for name in merged.state_dict()})
    half = export_checkpoint(path, tmp_path / "half", dtype="bfloat16", weights="merged")
    assert AutoModelForCausalLM.from_pretrained(half).dtype == torch.bfloat16
    adapter = export_checkpoint(path, tmp_path / "adapter", weights="adapter")
    assert sorted(item.name for item in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((adapter / "adapter_config.json").read_text())["use_rslora"] is True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = load_adapter_folder(folder, adapter).merge_and_unload()
    assert_same(dict(plain.state_dict()), {name: result["merged"][name] for name in plain.state_dict()})
    with pytest.raises(ValueError, match="holds an adapter of 'policy'"):
        export_checkpoint(path, tmp_path / "full", weights="full")


def test_an_export_on_another_base_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_model("llama").save_pretrained(base)
    documents = make_documents(base, vocabulary=64)
    path = tmp_path / "run.ckpt"
    run_workers(1, train, ModelConfig(path=str(base), lora=lora(**OPTIONS)), documents, 1, str(path), None)
    tiny_model("llama", seed=7).save_pretrained(base)
    with pytest.raises(ValueError, match="another base"):
        export_checkpoint(path, tmp_path / "hf")
    # The adapter itself needs no base.
    export_checkpoint(path, tmp_path / "adapter", weights="adapter")
    assert not (tmp_path / "hf").exists()


def test_a_run_that_started_from_an_adapter_folder_resumes_and_exports(tmp_path: Path) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    run_workers(2, train, ModelConfig(path=folder, lora=lora(**OPTIONS)), documents, 2, str(first), None)
    start = export_checkpoint(first, tmp_path / "start", weights="adapter")
    config = ModelConfig(path=folder, adapter=str(start))
    straight = run_workers(1, train, config, documents, 3, None, None)[0]
    run_workers(1, train, config, documents, 2, str(second), None)
    resumed = run_workers(2, train, config, documents, 3, None, str(second))[0]
    assert resumed["losses"] == pytest.approx(straight["losses"][2:], rel=2e-5)
    exported = export_checkpoint(second, tmp_path / "again", weights="adapter")
    assert (exported / "adapter_config.json").read_text() == (start / "adapter_config.json").read_text()
