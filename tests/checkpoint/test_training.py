"""Checkpoints: what continues is what would have gone on, on other layouts too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from typing_extensions import override

from lightning_rl_engines import FSDPUlyssesStrategy, ModelConfig, PolicyLoss
from lightning_rl_engines.checkpoint import export_checkpoint, read_metadata
from tests.strategies.reference import Documents, make_documents
from tests.support import WorkerError, run_workers
from tests.support.engine import share
from tests.support.lightning_env import make_trainer
from tests.support.models import tiny_model_folder


class TrainedModule(LightningModule):
    """AdamW on one policy, and the losses of its steps."""

    def __init__(self, policy: ModelConfig, documents: Documents) -> None:
        super().__init__()
        self.save_hyperparameters({"policy": policy.to_dict()})
        self.automatic_optimization = False
        self.policy_config, self.documents = policy, documents
        self.losses: list[float] = []

    @override
    def configure_model(self) -> None:
        if not hasattr(self, "policy"):
            self.policy = self.trainer.strategy.build_model(self.policy_config)  # type: ignore[attr-defined]

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.policy.parameters(), 1e-2)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> None:
        engine: Any = self.trainer.strategy
        mine = share(range(self.documents.size), engine.data_parallel_rank, engine.data_parallel_size)
        output = engine.train_batch(
            self.policy,
            self.optimizers(),
            self.documents.experience(mine),
            PolicyLoss(),
            max_grad_norm=1.0,
        )
        self.losses.append(output.loss)

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        engine: Any = self.trainer.strategy
        mine = share(range(self.documents.size), engine.data_parallel_rank, engine.data_parallel_size)
        columns = engine.infer_batch(self.policy, self.documents.experience(mine)).columns
        self.total = sum(engine.all_gather_objects(float(columns["log_probs"].sum()), "data"))


def train(folder: str, documents: Documents, steps: int, save: str | None, resume: str | None, **strategy: Any) -> Any:
    module = TrainedModule(ModelConfig(path=folder), documents)
    trainer = make_trainer(FSDPUlyssesStrategy(**strategy), max_steps=steps)
    trainer.fit(module, DataLoader(range(64)), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return module.losses


def validate(folder: str, documents: Documents, path: str) -> float:
    module = TrainedModule(ModelConfig(path=folder), documents)
    make_trainer(FSDPUlyssesStrategy()).validate(module, DataLoader(range(4)), ckpt_path=path)
    return module.total


@pytest.mark.parametrize(
    ("model", "saved_on", "resumed_on"),
    [
        ("qwen2", (2, {}), (2, {})),
        ("llama", (2, {}), (4, {"ulysses_sp_size": 2})),
        ("llama", (4, {"fsdp_size": 2}), (1, {})),
        ("qwen2", (1, {}), (2, {"ulysses_sp_size": 2})),
        ("qwen2", (2, {"fsdp_size": 1}), (4, {"fsdp_size": 2})),
    ],
)
def test_a_resumed_run_continues_on_another_layout(
    tmp_path: Path, model: str, saved_on: tuple[int, Any], resumed_on: tuple[int, Any]
) -> None:
    folder = str(tiny_model_folder(model))
    documents = make_documents(folder, vocabulary=64)
    path = str(tmp_path / "run.ckpt")
    straight = run_workers(1, train, folder, documents, 4, None, None)[0]
    world, layout = saved_on
    before = run_workers(world, train, folder, documents, 2, path, None, **layout)[0]
    world, layout = resumed_on
    after = run_workers(world, train, folder, documents, 4, None, path, **layout)[0]
    assert before + after == pytest.approx(straight, rel=2e-5)


def test_validation_and_export_see_the_saved_weights(tmp_path: Path) -> None:
    folder = str(tiny_model_folder("llama_tied"))
    documents = make_documents(folder, vocabulary=64)
    path = tmp_path / "run.ckpt"
    run_workers(2, train, folder, documents, 2, str(path), None)
    found = run_workers(4, validate, folder, documents, str(path))
    output = export_checkpoint(path, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(output)
    total = 0.0
    with torch.no_grad():
        for ids, mask in zip(documents.input_ids, documents.response_mask, strict=True):
            log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            total += float(log_probs[mask[1:]].sum())
    assert found == pytest.approx([total] * 4, rel=1e-5)
    half = AutoModelForCausalLM.from_pretrained(export_checkpoint(path, tmp_path / "half", dtype="bfloat16"))
    assert half.dtype == torch.bfloat16


def test_an_unfinished_checkpoint_is_refused_and_a_new_save_replaces_the_old_one(tmp_path: Path) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    path = tmp_path / "run.ckpt"
    run_workers(2, train, folder, documents, 1, str(path), None)
    run_workers(2, train, folder, documents, 2, str(path), None)
    assert read_metadata(path)["global_step"] == 2
    assert [item.name for item in tmp_path.iterdir()] == ["run.ckpt"]
    with pytest.raises(ValueError, match=r"is the folder of \['run.ckpt'\]; name a folder"):
        read_metadata(tmp_path)
    (path / "complete").unlink()
    with pytest.raises(WorkerError, match="was not finished") as caught:
        run_workers(2, train, folder, documents, 2, None, str(path))
    assert len(caught.value.errors) == 2
    with pytest.raises(ValueError, match="is no checkpoint folder"):
        read_metadata(tmp_path / "elsewhere")
