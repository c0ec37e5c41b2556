"""What the workers run for the tests of the base module, of generation and of fine-tuning."""

import contextlib
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_rl_engines.models import ModelConfig
from lightning_rl_engines.modules import SFTModule
from lightning_rl_engines.modules.optimization import total_optimizer_steps
from lightning_rl_engines.optim import WarmupCosine
from lightning_rl_engines.rollout import HFRollout
from lightning_rl_engines.sequence import Experience
from lightning_rl_engines.strategies import FSDPUlyssesStrategy
from tests.modules.cases import (
    adam,
    even_tokens,
    experience_loader,
    fit,
    history,
    loader,
    policy_module,
    prompts,
    weights,
)
from tests.support.engine import sharing_strategy
from tests.support.lightning_env import make_trainer
from tests.support.models import tiny_model_folder


def run_two_fits() -> dict[str, Any]:
    """Fit, raise the limit, fit again; another trainer then builds the module anew."""
    module = policy_module(
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), lr_scheduler=lambda o: WarmupCosine(o)
    )
    trainer = make_trainer(FSDPUlyssesStrategy(), max_steps=2)
    trainer.fit(module, loader(prompts(), 2))
    first = {"model": module.policy, "optimizer": trainer.optimizers[0], "rates": module.history["train/lr"].tolist()}
    trained = weights(module)
    trainer.fit_loop.epoch_loop.max_steps = 4
    seen: dict[str, Any] = {}

    class Look(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.update(weights(pl_module))

    trainer.callbacks.append(Look())
    trainer.fit(module, loader(prompts(), 2))
    return {
        "same": (module.policy is first["model"], trainer.optimizers[0] is first["optimizer"]),
        "kept": all(torch.equal(seen[name], trained[name]) for name in trained),
        "updates": module.updates,
        "global_step": trainer.global_step,
        "rates": (first["rates"], module.history["train/lr"].tolist()),
    }


def run_rebuilt() -> dict[str, Any]:
    """A second trainer gets a freshly built model, and says so."""
    module = policy_module()
    fit(module, limit_train_batches=1)
    model = module.policy
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, limit_train_batches=1)
    texts = [str(item.message) for item in caught]
    return {
        "rebuilt": module.policy is not model,
        "warned": any("built by another Trainer's strategy" in text for text in texts),
        "updates": module.updates,
    }


def run_checkpoint(folder: str) -> dict[str, Any]:
    """Two updates in one go; and the second one again, from the checkpoint of the first, with fresh objects."""
    options: dict[str, Any] = {
        "optimizer": adam,
        "mini_batches": 2,
        "lr_scheduler": lambda optimizer: WarmupCosine(optimizer, warmup_steps=1),
    }
    whole = policy_module(**options)
    saver = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    batches = {"train": lambda: loader(prompts(2) * 2, 2), "use_distributed_sampler": False}
    fit(whole, callbacks=[saver], enable_checkpointing=True, **batches)
    resumed = policy_module(**options)
    trainer = make_trainer(FSDPUlyssesStrategy(), max_epochs=1, use_distributed_sampler=False)
    trainer.fit(resumed, loader(prompts(2) * 2, 2), ckpt_path=f"{folder}/step=2.ckpt")
    expected, found = weights(whole), weights(resumed)
    saved = torch.load(Path(folder) / "step=2.ckpt" / "meta.pt", weights_only=True)
    slow = ("train/tokens_per_second",)
    rows = [[{k: v for k, v in row.items() if k not in slow} for row in history(m)] for m in (whole, resumed)]
    return {
        "equal": all(torch.equal(expected[name], found[name]) for name in expected),
        "history": [row["rl/update"] for row in rows[1]],
        "rows_equal": rows[0] == rows[1],
        "hparams": saved["hyper_parameters"],
        "rollout": saved["rl_module"]["rollout"],
    }


def run_length(**limits: Any) -> int | None:
    """Count the optimizer steps of a fit of four batches, two mini-batches and three epochs each."""
    counted: list[int | None] = []

    class Stop(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            counted.append(total_optimizer_steps(trainer, pl_module.optimizer_steps_per_batch))
            raise KeyError("enough")

    with contextlib.suppress(KeyError):
        fit(policy_module(mini_batches=2, update_epochs=3), callbacks=[Stop()], **limits)
    return counted[0]


def run_validation(duplicates: bool) -> dict[str, Any]:
    """Five prompts on the ranks at hand; Lightning's sampler repeats one on two ranks."""
    module = policy_module()
    trainer = make_trainer(FSDPUlyssesStrategy(), use_distributed_sampler=duplicates)
    items = prompts(5)
    (metrics,) = trainer.validate(module, loader(items, 2), verbose=False)
    expected = even_tokens([], [g[0].token_ids for g in module.rollout.generate(items, greedy=True, num_generations=1)])
    return {
        "metrics": metrics,
        "expected": sum(expected) / 5,
        "samples": module.last_samples,
        "rank": trainer.global_rank,
    }


def run_prediction() -> dict[str, Any]:
    """Predict for prompts, and for a recorded experience of the same responses."""
    module = policy_module()
    trainer = make_trainer(FSDPUlyssesStrategy())
    items = prompts(3)
    items[1].columns["answer"] = "4"
    rows = [row for batch in trainer.predict(module, loader(items, 2)) for row in batch]
    experience = Experience.from_documents(
        input_ids=[[*prompt.token_ids, *row["token_ids"]] for prompt, row in zip(items, rows, strict=True)],
        response_mask=[
            [0] * len(prompt.token_ids) + [1] * len(row["token_ids"]) for prompt, row in zip(items, rows, strict=True)
        ],
    )
    (recorded_rows,) = trainer.predict(module, experience_loader(experience))
    return {"rows": rows, "recorded": recorded_rows, "generated": module.generate(items)}


def run_stale_rollout() -> dict[str, Any]:
    """Count how often the rollout gets weights, and compare them with the policy's."""
    rollout = CountingRollout(num_generations=2, max_new_tokens=3)
    module = policy_module(rollout=rollout)
    fit(module, limit_train_batches=2, val=loader(prompts(2), 2), val_check_interval=1, num_sanity_val_steps=1)
    trained = weights(module)
    return {
        "received": rollout.received,
        "equal": all(torch.equal(rollout.last[name], trained[name]) for name in trained),
    }


class CountingRollout(HFRollout):
    """Counts updates and keeps the last weights."""

    received = 0

    def update_weights(self, named_tensors: Any) -> None:
        self.received += 1
        self.last = {}

        def record() -> Any:
            for name, tensor in named_tensors:
                self.last[name] = tensor.clone()
                yield name, tensor

        super().update_weights(record())


def run_sft(sp: int, split: str) -> dict[str, Any]:
    """Learn one response to every prompt."""
    module = SFTModule(
        policy=ModelConfig(path=str(tiny_model_folder("llama"))),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        completion_column="answer",
        max_tokens_per_micro_batch=32,
    )
    items = prompts()
    for prompt in items:
        prompt.columns["answer"] = [7, 9, 11, 2]
    trainer = make_trainer(sharing_strategy(sp, split), max_epochs=6)
    trainer.fit(module, loader(items, 4), loader(items, 4))
    return {
        "history": history(module),
        "val": float(trainer.callback_metrics["val/nll"]),
        "updates": module.updates,
        "global_step": trainer.global_step,
    }
