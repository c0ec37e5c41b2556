"""What the engine promises of a step: skipping and clipping by the global norm."""

from typing import Any

import pytest
import torch

from lightning_rl_engines import ModelConfig, SFTLoss
from tests.strategies.layouts import titan
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import (
    assert_near,
    assert_same,
    copies,
    gradients_of,
    mine,
    plain_model,
    plain_score_loss,
    score_loss,
    train_plain,
    weights_of,
)
from tests.support import run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.models import tiny_model_folder


def weights(module: EngineModule, name: str = "policy") -> dict[str, torch.Tensor]:
    return copies(module.engine.get_per_tensor_param(getattr(module, name)))


# ---- a gradient that is not finite ----


def step_with_a_bad_document(folder: str, documents: Documents, bad: float, **strategy: Any) -> dict[str, Any]:
    """On a rank: a step whose last data rank holds one bad number, and a good step after it."""

    def body(module: EngineModule) -> dict[str, Any]:
        engine, optimizer = module.engine, module.optimizers()
        experience = mine(engine, documents)
        before = weights(module)
        advantages = experience["advantages"].clone()
        if engine.data_parallel_rank == engine.data_parallel_size - 1:
            advantages[experience["response_mask"].nonzero()[0]] = bad
        poisoned = experience.with_token_columns(advantages=advantages)
        output = engine.train_batch(module.policy, optimizer, poisoned, score_loss, max_grad_norm=1.0)
        found = {
            "metrics": output.metrics,
            "before": before,
            "after": weights(module),
            "gradients": [name for name, item in module.policy.named_parameters() if item.grad is not None],
            "global_step": module.trainer.global_step,
        }
        good = engine.train_batch(module.policy, optimizer, experience, score_loss)
        return {**found, "good": good.metrics, "trained": weights(module), "steps": module.trainer.global_step}

    return with_engine(body, ModelConfig(path=folder), **strategy)


@pytest.mark.parametrize(
    ("world", "strategy", "bad"),
    [
        (2, {}, float("nan")),
        (2, {"fsdp_size": 1}, float("inf")),
        (4, {"ulysses_sp_size": 2}, float("nan")),
        (4, {"fsdp_size": 2}, float("nan")),
        (*titan("dp2"), float("nan")),
        (*titan("cp2"), float("inf")),
        (*titan("tp2"), float("nan")),
    ],
)
def test_a_bad_number_on_one_rank_skips_the_step_on_all(world: int, strategy: dict[str, Any], bad: float) -> None:
    folder = str(tiny_model_folder("llama_tied"))
    documents = make_documents(folder, vocabulary=64)
    model = plain_model(folder)
    train_plain(model, documents)
    for found in run_workers(world, step_with_a_bad_document, folder, documents, bad, **strategy):
        assert found["metrics"]["skipped_step"] == 1.0
        assert not torch.isfinite(torch.tensor(found["metrics"]["grad_norm"]))
        assert_same(found["before"], found["after"])
        assert found["gradients"] == []
        assert (found["global_step"], found["steps"]) == (0, 1)
        assert found["good"]["skipped_step"] == 0.0
        assert_near(found["trained"], weights_of(model))


# ---- clipping ----


def clip_in_every_way(folder: str, documents: Documents, max_norm: float, **strategy: Any) -> dict[str, Any]:
    """On a rank: norms and clipped gradients by the engine, by Lightning, and from lists, generators and groups."""

    def body(module: EngineModule) -> dict[str, Any]:
        engine: Any = module.engine
        experience = mine(engine, documents)
        found: dict[str, Any] = {}

        def clipped(name: str, clip: Any) -> None:
            module.policy.zero_grad()
            engine.forward_backward_batch(module.policy, experience, score_loss)
            norm = clip()
            found[name] = (norm, copies(engine.get_per_tensor_grad(module.policy)))

        policy, optimizer = module.policy, module.optimizers()
        clipped("none", lambda: engine.clip_grad_norm(policy, None).item())
        clipped("wide", lambda: engine.clip_grad_norm(policy, 1e6).item())
        clipped("engine", lambda: engine.clip_grad_norm(policy, max_norm).item())
        clipped("list", lambda: engine._clip_parameters(list(policy.parameters()), max_norm).item())
        clipped("generator", lambda: engine._clip_parameters((p for p in policy.parameters()), max_norm).item())
        groups = [{"params": list(policy.parameters())[::2]}, {"params": list(policy.parameters())[1::2]}]
        grouped = torch.optim.SGD(groups, 0.1)
        clipped("groups", lambda: engine.precision_plugin.clip_grad_by_norm(grouped, max_norm))
        clipped(
            "lightning",
            lambda: module.clip_gradients(optimizer, gradient_clip_val=max_norm, gradient_clip_algorithm="norm"),
        )
        clipped(
            "value",
            lambda: module.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="value"),
        )
        output = engine.train_batch(policy, optimizer, experience, score_loss, max_grad_norm=max_norm)
        return {"ways": found, "trained": weights(module), "grad_norm": output.metrics["grad_norm"]}

    return with_engine(body, ModelConfig(path=folder), **strategy)


@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        (1, {}),
        (2, {"ulysses_sp_size": 2}),
        (2, {"fsdp_size": 1}),
        (4, {"fsdp_size": 2, "ulysses_sp_size": 2}),
    ],
)
def test_clipping_is_by_the_global_norm_however_it_is_asked_for(world: int, strategy: dict[str, Any]) -> None:
    folder = str(tiny_model_folder("qwen2"))
    documents = make_documents(folder, vocabulary=64)
    model = plain_model(folder)
    plain_score_loss(model, documents).backward()
    gradients = gradients_of(model)
    norm = float(torch.cat([item.flatten() for item in gradients.values()]).double().norm())
    max_norm = norm / 20
    model.zero_grad()
    train_plain(model, documents, max_norm=max_norm)
    clipped = {name: item / 20 for name, item in gradients.items()}
    results = run_workers(world, clip_in_every_way, folder, documents, max_norm, **strategy)
    for found in results:
        for name in ("none", "wide", "engine", "list", "generator"):
            assert type(found["ways"][name][0]) is float
            assert found["ways"][name][0] == pytest.approx(norm, rel=1e-6)
            # The last bit too: a decision on the norm is the same on all ranks.
            assert found["ways"][name][0] == results[0]["ways"][name][0]
        for name in ("none", "wide"):
            assert_near(found["ways"][name][1], gradients)
        for name in ("engine", "list", "generator", "groups", "lightning"):
            assert_near(found["ways"][name][1], clipped, 2e-5)
        by_value = {name: item.clamp(-1e-3, 1e-3) for name, item in gradients.items()}
        assert_near(found["ways"]["value"][1], by_value, 1e-4)  # errors of unclipped size on clipped elements
        assert found["grad_norm"] == pytest.approx(norm, rel=1e-6)
        assert_near(found["trained"], weights_of(model))


def step_without_tokens(folder: str, documents: Documents) -> Any:
    def body(module: EngineModule) -> Any:
        engine: Any = module.engine
        optimizer = torch.optim.AdamW(module.policy.parameters(), 1e-1, weight_decay=0.1)
        experience = documents.experience([0, 1])
        with engine.train_mode(module.policy, optimizer):
            engine.train_batch(module.policy, optimizer, experience, SFTLoss())
            before = weights(module)
            silent = experience.with_token_columns(response_mask=torch.zeros(experience.num_tokens, dtype=torch.bool))
            output = engine.train_batch(module.policy, optimizer, silent, SFTLoss())
        after = weights(module)
        return all(torch.equal(before[name], after[name]) for name in before), output.num_tokens, output.metrics

    return with_engine(body, ModelConfig(path=folder))


def test_a_batch_without_response_tokens_moves_nothing() -> None:
    # Momentum of the step before and weight decay would.
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    for unchanged, tokens, metrics in run_workers(2, step_without_tokens, folder, documents):
        assert unchanged
        assert tokens == 0
        assert metrics["skipped_step"] == 0
