"""Processes from a notebook: none for one device, forks for several, and results that come back."""

import json
import textwrap
from pathlib import Path

import pytest

from tests.support.shell import run_python

_SCRIPT = """
    import json, sys
    sys.ps1 = ">>> "  # what makes Python, and so Lightning, believe that somebody types
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from examples.quickstart_reward import letters_in_place
    from lightning_rl_engines import HFFolderSink, HFRollout, ModelConfig, PolicyModule, PromptDataModule, WeightExport

    root = {root!r}
    module = PolicyModule(
        policy=ModelConfig(from_config="examples/quickstart"),
        rollout=HFRollout(num_generations=4, max_new_tokens=4),
        reward=letters_in_place,
    )
    files = dict(train="examples/quickstart/train.jsonl", val="examples/quickstart/val.jsonl")
    trainer = Trainer(
        strategy="fsdp_ulysses", accelerator="cpu", devices={devices}, max_steps=2, logger=False,
        default_root_dir=root, limit_val_batches=0, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(dirpath=root + "/checkpoints", save_last=True),
            WeightExport(sink=HFFolderSink(path=root + "/hf")),
        ],
    )
    trainer.fit(module, PromptDataModule(batch_size=4, **files))
    launcher = type(trainer.strategy.launcher).__name__
    print(json.dumps([launcher, trainer.state.status.value, float(trainer.callback_metrics["train/reward"])]))
"""


@pytest.mark.parametrize(("devices", "launcher"), [(1, "HereLauncher"), (2, "ForkLauncher")])
def test_a_notebook_trains_with_one_process_and_with_forks(tmp_path: Path, devices: int, launcher: str) -> None:
    script = textwrap.dedent(_SCRIPT).format(root=str(tmp_path), devices=devices)
    output = run_python("-W", "ignore", "-c", script)
    found, status, reward = json.loads(output.strip().splitlines()[-1])
    assert (found, status) == (launcher, "finished")
    assert 0 <= reward <= 1
    assert (tmp_path / "checkpoints" / "last.ckpt" / "complete").is_file()
    assert (tmp_path / "hf" / "model.safetensors").is_file()
