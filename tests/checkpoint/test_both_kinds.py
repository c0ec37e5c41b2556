"""What holds for checkpoints of whole models holds for those of adapters, and the other way round."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.data import DataLoader

from lightning_rl_engines import FSDPUlyssesStrategy, ModelConfig
from tests.checkpoint.cases import Everything, run, run_and_resume
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import assert_same, copies, mine, score_loss, value_loss
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.lightning_env import make_trainer
from tests.support.lora import lora
from tests.support.models import tiny_model_folder


@pytest.fixture(scope="module")
def documents() -> Documents:
    return make_documents(tiny_model_folder("llama_tied"), vocabulary=64)


@pytest.fixture(scope="module")
def folder() -> str:
    return str(tiny_model_folder("llama_tied"))


def adapter() -> Any:
    return lora(r=2, target_modules=["q_proj", "down_proj"], modules_to_save=["norm"])


class Adapted(Everything):
    """Trains an adapter; the optimizer is given the frozen base too, which has no state."""

    def __init__(self, policy: ModelConfig, documents: Documents, seed: int = 0) -> None:
        super().__init__(replace(policy, lora=adapter()), documents, seed)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.policy.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


KINDS = pytest.mark.parametrize("kind", [Everything, Adapted], ids=["full", "lora"])


# ---- runs ----


@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        (1, {}),
        (2, {"ulysses_sp_size": 2, "async_checkpoint": True}),
        (4, {"fsdp_size": 2, "offload_param": True, "offload_optimizer": True}),
    ],
)
def test_the_rest_of_an_adapters_run_is_equal_to_the_last_bit(
    tmp_path: Path, folder: str, documents: Documents, world: int, strategy: dict[str, Any]
) -> None:
    path = str(tmp_path / "run.ckpt")
    for whole, resumed in run_workers(world, run_and_resume, folder, documents, path, kind=Adapted, **strategy):
        assert [step["step"] for step in resumed] == [4, 5, 6]
        assert resumed == whole


def evaluate(folder: str, documents: Documents, path: str, kind: type[Everything]) -> list[float]:
    found = []
    for stage in ("validate", "test", "predict"):
        module = kind(ModelConfig(path=folder), documents)
        getattr(make_trainer(FSDPUlyssesStrategy()), stage)(module, DataLoader(range(4)), ckpt_path=path)
        found.append(module.sum_of_log_probs)
    return found


def fit_and_look(folder: str, documents: Documents, path: str, kind: type[Everything]) -> list[float]:
    module = kind(ModelConfig(path=folder), documents)
    trainer = make_trainer(FSDPUlyssesStrategy(), max_steps=2)
    found = []
    trainer.validate(module, DataLoader(range(2)), verbose=False)
    found.append(module.sum_of_log_probs)
    trainer.fit(module, DataLoader(range(8)))
    trainer.save_checkpoint(path)
    trainer.validate(module, DataLoader(range(2)), verbose=False)
    return [*found, module.sum_of_log_probs]


@KINDS
def test_evaluation_in_new_processes_sees_the_trained_weights(
    tmp_path: Path, folder: str, documents: Documents, kind: type[Everything]
) -> None:
    path = str(tmp_path / "run.ckpt")
    before, after = run_workers(2, fit_and_look, folder, documents, path, kind)[0]
    assert abs(after - before) > 1e-3 * abs(before)
    for found in run_workers(4, evaluate, folder, documents, path, kind):
        assert found == pytest.approx([after] * 3, rel=1e-5)


# ---- what is stored ----


def save_with(config: ModelConfig, documents: Documents, path: str, **strategy: Any) -> dict[str, Any]:
    """On a rank: one step, a save; the trained weights, and those of a run without options that resumes from it."""
    mode = "adapter" if config.has_adapter else "full"

    def body(module: EngineModule) -> Any:
        engine: Any = module.engine
        engine.train_batch(module.policy, module.optimizers(), mine(engine, documents), score_loss)
        module.trainer.save_checkpoint(path)
        return copies(engine.get_per_tensor_param(module.policy, mode=mode))

    def load(module: EngineModule) -> Any:
        engine: Any = module.engine
        engine.load_checkpoint(path)
        return copies(engine.get_per_tensor_param(module.policy, mode=mode))

    written = with_engine(body, config, **strategy)
    plain = replace(config, gradient_checkpointing=False, compile=False, compile_backend="inductor")
    return {"written": written, "read": with_engine(load, plain)}


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "compile": True, "compile_backend": "eager"},
        {"gradient_checkpointing": True, "lora": adapter()},
    ],
    ids=["checkpointing", "compile", "lora"],
)
@pytest.mark.parametrize("strategy", [{}, {"fsdp_size": 1, "offload_param": True}])
def test_names_are_those_of_the_model_and_plain_torch_reads_the_values(
    tmp_path: Path, folder: str, documents: Documents, options: dict[str, Any], strategy: dict[str, Any]
) -> None:
    path = tmp_path / "run.ckpt"
    config = ModelConfig(path=folder, **options)
    results = run_workers(2, save_with, config, documents, str(path), timeout=240, **strategy)
    written = results[0]["written"]
    for found in results:
        assert_same(found["read"], written)
    dcp_to_torch_save(path, tmp_path / "plain.pt")
    stored = torch.load(tmp_path / "plain.pt", weights_only=True)["model"]
    names = {name.removeprefix("policy.hf.") for name in stored}
    assert not any(part in name for name in stored for part in ("_fsdp", "_orig_mod", "_checkpoint_wrapped", "module."))
    if config.has_adapter:
        trained = {
            "base_model.model." + name.replace(".modules_to_save.default", "").replace(".default", ""): value
            for name, value in ((name.removeprefix("policy.hf."), value) for name, value in stored.items())
        }
        assert_same(trained, written)
    else:
        assert names == written.keys()  # a tie once
        assert_same({name: stored[f"policy.hf.{name}"] for name in written}, written)


def test_a_checkpoint_of_whole_weights_holds_each_of_them_once_and_its_two_moments(
    tmp_path: Path, folder: str, documents: Documents
) -> None:
    path = tmp_path / "run.ckpt"
    run_workers(2, run, folder, documents, steps=1, save=(1, str(path)))
    stored = torch.distributed.checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: item.size.numel() * 4 for name, item in stored.items() if hasattr(item, "size")}
    whole = sum(size for name, size in tensors.items() if name.startswith("model."))
    assert sum(tensors.values()) <= 3.01 * whole
    assert not any("lm_head" in name for name in tensors)  # tied


def save_and_load_many(config: ModelConfig, documents: Documents, path: str) -> None:
    def body(module: EngineModule) -> None:
        engine: Any = module.engine
        for _ in range(2):  # of an adapter, the first step moves one half
            engine.train_batch(module.policy, module.optimizers(), documents.experience([1, 8]), score_loss)
        before = copies(engine.get_per_tensor_param(module.policy, mode="merged"))
        for _ in range(20):
            module.trainer.save_checkpoint(path)
            with torch.no_grad():
                for parameter in module.policy.parameters():
                    if parameter.requires_grad:
                        parameter.zero_()
            engine.load_checkpoint(path)
            assert_same(copies(engine.get_per_tensor_param(module.policy, mode="merged")), before)

    with_engine(body, config)


@pytest.mark.parametrize("world", [1, 2])
def test_twenty_saves_and_loads_keep_an_adapter(tmp_path: Path, folder: str, documents: Documents, world: int) -> None:
    config = ModelConfig(path=folder, lora=adapter())
    run_workers(world, save_and_load_many, config, documents, str(tmp_path / "run.ckpt"))


def load_file(config: ModelConfig, path: str) -> None:
    with_engine(lambda module: module.engine.load_checkpoint(path), config)  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [{}, {"lora": adapter()}], ids=["full", "lora"])
def test_a_single_file_of_another_strategy_is_refused_on_all_ranks_with_the_way(
    tmp_path: Path, folder: str, options: dict[str, Any]
) -> None:
    file = tmp_path / "epoch=0.ckpt"
    torch.save({"state_dict": {"policy.weight": torch.ones(2)}, "optimizer_states": []}, file)
    with pytest.raises(WorkerError, match=r"epoch=0.ckpt' is no checkpoint folder; name a folder") as caught:
        run_workers(2, load_file, ModelConfig(path=folder, **options), str(file))
    assert caught.value.all_ranks_raised(ValueError)


# ---- critics ----


def train_critic(config: ModelConfig, documents: Documents, path: str, load: bool) -> Any:
    def body(module: EngineModule) -> Any:
        engine: Any = module.engine
        whole = documents.experience(list(range(documents.size)))
        found = {"fresh": engine.infer_batch(module.critic, whole).columns["values"]}
        if load:
            engine.load_checkpoint(path)
        else:
            for _ in range(2):
                engine.train_batch(module.critic, module.optimizers(), mine(engine, documents), value_loss)
            module.trainer.save_checkpoint(path)
        return {**found, "trained": engine.infer_batch(module.critic, whole).columns["values"]}

    return with_engine(body, {"critic": config}, lr=0.05)


@pytest.mark.parametrize("options", [{}, {"lora": lora(r=2)}], ids=["full", "lora"])
def test_a_trained_value_head_comes_back_from_a_checkpoint(
    tmp_path: Path, folder: str, documents: Documents, options: dict[str, Any]
) -> None:
    path = str(tmp_path / "run.ckpt")
    config = ModelConfig(path=folder, head="value", **options)
    written, _ = run_workers(2, train_critic, config, documents, path, False)
    (read,) = run_workers(1, train_critic, config, documents, path, True)
    torch.testing.assert_close(read["trained"], written["trained"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(read["fresh"], written["fresh"], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(read["fresh"], read["trained"], rtol=1e-2)
