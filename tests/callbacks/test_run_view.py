"""What a run shows: card, bar, samples, curves. Whole runs through the command line are in tests/test_cli.py."""

import pandas as pd
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console
from torch.utils.data import DataLoader

from lightning_rl_engines.callbacks import ConfiguredLearningRate, RunReport, SampleTable, UpdateCheckpoint
from lightning_rl_engines.callbacks.console import readable
from lightning_rl_engines.callbacks.progress import short
from lightning_rl_engines.callbacks.report import draw
from lightning_rl_engines.callbacks.samples import render as render_samples
from lightning_rl_engines.callbacks.start_card import hyper_parameter_changes, render, run_length

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]


def text_of(item) -> str:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(item)
    return captured.get()


def test_changed_arguments_are_listed_with_what_wins():
    saved = {"_class_path": "x", "loss": {"init_args": {"clip_high": 0.2}}, "optimizer": {"init_args": {"lr": 1.0}}}
    now = {"loss": {"init_args": {"clip_high": 0.3}}, "optimizer": {"init_args": {"lr": 2.0}}, "mini_batches": 4}
    assert hyper_parameter_changes(saved, now) == [
        "loss.init_args.clip_high: 0.2 in the checkpoint, now 0.3",
        "mini_batches: None in the checkpoint, now 4",
        "optimizer.init_args.lr: 1.0 in the checkpoint, now 2.0 (the restored optimizer keeps the former; "
        "--learning_rate_on_resume config takes the new one)",
    ]
    assert hyper_parameter_changes(now, now) == []


@pytest.mark.parametrize(
    ("steps", "epochs", "expected"),
    [
        (480, None, "60 updates (480 optimizer steps)"),
        (-1, 3, "3 passes over the prompts"),
        (8, 2, "1 updates (8 optimizer steps), or 2 passes over the prompts"),
        (-1, -1, "until it is stopped"),
    ],
)
def test_the_length_of_a_run(steps, epochs, expected):
    assert run_length(steps, epochs, 8) == expected


def test_a_long_value_of_the_card_is_not_cut():
    path = "/a/very/long/path" * 8
    assert path in text_of(render([("logs", path)])).replace("\n", "").replace(" ", "")


@pytest.mark.parametrize(("value", "expected"), [(0.51234, "0.512"), (4567.0, "4.6k"), (2.5e6, "2.5M"), (12.0, "12")])
def test_numbers_of_the_bar(value, expected):
    assert short(value) == expected


def test_paths_below_the_working_directory_are_relative(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert readable(tmp_path / "here" / "x") == "x"
    assert readable(tmp_path / "there") == str(tmp_path / "there")


def test_samples_show_the_end_of_a_prompt_and_the_start_of_a_response():
    sample = {"prompt": "x" * 100 + "last\n", "response": "first" + "y" * 100, "reward": 0.5}
    shown = text_of(render_samples([sample, {**sample, "reward": None}], update=3, width=20))
    assert "xlast\\n" in shown
    assert "firsty" in shown
    assert "0.500" in shown
    assert "Samples after update 3" in shown
    assert "y" * 21 not in shown


def test_curves_of_a_policy_and_of_supervised_training(tmp_path):
    history = pd.DataFrame({"rl/update": [1.0, 2.0], "train/reward": [0.1, 0.2], "train/kl": [0.0, 0.1]})
    sizes = {}
    for name, frame in (
        ("policy", history),
        ("entropy", history.assign(**{"train/entropy": [1.0, 0.5]})),
        ("sft", pd.DataFrame({"rl/update": [1.0], "train/loss": [2.0]})),
    ):
        path = tmp_path / "new" / f"{name}.png"
        draw(frame, pd.DataFrame(), path)
        header = path.read_bytes()[:24]
        assert header.startswith(b"\x89PNG")
        sizes[name] = int.from_bytes(header[20:24], "big")
    # One more panel makes the picture higher.
    assert sizes["sft"] < sizes["policy"] < sizes["entropy"]


def test_report_keeps_its_validations_in_checkpoints():
    report = RunReport()
    report.validations.append({"rl/update": 1.0, "val/reward": 0.5})
    other = RunReport()
    other.load_state_dict(report.state_dict())
    assert other.validations == report.validations


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SampleTable(rows=-1), "rows=-1"),
        (lambda: SampleTable(width=2), "width=2"),
        (lambda: UpdateCheckpoint(every_n_updates=0), "every_n_updates=0"),
    ],
)
def test_impossible_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        build()


class Plain(LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.lr = lr
        self.seen: list[float] = []

    def training_step(self, batch, batch_idx):
        self.seen.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return self.layer(batch).sum()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def rates(tmp_path, lr: float, steps: int, checkpoint: str | None, *callbacks) -> list[float]:
    module = Plain(lr)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(module, DataLoader(torch.ones(8, 1)), ckpt_path=checkpoint)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    return module.seen


def test_a_resumed_run_can_take_the_configured_learning_rate(tmp_path):
    path = str(tmp_path / "last.ckpt")
    assert rates(tmp_path, 1.0, 2, None, ConfiguredLearningRate()) == [1.0, 0.5]
    assert rates(tmp_path, 8.0, 4, path, ConfiguredLearningRate()) == [2.0, 1.0]
    # Without the callback the restored rate wins, here that of the resumed run.
    assert rates(tmp_path, 64.0, 5, path) == [0.5]
