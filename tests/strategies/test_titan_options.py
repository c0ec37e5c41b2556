"""Every option of the torchtitan strategy changes something that can be seen, or is refused.

The checks are found by the name of the option, so a new option without one fails here.
"""

import inspect
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan")

from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import DoublePrecision, FSDPPrecision
from lightning.pytorch.strategies import model_parallel as lightning_parallel
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_rl_engines import ModelConfig, TorchTitanStrategy
from lightning_rl_engines.models.titan import build
from tests.strategies.checks import asked_of_torch
from tests.strategies.reference import make_documents
from tests.strategies.steps import assert_near, copies, mine, score_loss
from tests.strategies.test_offload import bytes_on_device, state_tensors
from tests.strategies.test_options import Collectives, number, save_once
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.lightning_env import ExternalEnvironment
from tests.support.models import tiny_config, tiny_model_folder

CPU = torch.device("cpu")
TOKENS = 110
"""Of all documents together."""


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def config_of(model: str = "llama", **options: Any) -> ModelConfig:
    if model == "deep":
        return ModelConfig(from_config=tiny_config("llama", num_hidden_layers=4).to_dict(), **options)
    return ModelConfig(path=str(tiny_model_folder(model)), **options)


def observe(config: ModelConfig, precision: str = "32-true", **strategy: Any) -> dict[str, Any]:
    """On a rank: what several micro-batches with gradients do and leave behind."""
    documents = make_documents(tiny_model_folder("llama"), vocabulary=64)

    def body(module: EngineModule) -> dict[str, Any]:
        engine: Any = module.engine
        policy = module.policy
        optimizer = torch.optim.AdamW(policy.parameters(), 1e-2)
        found: dict[str, Any] = {"experts": set(), "entering": [], "order": "", "stages": policy.stages}

        def enter(_: Any, inputs: tuple[Tensor, ...]) -> None:
            found["entering"].append(inputs[0].flatten().tolist())
            found["order"] += "F"

        def leave(_: Any, __: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda _: found.update(order=found["order"] + "B"))

        def meet(experts: Any, _: Any) -> None:
            found["experts"].add(len(local(experts.w1_EFD)))

        policy.parts[0].register_forward_pre_hook(enter)
        policy.parts[0].register_forward_hook(leave)
        for item in policy.modules():
            if type(item).__name__ == "ExactExperts":
                item.register_forward_pre_hook(meet)
        with engine.train_mode(policy, optimizer), Collectives() as collectives, Products() as products:
            engine.forward_backward_batch(policy, mine(engine, documents), score_loss, max_tokens_per_micro_batch=32)
            found["gradients"] = copies(engine.get_per_tensor_grad(policy))
            found["held"] = {name: local(item).numel() for name, item in policy.named_parameters()}
            optimizer.step()
        found["parameter_bytes"] = bytes_on_device(policy.parameters())
        found["state_bytes"] = bytes_on_device([item for item in state_tensors(optimizer) if item.dim()])
        found["data_ranks"] = engine.data_parallel_size
        return {**found, "collectives": collectives.counts, "products": products.count}

    return with_engine(body, config, precision=precision, engine="torchtitan", **strategy)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@cache
def plain(precision: str = "32-true") -> dict[str, Any]:
    """What the first of two ranks sees without any option."""
    return run_workers(2, observe, config_of(), precision)[0]


def seen(precision: str = "32-true", config: ModelConfig | None = None, **strategy: Any) -> dict[str, Any]:
    return run_workers(2, observe, config or config_of(), precision, **strategy)[0]


def whole(found: dict[str, Any]) -> int:
    return sum(item.numel() for item in found["gradients"].values())


def held(found: dict[str, Any]) -> int:
    return sum(found["held"].values())


def same_gradients(found: dict[str, Any]) -> None:
    assert_near(found["gradients"], plain()["gradients"])


# ---- degrees ----


def check_data_parallel_shard_degree(tmp_path: Path) -> None:
    assert held(seen(data_parallel_shard_degree=2)) == held(plain()) < 0.6 * whole(plain())
    with pytest.raises(WorkerError, match=r"data_parallel_shard_degree=1.* needs 1 processes"):
        seen(data_parallel_shard_degree=1)


def check_data_parallel_replicate_degree(tmp_path: Path) -> None:
    found = seen(data_parallel_replicate_degree=2)
    assert held(found) == whole(found)
    same_gradients(found)


def check_tensor_parallel_degree(tmp_path: Path) -> None:
    found = seen(tensor_parallel_degree=2)
    name = "parts.0.layers.0.attention_norm.weight"
    # Norms are whole on each rank; matrices, and the data, are not split as without it.
    assert (found["held"][name], plain()["held"][name]) == (32, 16)
    assert held(found) < 0.6 * whole(found)
    assert (found["data_ranks"], plain()["data_ranks"]) == (1, 2)
    same_gradients(found)


def check_context_parallel_degree(tmp_path: Path) -> None:
    found = seen(context_parallel_degree=2, context_parallel_load_balancer=None)
    assert found["data_ranks"] == 1
    assert TOKENS / 2 <= sum(map(len, found["entering"])) < 0.6 * TOKENS
    same_gradients(found)


def check_context_parallel_load_balancer(tmp_path: Path) -> None:
    parts = []
    for balancer in (None, "headtail", "ptrr"):
        found = seen(context_parallel_degree=2, context_parallel_load_balancer=balancer)
        same_gradients(found)
        parts.append(found["entering"])
    assert parts[0] != parts[1] != parts[2] != parts[0]
    assert seen(context_parallel_degree=2)["entering"] == parts[2]


def check_expert_parallel_degree(tmp_path: Path) -> None:
    expected = seen(config=config_of("qwen3_moe"))
    found = seen(config=config_of("qwen3_moe"), expert_parallel_degree=2)
    assert (expected["experts"], found["experts"]) == ({4}, {2})
    assert_near(found["gradients"], expected["gradients"])


def check_pipeline_parallel_degree(tmp_path: Path) -> None:
    results = run_workers(2, observe, config_of(), pipeline_parallel_degree=2)
    assert [found["stages"] for found in results] == [(0,), (1,)]
    first, second = (found["held"] for found in results)
    assert any("layers.0." in name for name in first) and not any("layers.1." in name for name in first)
    assert any("layers.1." in name for name in second) and not any("layers.0." in name for name in second)
    same_gradients(results[0])


def check_pipeline_parallel_schedule(tmp_path: Path) -> None:
    found = {
        schedule: seen(config=config_of("deep"), pipeline_parallel_degree=2, pipeline_parallel_schedule=schedule)
        for schedule in ("1F1B", "GPipe", "Interleaved1F1B")
    }
    rows = found["GPipe"]["order"].count("F")
    assert found["GPipe"]["order"] == "F" * rows + "B" * rows
    assert found["1F1B"]["order"].startswith("FFBF")
    assert [found[name]["stages"] for name in found] == [(0,), (0,), (0, 2)]


# ---- memory and numbers ----


def check_fsdp_reshard_after_forward(tmp_path: Path) -> None:
    # The unit of the head, which the backward pass needs first, is freed by "always" alone.
    always, never = (seen(fsdp_reshard_after_forward=when) for when in ("always", "never"))
    assert 0 < number(never, "allgather_base") < number(plain(), "allgather_base") < number(always, "allgather_base")
    same_gradients(never)
    same_gradients(always)


def check_activation_checkpointing(tmp_path: Path) -> None:
    config = config_of(gradient_checkpointing=True)
    full, selective = (seen(config=config, activation_checkpointing=kind) for kind in ("full", "selective"))
    assert plain()["products"] < selective["products"] < full["products"]
    assert seen(config=config)["products"] == full["products"]
    # Without checkpointing there is nothing to choose.
    assert seen(activation_checkpointing="selective")["products"] == plain()["products"]
    same_gradients(selective)


def check_cpu_offload(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="cpu_offload=True needs an accelerator"):
        seen(cpu_offload=True)
    # What FSDP2 would be asked for on a device, and what does not go with it.
    for value in (False, True):
        options: Any = SimpleNamespace(compute_dtype=torch.float32, reduce_dtype=torch.float32, cpu_offload=value)
        assert build._training(options).enable_cpu_offload is value
    for other in ("offload_param", "offload_optimizer"):
        strategy = TorchTitanStrategy(cpu_offload=True, **on_cuda(), **{other: True})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="keeps everything in host memory already"):
            strategy.setup_environment()


def check_offload_param(tmp_path: Path) -> None:
    found = seen(offload_param=True)
    assert (found["parameter_bytes"], found["state_bytes"]) == (0, plain()["state_bytes"])
    assert plain()["parameter_bytes"] > 0


def check_offload_optimizer(tmp_path: Path) -> None:
    found = seen(offload_optimizer=True)
    assert (found["parameter_bytes"], found["state_bytes"]) == (plain()["parameter_bytes"], 0)
    assert plain()["state_bytes"] > 0


def check_reduce_dtype(tmp_path: Path) -> None:
    assert number(plain("bf16-mixed"), "_reduce_scatter_base_.default ['torch.float32']") > 0
    found = seen("bf16-mixed", reduce_dtype="bfloat16")
    assert number(found, "_reduce_scatter_base_.default ['torch.bfloat16']") > 0
    assert number(found, "_reduce_scatter_base_.default ['torch.float32']") == 0


def check_defer_gradient_sync(tmp_path: Path) -> None:
    found = seen(defer_gradient_sync=True)
    assert 0 < number(found, "_reduce_scatter_base_") < number(plain(), "_reduce_scatter_base_")
    same_gradients(found)


def check_async_checkpoint(tmp_path: Path) -> None:
    for value in (False, True):
        path = str(tmp_path / str(value))
        assert run_workers(2, save_once, path, engine="torchtitan", async_checkpoint=value) == [[value]] * 2


# ---- processes ----


def on_cuda() -> dict[str, Any]:
    return {"parallel_devices": [torch.device("cuda", 0)], "cluster_environment": ExternalEnvironment()}


def check_process_group_backend(tmp_path: Path) -> None:
    for processes in (1, 2):
        assert asked_of_torch(TorchTitanStrategy(), lightning_parallel, processes)["backend"] == "gloo"
        strategy = TorchTitanStrategy(process_group_backend="mpi")
        assert asked_of_torch(strategy, lightning_parallel, processes)["backend"] == "mpi"
    # On a device there is a side for the host, too: off-loaded gradients are measured there.
    assert TorchTitanStrategy(**on_cuda())._get_process_group_backend() == "cpu:gloo,cuda:nccl"
    with pytest.raises(ValueError, match="process_group_backend='nccl' cannot send host tensors"):
        TorchTitanStrategy(process_group_backend="nccl", **on_cuda())._get_process_group_backend()


def timeouts(seconds: float) -> set[timedelta]:
    """On a rank: the patience of all groups that the strategy made."""

    def body(module: EngineModule) -> set[timedelta]:
        engine: Any = module.engine
        meshes = [engine.mesh, *engine._titan_options.dims.get_all_one_dimensional_meshes().values()]
        groups = [engine._peers, *(group for mesh in meshes for group in mesh.get_all_groups())]
        return {group._get_backend(CPU).options._timeout for group in groups}

    return with_engine(body, config_of(), engine="torchtitan", timeout_seconds=seconds, tensor_parallel_degree=2)


def check_timeout_seconds(tmp_path: Path) -> None:
    for processes in (1, 2):
        asked = asked_of_torch(TorchTitanStrategy(timeout_seconds=7.0), lightning_parallel, processes)
        assert asked["timeout"] == timedelta(seconds=7)
    assert run_workers(2, timeouts, 700.0) == [{timedelta(seconds=700)}] * 2


def check_accelerator(tmp_path: Path) -> None:
    accelerator = CPUAccelerator()
    assert TorchTitanStrategy(accelerator=accelerator).accelerator is accelerator


def check_parallel_devices(tmp_path: Path) -> None:
    strategy = TorchTitanStrategy(parallel_devices=[torch.device("cuda", 3)], cluster_environment=ExternalEnvironment())
    assert strategy.root_device == torch.device("cuda", 3)
    assert strategy.num_processes == 1


def check_cluster_environment(tmp_path: Path) -> None:
    environment = ExternalEnvironment()
    assert (
        asked_of_torch(TorchTitanStrategy(cluster_environment=environment), lightning_parallel)["environment"]
        is environment
    )


def check_precision_plugin(tmp_path: Path) -> None:
    assert TorchTitanStrategy().precision_plugin.storage_dtype == torch.float32
    strategy = TorchTitanStrategy(precision_plugin=FSDPPrecision("bf16-true"))
    assert strategy.precision_plugin.storage_dtype == torch.bfloat16
    with pytest.raises(TypeError, match="does not fit"):
        TorchTitanStrategy(precision_plugin=DoublePrecision())


OPTIONS = list(inspect.signature(TorchTitanStrategy).parameters)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_option_does_something_or_is_refused(name: str, tmp_path: Path) -> None:
    check = globals().get(f"check_{name}")
    assert check is not None, f"the option {name!r} has no check here"
    check(tmp_path)


def test_there_are_no_checks_of_options_that_are_gone() -> None:
    assert {name.removeprefix("check_") for name in globals() if name.startswith("check_")} == set(OPTIONS)
