"""What README.md says can be run, and says what the package does."""

import inspect
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

import lightning_rl_engines
from lightning_rl_engines import FSDPUlyssesStrategy, HFRollout, ModelConfig, PolicyModule, PromptDataModule
from lightning_rl_engines.cli import main
from tests.support.shell import REPOSITORY, run_python

README = (REPOSITORY / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
QUICKSTART = "examples/quickstart"

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


def blocks(language: str, part: str = "") -> list[str]:
    """The code blocks of a language that contain ``part``."""
    return [text for found, text in BLOCKS if found == language and part in text]


def only(language: str, part: str) -> str:
    (text,) = blocks(language, part)
    return text


def shrink(text: str, **changes: str) -> str:
    """Replace parts of a block, each of which must be there once."""
    for before, after in changes.values():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def trainer(root: Path, max_steps: int) -> Trainer:
    return Trainer(
        strategy="fsdp_ulysses",
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        default_root_dir=root,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


# ---------------------------------------------------------------------------------------------- commands


def test_the_two_commands_are_those_of_the_continuous_check():
    first, second = (text.strip() for text in blocks("bash", "pip install"))
    assert first == 'pip install -e ".[examples]" && lightning-rl fit --config examples/grpo_quickstart.yaml'
    assert second in (REPOSITORY / ".ci" / "run").read_text().splitlines()


def test_the_yaml_of_the_readme_trains(tmp_path, capsys):
    config = yaml.safe_load(only("yaml", "PolicyModule"))
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    smaller = ["--trainer.devices=1", "--trainer.strategy.ulysses_sp_size=1", "--trainer.max_steps=2"]
    smaller += ["--model.mini_batches=2", "--data.batch_size=2", f"--trainer.default_root_dir={tmp_path}"]
    main(["fit", "--config", str(file), *smaller])
    assert "written" in capsys.readouterr().out
    assert (tmp_path / "checkpoints" / "last.ckpt" / "complete").exists()


def test_every_command_of_the_readme_is_valid(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(only("yaml", "PolicyModule"))
    lines = [line for text in blocks("bash") for line in text.replace("\\\n", "").splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith(("lightning-rl ", "torchrun "))]
    assert len(commands) == 7
    for command in commands:
        options = command[command.index("fit") if command[0] == "torchrun" else 1 :]
        options = [str(file) if option == "run.yaml" else option for option in options]
        # An export has nothing to print; the command line's tests run it.
        asked = ["--help"] if options[0] == "export" else ["--print_config"]
        with pytest.raises(SystemExit) as caught:
            main([*options, *asked])
        shown = capsys.readouterr()
        assert caught.value.code == 0, (command, shown.err)
        if options[0] == "export":
            assert all(option in shown.out for option in options if option.startswith("--"))


def test_torchrun_starts_a_run(tmp_path):
    """The command for several machines, on two processes of this one."""
    several = "--nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500"
    command = shrink(
        next(text for text in blocks("bash") if text.startswith("torchrun ")).replace("\\\n", ""),
        machines=(several, "--standalone --nproc_per_node 2"),
        config=("run.yaml", "examples/grpo_quickstart.yaml"),
        devices=("--trainer.accelerator gpu --trainer.num_nodes 2 --trainer.devices 8", "--trainer.devices 2"),
    )
    smaller = ["--trainer.max_steps=2", "--model.mini_batches=2", "--data.batch_size=2"]
    smaller += ["--model.rollout.num_generations=2", f"--trainer.default_root_dir={tmp_path}"]
    smaller += [f"--trainer.callbacks.sink.path={tmp_path / 'hf'}"]
    shown = run_python("-m", "torch.distributed.run", *shlex.split(command)[1:], *smaller)
    assert "2 data x 1 sequence ranks" in shown
    assert (tmp_path / "hf" / "model.safetensors").exists()


# ------------------------------------------------------------------------------------------------ Python


def test_the_script_of_the_readme_trains(tmp_path, monkeypatch, capsys):
    script = shrink(
        only("python", '__name__ == "__main__"'),
        steps=("max_steps=480", f"max_steps=8, default_root_dir={str(tmp_path)!r}, enable_checkpointing=False"),
        prompts=("batch_size=32", "batch_size=2"),
        loader=("devices=1,", "devices=1, logger=False, enable_progress_bar=False,"),
    )
    path = tmp_path / "script.py"
    path.write_text(script)
    module: dict[str, object] = {"__name__": "__main__"}
    exec(compile(script, str(path), "exec"), module)
    assert re.search(r"^\['.*'\] 0\.\d+$", capsys.readouterr().out, flags=re.MULTILINE)
    # The two lines for a notebook.
    trained = module["module"]
    exec("import matplotlib\nmatplotlib.use('agg')\n" + only("python", "history.plot"), {"module": trained})


@pytest.fixture
def parts():
    """The names that the blocks under "Your own parts" define."""
    section = README.split("## Your own parts")[1].split("\n## ")[0]
    namespace: dict = {}
    found = re.findall(r"^```python\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    assert len(found) == 6
    for text in found:
        exec(text, namespace)
    return namespace


def test_own_reward_advantage_loss_and_rollout_work_together(parts, tmp_path):
    module = PolicyModule(
        policy=ModelConfig(from_config=QUICKSTART),
        rollout=parts["EchoRollout"](),
        reward=parts["short_and_right"],
        advantage=parts["centered"],
        loss=parts["policy_gradient"],
    )
    data = PromptDataModule(train=f"{QUICKSTART}/train.jsonl", val=f"{QUICKSTART}/val.jsonl", batch_size=2)
    with pytest.warns(UserWarning, match=r"EchoRollout differ from the trainer's by 3\.\d+ nats"):
        trainer(tmp_path, max_steps=2).fit(module, data)
    history = module.history
    assert module.updates == 2
    # The answer is always right and three tokens long; without the tokenizer's end token there is no fourth.
    assert history["train/reward"].tolist() == pytest.approx([0.97, 0.97])
    assert history["train/loss"].tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    assert all(-4.0 < value < -3.0 for value in history["train/mean_log_prob"])


def test_own_loss_has_the_gradient_of_its_formula(parts, tmp_path):
    """Against PolicyLoss on the first step, where all ratios are 1."""
    results = []
    for loss in (parts["policy_gradient"], lightning_rl_engines.PolicyLoss()):
        module = PolicyModule(policy=ModelConfig(from_config=QUICKSTART), loss=loss)
        trainer(tmp_path, max_steps=1).fit(module, parts["recorded"])
        results.append(module.history["train/grad_norm"].iloc[0])
    assert results[0] > 0
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_own_module_learns(parts, tmp_path):
    module = parts["Imitation"](policy=ModelConfig(from_config=QUICKSTART))
    trainer(tmp_path, max_steps=1).fit(module, parts["recorded"])
    first = module.history["train/loss"].iloc[0]
    module = parts["Imitation"](policy=ModelConfig(from_config=QUICKSTART))
    trainer(tmp_path, max_steps=20).fit(module, DataLoader([parts["experience"]] * 20, batch_size=None))
    assert module.updates == 20
    assert module.history["train/loss"].iloc[0] == pytest.approx(first)
    assert module.history["train/loss"].iloc[-1] < first - 0.5


def test_own_prompts_are_answered(parts, tmp_path):
    module = PolicyModule(
        policy=ModelConfig(from_config=QUICKSTART),
        rollout=HFRollout(num_generations=2, max_new_tokens=2),
        reward=lightning_rl_engines.exact_match,
    )
    trainer(tmp_path, max_steps=1).fit(module, parts["prompts"])
    assert module.updates == 1
    assert 1 <= module.history["train/response_length"].iloc[0] <= 2


# ------------------------------------------------------------------------------------------------- claims


def test_names_in_the_readme_exist():
    section = README.split("## What works")[1].split("And what does not")[0]
    named = re.findall(r"`([A-Z]\w+)`", section)
    assert len(named) > 10
    assert [name for name in named if not hasattr(lightning_rl_engines, name)] == []
    options = {*inspect.signature(FSDPUlyssesStrategy).parameters, *inspect.signature(ModelConfig).parameters}
    for option in re.findall(r"`([a-z]+_\w+)`", section):
        assert option in options, option


def test_links_and_paths_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 8
    assert [link for link in links if not (REPOSITORY / link).exists()] == []


def test_the_picture_is_small_and_real():
    picture = REPOSITORY / QUICKSTART / "report.png"
    assert f"]({QUICKSTART}/report.png)" in README
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 150_000


def test_the_tree_of_the_package_is_complete():
    tree = README.split("## The package")[1]
    folders = {path.name for path in (REPOSITORY / "lightning_rl_engines").iterdir() if (path / "__init__.py").exists()}
    assert set(re.findall(r"^  (\w+)/ ", tree, flags=re.MULTILINE)) == folders


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md"])
def test_lines_are_short_and_plain(name):
    for line in (REPOSITORY / name).read_text().splitlines():
        assert len(line) <= 120 or line.startswith("|"), line
        assert not re.search("[\u2600-\u27bf\U0001f300-\U0001faff]", line), line


def test_the_changelog_has_this_version():
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()
    assert f"## [{lightning_rl_engines.__version__}]" in changelog
    assert set(re.findall(r"^### (\w+)$", changelog, flags=re.MULTILINE)) <= {"Added", "Changed", "Fixed", "Removed"}
