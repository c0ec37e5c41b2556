"""Which tensors are alive, and what memory lies behind them."""

import gc
from typing import Self

from torch import Tensor


class LiveTensors:
    """Looks at all tensors that Python can reach; what exists at the start is found once, which is the slow part.

    Tensors of the start are kept alive until the end, so that no address is used twice.
    """

    def __enter__(self) -> Self:
        gc.collect()
        self.old = self._found()
        gc.freeze()
        return self

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()
        del self.old

    def new(self) -> list[Tensor]:
        """Tensors made since the start."""
        gc.collect()
        return self._found()

    def count(self) -> int:
        """Number of tensors made since the start."""
        return len(self.new())

    def storages(self) -> dict[int, int]:
        """Bytes behind all tensors and their gradients, by address; a storage without memory is left out."""
        return storages_of((*self.old, *self.new()))

    def bytes(self) -> int:
        """Bytes behind all tensors and their gradients."""
        return sum(self.storages().values())

    def new_bytes(self) -> int:
        """Bytes behind tensors and gradients that were not there at the start."""
        old = storages_of(self.old)
        return sum(size for address, size in self.storages().items() if old.get(address) != size)

    def _found(self) -> list[Tensor]:
        # Compiled layers of other tests leave fake tensors behind, whose types dispatch for themselves.
        plain = Tensor.__torch_dispatch__
        types = {kind for kind in map(type, gc.get_objects()) if issubclass(kind, Tensor)}
        real = {kind for kind in types if kind.__torch_dispatch__ is plain}
        return [item for item in gc.get_objects() if type(item) in real and not item.is_meta]


def storages_of(tensors: "tuple[Tensor, ...] | list[Tensor]") -> dict[int, int]:
    """Bytes behind some tensors and their gradients, by address."""
    gradients = [item.grad for item in tensors if item.is_leaf and item.grad is not None]
    storages = [item.untyped_storage() for item in (*tensors, *gradients) if item.device.type == "cpu"]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
