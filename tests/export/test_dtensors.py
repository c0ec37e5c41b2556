"""Full tensors out of every sharding that DTensors have: to the bit, in blocks, the same names on all ranks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_rl_engines.export import ExportEntry, ExportPlan, stream_dtensors
from tests.support import WorkerError, run_workers

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
KILOBYTE = 1024


@dataclass(frozen=True)
class Piece:
    name: str
    expert: int | None = None
    transposed: bool = False


class Names:
    """Three-dimensional tensors are stacks of experts; those called ``t...`` are stored transposed."""

    def pieces(self, fqn: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
        transposed = fqn.startswith("t")
        if len(shape) < 3:
            return (Piece(f"hf.{fqn}", None, transposed),)
        return tuple(Piece(f"hf.{index}.{fqn}", index, transposed) for index in range(shape[0]))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(BITS[tensor.element_size()])


def random_bits(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Any bit pattern, so NaN payloads, infinities and signed zeros among others."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    kind = BITS[dtype.itemsize]
    info = torch.iinfo(kind)
    values = torch.randint(info.min, info.max, shape, generator=generator, dtype=kind)
    values.view(-1)[:2] = torch.tensor([-0.0, float("nan")], dtype=dtype).view(kind) + torch.tensor([0, 1], dtype=kind)
    return values.view(dtype)


def cut(full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a walk must yield, in its order."""
    expected = {}
    for fqn, tensor in full.items():
        for piece in Names().pieces(fqn, tuple(tensor.shape)):
            value = tensor if piece.expert is None else tensor[piece.expert]
            expected[piece.name] = value.mT if piece.transposed else value
    return expected


def plan_of(full: Mapping[str, Tensor]) -> ExportPlan:
    entries = []
    for fqn, tensor in full.items():
        for name, value in cut({fqn: tensor}).items():
            entries.append(ExportEntry(name, tuple(value.shape), value.dtype, fqn))
    return ExportPlan(tuple(entries))


def check(stream: Iterator[tuple[str, Tensor]], expected: Mapping[str, Tensor]) -> list[str]:
    """Compare a walk with what it should be, and return its names."""
    kept = list(stream)
    assert [name for name, _ in kept] == list(expected)
    for name, tensor in kept:
        assert not isinstance(tensor, DTensor)
        assert tensor.dtype == expected[name].dtype, name
        assert tensor.is_contiguous(), name
        assert not tensor.requires_grad
        assert torch.equal(bits(tensor), bits(expected[name])), name
    storages = {tensor.untyped_storage().data_ptr() for _, tensor in kept}
    assert len(storages) == len(kept)  # copies of their own, so they stay valid and can be freed alone
    return [name for name, _ in kept]


def sharded(full: Mapping[str, Tensor], mesh: DeviceMesh, outer: str | tuple[str, str], inner: Any = None) -> nn.Module:
    """Parameters split over the axes of ``inner`` (axis to fqn to placement), then by FSDP2 over ``outer``."""
    module = nn.Module()
    for fqn, tensor in full.items():
        value: Tensor = tensor.clone()
        if inner:
            axes = tuple(inner)
            placements = [inner[axis].get(fqn, Replicate()) for axis in axes]
            value = distribute_tensor(value, mesh[axes if len(axes) > 1 else axes[0]], placements)
        module.register_parameter(fqn, nn.Parameter(value))
    # Columns where rows are too few, as torchtitan does with experts.
    fully_shard(module, mesh=mesh[outer], shard_placement_fn=lambda p: Shard(1) if p.shape[0] == 2 else Shard(0))
    return module


def matrices(dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "even": random_bits(16, 8, dtype=dtype),
        "rows": random_bits(97, 3, dtype=dtype),
        "tcolumns": random_bits(8, 97, dtype=dtype),
        "norm": random_bits(13, dtype=dtype),
        "few": random_bits(3, 5, dtype=dtype),
    }


def stacks(dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "experts": random_bits(8, 4, 6, dtype=dtype),
        "t_experts": random_bits(7, 5, 3, dtype=dtype),
        "wide": random_bits(2, 8, 3, dtype=dtype),
        "five": random_bits(5, 3, 3, dtype=dtype),
        "router": random_bits(8, 6, dtype=dtype),
    }


TP = {"tp": {"even": Shard(0), "rows": Shard(0), "tcolumns": Shard(1), "few": Shard(0)}}
EP = {"ep": dict.fromkeys(("experts", "t_experts", "wide", "five"), Shard(0))}
ETP = {**EP, "etp": {"experts": Shard(1), "t_experts": Shard(2), "wide": Shard(2), "five": Shard(1)}}

LAYOUTS: dict[str, tuple[Any, ...]] = {
    "fsdp2": (2, (2,), ("fsdp",), "fsdp", None, matrices),
    "fsdp4": (4, (4,), ("fsdp",), "fsdp", None, matrices),
    "hsdp": (4, (2, 2), ("replicate", "fsdp"), ("replicate", "fsdp"), None, matrices),
    "fsdp_tp": (4, (2, 2), ("fsdp", "tp"), "fsdp", TP, matrices),
    "hsdp_tp": (8, (2, 2, 2), ("replicate", "fsdp", "tp"), ("replicate", "fsdp"), TP, matrices),
    "stacks_fsdp": (4, (4,), ("fsdp",), "fsdp", None, stacks),
    "ep": (4, (2, 2), ("efsdp", "ep"), "efsdp", EP, stacks),
    "ep_etp": (8, (2, 2, 2), ("efsdp", "ep", "etp"), "efsdp", ETP, stacks),
    "hsdp_ep": (8, (2, 2, 2), ("replicate", "efsdp", "ep"), ("replicate", "efsdp"), EP, stacks),
}


def build(layout: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], nn.Module]:
    _, shape, axes, outer, inner, tensors = LAYOUTS[layout]
    full = tensors(dtype)
    return full, sharded(full, init_device_mesh("cpu", shape, mesh_dim_names=axes), outer, inner)


def walk_layout(layout: str, dtype: torch.dtype) -> list[list[str]]:
    full, module = build(layout, dtype)
    parameters = dict(module.named_parameters())
    kinds = {type(p).__name__ for parameter in parameters.values() for p in parameter.placements}
    assert ("_StridedShard" in kinds) == any(axis in layout for axis in ("tp", "ep"))
    before = {name: bits(parameter.to_local().detach()).clone() for name, parameter in parameters.items()}
    names = []
    for bucket_bytes in (1, 300, 10 * KILOBYTE):
        stream = stream_dtensors(parameters, plan_of(full), Names(), bucket_bytes=bucket_bytes)
        names.append(check(stream, cut(full)))
    assert all(torch.equal(bits(p.to_local().detach()), before[name]) for name, p in parameters.items())
    return names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_very_bits_under_the_same_names(layout: str, dtype: torch.dtype) -> None:
    first, *others = run_workers(LAYOUTS[layout][0], walk_layout, layout, dtype)
    assert first[0] == first[1] == first[2]
    assert all(names == first for names in others)


def test_plain_tensors_are_copied_without_a_process_group() -> None:
    full = {**matrices(torch.float32), **stacks(torch.bfloat16), "count": torch.tensor(3), "mask": torch.ones(3) > 0}
    check(stream_dtensors(full, plan_of(full), Names(), bucket_bytes=100), cut(full))
    shared = {tensor.untyped_storage().data_ptr() for tensor in full.values()}
    for _, tensor in stream_dtensors(full, plan_of(full), Names()):
        assert tensor.untyped_storage().data_ptr() not in shared


def walk_in_bf16() -> None:
    full = {"rows": torch.randn(97, 3), "experts": torch.randn(5, 4, 4), "steps": torch.arange(4)}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    steps = distribute_tensor(full["steps"], mesh, [Shard(0)])
    parameters = {**dict(sharded({k: full[k] for k in ("rows", "experts")}, mesh, "fsdp").named_parameters())}
    expected = {k: v.bfloat16() if v.is_floating_point() else v for k, v in cut(full).items()}
    stream = stream_dtensors({**parameters, "steps": steps}, plan_of(full), Names(), dtype=torch.bfloat16)
    check(stream, expected)


def test_floating_point_tensors_are_cast() -> None:
    run_workers(2, walk_in_bf16)


def walk_and_count(layout: str, bucket_bytes: int) -> tuple[int, int]:
    """Most bytes alive beyond the model while a walk goes on, and bytes of the whole stack."""
    dtype = torch.float32
    _, shape, axes, outer, inner, _ = LAYOUTS[layout]
    full = {"experts": random_bits(16, 32, 8, dtype=dtype)}
    module = sharded(full, init_device_mesh("cpu", shape, mesh_dim_names=axes), outer, inner)
    stream = stream_dtensors(dict(module.named_parameters()), plan_of(full), Names(), bucket_bytes=bucket_bytes)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _, tensor in stream:
            del tensor
    now = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda item: item.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak, full["experts"].nbytes


@pytest.mark.parametrize("layout", ["stacks_fsdp", "ep", "ep_etp"])
def test_a_stack_is_never_whole(layout: str) -> None:
    expert = 32 * 8 * 4
    for experts in (1, 4):
        for peak, whole in run_workers(LAYOUTS[layout][0], walk_and_count, layout, experts * expert + 1):
            # One block, and one expert as it is yielded.
            assert peak == (experts + 1) * expert < whole


def stop_early(layout: str) -> None:
    full, module = build(layout, torch.float32)
    parameters = dict(module.named_parameters())
    for index, (_, tensor) in enumerate(stream_dtensors(parameters, plan_of(full), Names(), bucket_bytes=200)):
        tensor.zero_()  # a copy is the consumer's own
        if index == 3:
            break
    dist.barrier()
    check(stream_dtensors(parameters, plan_of(full), Names()), cut(full))
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.zero_()
    zeros = cut({name: torch.zeros_like(tensor) for name, tensor in full.items()})
    check(stream_dtensors(parameters, plan_of(full), Names()), zeros)


@pytest.mark.parametrize("layout", ["fsdp_tp", "ep"])
def test_a_walk_may_end_anywhere(layout: str) -> None:
    run_workers(4, stop_early, layout)


def with_grads(layout: str) -> None:
    full, module = build(layout, torch.float32)
    parameters = dict(module.named_parameters())
    gradients = {}
    for index, (name, parameter) in enumerate(parameters.items()):
        if index == 0:
            parameter.requires_grad_(False)
            continue
        parameter.grad = parameter.detach().clone()
        bits(parameter.grad.to_local()).add_(1)  # arithmetic would change some NaNs
        gradients[name] = (bits(full[name]) + 1).view(torch.float32)
    buffers = {"buffer": torch.ones(3)}
    everything = {**full, **buffers}
    stream = stream_dtensors({**parameters, **buffers}, plan_of(everything), Names(), bucket_bytes=200, grads=True)
    check(stream, cut(gradients))


@pytest.mark.parametrize("layout", ["fsdp_tp", "ep"])
def test_gradients_are_streamed_and_frozen_ones_are_not(layout: str) -> None:
    run_workers(4, with_grads, layout)


def partial_grads() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    full = {"norm": torch.arange(6.0), "experts": torch.arange(24.0).view(4, 2, 3)}
    parameters = {}
    for name, tensor in full.items():
        parameter = nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0), Replicate()]))
        # What tensor parallelism leaves of weights that it replicates: each of its ranks has a part of the sum.
        half = parameter.to_local().detach() * (0.25 + 0.5 * mesh.get_local_rank("tp"))
        parameter.grad = DTensor.from_local(
            half, mesh, [Shard(0), Partial()], shape=tensor.shape, stride=tensor.stride()
        )
        parameters[name] = parameter
    check(stream_dtensors(parameters, plan_of(full), Names(), bucket_bytes=50, grads=True), cut(full))


def test_parts_of_a_sum_are_added() -> None:
    run_workers(4, partial_grads)


def lacks_a_gradient() -> None:
    full, module = build("ep", torch.float32)
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        if name != "five" or dist.get_rank() != 2:
            parameter.grad = torch.zeros_like(parameter)
    stream_dtensors(parameters, plan_of(full), Names(), grads=True)


def test_a_parameter_without_gradient_on_one_rank_stops_all() -> None:
    with pytest.raises(WorkerError, match="five has no gradient; call backward") as caught:
        run_workers(4, lacks_a_gradient)
    assert caught.value.all_ranks_raised(RuntimeError)


def stages(dtype: torch.dtype) -> tuple[DeviceMesh, dict[str, Tensor], dict[str, Tensor]]:
    """Two pipeline stages, each over two FSDP ranks; the plan's order is not that of the stages."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
    full = {
        "embedding": random_bits(97, 3, dtype=dtype, seed=1),
        "experts_1": random_bits(5, 4, 3, dtype=dtype, seed=2),
        "experts_0": random_bits(6, 4, 3, dtype=dtype, seed=3),
        "thead": random_bits(5, 4, dtype=dtype, seed=4),
        "shared": random_bits(3, dtype=dtype, seed=5),
    }
    parts = (("embedding", "experts_0", "shared"), ("thead", "experts_1", "shared"))
    mine = {name: full[name] for name in parts[mesh.get_local_rank("pp")]}
    return mesh, full, mine


def walk_stages(dtype: torch.dtype) -> list[str]:
    mesh, full, mine = stages(dtype)
    parameters = dict(sharded(mine, mesh, "fsdp").named_parameters())
    group = mesh.get_group("pp")
    stream = stream_dtensors(parameters, plan_of(full), Names(), bucket_bytes=100, pipeline_group=group)
    return check(stream, cut(full))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_stage_gives_its_own_to_all(dtype: torch.dtype) -> None:
    first, *others = run_workers(4, walk_stages, dtype)
    assert len(first) == 1 + 5 + 6 + 1 + 1
    assert all(names == first for names in others)


def add_to_each(with_stages: bool) -> None:
    """Merge something into bf16 weights in fp32, as an adapter would be."""
    mesh, full, mine = stages(torch.bfloat16)
    full = {
        name: torch.randn(tensor.shape, generator=torch.Generator().manual_seed(7)).bfloat16()
        for name, tensor in full.items()
    }
    group = mesh.get_group("pp") if with_stages else None
    local = {name: full[name] for name in (mine if with_stages else full)}
    parameters = dict(sharded(local, mesh, "fsdp" if with_stages else ("pp", "fsdp")).named_parameters())
    deltas = {name: torch.full((tensor.shape[0],), 0.001).cumsum(0) for name, tensor in full.items()}
    seen: list[tuple[str, range | None]] = []

    def transform(fqn: str, experts: range | None, tensor: Tensor) -> Tensor:
        seen.append((fqn, experts))
        if fqn == "shared":
            return tensor
        delta = deltas[fqn] if experts is None else deltas[fqn][experts.start : experts.stop]
        return tensor.float() + delta.view(-1, *[1] * (tensor.ndim - 1))

    stream = stream_dtensors(
        parameters,
        plan_of(full),
        Names(),
        bucket_bytes=48,
        pipeline_group=group,
        dtype=torch.float32,
        transform=transform,
    )
    merged = {name: tensor.float() + deltas[name].view(-1, *[1] * (tensor.ndim - 1)) for name, tensor in full.items()}
    check(stream, cut({**merged, "shared": full["shared"].float()}))
    expected = [("experts_1", range(s, min(s + 2, 5))) for s in (0, 2, 4)]
    expected += [("experts_0", range(s, s + 2)) for s in (0, 2, 4)]
    everything = [("embedding", None), *expected, ("thead", None), ("shared", None)]
    # A tensor of several stages is changed on the first of them.
    first = not with_stages or mesh.get_local_rank("pp") == 0
    assert seen == [item for item in everything if item[0] in local and (item[0] != "shared" or first)]
    check(stream_dtensors(parameters, plan_of(full), Names(), pipeline_group=group), cut(full))


@pytest.mark.parametrize("with_stages", [False, True])
def test_values_are_changed_block_by_block_and_live_weights_are_not(with_stages: bool) -> None:
    run_workers(4, add_to_each, with_stages)


def lacks(what: str) -> None:
    full, module = build("fsdp2", torch.float32)
    parameters = dict(module.named_parameters())
    planned = {**full, **({"missing": torch.zeros(2)} if what == "tensor" else {"rows": torch.zeros(96, 3)})}
    stream_dtensors(parameters, plan_of(planned), Names())


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("tensor", r"no rank holds missing, the source of hf\.missing"),
        ("shape", r"rows of shape \(97, 3\) holds hf\.rows as \(97, 3\); the plan says \(96, 3\)"),
    ],
)
def test_what_does_not_fit_the_plan_is_named_on_all_ranks(what: str, message: str) -> None:
    with pytest.raises(WorkerError, match=message) as caught:
        run_workers(2, lacks, what)
    assert caught.value.all_ranks_raised(RuntimeError)


def test_arguments_are_checked() -> None:
    plan = plan_of({"norm": torch.zeros(3)})
    with pytest.raises(ValueError, match="bucket_bytes=0 must be positive, for instance 536870912"):
        stream_dtensors({"norm": torch.zeros(3)}, plan, Names(), bucket_bytes=0)
    with pytest.raises(ValueError, match="every pipeline stage must hold some"):
        stream_dtensors({}, plan, Names())
