"""Batches of this data rank, in an order that a resumed run continues on any number of ranks."""

import math
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

Batch = TypeVar("Batch")


class ShardedLoader(Generic[Batch]):
    """Walks a data set in global batches and yields this data rank's part of each.

    The order is a permutation of the whole data set that depends on ``seed`` and the epoch only; a global batch is the
    next ``batch_size * num_replicas`` items of it, and the position is counted in items. So a checkpoint can be
    continued with another number of ranks or another batch size. Every rank yields the same number of batches and no
    item comes twice in an epoch; without ``drop_last`` the last global batch is divided as evenly as possible, and a
    rank may get an empty list.

    Lightning finds the epoch through ``sampler.set_epoch`` and the state through ``state_dict``.

    Args:
        size: Number of items.
        collate: Makes a batch of item indices.
        batch_size: Items per data rank and batch.
        num_replicas: Number of data ranks.
        rank: This data rank.
        shuffle: Use another order in each epoch.
        drop_last: Leave out the items that do not fill a global batch.
        seed: Seed of the order.
        in_flight: How many of the batches that were yielded are not done with yet; they come again after a resume.
    """

    def __init__(
        self,
        *,
        size: int,
        collate: Callable[[list[int]], Batch],
        batch_size: int,
        num_replicas: int = 1,
        rank: int = 0,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        in_flight: Callable[[], int] = lambda: 0,
    ) -> None:
        self._size = size
        self._collate = collate
        self._num_replicas = num_replicas
        self._rank = rank
        self._global_batch = batch_size * num_replicas
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._seed = seed
        self._in_flight = in_flight
        self._trainer_epoch = 0
        # Resuming with max_steps, Lightning may count an epoch that has no batch; the order must not skip one.
        self._epoch_offset = 0
        self._position = 0
        self._resume: dict[str, Any] | None = None

    @property
    def sampler(self) -> "ShardedLoader[Batch]":
        """The object that Lightning tells the epoch."""
        return self

    @property
    def batch_sampler(self) -> None:
        """Lightning asks anything that has a sampler for this as well; there is none."""
        return

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides the order; iteration that has not begun yet uses it."""
        if epoch != self._trainer_epoch:
            self._trainer_epoch = epoch
            self._position = 0

    def __len__(self) -> int:
        """Number of batches of a whole epoch, the same on every rank."""
        return self._batches_in(self._size)

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's batches of the current epoch, after a resume only those that are left."""
        # Lightning calls iter() before it sets the epoch, so nothing may be decided before the first batch.
        order: list[int] | None = None
        stop = self._size
        while True:
            if order is None:
                self._position = self._take_resume()
                order = self._order()
            start = self._position
            if self._batches_in(stop - start) == 0:
                return
            chunk = order[start : start + self._global_batch]
            share = [self._rank * len(chunk) // self._num_replicas, (self._rank + 1) * len(chunk) // self._num_replicas]
            batch = self._collate(chunk[share[0] : share[1]])
            self._position = start + len(chunk)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain data, the same on every rank."""
        if self._resume is not None:
            return dict(self._resume)
        position = max(0, self._position - self._in_flight() * self._global_batch)
        left = self._batches_in(self._size - position)
        return {
            "epoch": self._trainer_epoch + self._epoch_offset,
            "trainer_epoch": self._trainer_epoch,
            # Items that a dropped last batch leaves over are not for another layout to pick up.
            "position": position if left else self._size,
            "batches": len(self) - left,
            "size": self._size,
            "seed": self._seed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the position of :meth:`state_dict`, once Lightning has set the epoch it was saved in.

        Raises:
            ValueError: The data set has another size, or the seed differs.
        """
        for name, value in (("size", self._size), ("seed", self._seed)):
            if state_dict[name] != value:
                raise ValueError(
                    f"The checkpoint was made with data of {name} {state_dict[name]}, and this run has {value}, so it "
                    f"cannot continue in the middle of an epoch; use the same data and seed={state_dict['seed']}."
                )
        self._resume = dict(state_dict)

    def resumed_batches(self) -> int:
        """How many batches of this layout are behind the position that was loaded."""
        if self._resume is None:
            return 0
        return len(self) - self._batches_in(self._size - int(self._resume["position"]))

    def _take_resume(self) -> int:
        """Return where this epoch begins, and settle which epoch it is."""
        resume, self._resume = self._resume, None
        if resume is None:
            return 0
        epoch, position = int(resume["epoch"]), int(resume["position"])
        # Lightning may have ended the epoch before its last batch, as limit_train_batches does.
        over = position >= self._size or (position > 0 and resume["trainer_epoch"] != self._trainer_epoch)
        self._epoch_offset = (epoch + 1 if over else epoch) - self._trainer_epoch
        return 0 if over else position

    def _batches_in(self, items: int) -> int:
        return items // self._global_batch if self._drop_last else math.ceil(items / self._global_batch)

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._size))
        # A generator of its own: the order must not depend on what else draws random numbers.
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._trainer_epoch + self._epoch_offset)
        order: list[int] = torch.randperm(self._size, generator=generator).tolist()
        return order
