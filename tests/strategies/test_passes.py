"""Passes in any order, of several models, between steps and in hooks of Lightning."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_rl_engines import FSDPUlyssesStrategy, ModelConfig
from lightning_rl_engines.models.huggingface import load_hf_model
from lightning_rl_engines.sequence import pack_row
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import (
    assert_near,
    copies,
    gradients_of,
    mine,
    plain_model,
    plain_score_loss,
    plain_value_loss,
    plain_values,
    score_loss,
    train_plain,
    value_loss,
    weights_of,
)
from tests.support import run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.lightning_env import make_trainer
from tests.support.models import reference_log_probs, tiny_model, tiny_model_folder


def weights(module: EngineModule, name: str = "policy") -> dict[str, torch.Tensor]:
    return copies(module.engine.get_per_tensor_param(getattr(module, name)))


def train_two_models(policy: ModelConfig, critic: ModelConfig, documents: Documents) -> dict[str, Any]:
    """On a rank: passes without gradients before, between and after those with, of two models in one module."""

    def body(module: EngineModule) -> dict[str, Any]:
        engine = module.engine
        experience = mine(engine, documents)
        first, second = module.optimizers()
        columns = {}
        columns["values"] = engine.infer_batch(module.critic, experience).columns["values"]
        columns["old"] = engine.infer_batch(module.policy, experience).columns["log_probs"]
        engine.forward_backward_batch(module.policy, experience, score_loss)
        engine.infer_batch(module.policy, experience)
        engine.forward_backward_batch(module.critic, experience, value_loss, max_tokens_per_micro_batch=40)
        engine.infer_batch(module.critic, experience)
        columns["again"] = engine.infer_batch(module.policy, experience).columns["log_probs"]
        second.step()
        first.step()
        first.zero_grad()
        second.zero_grad()
        columns["new"] = engine.infer_batch(module.policy, experience).columns["log_probs"]
        return {"columns": columns, "policy": weights(module), "critic": weights(module, "critic")}

    return with_engine(body, {"policy": policy, "critic": critic}, lr=0.05, ulysses_sp_size=2)


def test_two_models_and_passes_in_any_order_equal_plain_training() -> None:
    folder = str(tiny_model_folder("llama_tied"))
    documents = make_documents(folder, vocabulary=64)
    policy_config, critic_config = ModelConfig(path=folder), ModelConfig(path=folder, head="value", seed=3)
    policy, critic = plain_model(folder), load_hf_model(critic_config)
    critic.set_attn_implementation("eager")
    with torch.no_grad():
        values = torch.cat([plain_values(critic, ids) for ids in documents.input_ids])
    train_plain(policy, documents, lr=0.05)
    train_plain(critic, documents, lr=0.05, loss=plain_value_loss)
    response = torch.cat(documents.response_mask)
    results = run_workers(4, train_two_models, policy_config, critic_config, documents)
    found = torch.cat([results[0]["columns"]["values"], results[2]["columns"]["values"]])
    assert (found - values)[response].abs().max() < 1e-5
    for result in results:
        columns = result["columns"]
        assert torch.equal(columns["old"], columns["again"])
        assert not torch.equal(columns["old"], columns["new"])
        assert_near(result["policy"], weights_of(policy))
        assert_near(result["critic"], weights_of(critic))


def pass_then_step(folder: str, documents: Documents, **strategy: Any) -> dict[str, Any]:
    """On a rank: weights change after a pass that left the root gathered; a pass comes between forward and backward."""

    def body(module: EngineModule) -> dict[str, Any]:
        engine, policy, optimizer = module.engine, module.policy, module.optimizers()
        experience = mine(engine, documents)
        row = pack_row(experience, range(len(experience)))
        found: dict[str, Any] = {}
        engine.forward_backward_batch(policy, experience, score_loss)
        engine.infer_batch(policy, experience)
        optimizer.step()
        found["weights"] = weights(module)
        found["log_probs"] = engine.infer_batch(policy, experience).columns["log_probs"]
        optimizer.zero_grad()
        engine.forward_backward_batch(policy, experience, score_loss)
        policy(row)  # with a graph that is dropped
        optimizer.step()
        found["again"] = engine.infer_batch(policy, experience).columns["log_probs"]
        optimizer.zero_grad()
        outputs = policy(row)
        engine.infer_batch(policy, experience)
        score_loss(outputs, row).total.backward()
        found["gradients"] = copies(engine.get_per_tensor_grad(policy))
        return found

    return with_engine(body, ModelConfig(path=folder), **strategy)


@pytest.mark.parametrize(
    ("world", "strategy"),
    [(1, {}), (2, {}), (2, {"fsdp_size": 1}), (4, {"fsdp_size": 2}), (2, {"engine": "torchtitan"})],
)
def test_no_pass_sees_weights_of_before_a_step(world: int, strategy: dict[str, Any]) -> None:
    folder = str(tiny_model_folder("llama_tied"))
    documents = make_documents(folder, vocabulary=64)
    model = plain_model(folder)
    train_plain(model, documents)
    first = weights_of(model)
    expected = []
    for _ in range(2):
        with torch.no_grad():
            expected.append(torch.cat(reference_log_probs(model, documents.input_ids)[0]))
        train_plain(model, documents)
    model = plain_model(folder)
    train_plain(model, documents, steps=2)
    model.zero_grad()
    # A user's own backward pass is averaged over the ranks, as everywhere in FSDP1, and summed by torchtitan.
    divisor = 1 if strategy.get("engine") == "torchtitan" else world
    tokens = int(torch.cat(documents.response_mask).sum())
    (plain_score_loss(model, documents) * tokens / divisor).backward()
    response = torch.cat(documents.response_mask)
    results = run_workers(world, pass_then_step, folder, documents, **strategy)
    for result in results:
        assert_near(result["weights"], first)
        assert_near(result["gradients"], gradients_of(model), 3e-5)
    for name, wanted in zip(("log_probs", "again"), expected, strict=True):
        found = torch.cat([result[name] for result in results])
        assert (found - wanted)[response].abs().max() < 1e-4


def alternate(first: ModelConfig, second: ModelConfig, documents: Documents) -> dict[str, Any]:
    """On a rank: two models of other head counts take turns."""

    def body(module: EngineModule) -> dict[str, Any]:
        engine, experience = module.engine, mine(module.engine, documents)
        engine.forward_backward_batch(module.first, experience, score_loss)
        engine.infer_batch(module.second, experience)
        engine.forward_backward_batch(module.second, experience, score_loss)
        engine.infer_batch(module.first, experience)
        found = {name: copies(engine.get_per_tensor_grad(getattr(module, name))) for name in ("first", "second")}
        module.first.zero_grad()
        engine.forward_backward_batch(module.first, experience, score_loss)
        found["again"] = copies(engine.get_per_tensor_grad(module.first))
        return found

    return with_engine(body, {"first": first, "second": second}, ulysses_sp_size=2)


def test_models_of_other_head_counts_do_not_disturb_each_other(tmp_path: Path) -> None:
    first = str(tiny_model_folder("llama_tied"))
    second = str(tmp_path / "second")
    tiny_model("one_kv", num_attention_heads=8, head_dim=8, seed=5).save_pretrained(second)
    documents = make_documents(first, vocabulary=64)
    expected = {}
    for name, folder in (("first", first), ("second", second)):
        model = plain_model(folder)
        plain_score_loss(model, documents).backward()
        expected[name] = gradients_of(model)
    for found in run_workers(2, alternate, ModelConfig(path=first), ModelConfig(path=second), documents):
        assert_near(found["first"], expected["first"])
        assert_near(found["second"], expected["second"])
        assert_near(found["again"], expected["first"])


# ---- hooks ----


class Walker(Callback):
    """Walks the weights in hooks of Lightning."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def walk(self, hook: str, module: Any) -> None:
        self.seen.setdefault(hook, []).append(weights(module))

    @override
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.walk("on_before_optimizer_step", pl_module)
        self.seen["gradients"] = copies(pl_module.engine.get_per_tensor_grad(pl_module.policy))

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        self.walk("on_train_batch_end", pl_module)

    @override
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.walk("on_save_checkpoint", pl_module)


def fit_with_walker(folder: str, documents: Documents, path: str, **strategy: Any) -> dict[str, Any]:
    def body(module: EngineModule) -> None:
        engine = module.engine
        engine.train_batch(module.policy, module.optimizers(), mine(engine, documents), score_loss)

    module, walker = EngineModule({"policy": ModelConfig(path=folder)}, body, 0.1), Walker()
    trainer = make_trainer(FSDPUlyssesStrategy(**strategy), max_epochs=1, callbacks=[walker])
    trainer.fit(module, DataLoader(range(2 * trainer.world_size // strategy.get("ulysses_sp_size", 1))))
    trainer.save_checkpoint(path)
    return walker.seen


@pytest.mark.parametrize(("world", "strategy"), [(2, {}), (4, {"ulysses_sp_size": 2, "fsdp_size": 2})])
def test_hooks_may_walk_the_weights(world: int, strategy: dict[str, Any], tmp_path: Path) -> None:
    folder = str(tiny_model_folder("llama_tied"))
    documents = make_documents(folder, vocabulary=64)
    model = plain_model(folder)
    states = [weights_of(model)]
    for _ in range(2):
        train_plain(model, documents)
        states.append(weights_of(model))
    last = gradients_of(model)
    for seen in run_workers(world, fit_with_walker, folder, documents, str(tmp_path / "run.ckpt"), **strategy):
        expected = {
            "on_before_optimizer_step": states[:2],
            "on_train_batch_end": states[1:],
            "on_save_checkpoint": states[2:],
        }
        for hook, wanted in expected.items():
            assert len(seen[hook]) == len(wanted)
            for found, state in zip(seen[hook], wanted, strict=True):
                assert_near(found, state)
        assert_near(seen["gradients"], last)
