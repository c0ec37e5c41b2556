"""What the workers run for the tests of the actor-critic module, and the same updates computed naively."""

import itertools
import math
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_rl_engines.algorithms import ValueLoss
from lightning_rl_engines.callbacks import WeightExport
from lightning_rl_engines.data.rewards import Reward
from lightning_rl_engines.export import HFFolderSink
from lightning_rl_engines.models import ModelConfig
from lightning_rl_engines.modules import ActorCriticModule
from lightning_rl_engines.optim import WarmupCosine, WarmupLinear
from lightning_rl_engines.rollout import HFRollout
from lightning_rl_engines.sequence import Experience
from lightning_rl_engines.strategies import FSDPUlyssesStrategy
from tests.modules.cases import adam, even_tokens, experience_loader, fit, history, loader, prompts
from tests.strategies.test_value import critic_folder, plain_model, plain_values
from tests.support.lightning_env import make_trainer
from tests.support.models import random_documents, reference_log_probs, tiny_model_folder

GAMMA, LAM, KL, LEARNING_RATE, CLIP, VALUE_CLIP = 0.9, 0.8, 0.3, 0.3, 0.2, 0.1

MASKS = (
    [0, 0, 1, 1, 1],
    [0, 1, 1, 0, 0, 1, 1, 0],  # a tool's output in the middle, and a token after the response
    [0, 0, 0, 0],
    [0, 0, 0, 1],
    [0, 1, 1, 1, 1, 1, 1, 1, 1],
    [0, 0, 1, 1, 1, 1],
)
REWARDS = (1.0, -0.5, 2.0, 0.0, 0.5, 1.5)


def documents() -> dict[str, list[Any]]:
    generator = torch.Generator().manual_seed(3)
    ids = random_documents([len(mask) for mask in MASKS], seed=4)
    return {
        "input_ids": ids,
        "response_mask": [torch.tensor(mask, dtype=torch.bool) for mask in MASKS],
        "ref_log_probs": [-4.0 + 0.5 * torch.randn(len(item), generator=generator) for item in ids],
        "rewards": list(REWARDS),
    }


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def folders() -> tuple[str, str]:
    return str(tiny_model_folder("llama")), critic_folder("llama")


# ------------------------------------------------------------------------------------------------ naive


def naive_update() -> dict[str, Any]:
    """Two epochs of one update on the plain models, one document and one token at a time."""
    policy_path, critic_path = folders()
    policy = AutoModelForCausalLM.from_pretrained(policy_path, attn_implementation="eager", dtype=torch.float32).eval()
    critic = plain_model(critic_path)
    data = documents()
    ids, masks = data["input_ids"], data["response_mask"]
    with torch.no_grad():
        old_log_probs, values = reference_log_probs(policy, ids)[0], plain_values(critic, ids)
    advantages, returns = naive_gae(data, old_log_probs, values)
    chosen = torch.cat([item[mask] for item, mask in zip(advantages, masks, strict=True)])
    target = torch.cat([item[mask] for item, mask in zip(returns, masks, strict=True)])
    before = torch.cat([item[mask] for item, mask in zip(values, masks, strict=True)])
    whitened = [(item - chosen.mean()) / chosen.std() for item in advantages]
    for _ in range(2):
        step(critic, naive_value_loss(critic, ids, masks, values, returns))
    for _ in range(2):
        step(policy, naive_policy_loss(policy, ids, masks, old_log_probs, whitened))
    return {
        "values": values,
        "returns": returns,
        "advantages": whitened,
        "advantage_mean": float(chosen.mean()),
        "return_mean": float(target.mean()),
        "explained_variance": float(1 - (target - before).var() / target.var()),
        "policy": {name: tensor.detach() for name, tensor in policy.state_dict().items()},
        "critic": {name: tensor.detach() for name, tensor in critic.state_dict().items()},
    }


def step(model: torch.nn.Module, loss: Tensor) -> None:
    optimizer = sgd(model.parameters())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def naive_gae(
    data: dict[str, list[Any]], log_probs: list[Tensor], values: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    advantages, returns = [], []
    for index, mask in enumerate(data["response_mask"]):
        places = mask.nonzero()[:, 0].tolist()
        found = [torch.zeros(len(mask)), torch.zeros(len(mask))]
        following, next_value = 0.0, 0.0
        for place in reversed(places):
            gap = float(log_probs[index][place] - data["ref_log_probs"][index][place])
            reward = (data["rewards"][index] if place == places[-1] else 0.0) - KL * gap
            value = float(values[index][place])
            following = reward + GAMMA * next_value - value + GAMMA * LAM * following
            next_value = value
            found[0][place], found[1][place] = following, following + value
        advantages.append(found[0])
        returns.append(found[1])
    return advantages, returns


def naive_value_loss(model: Any, ids: Any, masks: Any, old: list[Tensor], returns: list[Tensor]) -> Tensor:
    terms = []
    for value, before, target, mask in zip(plain_values(model, ids), old, returns, masks, strict=True):
        clipped = before + (value - before).clamp(-VALUE_CLIP, VALUE_CLIP)
        terms.append(0.5 * torch.max((value - target) ** 2, (clipped - target) ** 2)[mask])
    return torch.cat(terms).mean()


def naive_policy_loss(model: Any, ids: Any, masks: Any, old: list[Tensor], advantages: list[Tensor]) -> Tensor:
    terms = []
    for log_probs, before, advantage, mask in zip(
        reference_log_probs(model, ids)[0], old, advantages, masks, strict=True
    ):
        ratio = (log_probs - before).exp()
        terms.append(-torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)[mask])
    return torch.cat(terms).mean()


# ------------------------------------------------------------------------------------------------ workers


class Spy(ActorCriticModule):
    """Keeps the experience that the optimizer steps see."""

    def update(self, experience: Experience, columns: Any) -> dict[str, float]:
        self.seen = experience
        return super().update(experience, columns)


def all_weights(module: ActorCriticModule) -> dict[str, dict[str, Tensor]]:
    return {
        name: {key: tensor.clone() for key, tensor in module.engine.get_per_tensor_param(getattr(module, name))}
        for name in ("policy", "critic")
    }


def run_update(parts: list[list[int]], sp: int, split: str) -> dict[str, Any]:
    """One update of two epochs on the documents of this data rank."""
    policy, critic = folders()
    mine = parts[int(os.environ["RANK"]) // sp]
    module = Spy(
        policy=ModelConfig(path=policy),
        critic=ModelConfig(path=critic, head="value"),
        critic_loss=ValueLoss(value_clip=VALUE_CLIP),
        gamma=GAMMA,
        lam=LAM,
        kl_in_reward=KL,
        reference=None,
        optimizer=sgd,
        critic_optimizer=sgd,
        update_epochs=2,
        max_grad_norm=None,
        max_tokens_per_micro_batch=20,
        critic_max_tokens_per_micro_batch=12,
    )
    experience = Experience.from_documents(**documents()).select(mine)
    trainer = fit(
        module, sp=sp, split=split, train=lambda: experience_loader(experience), use_distributed_sampler=False
    )
    return {
        "mine": mine,
        "columns": {name: module.seen.documents(name) for name in ("values", "returns", "advantages")},
        "row": history(module)[0],
        "global_step": trainer.global_step,
        **all_weights(module),
    }


def module_on_prompts(**options: Any) -> ActorCriticModule:
    options = {
        "policy": ModelConfig(path=str(tiny_model_folder("llama_tied"))),
        "rollout": HFRollout(num_generations=4, max_new_tokens=6),
        "reward": {"even": Reward(function=even_tokens)},
        "kl_in_reward": 0.1,
        "optimizer": adam,
        "critic_optimizer": adam,
        **options,
    }
    return ActorCriticModule(**options)


def run_warmup() -> dict[str, Any]:
    """Three updates of two steps each, the first of the critic alone; both have schedules of open length."""
    module = module_on_prompts(
        mini_batches=2,
        critic_warmup_updates=1,
        lr_scheduler=WarmupLinear,
        critic_lr_scheduler=WarmupLinear,
    )
    seen: list[Any] = []

    class Look(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append((trainer.global_step, all_weights(pl_module)))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append((trainer.global_step, all_weights(pl_module)))

    fit(module, limit_train_batches=3, callbacks=[Look()])
    moved = {
        name: [
            any(not torch.equal(before[1][name][key], after[1][name][key]) for key in before[1][name])
            for before, after in itertools.pairwise(seen)
        ]
        for name in ("policy", "critic")
    }
    lengths = [scheduler.total_steps for scheduler in module.lr_schedulers()]
    return {"moved": moved, "steps": [item[0] for item in seen], "history": history(module), "lengths": lengths}


def run_resume(folder: str) -> dict[str, Any]:
    """Two updates in one go; and the second one again, from the checkpoint of the first, with fresh objects."""
    options: dict[str, Any] = {
        "mini_batches": 2,
        "critic_warmup_updates": 1,
        "critic_lr_scheduler": lambda optimizer: WarmupCosine(optimizer, warmup_steps=1),
    }
    sink = HFFolderSink(path=str(Path(folder) / "critic"))
    whole = module_on_prompts(**options)
    saver = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    items = prompts(2) * 2
    fit(
        whole,
        train=lambda: loader(items, 2),
        callbacks=[saver, WeightExport(sink=sink, model="critic", every_n_updates=100)],
        enable_checkpointing=True,
        use_distributed_sampler=False,
    )
    resumed = module_on_prompts(**options)
    trainer = make_trainer(FSDPUlyssesStrategy(), max_epochs=1, use_distributed_sampler=False)
    trainer.fit(resumed, loader(items, 2), ckpt_path=f"{folder}/step=2.ckpt")
    # The policy has no metrics of steps in the first update.
    rows = [
        [
            {key: value for key, value in row.items() if "second" not in key and not math.isnan(value)}
            for row in history(module)
        ]
        for module in (whole, resumed)
    ]
    return {"weights": [all_weights(whole), all_weights(resumed)], "rows": rows, "global_step": trainer.global_step}


def run_given(**columns: Any) -> dict[str, Any]:
    """Four updates on experiences that bring their advantages along; returns are 1 everywhere if not left out."""
    policy, critic = folders()
    module = Spy(
        policy=ModelConfig(path=policy),
        critic=ModelConfig(path=critic, head="value"),
        optimizer=sgd,
        critic_optimizer=sgd,
        max_skipped_steps=2,
    )
    whole = Experience.from_documents(**documents(), **columns)
    mine = whole.select(list(range(int(os.environ["RANK"]), len(MASKS), int(os.environ["WORLD_SIZE"]))))
    trainer = make_trainer(FSDPUlyssesStrategy(), max_epochs=1, use_distributed_sampler=False)
    error = ""
    try:
        trainer.fit(module, experience_loader(*[mine] * 4))
    except RuntimeError as raised:
        error = str(raised)
    return {
        "error": error,
        "global_step": trainer.global_step,
        "history": history(module),
        "advantages": module.seen["advantages"],
        "values": module.seen["values"],
        **all_weights(module),
    }
