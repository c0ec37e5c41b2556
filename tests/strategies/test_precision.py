"""What each precision word stores, computes, reduces and keeps; and the loss scale of fp16."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_rl_engines import LossOutput, ModelConfig, SFTLoss
from lightning_rl_engines.strategies.loss_scale import LossScale
from tests.strategies.reference import Documents, make_documents
from tests.support import run_workers
from tests.support.engine import EngineModule, share, with_engine
from tests.support.models import tiny_model_folder

TP = {"tensor_parallel_degree": 2}

TYPES = {
    #             weights, compute, gradients, optimizer state
    "32-true": (torch.float32, torch.float32, torch.float32, torch.float32),
    "bf16-mixed": (torch.float32, torch.bfloat16, torch.float32, torch.float32),
    "16-mixed": (torch.float32, torch.float16, torch.float32, torch.float32),
    "bf16-true": (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16),
}


def inspect(documents: Documents) -> Callable[[EngineModule], Any]:
    """A body that takes one AdamW step and notes the types met on the way."""
    found: dict[str, Any] = {}

    def body(module: EngineModule) -> Any:
        engine: Any = module.engine
        model = module.policy
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        layer: Any = next(item for item in model.modules() if type(item).__name__ in ("LlamaMLP", "FeedForward"))
        layer.register_forward_hook(lambda _, inputs, output: found.update(compute=(inputs[0].dtype, output.dtype)))

        def loss(outputs: Any, micro_batch: Any) -> LossOutput:
            found["outputs"] = outputs.log_probs.dtype
            found["column"] = micro_batch["old_log_probs"].dtype
            return SFTLoss()(outputs, micro_batch)

        mine = share(range(documents.size), engine.data_parallel_rank, engine.data_parallel_size)
        with engine.train_mode(model, optimizer):
            engine.forward_backward_batch(model, documents.experience(mine), loss)
            found["gradients"] = {p.grad.dtype for p in model.parameters() if p.grad is not None}
            gradients = dict(engine.get_per_tensor_grad(model))
            optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        found["state"] = {value.dtype for value in states if value.dim()}
        found["weights"] = {p.dtype for p in model.parameters()}
        found["buffers"] = {b.dtype for b in model.buffers() if b.is_floating_point()}
        return found, gradients

    return body


def run(folder: str, documents: Documents, precision: str, **strategy: Any) -> Any:
    return with_engine(inspect(documents), ModelConfig(path=folder), precision=precision, **strategy)


LAYOUTS = {
    "fsdp_ulysses": ((1, {}), (2, {}), (2, {"ulysses_sp_size": 2, "fsdp_size": 1})),
    "torchtitan": tuple((world, {"engine": "torchtitan", **options}) for world, options in ((1, {}), (2, {}), (2, TP))),
}


@pytest.mark.parametrize("engine", LAYOUTS)
@pytest.mark.parametrize("precision", TYPES)
def test_each_precision_means_what_it_says(precision: str, engine: str) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    weights, compute, gradients, state = TYPES[precision]
    for world, layout in LAYOUTS[engine]:
        for found, _ in run_workers(world, run, folder, documents, precision, **layout):
            assert found["weights"] == {weights}
            assert found["compute"] == (compute, compute)
            assert found["gradients"] == {gradients}
            assert found["state"] == {state}
            assert found["buffers"] == {torch.float32}
            assert found["outputs"] == torch.float32
            assert found["column"] == torch.float32


HALF = {"bf16-mixed": 0.05, "16-mixed": 0.008, "bf16-true": 0.05}
"""Bounds on the distance of a gradient from that of fp32, relative to its norm."""

TITAN = {"tp2": TP, "cp2": {"context_parallel_degree": 2}, "pp2": {"pipeline_parallel_degree": 2}}
"""Layouts of two ranks that hold documents together."""


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        *((precision, {}) for precision in HALF),
        *((precision, {"engine": "torchtitan"}) for precision in HALF),
        *(("16-mixed", {"engine": "torchtitan", **layout}) for layout in TITAN.values()),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)) or "fsdp_ulysses",
)
def test_half_precision_gradients_are_near_those_of_fp32(precision: str, layout: dict[str, Any]) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    _, exact = run_workers(1, run, folder, documents, "32-true")[0]
    for _, found in run_workers(2, run, folder, documents, precision, **layout):
        assert found.keys() == exact.keys()
        for name, value in exact.items():
            assert (found[name].float() - value).norm() / value.norm() < HALF[precision], name


def overflow(folder: str, documents: Documents, options: dict[str, Any]) -> Any:
    """fp16: a first step in which one layer of rank 0 overflows in its backward pass, then one without."""

    def body(module: EngineModule) -> Any:
        engine: Any = module.engine
        optimizer: Any = module.optimizers()
        mine = share(range(documents.size), engine.data_parallel_rank, engine.data_parallel_size)
        experience = documents.experience(mine)
        before = dict(engine.get_per_tensor_param(module.policy))
        layer: Any = next(item for item in module.policy.modules() if type(item).__name__ in BLOCKS)
        hooks = [layer.register_forward_hook(explode)] if module.global_rank == 0 else []

        metrics = [engine.train_batch(module.policy, optimizer, experience, SFTLoss()).metrics]
        unchanged = all(torch.equal(before[name], item) for name, item in engine.get_per_tensor_param(module.policy))
        for hook in hooks:
            hook.remove()
        metrics.append(engine.train_batch(module.policy, optimizer, experience, SFTLoss()).metrics)
        changed = any(not torch.equal(before[n], item) for n, item in engine.get_per_tensor_param(module.policy))
        return metrics, unchanged, changed, module.trainer.precision_plugin.state_dict()

    return with_engine(body, ModelConfig(path=folder), precision="16-mixed", **options)


BLOCKS = ("LlamaMLP", "FeedForward", "MoE")


def explode(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * 65504.0 * 65504.0)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {}),
        ("llama", {"engine": "torchtitan"}),
        *(("llama", {"engine": "torchtitan", **layout}) for layout in TITAN.values()),
        ("qwen3_moe", {"engine": "torchtitan", "expert_parallel_degree": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)) or "fsdp_ulysses",
)
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(
    model: str, options: dict[str, Any]
) -> None:
    folder = str(tiny_model_folder(model))
    documents = make_documents(folder, vocabulary=64)
    for (first, second), unchanged, changed, state in run_workers(2, overflow, folder, documents, options):
        assert first["skipped_step"] == 1
        assert first["loss_scale"] == 2.0**16
        assert not math.isfinite(first["grad_norm"])
        assert unchanged
        assert second["skipped_step"] == 0
        assert second["loss_scale"] == 2.0**15
        assert changed
        assert state == {"value": 2.0**15, "finite_steps": 1}


def test_the_loss_scale_grows_after_enough_finite_steps_and_keeps_gradients_true() -> None:
    scale = LossScale(4.0, growth_interval=2)
    weight = torch.nn.Parameter(torch.ones(3))
    for _ in range(2):
        with scale.applied([weight]):
            (weight.sum() * scale.value).backward()
    assert torch.equal(weight.grad, torch.full((3,), 2.0))
    for finite, expected in ((True, 4.0), (True, 8.0), (True, 8.0), (False, 4.0), (True, 4.0), (True, 8.0)):
        scale.update(finite)
        assert scale.value == expected
    restored = LossScale()
    restored.load_state_dict(scale.state_dict())
    assert restored.state_dict() == scale.state_dict()


def refused(folder: str, precision: str, config: dict[str, Any], strategy: dict[str, Any]) -> None:
    with_engine(lambda module: None, ModelConfig(path=folder, **config), precision=precision, **strategy)


def test_contradictions_are_refused() -> None:
    folder = str(tiny_model_folder("llama"))
    with pytest.raises(Exception, match="contradicts precision='bf16-mixed'"):
        run_workers(1, refused, folder, "bf16-mixed", {"dtype": "bfloat16"}, {})
    with pytest.raises(Exception, match="accumulate gradients in half precision"):
        run_workers(1, refused, folder, "bf16-mixed", {}, {"defer_gradient_sync": True})
    with pytest.raises(Exception, match="precision='16-true'"):
        run_workers(1, refused, folder, "16-true", {}, {})
