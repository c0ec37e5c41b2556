"""Bad data and bad calls raise on all ranks together, and say where."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rl_engines import LossOutput, ModelConfig, PolicyLoss
from lightning_rl_engines.strategies.global_batch import describe
from tests.modules.cases import fit, policy_module
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import (
    copies,
    mine,
    plain_model,
    plain_score_loss,
    score_loss,
    train_plain,
)
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.models import tiny_model, tiny_model_folder


def weights(module: EngineModule, name: str = "policy") -> dict[str, torch.Tensor]:
    return copies(module.engine.get_per_tensor_param(getattr(module, name)))


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
        per_token = good.drop("group_ids").with_token_columns(group_ids=torch.zeros_like(ids))
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
            "groups per token": lambda: infer(per_token if bad else good),
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
        "groups per token": ["rank 2: ", "rank 3: ", "'group_ids'", "one per document", "with_document_columns"],
        "no such column": ["temperature='heat'", "input_ids"],
        "columns": ["rank 2", "'advantages'"],
    }
    assert found.keys() == words.keys()
    for name, parts in words.items():
        for part in parts:
            assert part in found[name], (name, found[name])


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16, torch.float32, torch.float64])
def test_columns_of_every_size_and_type_are_described_by_their_values(count: int, dtype: torch.dtype) -> None:
    experience = make_documents(str(tiny_model_folder("llama")), vocabulary=64).experience([0, 1]).select(range(count))

    def prints(column: torch.Tensor) -> tuple[int, ...]:
        other = experience.with_document_columns(weight=column)
        found = describe(other, data_rank=0, vocab_size=64, temperature=1.0, required_columns=(), settings="")
        assert found.error is None
        return found.fingerprints

    one = torch.ones(1, dtype=dtype).expand(count)
    assert prints(one) == prints(torch.ones(count, dtype=dtype))
    assert (prints(one) != prints(torch.zeros(count, dtype=dtype))) == (count > 0)


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


def judge_one_rank_with_nan(completions: list[str]) -> list[float]:
    """NaN where data rank 1 judges, as a reward that divides by zero there would give."""
    return [float("nan") if torch.distributed.get_rank() >= 2 else 1.0 for _ in completions]


def fit_with_nan_reward() -> None:
    fit(policy_module(reward=judge_one_rank_with_nan), sp=2)


def test_a_reward_that_is_nan_on_one_data_rank_is_refused_on_all_ranks() -> None:
    with pytest.raises(WorkerError, match="is nan for prompt") as caught:
        run_workers(4, fit_with_nan_reward)
    assert [error.rank for error in caught.value.errors] == [0, 1, 2, 3]
    for error in caught.value.errors:
        assert "is nan for prompt" in error.message, error.message


def raise_on_one_rank(folder: str, documents: Documents, strategy: dict[str, Any]) -> list[str]:
    """On a rank: how a pass ends whose loss raises on rank 1 alone, in its second row; and the weights after a step."""

    def body(module: EngineModule) -> list[str]:
        engine: Any = module.engine
        rows = 0

        def loss(outputs: Any, micro_batch: Any) -> Any:
            nonlocal rows
            rows += 1
            if rows == 2 and torch.distributed.get_rank() == 1:
                raise KeyError("my column")
            return score_loss(outputs, micro_batch)

        found = []
        for options in ({}, {"forward_only": True}):
            rows = 0
            try:
                engine.forward_backward_batch(
                    module.policy, mine(engine, documents), loss, max_tokens_per_micro_batch=40, **options
                )
            except (KeyError, RuntimeError) as error:
                found.append(f"{type(error).__name__}: {error}")
            assert rows >= 2
        module.policy.zero_grad()
        output = engine.train_batch(module.policy, module.optimizers(), mine(engine, documents), score_loss)
        return [*found, f"{output.metrics['grad_norm']:.4f}"]

    return with_engine(body, ModelConfig(path=folder), **strategy)


@pytest.mark.parametrize("strategy", [{}, {"ulysses_sp_size": 2}, {"fsdp_size": 1}])
def test_a_loss_that_raises_on_one_rank_raises_on_all(strategy: dict[str, Any]) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    first, second = run_workers(2, raise_on_one_rank, folder, documents, strategy)
    assert first[:2] == ["RuntimeError: the loss failed on rank 1: KeyError: 'my column'"] * 2
    assert second[:2] == ["KeyError: 'my column'"] * 2
    plain = plain_model(folder)
    (norm,) = train_plain(plain, documents, steps=1)
    assert first[2] == second[2] == f"{norm:.4f}"


def run_out_of_memory(folder: str, documents: Documents, options: dict[str, Any]) -> list[str]:
    """On a rank: what an allocation that fails says, in a pass of each kind."""

    def body(module: EngineModule) -> list[str]:
        engine, notes = module.engine, []
        layer: Any = next(
            item for item in module.policy.modules() if type(item).__name__ in ("LlamaMLP", "FeedForward")
        )

        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        experience = documents.experience(list(range(documents.size)))
        for loss in (None, score_loss):
            hook = layer.register_forward_hook(fail)
            with pytest.raises(torch.OutOfMemoryError) as caught:
                engine.forward_backward_batch(
                    module.policy, experience, loss, forward_only=loss is None, max_tokens_per_micro_batch=48
                )
            notes += caught.value.__notes__
            hook.remove()
        kept = weights(module)
        assert all(torch.equal(kept[name], item) for name, item in plain_model(folder).named_parameters())
        engine.forward_backward_batch(module.policy, experience, score_loss)
        reference = plain_model(folder)
        plain_score_loss(reference, documents).backward()
        for name, gradient in engine.get_per_tensor_grad(module.policy):
            expected = reference.get_parameter(name).grad
            assert (gradient - expected).norm() < 1e-5 * expected.norm(), name
        return notes

    return with_engine(body, ModelConfig(path=folder), **options)


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, {}),
        (2, {"ulysses_sp_size": 2}),
        (2, {"ulysses_sp_size": 2, "fsdp_size": 1}),
        (1, {"engine": "torchtitan"}),
        (2, {"engine": "torchtitan", "tensor_parallel_degree": 2}),
    ],
    ids=str,
)
def test_after_running_out_of_memory_the_rows_are_named_and_the_model_is_as_before(
    world: int, options: dict[str, Any]
) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    ((first, second), *_) = run_workers(world, run_out_of_memory, folder, documents, options)
    assert first == second
    assert f"max_tokens_per_micro_batch=48), its longest document {max(map(len, documents.input_ids))}." in first
    assert "gradient_checkpointing=True" in first


def useless(folder: str, documents: Documents, options: dict[str, Any]) -> list[str]:
    """On a rank: what is said of losses that cannot train, and a step that works after them."""

    def detached(outputs: Any, micro_batch: Any) -> LossOutput:
        return LossOutput(total=outputs.log_probs.detach().sum(), denominator="tokens")

    def number(outputs: Any, micro_batch: Any) -> Any:
        return outputs.log_probs.sum()

    def body(module: EngineModule) -> list[str]:
        engine, found = module.engine, []
        good = mine(engine, documents)
        for loss in (detached, number):
            with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
                engine.train_batch(module.policy, module.optimizers(), good, loss)
            found.append(str(caught.value))
        engine.forward_backward_batch(module.policy, good, detached, forward_only=True)
        assert engine.train_batch(module.policy, module.optimizers(), good, score_loss).metrics["grad_norm"] > 0
        return found

    return with_engine(body, ModelConfig(path=folder), **options)


@pytest.mark.parametrize(
    "options", [{}, {"engine": "torchtitan"}, {"engine": "torchtitan", "pipeline_parallel_degree": 2}], ids=str
)
def test_a_loss_that_trains_nothing_is_refused_on_all_ranks(options: dict[str, Any]) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    for first, second in run_workers(2, useless, folder, documents, options):
        assert "the loss has no gradient in any micro-batch" in first
        assert "LossOutput(total=..., denominator='tokens')" in second or "the loss failed on rank" in second
