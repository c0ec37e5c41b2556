"""Off-load of parameters, gradients and optimizer state to host memory, without a tensor changing its identity.

A tensor's storage is copied into a host buffer and shrunk to nothing; loading grows it again and copies back. Every
view of the storage, FSDP's and the optimizer's among them, stays what it was, so nothing has to be pointed anew. The
buffers are allocated once (pinned where there is an accelerator) and reused.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_rl_engines._compat import reshard_root


class _Held(NamedTuple):
    """A storage on the host: a tensor that views it, and its bytes."""

    tensor: Tensor
    buffer: Tensor


class HostBuffers:
    """Host copies of the storages behind tensors.

    Off-loading and loading are idempotent. A tensor must not be read or written while it is off-loaded.
    """

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self._free: dict[int, list[Tensor]] = {}

    @property
    def offloaded(self) -> bool:
        """Whether anything is on the host now."""
        return bool(self._held)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy the storages of these tensors to the host and free them; those that are there already stay.

        Args:
            tensors: Tensors that live until they are loaded again; several may share a storage.
        """
        moving = [_Held(tensor, self._buffer(tensor)) for tensor in _one_per_storage(tensors)]
        for held in moving:
            held.buffer.copy_(_bytes_of(held.tensor), non_blocking=True)
        if any(held.tensor.device.type != "cpu" for held in moving):
            torch.accelerator.synchronize()  # the copies must have ended before their sources are freed
        for held in moving:
            held.tensor.untyped_storage().resize_(0)
        self._held += moving

    def load(self) -> None:
        """Bring everything back that is on the host. Buffers are reused in stream order, so nothing waits."""
        for held in self._held:
            held.tensor.untyped_storage().resize_(held.buffer.numel())
            _bytes_of(held.tensor).copy_(held.buffer, non_blocking=True)
            self._free.setdefault(held.buffer.numel(), []).append(held.buffer)
        self._held = []

    def _buffer(self, tensor: Tensor) -> Tensor:
        size = tensor.untyped_storage().nbytes()
        free = self._free.get(size)
        if free:
            return free.pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=tensor.device.type != "cpu")


class Offloader:
    """Keeps track of what is on the host: for each model its parameters and gradients, for each optimizer its state."""

    def __init__(self) -> None:
        self._buffers: weakref.WeakKeyDictionary[object, dict[str, HostBuffers]] = weakref.WeakKeyDictionary()
        self._to_offload_again: list[tuple[str, weakref.ref[Any]]] = []

    def offload(
        self, *, model: nn.Module | None = None, optimizer: Optimizer | None = None, grad: nn.Module | None = None
    ) -> None:
        """Free what these keep on the device."""
        for kind, owner in _owners(model, optimizer, grad):
            if kind == "model":
                reshard_root(owner)
            self._of(owner, kind).offload(_TENSORS[kind](owner))

    def load(
        self, *, model: nn.Module | None = None, optimizer: Optimizer | None = None, grad: nn.Module | None = None
    ) -> None:
        """Bring back what these have on the host."""
        for kind, owner in _owners(model, optimizer, grad):
            self._of(owner, kind).load()

    def load_all(self) -> None:
        """Bring everything back, and remember what was on the host for :meth:`offload_again`."""
        for owner, kinds in list(self._buffers.items()):
            for kind, buffers in kinds.items():
                if buffers.offloaded:
                    buffers.load()
                    self._to_offload_again.append((kind, weakref.ref(owner)))

    def offload_again(self) -> None:
        """Undo :meth:`load_all`."""
        for kind, ref in self._to_offload_again:
            owner = ref()
            if owner is not None:
                self.offload(**{kind: owner})
        self._to_offload_again = []

    @contextmanager
    def loaded(
        self, *, model: nn.Module | None = None, optimizer: Optimizer | None = None, grad: nn.Module | None = None
    ) -> Iterator[None]:
        """Context in which these are on the device; what was on the host before goes back at exit."""
        owners = dict(_owners(model, optimizer, grad))
        offloaded = {kind: owner for kind, owner in owners.items() if self._of(owner, kind).offloaded}
        self.load(**offloaded)
        try:
            yield
        finally:
            self.offload(**offloaded)

    def _of(self, owner: object, kind: str) -> HostBuffers:
        return self._buffers.setdefault(owner, {}).setdefault(kind, HostBuffers())


def _owners(model: nn.Module | None, optimizer: Optimizer | None, grad: nn.Module | None) -> Iterator[tuple[str, Any]]:
    raw = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    for kind, owner in (("model", model), ("grad", grad), ("optimizer", raw)):
        if owner is not None:
            yield kind, owner


def model_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield what a model's parameters are stored in; FSDP units must be sharded."""
    for parameter in model.parameters():
        yield local_part(parameter.detach())


def gradient_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the gradients of a model's parameters."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            yield local_part(parameter.grad)


def optimizer_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the state of an optimizer, without its scalars: steps that count on the host stay there."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.dim() > 0:
                yield local_part(value)


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor; a DTensor is that, wrapped."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


_TENSORS: dict[str, Callable[[Any], Iterator[Tensor]]] = {
    "model": model_tensors,
    "grad": gradient_tensors,
    "optimizer": optimizer_tensors,
}


def _one_per_storage(tensors: Iterable[Tensor]) -> list[Tensor]:
    chosen: dict[int, Tensor] = {}
    for tensor in tensors:
        if tensor.untyped_storage().nbytes():
            chosen.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    return list(chosen.values())


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage behind a tensor, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
