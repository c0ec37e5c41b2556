"""Every example as a user runs it, in short form."""

import importlib.util
import json
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch

from lightning_rl_engines.cli import main
from tests.support.shell import REPOSITORY, run_python

EXAMPLES = REPOSITORY / "examples"
CONFIGS = sorted(path.name for path in EXAMPLES.glob("*.yaml"))

# Beyond devices, steps and folders; a new example needs no entry.
SMALLER = {
    "grpo_quickstart.yaml": ("--model.rollout.num_generations=2", "--model.mini_batches=2"),
    "grpo_moe.yaml": ("--model.rollout.num_generations=2", "--trainer.strategy.expert_parallel_degree=1"),
}

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


def short(config: str, root: Path) -> list[str]:
    """A configuration in small, on one process, below ``root``."""
    return [
        "fit",
        f"--config=examples/{config}",
        "--trainer.devices=1",
        "--trainer.max_steps=2",
        f"--trainer.default_root_dir={root}",
        f"--trainer.callbacks.sink.path={root / 'hf'}",
        "--data.batch_size=2",
        *SMALLER.get(config, ()),
    ]


def load_policy(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(tensor.equal(other.state_dict()[name]) for name, tensor in one.state_dict().items())


@pytest.mark.parametrize("config", CONFIGS)
def test_a_configuration_trains_and_leaves_everything_it_promises(capsys, tmp_path, config):
    main(short(config, tmp_path))
    shown = capsys.readouterr().out
    # The card at the start and the list at the end.
    assert "lightning-rl" in shown
    assert "written" in shown
    assert shown.index("lightning-rl") < shown.index("written")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "checkpoints" / "last.ckpt" / "complete").exists()
    assert "train/loss" in (tmp_path / "logs" / "version_0" / "metrics.csv").read_text().splitlines()[0]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in load_policy(tmp_path / "hf").state_dict().values())


@pytest.mark.parametrize("config", CONFIGS)
def test_the_commands_in_a_configuration_are_valid(capsys, config):
    """The header of each file says how to run it."""
    header = (EXAMPLES / config).read_text().split("\nseed_everything")[0]
    text = "\n".join(line.removeprefix("#").strip() for line in header.splitlines())
    lines = text.replace("\\\n", " ").splitlines()
    commands = [line for line in lines if line.startswith("lightning-rl ")]
    options = [line.split("  ")[0] for line in lines if line.startswith("--")]
    assert f"lightning-rl fit --config examples/{config}" in commands
    # An option alone stands for the first command with it; what --ckpt_path names exists only after a run.
    commands += [f"{commands[0]} {option}" for option in options if not option.startswith("--ckpt_path")]
    for command in commands:
        with pytest.raises(SystemExit) as caught:
            main([*shlex.split(command)[1:], "--print_config"])
        assert caught.value.code == 0, (command, capsys.readouterr().err)


def test_one_line_switches_engines(capsys, tmp_path):
    main([*short("grpo_quickstart.yaml", tmp_path), "--trainer.strategy=torchtitan"])
    assert "TorchTitanStrategy, 1 rank" in capsys.readouterr().out
    load_policy(tmp_path / "hf")


def test_reinforcement_starts_from_the_warm_up(tmp_path):
    main(short("sft_warmup.yaml", tmp_path / "warm"))
    policy = f"--model.policy={{path: {tmp_path / 'warm' / 'hf'}, from_config: null}}"
    # With a learning rate of 0 the exported weights are those that training began with.
    main([*short("grpo_quickstart.yaml", tmp_path / "grpo"), policy, "--model.optimizer.lr=0.0"])
    assert same_weights(load_policy(tmp_path / "warm" / "hf"), load_policy(tmp_path / "grpo" / "hf"))


def test_the_script_on_one_process(capsys, tmp_path, monkeypatch):
    arguments = ["--max-steps", "8", "--batch-size", "2", "--root", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["grpo_script.py", *arguments])
    runpy.run_path(str(EXAMPLES / "grpo_script.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "copy fad   -> " in shown
    assert "Mean reward: 0." in shown
    assert (tmp_path / "report.png").exists()
    load_policy(tmp_path / "hf")


def test_the_script_on_two_processes_that_share_rows(tmp_path):
    """The way a user starts it: the launcher runs the script again for the second process."""
    arguments = ["--devices=2", "--sp=2", "--max-steps=8", "--batch-size=2", f"--root={tmp_path}"]
    shown = run_python("examples/grpo_script.py", *arguments)
    assert "1 data x 2 sequence ranks" in shown
    assert shown.count("Mean reward: 0.") == 1
    load_policy(tmp_path / "hf")


def test_the_script_is_short():
    assert len((EXAMPLES / "grpo_script.py").read_text().splitlines()) < 150


def test_the_files_of_the_quickstart_are_what_their_maker_writes(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("make_quickstart_data", EXAMPLES / "make_quickstart_data.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    monkeypatch.setattr(maker, "FOLDER", tmp_path)
    maker.main()
    for name in ("train.jsonl", "val.jsonl"):
        assert (tmp_path / name).read_text() == (EXAMPLES / "quickstart" / name).read_text()
    tokenizer = json.loads((EXAMPLES / "quickstart" / "tokenizer.json").read_text())
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"] == tokenizer["model"]
    made, kept = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, EXAMPLES / "quickstart"))
    # Names the release that wrote it.
    made.pop("transformers_version")
    kept.pop("transformers_version")
    assert made == kept
