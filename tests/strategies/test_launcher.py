"""Processes from a notebook: none for one device, forks for several, and results that come back."""

import json
import os
import textwrap
from pathlib import Path

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_rl_engines.strategies.launcher import ScriptLauncher
from tests.support import WorkerError, run_workers
from tests.support.shell import run_python

_SCRIPT = """
    import json, os, socket, sys
    sys.ps1 = ">>> "  # what makes Python, and so Lightning, believe that somebody types
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from examples.quickstart_reward import letters_in_place
    from lightning_rl_engines import HFFolderSink, HFRollout, ModelConfig, PolicyModule, PromptDataModule, WeightExport

    def fit(devices):
        root = {root!r} + f"/{{devices}}"
        module = PolicyModule(
            policy=ModelConfig(from_config="examples/quickstart"),
            rollout=HFRollout(num_generations=4, max_new_tokens=4),
            reward=letters_in_place,
        )
        files = dict(train="examples/quickstart/train.jsonl", val="examples/quickstart/val.jsonl")
        trainer = Trainer(
            strategy={strategy!r}, accelerator="cpu", devices=devices, max_steps=2, logger=False,
            default_root_dir=root, limit_val_batches=0, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[
                ModelCheckpoint(dirpath=root + "/checkpoints", save_last=True),
                WeightExport(sink=HFFolderSink(path=root + "/hf")),
            ],
        )
        trainer.fit(module, PromptDataModule(batch_size=4, **files))
        launcher = type(trainer.strategy.launcher).__name__
        print(json.dumps([launcher, trainer.state.status.value, float(trainer.callback_metrics["train/reward"])]))

    fit(devices=2)
    with socket.create_server(("127.0.0.1", 0)) as another_program:
        os.environ["MASTER_PORT"] = str(another_program.getsockname()[1])
        fit(devices=1)
    try:
        fit(devices=2)
    except RuntimeError as error:
        print(json.dumps(str(error)))
"""


@pytest.mark.parametrize("strategy", ["fsdp_ulysses", "torchtitan"])
def test_a_notebook_trains_with_forks_and_then_with_one_process(tmp_path: Path, strategy: str) -> None:
    """One process needs no port, not even where an earlier run left the name of one that is taken now."""
    script = textwrap.dedent(_SCRIPT).format(root=str(tmp_path), strategy=strategy)
    forks, alone, refusal = map(json.loads, run_python("-W", "ignore", "-c", script).strip().splitlines()[-3:])
    for (found, status, reward), launcher in ((alone, "HereLauncher"), (forks, "ForkLauncher")):
        assert (found, status) == (launcher, "finished")
        assert 0 <= reward <= 1
    assert "in a process group of 1 from an earlier run" in refusal
    assert "cannot start a run of 2; restart the kernel" in refusal
    for devices in ("1", "2"):
        assert (tmp_path / devices / "checkpoints" / "last.ckpt" / "complete").is_file()
        assert (tmp_path / devices / "hf" / "model.safetensors").is_file()


def _launch_from_a_group() -> None:
    del os.environ["LOCAL_RANK"]  # as in a script that nothing has launched
    ScriptLauncher(LightningEnvironment(), num_processes=2, num_nodes=1).launch(print)


def test_a_script_with_a_group_of_its_own_starts_no_ranks() -> None:
    with pytest.raises(WorkerError, match=r"cannot start a run of 2; call torch\.distributed\.destroy_process_group"):
        run_workers(1, _launch_from_a_group)
