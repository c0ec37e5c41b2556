"""Layouts of the torchtitan engine that several tests go through."""

from typing import Any

_TP, _CP, _EP = "tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree"
_PP, _HSDP = "pipeline_parallel_degree", "data_parallel_replicate_degree"
_BALANCER = "context_parallel_load_balancer"

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
"""Number of ranks and arguments of the strategy, without pipelines."""

PIPELINES: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {_PP: 2}),
    "pp2-dp2": (4, {_PP: 2}),
    "pp2-tp2": (4, {_PP: 2, _TP: 2}),
}


def titan(layout: str) -> tuple[int, dict[str, Any]]:
    """Number of ranks of a layout, and the arguments of ``with_engine`` for it."""
    world, options = {**LAYOUTS, **PIPELINES}[layout]
    return world, {"engine": "torchtitan", **options}
