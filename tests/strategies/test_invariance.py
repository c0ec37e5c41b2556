"""Loss, metrics and every gradient equal the plain single-process reference, whatever the layout."""

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from lightning_rl_engines import ModelConfig, PolicyLoss
from tests.strategies.reference import Documents, make_documents, ppo_reference, reference_gradients
from tests.support import run_workers
from tests.support.engine import EngineModule, share, with_engine
from tests.support.models import tiny_model_folder
from tests.support.pairwise import pairwise

GRID: dict[str, tuple[Any, ...]] = {
    "layout": ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)),
    "micro": ("one", "several", "each"),
    "aggregation": (
        "token-mean",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        "token-sum-over-constant",
    ),
    "model": ("llama", "llama_tied", "qwen2", "qwen3", "one_kv", "odd_vocab", "mistral_window", "qwen3_moe"),
    "fsdp_size": (None, 1, 2),
    "balance": (False, True),
    "checkpointing": (False, True),
    "defer": (False, True),
}
_BUDGET = {"one": None, "several": 48, "each": 32}


def _legal(case: dict[str, Any]) -> bool:
    size = case.get("fsdp_size")
    return size is None or size <= case.get("layout", (4, 1))[0]


def full_product() -> list[dict[str, Any]]:
    """The product of layout, micro-batching, aggregation and model; the other options change with the case."""
    axes = ("layout", "micro", "aggregation", "model")
    cases = []
    for index, values in enumerate(itertools.product(*(GRID[name] for name in axes))):
        options = {"fsdp_size": (None, 1)[index % 2], "balance": index % 3 == 0, "checkpointing": index % 5 == 0}
        cases.append({**dict(zip(axes, values, strict=True)), **options, "defer": index % 7 == 0})
    return cases


def loss_of(aggregation: str) -> PolicyLoss:
    return PolicyLoss(
        clip_low=0.2,
        clip_high=0.28,
        aggregation=aggregation,  # type: ignore[arg-type]
        loss_scale_factor=32 if aggregation == "seq-mean-token-sum-norm" else None,
        constant=50 if aggregation == "token-sum-over-constant" else None,
        entropy_coef=0.05,
        kl_coef=0.1,
    )


def run_case(
    folder: str,
    documents: Documents,
    case: dict[str, Any],
    passes: Sequence[tuple[str, str]],
    engine: str = "fsdp_ulysses",
    options: dict[str, Any] | None = None,
) -> list[tuple[float, dict[str, Any], dict[str, Any]]]:
    """On a rank: loss, metrics and gradients of each pass, an aggregation and a way to micro-batch."""

    def body(module: EngineModule) -> Any:
        engine = module.engine
        mine = share(range(documents.size), engine.data_parallel_rank, engine.data_parallel_size)
        results = []
        for aggregation, micro in passes:
            with engine.train_mode(module.policy):
                output = engine.forward_backward_batch(
                    module.policy,
                    documents.experience(mine),
                    loss_of(aggregation),
                    calculate_entropy=True,
                    temperature="temperature",
                    max_tokens_per_micro_batch=_BUDGET[micro],
                    balance=case["balance"],
                )
                norm = float(engine.clip_grad_norm(module.policy, None))
                gradients = dict(engine.get_per_tensor_grad(module.policy))
            results.append((output.loss, {**output.metrics, "grad_norm": norm}, gradients))
        return results

    return with_engine(
        body,
        ModelConfig(path=folder, gradient_checkpointing=bool(case["checkpointing"])),
        engine=engine,
        defer_gradient_sync=case["defer"],
        **(options or {}),
    )


def check_case(case: dict[str, Any]) -> None:
    options = {"ulysses_sp_size": case["layout"][1], "fsdp_size": case["fsdp_size"]}
    passes = [(case["aggregation"], case["micro"])]
    compare_with_reference(case, passes, case["layout"][0], "fsdp_ulysses", options)


@cache
def _expected(
    folder: str, vocabulary: int, aggregation: str
) -> tuple[float, dict[str, float], dict[str, torch.Tensor]]:
    """Loss, metrics and gradients of the plain model."""
    metrics: dict[str, float] = {}

    def loss(model: Any) -> torch.Tensor:
        documents = make_documents(folder, vocabulary=vocabulary)
        total, found = ppo_reference(model, documents, aggregation, entropy_coef=0.05, kl_coef=0.1)
        metrics.update(found)
        return total

    total, gradients = reference_gradients(folder, loss)
    metrics["grad_norm"] = float(torch.cat([item.flatten() for item in gradients.values()]).norm())
    return total, metrics, gradients


def compare_with_reference(
    case: dict[str, Any], passes: Sequence[tuple[str, str]], world: int, engine: str, options: dict[str, Any]
) -> None:
    """Run the passes of a case on ``world`` ranks, and compare everything with the plain model."""
    folder = str(case.get("folder") or tiny_model_folder(case["model"]))
    vocabulary = 64 if "model" in case and case["model"] != "odd_vocab" else 97
    documents = make_documents(folder, vocabulary=vocabulary)
    on_ranks = run_workers(world, run_case, folder, documents, case, passes, engine, options)
    for index, (aggregation, _) in enumerate(passes):
        expected_loss, expected_metrics, expected = _expected(folder, vocabulary, aggregation)
        results = [passes_of_rank[index] for passes_of_rank in on_ranks]
        for found_loss, metrics, gradients in results:
            assert found_loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
            for name, value in expected_metrics.items():
                assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
            assert gradients.keys() == expected.keys()
            for name, value in expected.items():
                error = (gradients[name] - value).norm() / value.norm()
                assert error < 1e-5, f"{name}: relative error {error:.2e}"
            assert (found_loss, metrics) == results[0][:2]


def _id(case: dict[str, Any]) -> str:
    return "-".join(str(value).replace(" ", "") for value in case.values())


@pytest.mark.parametrize("case", pairwise(GRID, _legal), ids=_id)
def test_every_pair_of_options_equals_the_plain_model(case: dict[str, Any]) -> None:
    check_case(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", full_product(), ids=_id)
def test_the_full_product_equals_the_plain_model(case: dict[str, Any]) -> None:
    check_case(case)
