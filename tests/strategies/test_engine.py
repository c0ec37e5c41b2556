"""What the engine promises of a step: skipping, clipping, orders of passes, hooks, and errors on all ranks together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_rl_engines import FSDPUlyssesStrategy, ModelConfig, PolicyLoss
from lightning_rl_engines.models.huggingface import load_hf_model
from lightning_rl_engines.sequence import pack_row
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import (
    assert_near,
    assert_same,
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
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.lightning_env import make_trainer
from tests.support.models import reference_log_probs, tiny_model, tiny_model_folder


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


# ---- manual optimization, two models, passes in any order ----


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


@pytest.mark.parametrize(("world", "strategy"), [(1, {}), (2, {}), (2, {"fsdp_size": 1}), (4, {"fsdp_size": 2})])
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
    # A user's own backward pass is averaged over the ranks, as everywhere in FSDP.
    tokens = int(torch.cat(documents.response_mask).sum())
    (plain_score_loss(model, documents) * tokens / world).backward()
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


# ---- errors ----


def raise_everywhere(folder: str, documents: Documents) -> dict[str, str]:
    """On a rank: the message of each error, and a step that works after all of them."""

    def body(module: EngineModule) -> dict[str, str]:
        engine = module.engine
        rank, bad = torch.distributed.get_rank(), engine.data_parallel_rank == 1
        good = mine(engine, documents)

        def infer(experience: Any, **options: Any) -> Any:
            return engine.infer_batch(module.policy, experience, **options)

        def train(experience: Any, loss: Any, **options: Any) -> Any:
            return engine.forward_backward_batch(module.policy, experience, loss, **options)

        ids = good["input_ids"].clone()
        if bad:
            ids[good.lengths[0] + 2] = 64
        swapped = documents.experience([2, 3] if rank == 1 else [0, 1]) if not bad else good
        other = good["advantages"] + float(rank == 1)
        cases: dict[str, Any] = {
            "budget": lambda: infer(good, max_tokens_per_micro_batch=18),
            "vocabulary": lambda: infer(good.with_token_columns(input_ids=ids)),
            "missing": lambda: train(good.drop("old_log_probs") if bad else good, PolicyLoss()),
            "peers": lambda: infer(swapped),
            "peer columns": lambda: infer(good.with_token_columns(advantages=other)),
            "settings": lambda: infer(good, max_tokens_per_micro_batch=64 if bad else 32),
            "entropy": lambda: infer(good, calculate_entropy=bad),
            "forward": lambda: train(good, score_loss, forward_only=bad),
            "temperature": lambda: infer(good, temperature=0.0),
            "temperature column": lambda: infer(
                good.with_document_columns(temperature=good["temperature"] * (0.0 if bad else 1.0)),
                temperature="temperature",
            ),
            "no such column": lambda: infer(good, temperature="heat"),
            "columns": lambda: infer(good.drop("advantages") if bad else good),
        }
        found = {}
        for name, call in cases.items():
            try:
                call()
            except ValueError as error:
                found[name] = str(error)
        train(good, score_loss)
        return found

    return with_engine(body, ModelConfig(path=folder), ulysses_sp_size=2, steps=1)


def test_bad_calls_are_refused_on_all_ranks_together_with_the_place() -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    results = run_workers(4, raise_everywhere, folder, documents)
    assert results[1:] == results[:1] * 3, "every rank raises the same error"
    found = results[0]
    words = {
        "budget": ["rank 0", "document 2", "29", "18"],
        "vocabulary": ["rank 2: ", "rank 3: ", "document 1", "token id 64", "63"],
        "missing": ["rank 2: ", "'old_log_probs'"],
        "peers": ["rank 1", "data rank 0", "same experience"],
        "peer columns": ["rank 1", "data rank 0", "advantages"],
        "settings": ["rank 0", "max_tokens_per_micro_batch=32", "rank 2", "max_tokens_per_micro_batch=64"],
        "entropy": ["calculate_entropy=False", "calculate_entropy=True"],
        "forward": ["forward_only=False", "forward_only=True"],
        "temperature": ["temperature=0.0", "1.0"],
        "temperature column": ["rank 2: ", "'temperature'", "not positive"],
        "no such column": ["temperature='heat'", "input_ids"],
        "columns": ["rank 2", "'advantages'"],
    }
    assert found.keys() == words.keys()
    for name, parts in words.items():
        for part in parts:
            assert part in found[name], (name, found[name])


def disagree_beyond_an_empty_rank(folder: str, documents: Documents) -> None:
    def body(module: EngineModule) -> None:
        rank = module.engine.data_parallel_rank
        experience = documents.experience([[], [0, 1], [2, 3]][rank])
        module.engine.infer_batch(module.policy, experience.drop("advantages") if rank == 2 else experience)

    with_engine(body, ModelConfig(path=folder))


def test_columns_are_compared_also_when_the_first_rank_holds_no_document() -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    with pytest.raises(WorkerError, match=r"ranks disagree on the columns: rank 1 .*rank 2") as caught:
        run_workers(3, disagree_beyond_an_empty_rank, folder, documents)
    assert caught.value.all_ranks_raised(ValueError)


def test_a_degree_that_splits_no_heads_is_refused_on_all_ranks_with_both_numbers(tmp_path: Path) -> None:
    folder = str(tmp_path / "two_heads")
    tiny_model("llama", num_attention_heads=2, num_key_value_heads=2).save_pretrained(folder)
    with pytest.raises(WorkerError, match=r"4.*2|2.*4") as caught:
        run_workers(4, with_engine, None, ModelConfig(path=folder), ulysses_sp_size=4)
    assert caught.value.all_ranks_raised(ValueError)
    for error in caught.value.errors:
        assert "ulysses_sp_size=4 cannot split 2 query heads" in error.message
        assert "use one of [1, 2]" in error.message
