"""The command line in this process, on the quickstart's model and prompts; one process unless said otherwise."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_rl_engines.cli import main
from tests.support.shell import RANK_VARIABLES, REPOSITORY

QUICKSTART = "examples/grpo_quickstart.yaml"

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    # What one process means to FSDP.
    pytest.mark.filterwarnings("ignore:When using ``NO_SHARD``:UserWarning"),
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning"),
]


@pytest.fixture(autouse=True)
def in_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "path", list(sys.path))
    # LightningCLI 2.6 calls a function that jsonargparse has renamed.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def arguments(subcommand: str, root: Path, *more: str) -> list[str]:
    """The quickstart in small, on one process, below ``root``."""
    small = {
        "trainer.devices": 1,
        "trainer.default_root_dir": root,
        "trainer.callbacks.sink.path": root / "hf",
        "model.rollout.num_generations": 2,
        "model.mini_batches": 2,
        "data.batch_size": 2,
        "data.eval_batch_size": 64,
    }
    options = [f"--{name}={value}" for name, value in small.items()]
    return [subcommand, "--config", QUICKSTART, *options, *more]


def fails(capsys, *command: str, code: int = 2) -> str:
    """Run a command that must fail; return the last line that it writes."""
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == code
    return capsys.readouterr().err.strip().splitlines()[-1]


# ------------------------------------------------------------------------------------------------ parsing


def printed_config(capsys, *command: str) -> dict:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--print_config"])
    assert caught.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_print_config_can_be_run_again(capsys, tmp_path):
    config = printed_config(capsys, *arguments("fit", tmp_path))
    assert config["model"]["class_path"].endswith(".PolicyModule")
    assert config["trainer"]["strategy"]["init_args"]["ulysses_sp_size"] == 1
    file = tmp_path / "printed.yaml"
    file.write_text(yaml.safe_dump(config))
    again = printed_config(capsys, "fit", "--config", str(file))
    assert again == config


def test_changing_the_loss_class_on_the_command_line(capsys, tmp_path):
    config = printed_config(capsys, *arguments("fit", tmp_path, "--model.loss", "GSPOLoss"))
    loss = config["model"]["init_args"]["loss"]
    assert loss["class_path"].endswith(".GSPOLoss")
    # PolicyLoss' clip range is a hundred times GSPO's, and must not be taken over.
    assert loss["init_args"].get("clip_high", 0.0) != 0.28


def test_a_strategy_by_class_name_with_arguments(capsys, tmp_path):
    command = arguments(
        "fit", tmp_path, "--trainer.strategy=FSDPUlyssesStrategy", "--trainer.strategy.ulysses_sp_size=2"
    )
    assert printed_config(capsys, *command)["trainer"]["strategy"]["init_args"]["ulysses_sp_size"] == 2


def test_a_reward_weight_on_the_command_line(capsys, tmp_path):
    config = printed_config(capsys, *arguments("fit", tmp_path, "--model.reward.letters.weight=0.7"))
    assert config["model"]["init_args"]["reward"]["letters"]["weight"] == 0.7


def test_help_names_the_subcommands_and_the_help_of_classes(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "lightning-rl export --checkpoint DIR --output DIR" in shown
    assert "--model.help PolicyModule" in shown
    with pytest.raises(SystemExit):
        main(["fit", "--model.help", "PolicyModule"])
    assert "max_tokens_per_micro_batch" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--trainer.strategy=fsdp_ulises", "Did you mean fsdp_ulysses?"),
        ("--model.loss.epsilon_high=0.3", "`epsilon_high` is loss.clip_high here."),
        ("--model.max_gradnorm=1", "Did you mean max_grad_norm?"),
        ("--model=PolicyModul", "Did you mean PolicyModule?"),
        ("--trainer.max_stepz=3", "Did you mean trainer.max_steps?"),
        ("--ckpt_path=last", "leave --ckpt_path out to start anew"),
        ("--ckpt_path=nowhere.ckpt", "ckpt_path='nowhere.ckpt' does not exist"),
        ("--learning_rate_on_resume=config", "add --ckpt_path last"),
        ("--trainer.strategy.ulysses_sp_size=0", "ulysses_sp_size=0"),
        ("--trainer.strategy.reduce_dtype=foo", "reduce_dtype=foo is not valid; use one of 'float32', 'bfloat16'"),
        ("--model.mini_batches=0", "mini_batches=0"),
    ],
)
def test_the_last_line_says_what_is_wrong(capsys, tmp_path, option, expected):
    assert expected in fails(capsys, *arguments("fit", tmp_path, option))
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--trainer.gradient_clip_val=0.5", "max_grad_norm"),
        ("--trainer.strategy=ddp", "fsdp_ulysses"),
        (
            "--trainer.callbacks+={class_path: ModelCheckpoint, init_args: {save_on_exception: true}}",
            "GracefulInterrupt",
        ),
    ],
)
def test_options_of_lightning_that_do_not_fit_are_refused(capsys, tmp_path, option, expected):
    assert expected in fails(capsys, *arguments("fit", tmp_path, option), code=1)


# ----------------------------------------------------------------------------------------------------- runs


def test_fit_resume_validate_predict_export(capsys, tmp_path):
    main(arguments("fit", tmp_path, "--trainer.max_steps=4"))
    shown = capsys.readouterr().out
    card = " ".join(re.sub("[│╭╮╰╯─]", " ", shown).split())
    for part in ("1 data x 1 sequence ranks", "4 (2 prompts x 2 responses)", "2 updates (4 optimizer steps)"):
        assert part in card
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"last.ckpt"}
    assert (tmp_path / "hf" / "model.safetensors").exists()
    metrics = (tmp_path / "logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert "train/reward" in metrics[0]
    assert "train/kl" in metrics[0] or "train/approx_kl" in metrics[0]

    # Another learning rate: the checkpoint's stays unless asked otherwise, and the card says so.
    resumed = ("--ckpt_path=last", "--model.optimizer.lr=0.5", "--trainer.val_check_interval=1")
    main(arguments("fit", tmp_path, "--trainer.max_steps=6", *resumed))
    shown = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert "optimizer step 4" in shown
    assert "optimizer.init_args.lr: 0.003 in the checkpoint, now 0.5" in shown
    rate = column(tmp_path, 1, "train/lr")
    assert len(rate) == 1
    assert rate[0] < 0.003
    samples = [
        json.loads(line) for line in (tmp_path / "logs" / "version_1" / "samples.jsonl").read_text().splitlines()
    ]
    assert samples[0]["update"] == 3
    assert {"prompt", "response", "reward"} <= set(samples[0])

    main(arguments("fit", tmp_path, "--trainer.max_steps=8", *resumed, "--learning_rate_on_resume=config"))
    assert 0.003 < column(tmp_path, 2, "train/lr")[0] <= 0.5
    capsys.readouterr()

    main(arguments("validate", tmp_path, "--ckpt_path=last"))
    assert "val/reward" in capsys.readouterr().out

    main(arguments("predict", tmp_path, "--ckpt_path=last", "--data.predict=examples/quickstart/val.jsonl"))
    predictions = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    prompts = [json.loads(line) for line in Path("examples/quickstart/val.jsonl").read_text().splitlines()]
    assert [item["prompt"] for item in predictions] == [item["prompt"] for item in prompts]
    assert all(len(item["log_probs"]) == len(item["token_ids"]) for item in predictions)

    main(["export", "--checkpoint", str(tmp_path / "checkpoints" / "last.ckpt"), "--output", str(tmp_path / "export")])
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "export" / "model.safetensors")
    streamed = load_file(tmp_path / "hf" / "model.safetensors")
    assert exported.keys() == streamed.keys()
    assert all(exported[name].equal(streamed[name]) for name in exported)


def column(root: Path, version: int, name: str) -> list[float]:
    import pandas as pd

    return pd.read_csv(root / "logs" / f"version_{version}" / "metrics.csv")[name].dropna().tolist()


def test_export_names_a_folder_that_is_no_checkpoint(capsys, tmp_path):
    last = fails(capsys, "export", "--checkpoint", str(tmp_path), "--output", str(tmp_path / "x"), code=1)
    assert str(tmp_path) in last


def test_the_working_directory_can_be_imported_from(tmp_path, monkeypatch):
    (tmp_path / "my_project_reward.py").write_text("def fun(completion: str) -> float:\n    return 0.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    with pytest.raises(SystemExit):
        main(["--help"])
    assert sys.path[0] == str(tmp_path)


def test_ctrl_c_on_two_processes_then_last_continues(tmp_path):
    """What a user types, with the short quickstart on two processes, Ulysses over both."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    for name in RANK_VARIABLES:
        environment.pop(name, None)

    def start(*more: str) -> "subprocess.Popen[str]":
        command = arguments("fit", tmp_path, "--trainer.devices=2", "--trainer.strategy.ulysses_sp_size=2", *more)
        return subprocess.Popen(
            [sys.executable, "-m", "lightning_rl_engines", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=REPOSITORY,
            start_new_session=True,
        )

    process = start("--trainer.max_steps=100000")
    try:
        assert process.stdout is not None
        seen = ""
        while "reward=" not in seen:
            seen += process.stdout.read(64)
            assert process.poll() is None, seen
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 130, seen + output
    assert (tmp_path / "checkpoints" / "last.ckpt" / "complete").exists()
    assert (tmp_path / "report.png").exists()
    updates = len(column(tmp_path, 0, "train/reward"))

    process = start(f"--trainer.max_steps={2 * updates + 2}", "--ckpt_path=last")
    try:
        output, _ = process.communicate(timeout=240)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    assert len(column(tmp_path, 1, "train/reward")) == 1
