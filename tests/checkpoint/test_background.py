"""Checkpoints that are written while training goes on: what fails there is raised on all ranks, and nothing is lost."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_rl_engines import ModelConfig
from lightning_rl_engines.checkpoint import read_metadata
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import score_loss
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.models import tiny_model_folder


@pytest.fixture(scope="module")
def folder() -> str:
    return str(tiny_model_folder("llama"))


@pytest.fixture(scope="module")
def documents(folder: str) -> Documents:
    return make_documents(folder, vocabulary=64)


class Disk:
    """Writes as `dcp.save` does, but waits for a sign first, and fails on one rank if asked to."""

    def __init__(self, sign: Path, failing_rank: int | None) -> None:
        self.sign, self.failing_rank, self.save = sign, failing_rank, dcp.save

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + 30
        while not self.sign.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.failing_rank == int(os.environ["RANK"]):
            raise OSError("No space left on device")
        if self.failing_rank is not None:
            return None  # a real save would fail with the other rank
        return self.save(*args, **kwargs)


class Live(Callback):
    """Hands out its list itself, as ModelCheckpoint does with its best models."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}


def train_during_a_save(folder: str, documents: Documents, root: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    path, sign = Path(root) / "last.ckpt", Path(root) / "sign"

    def body(module: EngineModule) -> None:
        engine, trainer = module.engine, module.trainer

        def step() -> None:
            engine.train_batch(module.policy, module.optimizers(), documents.experience([1, 8]), score_loss)

        step()
        trainer.save_checkpoint(path)
        trainer.save_checkpoint(path)  # waits for the first
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dcp, "save", Disk(sign, None))
            step()
            trainer.save_checkpoint(path)
            step()
            seen["while"] = read_metadata(path)["global_step"]
            engine.barrier()  # type: ignore[attr-defined]
            trainer.strategy.remove_checkpoint(path)
            seen["kept"] = path.exists()
            engine.barrier()  # type: ignore[attr-defined]
            sign.touch()
            engine.finish_checkpoints()  # type: ignore[attr-defined]
            engine.barrier()  # type: ignore[attr-defined]
            seen["removed"] = not path.exists()
            engine.barrier()  # type: ignore[attr-defined]
            sign.unlink(missing_ok=True)
            engine.barrier()  # type: ignore[attr-defined]
            live.seen.append(3)
            trainer.save_checkpoint(path)
            live.seen.append(4)
            sign.touch()
            time.sleep(0.5)  # until the thread has met the replacement

    live = Live()
    with_engine(body, ModelConfig(path=folder), async_checkpoint=True, trainer={"callbacks": [live]})
    found = read_metadata(path)
    seen["after"] = found["global_step"]  # the end of the run waits for the last one
    seen["live"] = found["callbacks"]["Live"]["seen"]
    return seen


def test_training_goes_on_and_everything_else_waits(tmp_path: Path, folder: str, documents: Documents) -> None:
    for seen in run_workers(2, train_during_a_save, folder, documents, str(tmp_path)):
        # The former checkpoint stays until the new one is whole; what is to be removed is not before that either.
        assert seen == {"while": 1, "kept": True, "removed": True, "after": 3, "live": [3]}


def fail(folder: str, documents: Documents, root: str, asynchronous: bool, rank: int, at_end: bool) -> dict[str, Any]:
    path = Path(root) / "last.ckpt"
    seen: dict[str, Any] = {}

    def body(module: EngineModule) -> None:
        module.trainer.save_checkpoint(path)
        engine: Any = module.engine
        engine.finish_checkpoints()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dcp, "save", Disk(Path(root), rank))
            try:
                module.trainer.save_checkpoint(path)
                seen["returned"] = True
                if at_end:
                    time.sleep(1.0)  # the thread must have met the replacement
                    return
                module.trainer.save_checkpoint(path)
            except RuntimeError as error:
                seen["error"] = str(error)
        module.trainer.save_checkpoint(path)

    try:
        with_engine(body, ModelConfig(path=folder), async_checkpoint=asynchronous)
    except RuntimeError as error:
        seen["error at end"] = str(error)
    seen["whole"] = read_metadata(path)["global_step"]
    return seen


@pytest.mark.parametrize(("asynchronous", "rank", "at_end"), [(False, 1, False), (True, 0, False), (True, 1, True)])
def test_an_error_of_one_rank_is_raised_on_all_and_the_former_checkpoint_stays(
    tmp_path: Path, folder: str, documents: Documents, asynchronous: bool, rank: int, at_end: bool
) -> None:
    for seen in run_workers(2, fail, folder, documents, str(tmp_path), asynchronous, rank, at_end):
        error = seen.pop("error at end" if at_end else "error")
        assert error == (f"A checkpoint could not be written; rank {rank} says: OSError: No space left on device")
        assert seen == ({"returned": True, "whole": 0} if asynchronous else {"whole": 0})


def refuse_link(folder: str, root: str) -> None:
    callbacks = [ModelCheckpoint(dirpath=root, save_last="link", every_n_train_steps=1)]
    with_engine(
        lambda module: None, ModelConfig(path=folder), async_checkpoint=True,
        trainer={"enable_checkpointing": True, "callbacks": callbacks},
    )  # fmt: skip


def test_a_link_to_what_is_not_there_yet_is_refused(tmp_path: Path, folder: str) -> None:
    with pytest.raises(WorkerError, match="save_last='link'") as caught:
        run_workers(1, refuse_link, folder, str(tmp_path))
    assert isinstance(caught.value.errors[0].exception, MisconfigurationException)
