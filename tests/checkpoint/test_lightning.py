"""What Lightning does with checkpoints: its callback, evaluation, saving outside of fit, overrides, several nodes."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_rl_engines import EnginePrecision, FSDPUlyssesStrategy, ModelConfig
from lightning_rl_engines.checkpoint import read_metadata
from tests.checkpoint.cases import ENGINES, Everything, SaveAfter, run
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import score_loss
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.lightning_env import ExternalEnvironment, make_trainer
from tests.support.models import tiny_model_folder

REWARDS = (1.0, 3.0, 2.0, 0.0)


@pytest.fixture(scope="module")
def folder() -> str:
    return str(tiny_model_folder("llama"))


@pytest.fixture(scope="module")
def documents(folder: str) -> Documents:
    return make_documents(folder, vocabulary=64)


class Rewarded(Everything):
    """Validates with one reward after another."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        reward = REWARDS[self.trainer.current_epoch]
        self.sums = [*getattr(self, "sums", []), self.sum_of_log_probs]
        self.log("val/reward", reward, sync_dist=True, batch_size=1)


def run_model_checkpoint(
    folder: str, documents: Documents, root: str, asynchronous: bool, engine: str
) -> dict[str, Any]:
    module = Rewarded(ModelConfig(path=folder), documents)
    best = ModelCheckpoint(
        dirpath=root, filename="{step}", monitor="val/reward", mode="max", save_top_k=2, save_last=True
    )
    newest = ModelCheckpoint(dirpath=f"{root}/steps", filename="{step}", every_n_train_steps=1, save_top_k=1)
    trainer = make_trainer(
        ENGINES[engine](async_checkpoint=asynchronous), max_epochs=4, limit_train_batches=1, limit_val_batches=1,
        num_sanity_val_steps=0, enable_checkpointing=True, callbacks=[best, newest],
    )  # fmt: skip
    trainer.fit(module, DataLoader(range(8)), DataLoader(range(8)))
    names = [sorted(item.name for item in Path(path).glob("*.ckpt")) for path in (root, f"{root}/steps")]
    again = Everything(ModelConfig(path=folder), documents)
    other = make_trainer(
        ENGINES[engine](), max_steps=4, enable_checkpointing=True, callbacks=[ModelCheckpoint(dirpath=root)]
    )
    other.validate(again, DataLoader(range(2)), ckpt_path="last", verbose=False)
    return {
        "best": Path(best.best_model_path).name,
        "names": names,
        "hidden": [item.name for item in Path(root).rglob(".*") if item.is_dir()],
        "sums": module.sums,
        "last": again.sum_of_log_probs,
    }


@pytest.mark.parametrize(
    ("asynchronous", "engine"), [(False, "fsdp_ulysses"), (True, "fsdp_ulysses"), (True, "torchtitan")]
)
def test_model_checkpoint_keeps_the_best_the_newest_and_the_last(
    tmp_path: Path, folder: str, documents: Documents, asynchronous: bool, engine: str
) -> None:
    for found in run_workers(2, run_model_checkpoint, folder, documents, str(tmp_path), asynchronous, engine):
        assert found["best"] == "step=2.ckpt"
        assert found["names"] == [["last.ckpt", "step=2.ckpt", "step=3.ckpt"], ["step=4.ckpt"]]
        assert found["hidden"] == []
        assert len(set(found["sums"])) == 4
        assert found["last"] == found["sums"][2]
    # Lightning's last is that of the last save: the fourth step was not among the best.
    assert [read_metadata(tmp_path / f"{name}.ckpt")["global_step"] for name in ("step=2", "last")] == [2, 3]


def run_outside_fit(folder: str, documents: Documents, root: str, engine: str) -> dict[str, Any]:
    module = Everything(ModelConfig(path=folder), documents)
    trainer = make_trainer(ENGINES[engine](), max_steps=2)
    errors = []
    try:
        trainer.save_checkpoint(f"{root}/none.ckpt")
    except AttributeError as error:
        errors.append(str(error))
    trainer.validate(module, DataLoader(range(2)), verbose=False)
    trainer.save_checkpoint(f"{root}/validated.ckpt")
    trainer.fit(module, DataLoader(range(8)))
    trainer.save_checkpoint(f"{root}/fitted.ckpt")
    trainer.save_checkpoint(f"{root}/weights.ckpt", weights_only=True)
    trainer.validate(module, DataLoader(range(2)), verbose=False)
    expected = module.sum_of_log_probs
    for name in ("validated", "weights"):
        try:
            run(folder, documents, steps=3, resume=f"{root}/{name}.ckpt", engine=engine)
        except ValueError as error:
            errors.append(str(error))
    return {"errors": errors, "expected": expected}


def evaluate(folder: str, documents: Documents, path: str, engine: str) -> tuple[float, ...]:
    found = []
    for stage in ("validate", "test", "predict"):
        module = Everything(ModelConfig(path=folder), documents)
        trainer = make_trainer(ENGINES[engine]())
        options: dict[str, Any] = {} if stage == "predict" else {"verbose": False}
        result = getattr(trainer, stage)(module, DataLoader(range(2)), ckpt_path=path, **options)
        found.append(result[0] if stage == "predict" else module.sum_of_log_probs)
        found.append(float(module.total[0]))
    return tuple(found)


@pytest.mark.parametrize("engine", ENGINES)
def test_saving_outside_of_fit_and_evaluation_in_other_processes(
    tmp_path: Path, folder: str, documents: Documents, engine: str
) -> None:
    first, _ = run_workers(2, run_outside_fit, folder, documents, str(tmp_path), engine)
    nothing, validated, weights = first["errors"]
    assert "if a model is attached to the Trainer" in nothing
    for error in (validated, weights):
        assert "holds weights alone, without optimizers, and the module configures 1" in error
    assert "random_states" not in read_metadata(tmp_path / "weights.ckpt")
    for name in ("fitted", "weights"):
        (found,) = run_workers(1, evaluate, folder, documents, str(tmp_path / f"{name}.ckpt"), engine)
        assert found[0::2] == pytest.approx([first["expected"]] * 3, rel=1e-5)
        assert found[1::2] == (found[1],) * 3
        assert found[1] != 0.0


def start_from(folder: str, documents: Documents, path: str, engine: str, stage: str) -> None:
    module = Everything(ModelConfig(path=folder), documents)
    getattr(make_trainer(ENGINES[engine](), max_steps=4), stage)(module, DataLoader(range(8)), ckpt_path=path)


@pytest.mark.parametrize("stage", ["fit", "validate"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_file_that_another_strategy_saved_is_refused_as_a_start(
    tmp_path: Path, folder: str, documents: Documents, engine: str, stage: str
) -> None:
    path = tmp_path / "other.ckpt"
    other = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    other.strategy.connect(BoringModel())
    other.save_checkpoint(path)
    assert path.is_file()
    with pytest.raises(WorkerError, match=r"other.ckpt' is no checkpoint folder; name a folder") as caught:
        run_workers(2, start_from, folder, documents, str(path), engine, stage)
    assert caught.value.all_ranks_raised(ValueError)


class Partial(Everything):
    """Leaves its buffer out, and a model that it does not train."""

    def configure_model(self) -> None:
        if not hasattr(self, "policy"):
            super().configure_model()
            engine: Any = self.trainer.strategy
            self.reference = engine.build_model(self.policy_config, trainable=False)
            self.second = engine.build_model(self.policy_config)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        self.names = list(found)
        return {name: value for name, value in found.items() if not name.startswith(("total", "second."))}


class Lenient(Partial):
    """Takes what fits."""

    def on_fit_start(self) -> None:
        self.strict_loading = False


def run_partial(folder: str, documents: Documents, path: str) -> dict[str, Any]:
    module = Partial(ModelConfig(path=folder), documents)
    trainer = make_trainer(FSDPUlyssesStrategy(), max_steps=1, callbacks=[SaveAfter(1, path)])
    trainer.fit(module, DataLoader(range(8)))
    result: dict[str, Any] = {"names": module.names, "steps": module.steps}
    try:
        run(folder, documents, steps=2, resume=path, kind=Partial)
    except ValueError as error:
        result["strict"] = str(error)
    result["lenient"] = run(folder, documents, steps=2, resume=path, kind=Lenient)
    return result


def test_an_override_of_state_dict_says_what_is_saved(tmp_path: Path, folder: str, documents: Documents) -> None:
    path = tmp_path / "run.ckpt"
    for found in run_workers(2, run_partial, folder, documents, str(path)):
        assert {name.split(".")[0] for name in found["names"]} == {"total", "metric", "policy", "second"}
        assert "does not hold 'second.hf." in found["strict"]
        assert "set its strict_loading=False" in found["strict"]
        (step,) = found["lenient"]
        assert step["total"] == pytest.approx([step["loss"]] * 2)  # the buffer starts anew
        assert step["mean"] == pytest.approx((step["loss"] + found["steps"][0]["loss"]) / 2)  # the metric goes on
    assert set(read_metadata(path)["state_dict"]) == {"metric.mean_value", "metric.weight"}


class TwoNodes(ExternalEnvironment):
    """Ranks 0 and 1 on one node, 2 and 3 on another: local ranks start at 0 on each."""

    def local_rank(self) -> int:
        return self.global_rank() % 2

    def node_rank(self) -> int:
        return self.global_rank() // 2


def run_two_nodes(folder: str, documents: Documents, path: str) -> Any:
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % 2)
    options = {"plugins": [TwoNodes()], "devices": 2, "num_nodes": 2}
    return run(folder, documents, steps=3, save=(2, path), trainer=options)


def test_all_shards_of_two_nodes_are_saved(tmp_path: Path, folder: str, documents: Documents) -> None:
    path = tmp_path / "run.ckpt"
    whole = run_workers(4, run_two_nodes, folder, documents, str(path))[0]
    assert {item.name for item in path.glob("*.distcp")} == {f"__{rank}_0.distcp" for rank in range(4)}
    (resumed,) = run_workers(1, run, folder, documents, steps=3, resume=str(path))
    assert resumed[0]["loss"] == pytest.approx(whole[2]["loss"], rel=1e-5)


def save_and_load(folder: str, documents: Documents, path: str, fsdp_size: int | None) -> None:
    def body(module: EngineModule) -> None:
        engine: Any = module.engine
        engine.train_batch(module.policy, module.optimizers(), documents.experience([1, 8]), score_loss)
        before = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param(module.policy)}
        for _ in range(20):
            module.trainer.save_checkpoint(path)
            with torch.no_grad():
                for parameter in module.policy.parameters():
                    parameter.zero_()
            engine.load_checkpoint(path)
            for name, tensor in engine.get_per_tensor_param(module.policy):
                assert torch.equal(tensor, before[name]), name

    with_engine(body, ModelConfig(path=folder), fsdp_size=fsdp_size)


@pytest.mark.parametrize(("world", "fsdp_size"), [(1, None), (2, None), (2, 1)])
def test_twenty_saves_and_loads_keep_values(
    tmp_path: Path, documents: Documents, world: int, fsdp_size: int | None
) -> None:
    tied = str(tiny_model_folder("llama_tied"))
    run_workers(world, save_and_load, tied, documents, str(tmp_path / "run.ckpt"), fsdp_size)


def run_scaled(folder: str, documents: Documents, path: str, engine: str, resume: bool) -> tuple[float, int]:
    module = Everything(ModelConfig(path=folder), documents)
    plugin = EnginePrecision("16-mixed")
    trainer = make_trainer(engine, plugins=[ExternalEnvironment(), plugin], max_steps=3 if resume else 2)
    scale = plugin.loss_scale
    assert scale is not None
    if not resume:
        scale.value = 2.0**9
    trainer.fit(module, DataLoader(range(64)), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    return scale.value, scale.state_dict()["finite_steps"]


@pytest.mark.parametrize("engine", ["fsdp_ulysses", "torchtitan"])
def test_the_loss_scale_is_restored(tmp_path: Path, folder: str, documents: Documents, engine: str) -> None:
    path = str(tmp_path / "run.ckpt")
    assert run_workers(2, run_scaled, folder, documents, path, engine, False) == [(2.0**9, 2)] * 2
    assert run_workers(1, run_scaled, folder, documents, path, engine, True) == [(2.0**9, 3)]
