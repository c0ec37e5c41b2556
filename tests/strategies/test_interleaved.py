"""Passes without gradients between those with, while activations are recomputed and weights move to the host."""

from typing import Any

import pytest
import torch

from lightning_rl_engines import ModelConfig
from lightning_rl_engines.models.huggingface import load_hf_model
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import (
    assert_near,
    copies,
    mine,
    plain_model,
    plain_score_loss,
    plain_value_loss,
    plain_values,
    score_loss,
    train_plain,
    value_loss,
)
from tests.strategies.test_lora import two_plain_steps
from tests.support import run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.lora import lora
from tests.support.models import reference_log_probs, tiny_model_folder

STEPS = 2


def interleave(configs: dict[str, ModelConfig], documents: Documents, **strategy: Any) -> dict[str, Any]:
    """On a rank: gradients of two models per step, and the results of the passes around them."""

    def body(module: EngineModule) -> dict[str, Any]:
        engine: Any = module.engine
        experience = mine(engine, documents)
        first, second = module.optimizers()
        found: dict[str, Any] = {"policy": [], "critic": [], "log_probs": [], "entropy": [], "values": []}

        def look() -> None:
            policy = engine.infer_batch(module.policy, experience, calculate_entropy=True).columns
            values = engine.infer_batch(module.critic, experience, max_tokens_per_micro_batch=40).columns
            for name, column in {**policy, **values}.items():
                found[name].append(column)

        for _ in range(STEPS):
            # The modules are in train mode also here, where no backward pass follows.
            with engine.train_mode(module.policy, first), engine.train_mode(module.critic, second):
                look()
                engine.forward_backward_batch(module.policy, experience, score_loss, max_tokens_per_micro_batch=64)
                look()
                engine.forward_backward_batch(module.critic, experience, value_loss, max_tokens_per_micro_batch=40)
                look()
                found["policy"].append(copies(engine.get_per_tensor_grad(module.policy)))
                found["critic"].append(copies(engine.get_per_tensor_grad(module.critic)))
                first.step()
                second.step()
                first.zero_grad()
                second.zero_grad()
        return found

    return with_engine(body, configs, lr=0.05, **strategy)


@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, {}), (2, {}), (2, {"ulysses_sp_size": 2}), (1, {"engine": "torchtitan"}), (2, {"engine": "torchtitan"})],
)
def test_gradients_are_those_of_a_plain_model(world: int, layout: dict[str, Any]) -> None:
    folder = str(tiny_model_folder("llama_tied"))
    documents = make_documents(folder, vocabulary=64)
    configs = {
        "policy": ModelConfig(path=folder, gradient_checkpointing=True),
        "critic": ModelConfig(path=folder, head="value", seed=3, gradient_checkpointing=True),
    }
    policy, critic = plain_model(folder), load_hf_model(configs["critic"])
    critic.set_attn_implementation("eager")
    expected: dict[str, list[Any]] = {"policy": [], "critic": [], "log_probs": [], "entropy": [], "values": []}
    for _ in range(STEPS):
        with torch.no_grad():
            log_probs, entropies = reference_log_probs(policy, documents.input_ids)
            values = [plain_values(critic, ids) for ids in documents.input_ids]
        for name, items in (("log_probs", log_probs), ("entropy", entropies), ("values", values)):
            expected[name] += [torch.cat(items)] * 3
        for name, model, loss in (("policy", policy, plain_score_loss), ("critic", critic, plain_value_loss)):
            train_plain(model, documents, lr=0.05, loss=loss)
            expected[name].append({key: item.grad.clone() for key, item in model.named_parameters()})
    results = run_workers(world, interleave, configs, documents, offload_param=True, offload_optimizer=True, **layout)
    for result in results:
        for name in ("policy", "critic"):
            for found, wanted in zip(result[name], expected[name], strict=True):
                assert_near(found, wanted, 3e-5)
    response = torch.cat(documents.response_mask)
    heads = results[:: layout.get("ulysses_sp_size", 1)]
    for name in ("log_probs", "entropy", "values"):
        for index, wanted in enumerate(expected[name]):
            found = torch.cat([result[name][index] for result in heads])
            assert (found - wanted)[response].abs().max() < 1e-4, (name, index)


def interleave_adapter(config: ModelConfig, documents: Documents, **strategy: Any) -> dict[str, Any]:
    """On a rank: an adapter before and after two steps, and log-probabilities with and without it around them."""

    def body(module: EngineModule) -> dict[str, Any]:
        engine, policy, optimizer = module.engine, module.policy, module.optimizers()
        experience = mine(engine, documents)
        found: dict[str, Any] = {"start": copies(engine.get_per_tensor_param(policy, mode="adapter")), "base": []}

        def look() -> None:
            engine.infer_batch(policy, experience, calculate_entropy=True, max_tokens_per_micro_batch=40)
            with engine.disable_adapter(policy):
                found["base"].append(engine.infer_batch(policy, experience).columns["log_probs"])

        for _ in range(STEPS):
            with engine.train_mode(policy, optimizer):
                look()
                engine.forward_backward_batch(policy, experience, score_loss, max_tokens_per_micro_batch=64)
                look()
                optimizer.step()
        return {**found, "end": copies(engine.get_per_tensor_param(policy, mode="adapter"))}

    return with_engine(body, config, lr=0.5, **strategy)


@pytest.mark.parametrize(("world", "layout"), [(1, {}), (2, {"ulysses_sp_size": 2})])
def test_passes_around_the_steps_of_an_adapter_change_nothing(world: int, layout: dict[str, Any]) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    config = ModelConfig(path=folder, lora=lora(), gradient_checkpointing=True)
    offload = {"offload_param": True, "offload_optimizer": True}
    results = run_workers(world, interleave_adapter, config, documents, **offload, **layout)
    expected = two_plain_steps(folder, lora(), results[0]["start"], documents)
    for found in results:
        assert_near(found["end"], expected)
        assert all(torch.equal(column, found["base"][0]) for column in found["base"])
