"""Refuses orders of forward and backward passes that FSDP1 gets wrong.

FSDP1 keeps per-module state between a forward pass and its backward pass. Several forward passes are right when one
backward pass consumes all of them; ``forward, forward, backward, backward`` raises deep inside FSDP under sharding and
is *silently wrong* without sharding, which world size 1 becomes. The guard makes every layout refuse it alike.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_rl_engines._compat import queue_backward_callback


class _Pass:
    """One forward pass with a graph; lives as long as its graph does."""

    consumed = False


class GraphGuard:
    """Tracks the forward passes of one model whose backward pass is still to come.

    Passes under ``no_grad`` and passes whose graph was dropped do not count.
    """

    def __init__(self) -> None:
        self._pending: list[weakref.ref[_Pass]] = []
        self._callback_queued = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "GraphGuard":
        """A copied model starts with no pass: the graphs belong to the original."""
        return GraphGuard()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def track(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the outputs of a forward pass, tied to this guard when they require a gradient."""
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            return tensors
        current = _Pass()
        self._callback_queued = False  # a backward pass that raised never ran its callback
        self._pending = [ref for ref in self._pending if ref() is not None]
        self._pending.append(weakref.ref(current))
        outputs: tuple[Tensor, ...] = _Track.apply(self, current, *tensors)
        return outputs

    def consume(self, current: _Pass) -> None:
        """Note that the backward pass reached this forward pass; called by autograd.

        Raises:
            RuntimeError: The pass was consumed before.
        """
        if current.consumed:
            raise RuntimeError(
                "A second backward pass through the same forward pass is refused: FSDP1 has freed its parameters. "
                "Run the forward pass again, or add the losses and call backward once."
            )
        current.consumed = True
        if not self._callback_queued:
            self._callback_queued = True
            queue_backward_callback(self._check)

    def _check(self) -> None:
        self._callback_queued = False
        alive = [ref() for ref in self._pending]
        left = sum(1 for item in alive if item is not None and not item.consumed)
        self._pending = []
        if left:
            raise RuntimeError(
                f"This backward pass left {left} earlier forward pass(es) of the same model without one: gradients "
                "would be wrong under FSDP1. Run backward before the next forward pass, add the losses and call "
                "backward once, or run passes that need no gradient under torch.no_grad()."
            )


class _Track(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, guard: GraphGuard, current: _Pass, *tensors: Tensor) -> tuple[Tensor, ...]:
        # The context is the only strong reference to the pass: it dies with the graph.
        ctx.guard, ctx.current = guard, current
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.guard.consume(ctx.current)
        return (None, None, *grads)
