"""Real Trainers: what a run that stops and resumes sees is what an uninterrupted run sees."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_rl_engines.data import PromptDataModule
from lightning_rl_engines.rollout import Prompt

SIZE = 23


class _Recorder(LightningModule):
    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[tuple[int, list[int]]] = []
        self.validated: list[int] = []
        self.fail_at = fail_at

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: list[Prompt], batch_idx: int) -> None:
        if self.fail_at is not None and len(self.seen) == self.fail_at:
            raise KeyError("stop here")
        self.layer.weight.grad = torch.zeros(1, 1)
        self.optimizers().step()  # type: ignore[union-attr]
        self.seen.append((self.current_epoch, [prompt.index for prompt in batch]))

    def validation_step(self, batch: list[Prompt], batch_idx: int) -> None:
        self.validated += [prompt.index for prompt in batch]


class _SaveAt(Callback):
    """Saves after a number of batches, or after an epoch."""

    def __init__(self, path: Path, *, batches: int | None = None, epoch: int | None = None) -> None:
        self.path, self.batches, self.epoch, self.count = path, batches, epoch, 0

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.count += 1
        if self.count == self.batches:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    for name, size in (("train", SIZE), ("val", 5)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"prompt": [1, n]}) for n in range(size)))
    return {"train": str(tmp_path / "train.jsonl"), "val": str(tmp_path / "val.jsonl")}


def _fit(
    files: dict[str, str],
    tmp_path: Path,
    *,
    callbacks: list[Callback] | None = None,
    ckpt_path: Path | None = None,
    fail_at: int | None = None,
    batch_size: int = 2,
    **options: Any,
) -> _Recorder:
    module = _Recorder(fail_at)
    limits = options or {"max_epochs": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks or []),
            callbacks=callbacks, default_root_dir=tmp_path, num_sanity_val_steps=0, **limits,
        )  # fmt: skip
        data = PromptDataModule(**files, batch_size=batch_size)
        trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=None if ckpt_path is None else True)
    return module


@pytest.mark.parametrize("batches", [1, 4, 10, 11, 12, 15, 22])
@pytest.mark.parametrize("limits", [{"max_epochs": 3}, {"max_steps": 30}])
def test_resume_after_any_batch_sees_the_rest(
    files: dict[str, str], tmp_path: Path, batches: int, limits: dict[str, int]
) -> None:
    whole = _fit(files, tmp_path, callbacks=[_SaveAt(tmp_path / "c.ckpt", batches=batches)], **limits)
    assert len(whole.seen) == 33 if "max_epochs" in limits else 30
    assert whole.seen[0][1] != whole.seen[11][1]
    rest = _fit(files, tmp_path, ckpt_path=tmp_path / "c.ckpt", **limits)
    assert rest.seen == whole.seen[batches:]


@pytest.mark.parametrize("limits", [{"max_epochs": 3}, {"max_steps": 30}])
def test_resume_after_an_epoch_sees_the_next(files: dict[str, str], tmp_path: Path, limits: dict[str, int]) -> None:
    whole = _fit(files, tmp_path, callbacks=[_SaveAt(tmp_path / "c.ckpt", epoch=0)], **limits)
    rest = _fit(files, tmp_path, ckpt_path=tmp_path / "c.ckpt", **limits)
    assert rest.seen == whole.seen[11:]


def test_resume_after_an_epoch_that_a_limit_cut_short(files: dict[str, str], tmp_path: Path) -> None:
    limits = {"max_epochs": 3, "limit_train_batches": 4}
    whole = _fit(files, tmp_path, callbacks=[_SaveAt(tmp_path / "c.ckpt", epoch=0)], **limits)
    assert len(whole.seen) == 12
    rest = _fit(files, tmp_path, ckpt_path=tmp_path / "c.ckpt", **limits)
    assert rest.seen == whole.seen[4:]


def test_a_second_resume_keeps_the_order(files: dict[str, str], tmp_path: Path) -> None:
    whole = _fit(files, tmp_path, callbacks=[_SaveAt(tmp_path / "1.ckpt", epoch=0)], max_steps=30)
    again = _SaveAt(tmp_path / "2.ckpt", batches=14)
    second = _fit(files, tmp_path, callbacks=[again], ckpt_path=tmp_path / "1.ckpt", max_steps=30)
    third = _fit(files, tmp_path, ckpt_path=tmp_path / "2.ckpt", max_steps=30)
    assert [batch for _, batch in second.seen] == [batch for _, batch in whole.seen[11:]]
    assert [batch for _, batch in third.seen] == [batch for _, batch in whole.seen[25:]]


@pytest.mark.parametrize("fail_at", [1, 3, 11, 14])
def test_a_batch_that_failed_comes_again(files: dict[str, str], tmp_path: Path, fail_at: int) -> None:
    whole = _fit(files, tmp_path)
    saver = ModelCheckpoint(dirpath=tmp_path, save_on_exception=True, save_top_k=0)
    with pytest.raises(KeyError, match="stop here"):
        _fit(files, tmp_path, callbacks=[saver], fail_at=fail_at)
    (path,) = tmp_path.glob("*.ckpt")
    rest = _fit(files, tmp_path, ckpt_path=path)
    assert rest.seen == whole.seen[fail_at:]


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 3)])
@pytest.mark.parametrize("batches", [1, 3, 5])
def test_another_global_batch_continues_and_later_epochs_are_whole(
    files: dict[str, str], tmp_path: Path, before: int, after: int, batches: int
) -> None:
    # The global batch is what a change of the number of ranks changes.
    saver = _SaveAt(tmp_path / "c.ckpt", batches=batches)
    first = _fit(files, tmp_path, callbacks=[saver], batch_size=before)
    other = _fit(files, tmp_path, batch_size=after)
    rest = _fit(files, tmp_path, ckpt_path=tmp_path / "c.ckpt", batch_size=after)
    seen = [index for _, batch in first.seen[:batches] for index in batch]
    left = [index for epoch, batch in rest.seen for index in batch if epoch == 0]
    order = [index for epoch, batch in _fit(files, tmp_path, batch_size=1).seen for index in batch if epoch == 0]
    assert seen + left == order[: len(seen + left)]
    # What a finished epoch left over stays out, as it would have without the change.
    finished = len(seen) + before > SIZE
    assert SIZE - len(seen + left) < (before if finished else after)
    assert [item for item in rest.seen if item[0] > 0] == [item for item in other.seen if item[0] > 0]
    # Lightning leaves out the validation of an epoch whose last batch saved the checkpoint.
    assert rest.validated == list(range(5)) * (2 if finished else 3)


def test_validation_sees_each_prompt_once(files: dict[str, str], tmp_path: Path) -> None:
    assert _fit(files, tmp_path, max_epochs=1).validated == list(range(5))


def test_evaluation_with_a_checkpoint_does_not_move_a_later_fit(files: dict[str, str], tmp_path: Path) -> None:
    whole = _fit(files, tmp_path, callbacks=[_SaveAt(tmp_path / "c.ckpt", batches=4)])
    data, module = PromptDataModule(**files, batch_size=2), _Recorder()
    options: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False,
        "enable_model_summary": False, "default_root_dir": tmp_path,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(**options).validate(module, data, ckpt_path=tmp_path / "c.ckpt", weights_only=True, verbose=False)
        Trainer(max_epochs=3, num_sanity_val_steps=0, **options).fit(module, data)
    assert module.seen == whole.seen
