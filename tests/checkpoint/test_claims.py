"""Two runs do not write into one folder."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_rl_engines import FSDPUlyssesStrategy, ModelConfig
from lightning_rl_engines.checkpoint import read_metadata
from lightning_rl_engines.checkpoint.saver import CheckpointSaver
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule
from tests.support.lightning_env import make_trainer
from tests.support.models import tiny_model_folder

HOLD = """
import sys, time
from datetime import timedelta
from pathlib import Path
from lightning_rl_engines.checkpoint.saver import CheckpointSaver
saver = CheckpointSaver(lambda item: [item], is_writer=True, timeout=timedelta(seconds=60))
saver.claim(Path(sys.argv[1]))
print("claimed", flush=True)
time.sleep(600)
"""


@contextmanager
def another_run(folder: Path) -> Iterator[None]:
    """A process that writes checkpoints into the folder, and is killed at the end."""
    run = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert run.stdout is not None
        assert run.stdout.readline() == "claimed\n"
        yield
    finally:
        run.kill()
        run.communicate()


def new_saver() -> CheckpointSaver:
    return CheckpointSaver(lambda item: [item], is_writer=True, timeout=timedelta(seconds=60))


def test_a_folder_belongs_to_one_run_while_it_lives(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with another_run(folder):
        half = folder / ".last.ckpt.part"
        half.mkdir()
        with pytest.raises(RuntimeError, match=r"another run writes checkpoints into '.*checkpoints'; give this one a"):
            new_saver().claim(folder)
        assert half.exists(), "the other run is at work on it"
    first, second = new_saver(), new_saver()
    first.claim(folder)
    assert not half.exists()
    second.claim(folder)  # a second Trainer of the same process
    first.close()
    assert (folder / ".lock").exists()
    second.close()
    assert list(folder.iterdir()) == []


def step(module: EngineModule) -> bool:
    module.optimizers().step()  # type: ignore[union-attr]  # Lightning saves nothing before the first one
    return True


def fit(folder: str) -> bool:
    module = EngineModule({"policy": ModelConfig(path=str(tiny_model_folder("llama")))}, step, 0.1)
    trainer = make_trainer(
        FSDPUlyssesStrategy(),
        max_epochs=1,
        max_steps=-1,
        limit_train_batches=1,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(dirpath=folder, filename="end", save_on_train_epoch_end=True)],
    )
    trainer.fit(module, DataLoader(range(2)))
    return bool(module.result)


def test_a_run_into_the_folder_of_another_one_ends_before_it_begins(tmp_path: Path) -> None:
    with another_run(tmp_path), pytest.raises(WorkerError, match="another run writes checkpoints into") as error:
        run_workers(2, fit, str(tmp_path))
    assert len(error.value.errors) == 2
    assert [item.name for item in tmp_path.iterdir()] == [".lock"]
    assert run_workers(2, fit, str(tmp_path)) == [True, True]
    assert read_metadata(tmp_path / "end.ckpt")
    assert [item.name for item in tmp_path.iterdir()] == ["end.ckpt"]
