"""What the kill tests start: two ranks that train, save and export without pause, and say how far they are.

python tests/checkpoint/kill_run.py FOLDER sync|async UPDATES ENGINE full|lora, with the folder of tiny models in
LRE_TEST_MODELS.
"""

import os
import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lightning_rl_engines import HFFolderSink, ModelConfig
from lightning_rl_engines.callbacks import UpdateCheckpoint, WeightExport
from tests.checkpoint.cases import ENGINES
from tests.modules.cases import adam, experience_loader, recorded, spy_module
from tests.support.lora import lora
from tests.support.models import tiny_model_folder


def say(*words: Any) -> None:
    # In one write: two processes share the pipe.
    os.write(1, (" ".join(str(word) for word in words) + "\n").encode())


class Saving(UpdateCheckpoint):
    def _save(self, trainer: Trainer, updates: int) -> None:
        if trainer.is_global_zero:
            say("SAVING", updates)
        super()._save(trainer, updates)
        if trainer.is_global_zero:
            say("SAVED", updates)


class Exporting(WeightExport):
    def export(self, trainer: Trainer, pl_module: Any) -> Any:
        if trainer.is_global_zero:
            say("EXPORTING", pl_module.updates)
        return super().export(trainer, pl_module)


class Progress(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        say("RANK", trainer.global_rank, os.getpid())
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            say("START", pl_module.updates)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero:
            say("TRAINING", pl_module.updates + 1)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.is_global_zero:
            row = pl_module.history.iloc[-1]
            say("UPDATE", pl_module.updates, repr(row["train/loss"]), repr(row["train/grad_norm"]))


def main(folder: str, mode: str, updates: int, engine: str, trained: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ENGINES[engine](async_checkpoint=mode == "async"),
        max_steps=updates,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[
            Progress(),
            Exporting(sink=HFFolderSink(path=f"{folder}/export"), weights="merged" if trained == "lora" else "full"),
            Saving(dirpath=f"{folder}/checkpoints", every_n_updates=1),
        ],
    )
    experience = recorded(range(4 * rank, 4 * rank + 4))
    adapter = lora(target_modules=["q_proj", "up_proj"]) if trained == "lora" else None
    module = spy_module(optimizer=adam, policy=ModelConfig(path=str(tiny_model_folder("llama")), lora=adapter))
    trainer.fit(module, experience_loader(*[experience] * 1000), ckpt_path="last")
    if trainer.is_global_zero:
        say("END", trainer.global_step)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
