"""Pipelines of stages: loss, metrics, gradients and columns equal the plain model, whatever the schedule and layout."""

import gc
import os
import weakref
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rl_engines import Experience, ModelConfig, PolicyLoss
from lightning_rl_engines.algorithms import GSPOLoss, LossOutput, SFTLoss, TokenOutputs, ValueLoss
from lightning_rl_engines.sequence import MicroBatch
from tests.strategies import test_losses_over_layouts as losses
from tests.strategies import test_value as critics
from tests.strategies.checks import assert_gradients, assert_number, backward
from tests.strategies.reference import Documents, make_documents, ppo_reference, reference_gradients
from tests.strategies.test_invariance import GRID, loss_of
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule, share, with_engine
from tests.support.models import random_documents, reference_log_probs, tiny_model, tiny_model_folder

PP, TP, CP, EP = (f"{name}_parallel_degree" for name in ("pipeline", "tensor", "context", "expert"))
SCHEDULE, DEFER = "pipeline_parallel_schedule", "defer_gradient_sync"
RESHARD, CHECKPOINTING = "fsdp_reshard_after_forward", "activation_checkpointing"
BUDGETS = (None, 48, 32)

LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "1f1b": (2, "qwen3", {PP: 2}),
    "gpipe": (2, "odd_vocab", {PP: 2, SCHEDULE: "GPipe"}),
    "interleaved": (2, "qwen3", {PP: 2, SCHEDULE: "Interleaved1F1B"}),
    "moe": (2, "qwen3_moe", {PP: 2}),
    "four-stages": (4, "one_kv", {PP: 4}),
    "1f1b-hsdp": (4, "qwen3", {PP: 2, "data_parallel_replicate_degree": 2}),
    "1f1b-dp2": (4, "qwen3", {PP: 2}),
    "1f1b-dp2-deferred": (4, "odd_vocab", {PP: 2, DEFER: True, RESHARD: "always"}),
    "gpipe-dp2": (4, "qwen3", {PP: 2, SCHEDULE: "GPipe"}),
    "gpipe-dp2-resharded": (4, "qwen3", {PP: 2, SCHEDULE: "GPipe", RESHARD: "always"}),
    "gpipe-dp2-deferred": (4, "qwen3", {PP: 2, SCHEDULE: "GPipe", DEFER: True, CHECKPOINTING: "full"}),
    "interleaved-dp2": (4, "qwen3", {PP: 2, SCHEDULE: "Interleaved1F1B", RESHARD: "never"}),
    "interleaved-dp2-deferred": (4, "qwen3", {PP: 2, SCHEDULE: "Interleaved1F1B", DEFER: True}),
    "1f1b-tp2": (4, "odd_vocab", {PP: 2, TP: 2}),
    "interleaved-tp2": (4, "qwen3", {PP: 2, TP: 2, SCHEDULE: "Interleaved1F1B", CHECKPOINTING: "selective"}),
    "1f1b-cp2": (4, "qwen3", {PP: 2, CP: 2}),
    "gpipe-cp2": (4, "qwen3", {PP: 2, CP: 2, SCHEDULE: "GPipe", "context_parallel_load_balancer": "ptrr"}),
    "moe-ep2": (4, "qwen3_moe", {PP: 2, EP: 2}),
    "moe-ep2-tp2": (4, "qwen3_moe", {PP: 2, EP: 2, TP: 2, SCHEDULE: "Interleaved1F1B"}),
}
"""Number of ranks, model and arguments of the strategy; a named mode of checkpointing switches it on."""


def deep_folder(name: str) -> str:
    """A saved tiny model of four layers, enough for four stages."""
    folder = Path(os.environ["LRE_TEST_MODELS"]) / f"deep_{name}"
    if not folder.exists():
        tiny_model(name, num_hidden_layers=4).save_pretrained(folder)
    return str(folder)


def subset(documents: Documents, indices: list[int]) -> Documents:
    return Documents(**{item.name: [getattr(documents, item.name)[i] for i in indices] for item in fields(documents)})


def documents_of(name: str) -> Documents:
    return make_documents(deep_folder(name), vocabulary=97 if name == "odd_vocab" else 64)


def policy_loss() -> PolicyLoss:
    return PolicyLoss(clip_low=0.2, clip_high=0.28, entropy_coef=0.05, kl_coef=0.1)


@cache
def expected_of(name: str, few: bool) -> tuple[float, dict[str, float], dict[str, Tensor], list[Tensor], list[Tensor]]:
    """Loss, metrics, gradients, and each document's log-probabilities and entropies, of the plain model."""
    documents, metrics, columns = documents_of(name), {}, []
    if few:
        documents = subset(documents, [2])

    def loss(model: Any) -> Tensor:
        total, found = ppo_reference(model, documents, "token-mean", entropy_coef=0.05, kl_coef=0.1)
        metrics.update(found)
        with torch.no_grad():
            columns.extend(reference_log_probs(model, documents.input_ids, documents.temperature))
        return total

    total, gradients = reference_gradients(deep_folder(name), loss)
    metrics["grad_norm"] = float(torch.cat([item.flatten() for item in gradients.values()]).norm())
    return total, metrics, gradients, *columns


def run_layout(folder: str, documents: Documents, options: dict[str, Any]) -> Any:
    """On a rank: a pass with gradients and one without for each budget; the first with fewer documents than ranks."""

    def body(module: EngineModule) -> Any:
        engine, found = module.engine, []
        for budget in ("few", *BUDGETS):
            chosen, budget = (subset(documents, [2]), 32) if budget == "few" else (documents, budget)
            mine = share(range(chosen.size), engine.data_parallel_rank, engine.data_parallel_size)
            settings: dict[str, Any] = {
                "calculate_entropy": True,
                "temperature": "temperature",
                "max_tokens_per_micro_batch": budget,
                "balance": budget == 48,
            }
            with engine.eval_mode(module.policy):
                columns = engine.infer_batch(module.policy, chosen.experience(mine), **settings).columns
            with engine.train_mode(module.policy):
                output = engine.forward_backward_batch(
                    module.policy, chosen.experience(mine), policy_loss(), **settings
                )
                metrics = {**output.metrics, "grad_norm": float(engine.clip_grad_norm(module.policy, None))}
                gradients = dict(engine.get_per_tensor_grad(module.policy))
            found.append((output.loss, metrics, gradients, mine, columns))
        return found

    config = ModelConfig(path=folder, gradient_checkpointing=CHECKPOINTING in options)
    return with_engine(body, config, engine="torchtitan", **options)


VARIATIONS = ("gpipe-dp2", "gpipe-dp2-resharded", "interleaved-dp2", "interleaved-dp2-deferred", "gpipe")
"""Layouts that differ in one option from others."""


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in VARIATIONS)) for name in LAYOUTS]
)
def test_loss_metrics_gradients_and_columns_equal_the_plain_model(layout: str):
    world, name, options = LAYOUTS[layout]
    documents = documents_of(name)
    results = run_workers(world, run_layout, deep_folder(name), documents, options, timeout=180)
    for found in results:
        for index, (loss, metrics, gradients, mine, columns) in enumerate(found):
            case = (layout, "few", *BUDGETS)[index + 1]
            wanted_loss, wanted_metrics, wanted, log_probs, entropies = expected_of(name, index == 0)
            assert_number(loss, wanted_loss, case)
            for key, value in wanted_metrics.items():
                assert_number(metrics[key], value, (case, key))
            assert_gradients(gradients, wanted, case)
            assert (loss, metrics) == results[0][index][:2], "one number on all ranks"
            assert columns.keys() == {"log_probs", "entropy"}
            chosen = subset(documents, [2]) if index == 0 else documents
            mask = torch.cat([chosen.response_mask[i] for i in mine]) if mine else torch.zeros(0, dtype=torch.bool)
            for key, plain in (("log_probs", log_probs), ("entropy", entropies)):
                whole = torch.cat([plain[i] for i in mine]) if mine else torch.zeros(0)
                torch.testing.assert_close(columns[key], whole * mask, rtol=1e-5, atol=1e-5)


def run_in_bf16(folder: str, documents: Documents, options: dict[str, Any]) -> Any:
    """On a rank: columns and gradients in bf16-mixed."""

    def body(module: EngineModule) -> Any:
        experience = documents.experience(list(range(documents.size)))
        columns = module.engine.infer_batch(module.policy, experience, max_tokens_per_micro_batch=32).columns
        return columns["log_probs"], backward(module, experience, SFTLoss(), max_tokens_per_micro_batch=32)[2]

    return with_engine(body, ModelConfig(path=folder), precision="bf16-mixed", engine="torchtitan", **options)


def run_aggregations(folder: str, documents: Documents) -> Any:
    def body(module: EngineModule) -> Any:
        engine = module.engine
        mine = share(range(documents.size), engine.data_parallel_rank, engine.data_parallel_size)
        return [
            backward(
                module,
                documents.experience(mine),
                loss_of(name),
                calculate_entropy=True,
                temperature="temperature",
                max_tokens_per_micro_batch=32,
            )
            for name in GRID["aggregation"]
        ]

    return with_engine(body, ModelConfig(path=folder), engine="torchtitan", pipeline_parallel_degree=2)


def test_every_aggregation_equals_the_plain_model():
    folder, documents = deep_folder("llama"), documents_of("llama")
    for found in run_workers(4, run_aggregations, folder, documents):
        for name, (loss, _, gradients) in zip(GRID["aggregation"], found, strict=True):
            total, expected = reference_gradients(
                folder,
                lambda model, name=name: ppo_reference(model, documents, name, entropy_coef=0.05, kl_coef=0.1)[0],
            )
            assert_number(loss, total, name)
            assert_gradients(gradients, expected, name)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_rounding_in_half_precision_is_that_of_a_whole_model(schedule: str):
    folder, documents = deep_folder("qwen3"), documents_of("qwen3")
    ((whole, expected),) = run_workers(1, run_in_bf16, folder, documents, {})
    for log_probs, gradients in run_workers(2, run_in_bf16, folder, documents, {PP: 2, SCHEDULE: schedule}):
        assert torch.equal(log_probs, whole)
        assert_gradients(gradients, expected)


def run_gspo(folder: str, documents: Documents, options: dict[str, Any]) -> Any:
    def body(module: EngineModule) -> Any:
        engine = module.engine
        mine = share(range(documents.size), engine.data_parallel_rank, engine.data_parallel_size)
        experience = losses.experience_of(documents, mine)
        loss = GSPOLoss(sequence_clip_low=0.03, sequence_clip_high=0.04)
        return [backward(module, experience, loss, max_tokens_per_micro_batch=budget) for budget in (None, 32)]

    return with_engine(body, ModelConfig(path=folder), engine="torchtitan", **options)


@pytest.mark.parametrize(("world", "options"), [(2, {PP: 2}), (4, {PP: 2, CP: 2, SCHEDULE: "GPipe"})])
def test_a_loss_of_whole_sequences_has_the_gradients_of_the_plain_model(world: int, options: dict[str, Any]):
    folder = str(tiny_model_folder(losses.MODEL))
    documents = make_documents(folder, vocabulary=64)
    expected_loss, expected = losses.expected_of("gspo")
    for found in run_workers(world, run_gspo, folder, documents, options):
        for loss, metrics, gradients in found:
            assert_number(loss, expected_loss)
            assert_gradients(gradients, expected)
            assert 0 < metrics["clip_fraction"] < 1


def run_critic(folder: str, policy: str, data: critics.Critique, options: dict[str, Any]) -> Any:
    """On a rank: passes of a critic, with passes of a policy in the same module in between."""

    def body(module: Any) -> Any:
        engine = module.engine
        mine = share(range(len(critics.SHAPES)), engine.data_parallel_rank, engine.data_parallel_size)
        experience = data.experience(mine)
        everywhere = experience.with_columns(response_mask=[[1] * length for length in experience.lengths])
        values = engine.infer_batch(module.critic, everywhere, max_tokens_per_micro_batch=32).columns
        scores = engine.infer_batch(module.policy, experience, max_tokens_per_micro_batch=32).columns
        with engine.train_mode(module.critic), engine.train_mode(module.policy):
            output = engine.forward_backward_batch(
                module.critic, experience, ValueLoss(), max_tokens_per_micro_batch=32
            )
            engine.forward_backward_batch(module.policy, experience, SFTLoss(), max_tokens_per_micro_batch=48)
            gradients = dict(engine.get_per_tensor_grad(module.critic))
            touched = sum(1 for gradient in dict(engine.get_per_tensor_grad(module.policy)).values() if gradient.any())
        return mine, values, list(scores), output.loss, output.metrics, gradients, touched

    configs = {"critic": ModelConfig(path=folder, head="value"), "policy": ModelConfig(path=policy)}
    return with_engine(body, configs, engine="torchtitan", **options)


@pytest.mark.parametrize(("world", "options"), [(2, {PP: 2}), (4, {PP: 2, TP: 2})])
def test_a_critic_beside_a_policy_equals_the_plain_model(world: int, options: dict[str, Any]):
    folder = critics.critic_folder("llama")
    data = critics.make_critique(folder)
    model = critics.plain_model(folder)
    total, metrics = critics.plain_loss(model, data, "token-mean")
    total.backward()
    expected = {key: item.grad for key, item in model.named_parameters()}
    with torch.no_grad():
        plain = critics.plain_values(model, data.input_ids)
    for found in run_workers(world, run_critic, folder, str(tiny_model_folder("llama")), data, options):
        mine, values, scores, loss, own, gradients, touched = found
        torch.testing.assert_close(values["values"], torch.cat([plain[i] for i in mine]), rtol=1e-5, atol=1e-5)
        assert scores == ["log_probs"]
        assert_number(loss, float(total.detach()))
        for key, value in metrics.items():
            assert_number(own[key], value, key)
        assert_gradients(gradients, expected)
        assert touched == 21, "the policy's gradients are of its own pass"


class Failing:
    """A loss that raises at its second call, on the last stage."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: TokenOutputs, micro_batch: MicroBatch) -> LossOutput:
        self.calls += 1
        if self.calls == 2:
            raise KeyError("no such column")
        return SFTLoss()(outputs, micro_batch)


def run_failing(folder: str, documents: Documents, schedule: str) -> Any:
    """On a rank: an accumulated pass, one whose loss fails, and one after it."""

    def body(module: EngineModule) -> Any:
        engine, policy = module.engine, module.policy
        mine = share(range(documents.size), engine.data_parallel_rank, engine.data_parallel_size)
        experience = documents.experience(mine)
        with engine.train_mode(policy):
            for _ in range(2):
                engine.forward_backward_batch(policy, experience, SFTLoss(), max_tokens_per_micro_batch=32)
            twice = dict(engine.get_per_tensor_grad(policy))
        messages = []
        for forward_only in (False, True):
            with pytest.raises((KeyError, RuntimeError)) as caught, engine.train_mode(policy):
                engine.forward_backward_batch(
                    policy, experience, Failing(), max_tokens_per_micro_batch=32, forward_only=forward_only
                )
            messages.append(f"{type(caught.value).__name__}: {caught.value}")
        after = backward(module, experience, SFTLoss(), max_tokens_per_micro_batch=32)[2]
        return twice, after, messages

    return with_engine(body, ModelConfig(path=folder), engine="torchtitan", **{PP: 2, SCHEDULE: schedule})


@pytest.mark.parametrize(("world", "schedule"), [(2, "1F1B"), (4, "GPipe"), (4, "Interleaved1F1B")])
def test_gradients_add_up_and_a_failing_loss_ends_the_pass_on_all_ranks(world: int, schedule: str):
    name = "qwen3"
    documents = documents_of(name)

    def plain(model: Any) -> Tensor:
        log_probs, _ = reference_log_probs(model, documents.input_ids)
        return -torch.cat([item[mask] for item, mask in zip(log_probs, documents.response_mask, strict=True)]).mean()

    _, expected = reference_gradients(deep_folder(name), plain)
    results = run_workers(world, run_failing, deep_folder(name), documents, schedule)
    for rank, (twice, after, messages) in enumerate(results):
        assert_gradients(twice, {key: 2 * value for key, value in expected.items()})
        assert_gradients(after, expected)
        for message in messages:
            if rank < world // 2:
                assert message.startswith("RuntimeError: the loss failed on rank"), message
                assert message.endswith("the last stage of a pipeline: KeyError: 'no such column'"), message
    own = [message for result in results[world // 2 :] for message in result[2]]
    assert "KeyError: 'no such column'" in own


def run_counting(folder: str, schedule: str) -> Any:
    """On a rank: the most hidden states and results of stages that live at a time, by number of rows and pass."""

    def body(module: Any) -> Any:
        engine, policy, most = module.engine, module.policy, {}
        alive: list[weakref.ref[Tensor]] = []
        counts: list[int] = []

        def note(made: Tensor) -> None:
            alive.append(weakref.ref(made))
            counts.append(sum(item() is not None for item in alive))

        def loss(outputs: TokenOutputs, micro_batch: MicroBatch) -> LossOutput:
            note(outputs.log_probs)  # type: ignore[arg-type]
            return SFTLoss()(outputs, micro_batch)

        for stage, part in zip(policy.stages, policy.parts, strict=True):
            if stage < 2 * len(policy.parts) - 1:
                part.register_forward_hook(lambda _, __, hidden: note(hidden))
        for rows in (4, 16):
            experience = Experience.from_documents(
                input_ids=random_documents([8] * rows), response_mask=[[1] * 8] * rows
            )
            for forward_only in (False, True):
                alive.clear()
                counts.clear()
                gc.collect()
                with engine.train_mode(policy):
                    engine.forward_backward_batch(
                        policy, experience, loss, max_tokens_per_micro_batch=8, forward_only=forward_only
                    )
                assert len(counts) == rows * len(policy.parts)
                most[rows, forward_only] = max(counts)
        return most

    return with_engine(body, ModelConfig(path=folder), engine="torchtitan", **{PP: 2, SCHEDULE: schedule})


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B"])
def test_what_is_held_does_not_grow_with_the_number_of_rows(schedule: str):
    for rank, most in enumerate(run_workers(2, run_counting, deep_folder("qwen3"), schedule)):
        assert most[16, True] == most[4, True] <= (3 if schedule != "Interleaved1F1B" else 5), (rank, most)
        if schedule == "GPipe":
            # The first stage has all rows in flight before its first backward pass; results are dropped all the same.
            assert most[16, False] == (16 if rank == 0 else 1), (rank, most)
        else:
            assert most[16, False] <= most[4, False] + 1 <= 8, (rank, most)


def test_a_row_through_a_stage_by_itself_is_refused():
    with pytest.raises(WorkerError, match="a pipeline of stages runs in the strategy's passes only"):
        run_workers(2, call_directly, deep_folder("qwen3"))


def call_directly(folder: str) -> None:
    with_engine(lambda module: module.policy(None), ModelConfig(path=folder), engine="torchtitan", **{PP: 2})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({PP: 4}, r"pipeline_parallel_degree=4 with '1F1B' makes 4 stages of 2 layers; use at most 2"),
        ({PP: 2, SCHEDULE: "Interleaved1F1B"}, r"'Interleaved1F1B' makes 4 stages of 2 layers; use at most 1"),
    ],
)
def test_more_stages_than_layers_are_refused(options: dict[str, Any], words: str):
    with pytest.raises(WorkerError, match=words):
        run_workers(options[PP], call_directly_with, str(tiny_model_folder("qwen3")), options)


def call_directly_with(folder: str, options: dict[str, Any]) -> None:
    with_engine(lambda module: None, ModelConfig(path=folder), engine="torchtitan", **options)
