"""What the workers run: small modules, trainers and data, and functions that return plain results."""

import contextlib
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from lightning_rl_engines.data.rewards import Reward
from lightning_rl_engines.models import ModelConfig
from lightning_rl_engines.modules import PolicyModule, SFTModule
from lightning_rl_engines.modules.optimization import total_optimizer_steps
from lightning_rl_engines.optim import WarmupCosine
from lightning_rl_engines.rollout import HFRollout, Prompt
from lightning_rl_engines.sequence import Experience
from lightning_rl_engines.strategies import FSDPUlyssesStrategy
from tests.support.lightning_env import make_trainer
from tests.support.models import tiny_model_folder


class ListDataset(Dataset):
    """Batches are lists of these items."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = list(items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def prompts(count: int = 8, length: int = 4) -> list[Prompt]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 64, (count, length), generator=generator).tolist()
    return [Prompt(token_ids=ids[index][: 2 + index % 3], index=index) for index in range(count)]


def loader(items: Sequence[Any], batch_size: int) -> DataLoader:
    return DataLoader(ListDataset(items), batch_size=batch_size, collate_fn=list)


def even_tokens(completions: list[str], completion_ids: list[list[int]]) -> list[float]:
    """Share of even token ids in each response."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def long_response(completions: list[str], completion_ids: list[list[int]]) -> list[float | None]:
    """1 for at least four tokens; does not apply to single tokens."""
    return [None if len(ids) == 1 else float(len(ids) >= 4) for ids in completion_ids]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def policy_module(model: str = "llama", **options: Any) -> PolicyModule:
    options = {
        "policy": ModelConfig(path=str(tiny_model_folder(model))),
        "rollout": HFRollout(num_generations=4, max_new_tokens=6),
        "reward": {"even": Reward(function=even_tokens), "long": Reward(function=long_response, weight=0.5)},
        "optimizer": sgd,
        **options,
    }
    return PolicyModule(**options)


def weights(module: PolicyModule) -> dict[str, torch.Tensor]:
    """Full weights by their Hugging Face names."""
    return {name: tensor.clone() for name, tensor in module.engine.get_per_tensor_param(module.policy)}


def fit(
    module: PolicyModule,
    *,
    sp: int = 1,
    batch_size: int = 2,
    train: Callable[[], DataLoader] | None = None,
    val: DataLoader | None = None,
    **trainer_options: Any,
) -> Any:
    """Fit under the engine and return the trainer."""
    trainer = make_trainer(FSDPUlyssesStrategy(ulysses_sp_size=sp), **{"max_epochs": 1, **trainer_options})
    trainer.fit(module, train() if train else loader(prompts(), batch_size), val)
    return trainer


def history(module: PolicyModule) -> list[dict[str, float]]:
    return module.history.to_dict("records")


def run_two_updates(sp: int, **options: Any) -> dict[str, Any]:
    module = policy_module(**options)
    trainer = fit(module, sp=sp, batch_size=2, limit_train_batches=2)
    return {
        "history": history(module),
        "updates": module.updates,
        "hparams": dict(module.hparams),
        "global_step": trainer.global_step,
        "weights": weights(module),
        "logged": {name: float(value) for name, value in trainer.logged_metrics.items()},
    }


RECORDED_LENGTHS = (5, 9, 7, 6, 8, 5, 10, 6)


def recorded(indices: Sequence[int] = range(8), **columns: Any) -> Experience:
    """Documents in four groups of two, with the sampler's log-probabilities; group ``g`` is documents g and g + 4."""
    generator = torch.Generator().manual_seed(11)
    ids = [torch.randint(3, 64, (length,), generator=generator) for length in RECORDED_LENGTHS]
    whole = Experience.from_documents(
        input_ids=ids,
        response_mask=[[0] * 3 + [1] * (length - 3) for length in RECORDED_LENGTHS],
        rollout_log_probs=[torch.full((length,), -4.0) for length in RECORDED_LENGTHS],
        rewards=[0.0, 1.0, 2.0, 1.0, 1.0, 1.0, 0.5, 0.0],
        group_ids=[0, 1, 2, 3, 0, 1, 2, 3],
        **columns,
    )
    return whole.select(indices)


class ExperienceBatches(Dataset):
    """Each item is a ready batch; a data rank reads its own documents of the recorded experience."""

    def __init__(self, batches: Sequence[Experience]) -> None:
        self.batches = list(batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Experience:
        return self.batches[index]


def experience_loader(*batches: Experience) -> DataLoader:
    return DataLoader(ExperienceBatches(batches), batch_size=None)


class Spy(PolicyModule):
    """Keeps the experience that the optimizer steps see."""

    def update(self, experience: Experience, columns: Any) -> list[dict[str, float]]:
        self.seen = experience
        return super().update(experience, columns)


def run_experience(
    parts: dict[int, list[list[int]]], sp: int = 1, columns: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Train on recorded experience split over data ranks: ``parts[world // sp][data rank]`` are document indices."""
    ranks = int(os.environ["WORLD_SIZE"]) // sp
    mine = parts[ranks][int(os.environ["RANK"]) // sp]
    module = spy_module(**options)
    trainer = fit(
        module,
        sp=sp,
        train=lambda: experience_loader(recorded(mine, **(columns or {}))),
        use_distributed_sampler=False,
    )
    names = [name for name in module.seen.token_columns if name.endswith("log_probs")]
    return {
        "history": history(module),
        "updates": module.updates,
        "global_step": trainer.global_step,
        "advantages": dict(zip(mine, module.seen["advantages"].tolist(), strict=False)),
        "columns": {name: module.seen[name] for name in names},
        "seen": module.seen.column_names,
        "lengths": module.seen.lengths,
        "weights": weights(module),
    }


def spy_module(**options: Any) -> Spy:
    options = {
        "policy": ModelConfig(path=str(tiny_model_folder(options.pop("model", "llama")))),
        "optimizer": sgd,
        **options,
    }
    return Spy(**options)


def run_training(updates: int) -> dict[str, Any]:
    """Train on one prompt only, with a learning rate that shows."""
    module = policy_module(
        rollout=HFRollout(num_generations=16, max_new_tokens=4),
        reward={"even": Reward(function=even_tokens)},
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
    )
    fit(module, batch_size=2, train=lambda: loader(prompts(2) * updates, 2))
    return {"history": history(module)}


def run_all_dropped(indices: list[int]) -> dict[str, Any]:
    """Train on groups without a signal, which are dropped."""
    module = spy_module(filter_zero_variance=True)
    before: dict[str, torch.Tensor] = {}

    class Look(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            before.update(weights(pl_module))

    trainer = fit(module, train=lambda: experience_loader(recorded(indices)), callbacks=[Look()])
    after = weights(module)
    return {
        "updates": module.updates,
        "global_step": trainer.global_step,
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
    }


def useful_only(completions: list[str], useful: list[bool]) -> list[float]:
    """Alternating rewards for useful prompts, equal ones for the others."""
    return [float(index % 2) if flag else 1.0 for index, flag in enumerate(useful)]


class CountingModule(PolicyModule):
    """Counts the documents of each update over all ranks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.documents: list[int] = []

    def update(self, experience: Experience, columns: Any) -> list[dict[str, float]]:
        self.documents.append(sum(columns.counts))
        self.seen = experience
        return super().update(experience, columns)


def counting_module(**options: Any) -> CountingModule:
    options = {
        "policy": ModelConfig(path=str(tiny_model_folder("llama"))),
        "rollout": HFRollout(num_generations=4, max_new_tokens=6),
        "optimizer": sgd,
        **options,
    }
    return CountingModule(**options)


def run_dynamic_sampling(**options: Any) -> dict[str, Any]:
    """Every second prompt gives a signal."""
    module = counting_module(dynamic_sampling=True, reward=useful_only, **options)
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    items = prompts(8 * world)
    for prompt in items:
        prompt.columns["useful"] = prompt.index % 2 == 0
    # On two ranks, rank 0 gets all useful prompts. Lightning's own sampler would shuffle.
    trainer = fit(module, train=lambda: loader(items[rank::world], 2), use_distributed_sampler=False)
    return {
        "history": history(module),
        "documents": module.documents,
        "updates": module.updates,
        "global_step": trainer.global_step,
    }


def run_masked() -> dict[str, float]:
    """Half of the vocabulary ends a response."""
    rollout = HFRollout(num_generations=8, max_new_tokens=2, stop=list(range(3, 64, 2)))
    module = counting_module(mask_truncated=True, reward=even_tokens, rollout=rollout)
    fit(module, limit_train_batches=1)
    row = history(module)[0]
    return {
        "train/truncated": row["train/truncated"],
        "masked": module.seen.response_lengths.count(0),
        "truncated": round(row["train/truncated"] * module.documents[0]),
    }


def bad_reward(prompt: str, completion: str, poison: bool) -> float:
    """Raises on one prompt."""
    if poison:
        raise KeyError("answer")
    return 0.0


def run_failing_reward() -> None:
    """The last prompt, which only one of two ranks has, makes the reward raise."""
    items = prompts(4)
    for prompt in items:
        prompt.columns["poison"] = prompt.index == 3
    fit(policy_module(reward={"bad": Reward(function=bad_reward)}), train=lambda: loader(items, 2))


def run_without_groups() -> None:
    """Rank 1 has no group ids."""
    experience = recorded()
    if os.environ["RANK"] == "1":
        experience = experience.drop("group_ids")
    fit(spy_module(), train=lambda: experience_loader(experience), use_distributed_sampler=False)


def run_not_finite() -> dict[str, Any]:
    """Advantages that are NaN."""
    module = spy_module(max_skipped_steps=2)
    batches = [recorded(advantages=[float("nan")] * 8) for _ in range(4)]
    before: dict[str, torch.Tensor] = {}

    class Look(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            before.update(weights(pl_module))

    trainer = make_trainer(FSDPUlyssesStrategy(), max_epochs=1, callbacks=[Look()])
    error = ""
    try:
        trainer.fit(module, experience_loader(*batches))
    except RuntimeError as raised:
        error = str(raised)
    after = weights(module)
    return {
        "error": error,
        "skipped": [row["train/skipped_steps"] for row in history(module)],
        "global_step": trainer.global_step,
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
    }


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


def run_sft(sp: int) -> dict[str, Any]:
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
    trainer = make_trainer(FSDPUlyssesStrategy(ulysses_sp_size=sp), max_epochs=6)
    trainer.fit(module, loader(items, 4), loader(items, 4))
    return {
        "history": history(module),
        "val": float(trainer.callback_metrics["val/nll"]),
        "updates": module.updates,
        "global_step": trainer.global_step,
    }
