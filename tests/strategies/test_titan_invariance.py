"""Loss, metrics and every gradient of the torchtitan engine equal the plain reference, whatever the layout."""

import collections
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rl_engines import ModelConfig
from tests.models.titan import test_deepseek, test_gpt_oss
from tests.models.titan.exactness import hugging_face_model
from tests.strategies.layouts import LAYOUTS
from tests.strategies.reference import Documents, make_documents
from tests.strategies.test_invariance import GRID, compare_with_reference
from tests.support import run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.models import reference_log_probs, tiny_model
from tests.support.pairwise import pairwise

SMALL = tuple(name for name, (world, _) in LAYOUTS.items() if world <= 2)
PRODUCTS = tuple(name for name, (world, _) in LAYOUTS.items() if world == 4)

_MODELS = ("llama_tied", "odd_vocab", "qwen3_moe")

TITAN_GRID: dict[str, tuple[Any, ...]] = {
    "layout": SMALL,
    "model": _MODELS,
    "checkpointing": (False, "full", "selective"),
    "defer": (False, True),
}

_PASSES = 2
"""Passes of a case in the suite; those of one layout together have all aggregations and ways to micro-batch."""


def _legal(case: dict[str, Any]) -> bool:
    _, options = LAYOUTS[case.get("layout", "one")]
    sparse = case.get("model") == "qwen3_moe"
    if case.get("model") == "odd_vocab" and LAYOUTS[case.get("layout", "one")][0] == 8:
        return False  # refused: torch cannot place the parts of 97 rows
    return sparse or "expert_parallel_degree" not in options or "model" not in case


def _id(value: Any) -> str:
    return "-".join(str(item) for item in value.values()) if isinstance(value, dict) else str(value)


def check_case(case: dict[str, Any], first: int = 0, count: int = len(GRID["aggregation"])) -> None:
    """Run so many passes, from the given one on in the endless row of aggregations and ways to micro-batch."""
    world, options = LAYOUTS[case["layout"]]
    aggregations, micro = GRID["aggregation"], GRID["micro"]
    passes = [
        (aggregations[index % len(aggregations)], micro[index % len(micro)]) for index in range(first, first + count)
    ]
    options = {**options, "activation_checkpointing": case["checkpointing"] or "full"}
    compare_with_reference({"balance": False, **case}, passes, world, "torchtitan", options)


def pairs() -> list[tuple[int, dict[str, Any]]]:
    """Cases that cover every pair of the grid, each with the number of its first pass among those of its layout."""
    of_layout: collections.Counter[str] = collections.Counter()
    cases = []
    for case in pairwise(TITAN_GRID, _legal):
        cases.append((_PASSES * of_layout[case["layout"]], case))
        of_layout[case["layout"]] += 1
    assert all(_PASSES * count >= len(GRID["aggregation"]) for count in of_layout.values())
    return cases


def full_product() -> list[tuple[int, dict[str, Any]]]:
    """The product of layout, model, micro-batching and aggregation; the other options change with the case."""
    models = (*_MODELS, "llama", "qwen2", "qwen3")
    cases = []
    for index, (layout, model, first) in enumerate(itertools.product(LAYOUTS, models, (0, 5, 10))):
        case = {"layout": layout, "model": model}
        if _legal(case):
            options = {"checkpointing": (False, "full", "selective")[index % 3], "defer": index % 7 == 0}
            cases.append((first, {**case, **options, "balance": index % 5 == 0}))
    return cases


@pytest.mark.parametrize(("first", "case"), pairs(), ids=_id)
def test_every_pair_of_options_equals_the_plain_model(first: int, case: dict[str, Any]) -> None:
    check_case(case, first, _PASSES)


@pytest.mark.parametrize("index", range(len(PRODUCTS)), ids=PRODUCTS)
def test_products_of_axes_equal_the_plain_model(index: int) -> None:
    """Every aggregation and way to micro-batch; models and options change with the layout."""
    layout = PRODUCTS[index]
    dense = "expert_parallel_degree" not in LAYOUTS[layout][1]
    case = {
        "layout": layout,
        "model": ("llama_tied", "odd_vocab")[index % 2] if dense else "qwen3_moe",
        "checkpointing": (False, "full", "selective")[index % 3],
        "defer": index % 2 == 1,
        "balance": index % 2 == 0,
    }
    check_case(case)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("dp2-cp2-tp2", "llama_tied"),
        pytest.param("dp2-cp2-tp2-ep4", "qwen3_moe", marks=pytest.mark.exhaustive),
    ],
)
def test_three_axes_of_eight_ranks_equal_the_plain_model(layout: str, model: str) -> None:
    case = {"layout": layout, "model": model, "checkpointing": False, "defer": False, "balance": True}
    check_case(case, count=_PASSES)


@pytest.mark.parametrize("layout", ["dp2", "tp2", "cp2", "ep2", "ep2-tp2"])
@pytest.mark.parametrize("family", [test_deepseek, test_gpt_oss], ids=["deepseek", "gpt_oss"])
def test_experts_of_other_families_equal_the_plain_model(tmp_path: Path, family: Any, layout: str) -> None:
    hugging_face_model(family.config_of()).save_pretrained(tmp_path)
    case = {"layout": layout, "folder": tmp_path, "checkpointing": False, "defer": False}
    check_case(case, count=1)


def short_log_probs(folder: str, documents: Documents, options: dict[str, Any]) -> torch.Tensor:
    def body(module: EngineModule) -> torch.Tensor:
        return module.engine.infer_batch(module.policy, documents.experience([0])).columns["log_probs"]

    return with_engine(body, ModelConfig(path=folder), engine="torchtitan", **options)


def test_padding_needs_no_positions_that_a_model_lacks(tmp_path: Path) -> None:
    """Tensor parallelism rounds rows up to 128 tokens, and many a small model has fewer positions."""
    model = tiny_model("llama", max_position_embeddings=40)
    model.save_pretrained(tmp_path)
    documents = make_documents(str(tmp_path), vocabulary=64)
    with torch.no_grad():
        (expected,), _ = reference_log_probs(model, documents.input_ids[:1])
    expected = expected * documents.response_mask[0]
    for found in run_workers(2, short_log_probs, str(tmp_path), documents, {"tensor_parallel_degree": 2}):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("first", "case"), full_product(), ids=_id)
def test_the_full_product_equals_the_plain_model(first: int, case: dict[str, Any]) -> None:
    check_case(case, first)
