"""Loss, metrics and every gradient of the torchtitan engine equal the plain reference, whatever the layout."""

import itertools
from typing import Any

import pytest

from tests.strategies.test_invariance import GRID, compare_with_reference
from tests.support.pairwise import pairwise

_TP, _CP, _EP = "tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree"
_HSDP, _BALANCER = "data_parallel_replicate_degree", "context_parallel_load_balancer"

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "replicate2": (2, {_HSDP: 2}),
    "hsdp2x2": (4, {_HSDP: 2}),
    "tp2": (2, {_TP: 2}),
    "cp2": (2, {_CP: 2, _BALANCER: None}),
    "cp2-headtail": (2, {_CP: 2, _BALANCER: "headtail"}),
    "cp2-ptrr": (2, {_CP: 2, _BALANCER: "ptrr"}),
    "dp2-tp2": (4, {_TP: 2}),
    "cp2-tp2": (4, {_CP: 2, _TP: 2}),
    "ep2": (2, {_EP: 2}),
    "ep2-dp2": (4, {_EP: 2}),
    "ep4": (4, {_EP: 4}),
    "ep2-tp2": (4, {_EP: 2, _TP: 2}),
    "ep2-cp2": (4, {_EP: 2, _CP: 2}),
    "ep2-hsdp": (4, {_EP: 2, _HSDP: 2}),
    "dp2-cp2-tp2": (8, {_CP: 2, _TP: 2}),
    "dp2-cp2-tp2-ep4": (8, {_CP: 2, _TP: 2, _EP: 4}),
}
"""Number of ranks and arguments of the strategy. Pipelines have tests of their own."""

SMALL = tuple(name for name, (world, _) in LAYOUTS.items() if world <= 4)

_MODELS = ("llama_tied", "qwen3", "odd_vocab", "qwen3_moe")

TITAN_GRID: dict[str, tuple[Any, ...]] = {
    "layout": SMALL,
    "micro": GRID["micro"],
    "aggregation": GRID["aggregation"],
    "model": _MODELS,
    "checkpointing": (False, "full", "selective"),
    "defer": (False, True),
}


def _legal(case: dict[str, Any]) -> bool:
    _, options = LAYOUTS[case.get("layout", "one")]
    sparse = case.get("model") == "qwen3_moe"
    if _EP in options and "model" in case and not sparse:
        return False
    return not (_TP in options and _EP not in options and sparse)


def _id(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


def check_case(case: dict[str, Any]) -> None:
    world, options = LAYOUTS[case["layout"]]
    mode = case["checkpointing"] or "full"
    compare_with_reference(
        {"balance": False, **case}, world, "torchtitan", {**options, "activation_checkpointing": mode}
    )


def full_product() -> list[dict[str, Any]]:
    """The product of layout, micro-batching, aggregation and model; the other options change with the case."""
    axes = {"layout": SMALL, "micro": GRID["micro"], "aggregation": GRID["aggregation"], "model": _MODELS}
    cases = []
    for index, values in enumerate(itertools.product(*axes.values())):
        case = dict(zip(axes, values, strict=True))
        if _legal(case):
            cases.append(
                {
                    **case,
                    "checkpointing": (False, "full", "selective")[index % 3],
                    "defer": index % 7 == 0,
                    "balance": index % 5 == 0,
                }
            )
    return cases


@pytest.mark.parametrize("case", pairwise(TITAN_GRID, _legal), ids=_id)
def test_every_pair_of_options_equals_the_plain_model(case: dict[str, Any]) -> None:
    check_case(case)


@pytest.mark.parametrize(("layout", "model"), [("dp2-cp2-tp2", "llama_tied"), ("dp2-cp2-tp2-ep4", "qwen3_moe")])
def test_three_axes_of_eight_ranks_equal_the_plain_model(layout: str, model: str) -> None:
    case = {"layout": layout, "micro": "several", "aggregation": "seq-mean-token-mean", "model": model}
    check_case({**case, "checkpointing": False, "defer": False, "balance": True})


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", full_product(), ids=_id)
def test_the_full_product_equals_the_plain_model(case: dict[str, Any]) -> None:
    check_case(case)
