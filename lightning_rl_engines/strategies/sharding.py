"""Puts a model's weights from rank 0 onto all ranks and shards it with FSDP1, one unit at a time."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from lightning_rl_engines._compat import end_aborted_passes, reshard_root


@dataclass(frozen=True)
class FSDPLayout:
    """How FSDP1 shards: everything its constructor takes from us.

    Attributes:
        device: Where parameters live; given explicitly, since FSDP1 guesses a GPU otherwise.
        strategy: Sharding strategy.
        mesh: One axis for full sharding, (replicate, shard) for hybrid sharding, ``None`` without sharding.
        mixed_precision: Types of compute and reduction; ``None`` computes in ``compute_dtype``.
        compute_dtype: Type of weights in forward and backward passes; weights stored in another one are cast.
    """

    device: torch.device
    strategy: ShardingStrategy
    mesh: DeviceMesh | None
    mixed_precision: MixedPrecision | None
    compute_dtype: torch.dtype

    def wrap(self, module: nn.Module) -> FSDP:
        """Return the module as one FSDP unit; units inside it stay units of their own."""
        mixed_precision = self.mixed_precision
        own = (item for part in _modules_outside_units(module) for item in part.parameters(recurse=False))
        if mixed_precision is None and any(item.dtype != self.compute_dtype for item in own):
            # A frozen base or reference that is stored in fewer bits than it computes in.
            mixed_precision = MixedPrecision(
                param_dtype=self.compute_dtype, cast_forward_inputs=False, cast_root_forward_inputs=False
            )
        return FSDP(
            module,
            device_id=self.device,
            sharding_strategy=self.strategy,
            device_mesh=self.mesh,
            mixed_precision=mixed_precision,
            use_orig_params=True,
        )


def fsdp_layout(
    device: torch.device,
    world: int,
    size: int | None,
    mixed_precision: MixedPrecision | None,
    compute_dtype: torch.dtype,
) -> FSDPLayout:
    """Return the layout that shards over ``size`` neighbouring ranks and replicates across; collective over the world.

    Args:
        device: Where parameters live.
        world: Number of ranks.
        size: Ranks that parameters are sharded over; ``None`` for all.
        mixed_precision: Types of compute and reduction.
        compute_dtype: Type of compute where ``mixed_precision`` is ``None``.
    """
    size = size or world
    if size == 1:
        # A hybrid layout with 1-wide shards would not reduce gradients at all.
        return FSDPLayout(device, ShardingStrategy.NO_SHARD, None, mixed_precision, compute_dtype)
    if size == world:
        mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
        return FSDPLayout(device, ShardingStrategy.FULL_SHARD, mesh, mixed_precision, compute_dtype)
    mesh = init_device_mesh(device.type, (world // size, size), mesh_dim_names=("replicate", "shard"))
    return FSDPLayout(device, ShardingStrategy.HYBRID_SHARD, mesh, mixed_precision, compute_dtype)


def shard(model: nn.Module, units: Iterable[nn.Module], layout: FSDPLayout) -> FSDP:
    """Materialise, broadcast and wrap ``model``, each unit by itself; collective over the world.

    Rank 0 holds the weights on the host, the other ranks may be on meta. At no time is more than one unit and the
    root's own parameters unsharded on the device of a rank. Tied parameters stay one parameter.

    Args:
        model: The root; parameters that are in no unit stay in it, so tied embeddings and heads are whole.
        units: Submodules that become units; they may lie inside each other.
        layout: How to shard.
    """
    chosen = {id(unit) for unit in units}
    memo: dict[int, nn.Parameter] = {}
    # Descendants come before what holds them: a unit leaves out the units that are inside it already.
    for parent in reversed(list(model.modules())):
        for name, child in list(parent.named_children()):
            if id(child) in chosen:
                _materialize(child, layout.device, memo)
                setattr(parent, name, layout.wrap(child))
    _materialize(model, layout.device, memo)
    root = layout.wrap(model)
    # FSDP1 leaves the root gathered after a forward pass, and takes that copy for the next one, though the weights may
    # have changed: a step, or a checkpoint that is loaded, after a pass without gradients.
    root.register_forward_pre_hook(_reshard_before)
    root.register_forward_hook(_reshard_after)
    return root


def _reshard_before(root: nn.Module, arguments: Any) -> None:
    end_aborted_passes(root)
    reshard_root(root)


def _reshard_after(root: nn.Module, arguments: Any, outputs: Any) -> None:
    if not torch.is_grad_enabled():
        reshard_root(root)


def _materialize(module: nn.Module, device: torch.device, memo: dict[int, nn.Parameter]) -> None:
    """Give every parameter and buffer below ``module`` storage on the device and rank 0's values.

    FSDP units below are left alone: they hold flat parameters already.
    """
    for submodule in _modules_outside_units(module):
        for name, parameter in list(submodule._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in memo:
                data = _from_rank_zero(parameter.detach(), device)
                replacement = nn.Parameter(data, requires_grad=parameter.requires_grad)
                memo[id(parameter)] = replacement
                memo[id(replacement)] = replacement
            submodule._parameters[name] = memo[id(parameter)]
        for name, buffer in list(submodule._buffers.items()):
            if buffer is not None:
                submodule._buffers[name] = _from_rank_zero(buffer, device)


def _modules_outside_units(module: nn.Module) -> Iterable[nn.Module]:
    yield module
    for child in module.children():
        if not isinstance(child, FSDP):
            yield from _modules_outside_units(child)


def _from_rank_zero(tensor: Tensor, device: torch.device) -> Tensor:
    data = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device).contiguous()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(data, src=0)
    return data
