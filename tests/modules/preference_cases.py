"""What the workers run for the tests of reward models and DPO."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_rl_engines.algorithms import DPOLoss, RewardRegressionLoss
from lightning_rl_engines.callbacks import WeightExport
from lightning_rl_engines.data import PreferenceDataModule
from lightning_rl_engines.export import HFFolderSink
from lightning_rl_engines.models import ModelConfig
from lightning_rl_engines.modules import DPOModule, RewardModelModule
from lightning_rl_engines.sequence import Experience
from lightning_rl_engines.strategies import FSDPUlyssesStrategy
from tests.modules.cases import experience_loader, history
from tests.strategies.test_value import critic_folder
from tests.support.engine import sharing_strategy
from tests.support.lightning_env import make_trainer
from tests.support.models import tiny_model_folder

LEARNING_RATE = 0.1


def pairs() -> list[dict[str, list[int]]]:
    """Ten pairs: the chosen response ends with an even id, the rejected one with an odd id."""
    generator = torch.Generator().manual_seed(2)
    rows = []
    for index in range(10):
        ids = torch.randint(3, 31, (8,), generator=generator).mul(2).tolist()
        prompt, middle = ids[: 2 + index % 3], ids[5 : 5 + index % 3]
        rows.append({"prompt": prompt, "chosen": [*middle, 8, 2], "rejected": [*middle, ids[0], 9, 2]})
    return rows


def write_pairs(folder: Path) -> str:
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in pairs()))
    return str(path)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def data(file: str, world: int, sp: int, **options: Any) -> PreferenceDataModule:
    """All pairs in one global batch."""
    return PreferenceDataModule(train=file, val=file, batch_size=10 * sp // world, shuffle=False, **options)


def run(
    kind: str,
    file: str,
    world: int,
    sp: int,
    steps: int,
    *,
    model: str = "llama",
    export: str | None = None,
    split: str = "sp",
) -> dict[str, Any]:
    """Train on all pairs at once; one step by SGD, more by AdamW."""
    optimizer = sgd if steps == 1 else adam
    options: dict[str, Any] = {"optimizer": optimizer, "max_grad_norm": None, "max_tokens_per_micro_batch": 40}
    module: DPOModule | RewardModelModule
    if kind == "dpo":
        policy = ModelConfig(path=str(tiny_model_folder(model)))
        module = DPOModule(policy=policy, loss=DPOLoss(beta=0.5), **options)
    else:
        module = RewardModelModule(reward_model=ModelConfig(path=critic_folder(model), head="value"), **options)
    callbacks = []
    if export is not None:
        sink = HFFolderSink(path=export)
        callbacks.append(WeightExport(sink=sink, model=module.model_name, every_n_updates=1000))
    trainer = make_trainer(
        sharing_strategy(sp, split),
        max_epochs=steps,
        check_val_every_n_epoch=steps,
        callbacks=callbacks,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, datamodule=data(file, world, sp))
    return {
        "history": history(module),
        "val": {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")},
        "weights": {name: tensor.clone() for name, tensor in module.engine.get_per_tensor_param(module.model)},
        "global_step": trainer.global_step,
    }


def scored_documents() -> list[Tensor]:
    return [torch.tensor([*row["prompt"], *row["chosen"]]) for row in pairs()[:5]]


def run_regression() -> dict[str, Any]:
    """Learn scores, then predict them."""
    documents, targets = scored_documents(), [0.5, -0.5, 1.0, 0.0, 2.0]
    masks = [[0] * (len(ids) - 2) + [1, 1] for ids in documents]
    experience = Experience.from_documents(input_ids=documents, response_mask=masks, targets=targets)
    module = RewardModelModule(
        reward_model=ModelConfig(path=critic_folder("llama"), head="value"),
        loss=RewardRegressionLoss(),
        optimizer=adam,
    )
    trainer = make_trainer(FSDPUlyssesStrategy(), max_epochs=1)
    trainer.fit(module, experience_loader(*[experience] * 40))
    (rows,) = trainer.predict(module, experience_loader(experience))
    return {"rows": rows, "targets": targets, "history": history(module)}
