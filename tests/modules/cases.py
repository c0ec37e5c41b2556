"""What the workers run: small modules, trainers and data, and functions that return plain results."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Dataset

from lightning_rl_engines.data.rewards import Reward
from lightning_rl_engines.models import ModelConfig
from lightning_rl_engines.modules import PolicyModule
from lightning_rl_engines.rollout import HFRollout, Prompt
from lightning_rl_engines.sequence import Experience
from lightning_rl_engines.strategies import FSDPUlyssesStrategy
from tests.support.engine import sharing_strategy
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


def policy_module(model: str = "llama", kind: type[PolicyModule] = PolicyModule, **options: Any) -> Any:
    options = {
        "policy": ModelConfig(path=str(tiny_model_folder(model))),
        "rollout": HFRollout(num_generations=4, max_new_tokens=6),
        "reward": {"even": Reward(function=even_tokens), "long": Reward(function=long_response, weight=0.5)},
        "optimizer": sgd,
        **options,
    }
    return kind(**options)


def weights(module: PolicyModule) -> dict[str, torch.Tensor]:
    """Full weights by their Hugging Face names."""
    return {name: tensor.clone() for name, tensor in module.engine.get_per_tensor_param(module.policy)}


def fit(
    module: PolicyModule,
    *,
    sp: int = 1,
    split: str = "sp",
    batch_size: int = 2,
    train: Callable[[], DataLoader] | None = None,
    val: DataLoader | None = None,
    **trainer_options: Any,
) -> Any:
    """Fit under the engine and return the trainer."""
    trainer = make_trainer(sharing_strategy(sp, split), **{"max_epochs": 1, **trainer_options})
    trainer.fit(module, train() if train else loader(prompts(), batch_size), val)
    return trainer


def history(module: PolicyModule) -> list[dict[str, float]]:
    return module.history.to_dict("records")


def run_two_updates(sp: int, split: str = "sp", **options: Any) -> dict[str, Any]:
    module = policy_module(kind=Spy, **options)
    trainer = fit(module, sp=sp, split=split, batch_size=2, limit_train_batches=2)
    return {
        "history": history(module),
        "updates": module.updates,
        "hparams": dict(module.hparams),
        "global_step": trainer.global_step,
        "weights": weights(module),
        "sampled": {name: module.seen[name] for name in ("input_ids", "response_mask", "rollout_log_probs")},
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

    def update(self, experience: Experience, columns: Any) -> dict[str, float]:
        self.seen = experience
        return super().update(experience, columns)


def run_experience(
    parts: dict[int, list[list[int]]],
    sp: int = 1,
    split: str = "sp",
    columns: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train on recorded experience split over data ranks: ``parts[world // sp][data rank]`` are document indices."""
    ranks = int(os.environ["WORLD_SIZE"]) // sp
    mine = parts[ranks][int(os.environ["RANK"]) // sp]
    module = spy_module(**options)
    trainer = fit(
        module,
        sp=sp,
        split=split,
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

    def update(self, experience: Experience, columns: Any) -> dict[str, float]:
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


def run_failing_generation() -> None:
    """The last prompt, which only one of two ranks has, is longer than the model's positions."""
    items = prompts(4)
    items[3].token_ids = [3] * 300
    fit(policy_module(), train=lambda: loader(items, 2))


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


def weights_of_folder(model: str) -> dict[str, torch.Tensor]:
    """The weights that a run on this tiny model starts from."""
    return load_file(tiny_model_folder(model) / "model.safetensors")
