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
from torch.autograd.graph import register_multi_grad_hook
from typing_extensions import override

from lightning_rl_engines._compat import queue_backward_callback


class _Pass:
    """One forward pass with a graph; lives as long as its graph does.

    Attributes:
        refusal: Why a backward pass through it is refused; ``None`` while it has its one backward pass to come.
    """

    refusal: str | None = None


_CONSUMED = (
    "A second backward pass through the same forward pass is refused: FSDP1 has freed its parameters. Run the forward "
    "pass again, or add the losses and call backward once."
)
_LEFT_BEHIND = (
    "A backward pass through a forward pass that was left behind is refused: another backward pass of the same model, "
    "or the end of train_mode, came first. Run the forward pass again."
)


class GraphGuard:
    """Tracks the forward passes of one model whose backward pass is still to come.

    Passes under ``no_grad`` and passes whose graph was dropped do not count. After a refusal the model can be used
    again: FSDP has finished, or not begun, the backward pass that was refused.
    """

    def __init__(self) -> None:
        self._pending: list[weakref.ref[_Pass]] = []

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
        self._pending = [ref for ref in self._pending if ref() is not None]
        self._pending.append(weakref.ref(current))
        outputs: tuple[Tensor, ...] = _Track.apply(self, current, *tensors)
        # A hook on the tensors, and before FSDP puts its own there: a refusal must come before FSDP begins.
        register_multi_grad_hook(outputs, lambda grad: _consume(current), mode="any")
        return outputs

    def forget(self) -> None:
        """Refuse later backward passes through the forward passes so far, and count them no more."""
        for ref in self._pending:
            item = ref()
            if item is not None and item.refusal is None:
                item.refusal = _LEFT_BEHIND
        self._pending = []

    def check(self) -> None:
        """Compare what the backward pass that ends has reached with what there was; called by autograd.

        Raises:
            RuntimeError: It left forward passes behind.
        """
        alive = [ref() for ref in self._pending]
        left = sum(1 for item in alive if item is not None and item.refusal is None)
        self.forget()
        if left:
            raise RuntimeError(
                f"This backward pass left {left} earlier forward pass(es) of the same model without one: gradients "
                "would be wrong under FSDP1. Run backward before the next forward pass, add the losses and call "
                "backward once, or run passes that need no gradient under torch.no_grad()."
            )


def _consume(current: _Pass) -> None:
    if current.refusal is not None:
        raise RuntimeError(current.refusal)
    current.refusal = _CONSUMED


class _Track(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, guard: GraphGuard, current: _Pass, *tensors: Tensor) -> tuple[Tensor, ...]:
        # The pass dies with the graph: only this context and a hook of the graph refer to it.
        ctx.guard, ctx.current = guard, current
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # FSDP has queued its own final callback by now, so the check runs after it and finds the model at rest.
        queue_backward_callback(ctx.guard.check)
        return (None, None, *grads)
