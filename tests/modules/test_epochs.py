"""A run that stopped within an epoch goes on where it stopped."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_rl_engines import HFRollout, ModelConfig, PolicyModule, PromptDataModule, TorchTitanStrategy
from lightning_rl_engines.callbacks import UpdateCheckpoint
from lightning_rl_engines.modules.epochs import reopen_cut_epoch
from lightning_rl_engines.strategies import FSDPUlyssesStrategy
from tests.modules.cases import sgd, weights
from tests.support import run_workers
from tests.support.lightning_env import make_trainer

QUICKSTART = "examples/quickstart"
STRATEGIES: dict[str, Any] = {"fsdp_ulysses": FSDPUlyssesStrategy, "torchtitan": TorchTitanStrategy}


class Watch(Callback):
    """Notes the prompts of each batch, and stops after so many updates."""

    def __init__(self, stop: int | None) -> None:
        self.seen: list[tuple[int, list[int]]] = []
        self.stop = stop

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((trainer.current_epoch, [prompt.index for prompt in batch]))

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        trainer.should_stop = trainer.should_stop or pl_module.updates == self.stop


def first_letter(completion: str, answer: str) -> float:
    return float(completion[:1] == answer[:1]) - 0.01 * len(completion)


def run(
    folder: str, engine: str, stop: int | None = None, resume: bool = False, **limits: Any
) -> tuple[list[tuple[int, list[int]]], dict[str, torch.Tensor]]:
    module = PolicyModule(
        policy=ModelConfig(from_config=QUICKSTART),
        rollout=HFRollout(num_generations=4, max_new_tokens=4),
        reward=first_letter,
        optimizer=sgd,
    )
    data = PromptDataModule(train=f"{QUICKSTART}/train.jsonl", batch_size=4)
    watch = Watch(stop)
    trainer = make_trainer(
        STRATEGIES[engine](),
        callbacks=[watch, UpdateCheckpoint(dirpath=folder)],
        enable_checkpointing=True,
        **{"max_epochs": -1, **limits},
    )
    trainer.fit(module, data, ckpt_path=f"{folder}/last.ckpt" if resume else None)
    return watch.seen, weights(module)


CUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "max_steps": ({"max_steps": 2}, {"max_steps": 4}),
    "should_stop": ({"max_steps": 4, "stop": 2}, {"max_steps": 4}),
    "in the second epoch": (
        {"max_steps": 3, "limit_train_batches": 2},
        {"max_steps": 5, "limit_train_batches": 2},
    ),
    "at the end of an epoch": (
        {"max_epochs": 1, "limit_train_batches": 2},
        {"max_epochs": 2, "limit_train_batches": 2},
    ),
}


@pytest.mark.parametrize("engine", STRATEGIES)
@pytest.mark.parametrize("cut", CUTS)
def test_a_run_that_stopped_goes_on_with_the_next_batch(tmp_path: Path, cut: str, engine: str) -> None:
    first, whole = CUTS[cut]
    ((seen, expected),) = run_workers(1, run, str(tmp_path / "whole"), engine, **whole)
    ((before, _),) = run_workers(1, run, str(tmp_path / "parts"), engine, **first)
    ((after, found),) = run_workers(1, run, str(tmp_path / "parts"), engine, resume=True, **whole)
    assert before + after == seen
    assert all(torch.equal(found[name], item) for name, item in expected.items())


def again(folder: str, damage: str | None) -> list[str]:
    """Warnings of a run into a folder that holds a checkpoint; or, of a damaged one, the error of a resumed run."""
    if damage is None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(folder, "fsdp_ulysses", max_steps=1)
        return [str(item.message) for item in caught]
    for path in Path(folder, "last.ckpt").glob(damage):
        os.truncate(path, 40)
    with pytest.raises(ValueError, match=r"last.ckpt' cannot be read: its files were damaged or removed") as error:
        run(folder, "fsdp_ulysses", resume=True, max_steps=2)
    return [str(error.value)]


def test_a_run_that_will_replace_a_checkpoint_says_so(tmp_path: Path) -> None:
    for expected in (0, 1):
        (messages,) = run_workers(1, again, str(tmp_path), None)
        assert sum("is of an earlier run, and this run will replace it" in message for message in messages) == expected


@pytest.mark.parametrize("damage", ["*.distcp", "meta.pt", ".metadata"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, damage: str) -> None:
    run_workers(1, run, str(tmp_path), "fsdp_ulysses", max_steps=1)
    run_workers(1, again, str(tmp_path), damage)


def test_a_loader_without_a_position_is_left_to_lightning() -> None:
    progress = {"current": {"ready": 1, "processed": 1, "completed": 1}, "total": {"processed": 1, "completed": 1}}
    loop = {"epoch_progress": progress, "state_dict": {"combined_loader": []}}
    checkpoint = {"epoch": 1, "loops": {"fit_loop": loop}}
    reopen_cut_epoch(checkpoint)
    assert checkpoint["epoch"] == 1
    assert progress["current"]["completed"] == 1
