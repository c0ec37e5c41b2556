"""Full weights of a sharded model, one tensor at a time, gathered one FSDP unit after another."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_rl_engines.export.plan import ExportPlan

# Path components that FSDP, activation checkpointing and torch.compile put into names.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


@dataclass(frozen=True)
class _Unit:
    """One FSDP module without the FSDP modules inside it, or what lies outside all of them."""

    module: nn.Module
    outermost: bool
    # Source name in the plan, the module that owns the tensor, its name there.
    members: list[tuple[str, nn.Module, str]] = field(default_factory=list)


def gathered(module: nn.Module, *, with_grads: bool = False) -> AbstractContextManager[None]:
    """Return a context in which the parameters of one unit are whole and not to be written; a plain module always is.

    Collective over the sharding group.

    Args:
        module: An FSDP module, units inside it left alone, or a plain one.
        with_grads: Gather gradients, too.
    """
    if not isinstance(module, FullyShardedDataParallel):
        return nullcontext()
    return FullyShardedDataParallel.summon_full_params(module, recurse=False, writeback=False, with_grads=with_grads)


def stream_full_parameters(
    root: nn.Module,
    plan: ExportPlan,
    *,
    prefix: str = "hf.",
    rename: Callable[[str], str | None] | None = None,
    dtype: torch.dtype | None = None,
    transform: Callable[[nn.Module, str, Tensor], Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Stream the full weights of a module, each entry of the plan once.

    Collective over the sharding groups of ``root``: every rank walks the iterator, to the end or to the same point.
    A rank that stops early leaves its own model usable (close the iterator, or drop it), but ranks that go on then
    wait for it. While the iterator is suspended, a unit is gathered: do not run the model in between.

    Order: units as modules are nested, the root first (embeddings, norm and head, then the layers); inside a unit as
    its modules and their parameters are registered. It is the same on all ranks, and differs from the plan's, which
    would need the root's weights for the whole walk.

    Memory beyond the sharded model: one unit, the granule that FSDP1 gathers, and one tensor. Experts kept in a stack
    are yielded one at a time.

    Args:
        root: The outermost FSDP module (``use_orig_params=True``; any sharding strategy), or a plain module.
        plan: What to export.
        prefix: Where in ``root`` the planned model lies; names outside it are not exported.
        rename: Maps a name, wrapper components and ``prefix`` removed, to a source of the plan, or to ``None`` where it
            is not to be exported. Names that are no source are skipped either way.
        dtype: Type to cast floating-point tensors to; ``None`` keeps the storage type, so fp32 masters stay fp32.
        transform: Maps a module, the name of its tensor and the full value to what is exported in its place. It must
            not change its argument, and may gather other units.

    Returns:
        Iterator over pairs of exported name and tensor: contiguous copies on the model's device, without gradient,
        that stay valid.

    Raises:
        RuntimeError: The module lacks a tensor of the plan or holds it in another shape (on all ranks, before the
            first gather where it can be seen).
        ValueError: Two tensors of the module map to the same source.
    """
    units = _units(root, plan, prefix, rename)
    return _walk(units, plan, dtype, with_grads=False, transform=transform)


def stream_full_gradients(
    root: nn.Module,
    plan: ExportPlan,
    *,
    prefix: str = "hf.",
    rename: Callable[[str], str | None] | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Stream the full gradients of a module as they have been accumulated in ``.grad``.

    Like :func:`stream_full_parameters` in arguments, order, errors and who must call it. Frozen parameters and buffers
    are skipped; a trainable parameter without a gradient gives zeros. Gradients must have been reduced: those left
    by ``no_sync`` are still whole on each rank, and FSDP refuses them.

    Returns:
        Iterator over pairs of exported name and gradient: contiguous copies that stay valid.
    """
    units = _units(root, plan, prefix, rename)
    return _walk(units, plan, dtype, with_grads=True)


def _walk(
    units: list[_Unit],
    plan: ExportPlan,
    dtype: torch.dtype | None,
    *,
    with_grads: bool,
    transform: Callable[[nn.Module, str, Tensor], Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    for unit in units:
        # A unit that nothing is exported from is left alone, but the outermost one must be the first FSDP module that
        # is entered: it makes itself the root, and a unit inside it would make itself one, too.
        if not unit.members and not unit.outermost:
            continue
        with gathered(unit.module, with_grads=with_grads):
            for source, owner, name in unit.members:
                tensor = getattr(owner, name)
                if with_grads:
                    if not tensor.requires_grad:
                        continue
                    tensor = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                tensor = tensor.detach()
                if transform is not None:
                    tensor = transform(owner, name, tensor)
                for exported, piece in plan.pieces(source, tensor):
                    yield exported, _copy(piece, dtype)


def _copy(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    target = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
    return tensor.to(target, copy=True, memory_format=torch.contiguous_format)


def _units(root: nn.Module, plan: ExportPlan, prefix: str, rename: Callable[[str], str | None] | None) -> list[_Unit]:
    """Assign each source of the plan to the unit that holds it; local, without communication."""
    units = [_Unit(root, outermost=True)]
    owners: dict[str, str] = {}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, path: str, unit: _Unit) -> None:
        if module in seen:
            return
        seen.add(module)
        if isinstance(module, FullyShardedDataParallel) and module is not unit.module:
            unit = _Unit(module, outermost=not isinstance(unit.module, FullyShardedDataParallel))
            units.append(unit)
        for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            source = _source(path + name, prefix, rename)
            if source not in plan.by_source:
                continue
            if source in owners:
                raise ValueError(f"{path + name} and {owners[source]} both map to {source!r}; rename one to None.")
            owners[source] = path + name
            unit.members.append((source, module, name))
        for name, child in module.named_children():
            visit(child, path if name in _WRAPPERS else f"{path}{name}.", unit)

    visit(root, "", units[0])
    missing = [entry.name for entry in plan.entries if entry.source not in owners]
    if missing:
        raise RuntimeError(
            f"{len(missing)} of {len(plan.entries)} planned tensors are not in the module under prefix={prefix!r}, the "
            f"first ones {missing[:5]}; FSDP modules need use_orig_params=True."
        )
    return units


def _source(path: str, prefix: str, rename: Callable[[str], str | None] | None) -> str | None:
    if not path.startswith(prefix):
        return None
    name = path.removeprefix(prefix)
    return name if rename is None else rename(name)
