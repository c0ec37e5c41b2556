"""Whether an optimizer takes the same steps on sharded parameters as on whole ones."""

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def require_exact_optimizer(optimizer: Optimizer, shard: Callable[[Tensor], Sequence[Tensor]]) -> None:
    """Refuse an optimizer that needs a closure, or whose steps depend on how parameters are sharded.

    A second optimizer of the same kind and options takes two steps on a small matrix, whole and sharded. One that
    cannot be made from its defaults alone is let through. Collective over the ranks that ``shard`` needs.

    Args:
        optimizer: An optimizer of the run.
        shard: Cuts a matrix as the engine does: into DTensors, or into flat pieces one after another.

    Raises:
        ValueError: It cannot be used, on all ranks.
    """
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(f"the optimizer {name} evaluates the loss within its steps; use one without, such as AdamW.")
    generator = torch.Generator().manual_seed(0)
    # In fp64, where rounding is no difference.
    values = [torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    try:
        (expected,) = _train(optimizer, [[value] for value in values])
    except Exception:  # of any type: the optimizer is somebody else's
        return
    try:
        pieces = _train(optimizer, [shard(value) for value in values])
    except Exception as error:
        raise ValueError(
            f"the optimizer {name} cannot step on sharded parameters ({error}); use one that works element by element, "
            "such as AdamW."
        ) from error
    found = torch.cat([(piece.full_tensor() if isinstance(piece, DTensor) else piece).flatten() for piece in pieces])
    if not torch.allclose(found.cpu(), expected.flatten(), rtol=1e-9, atol=1e-9):
        raise ValueError(
            f"the optimizer {name} takes other steps on sharded parameters than on whole ones, so that training would "
            "depend on the number of ranks; use one that works element by element, such as AdamW."
        )


def _train(optimizer: Optimizer, values: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the first values after a step by each of the others."""
    start, *gradients = values
    parameters = [nn.Parameter(piece.clone()) for piece in start]
    # A schedule may begin at 0.
    options = {**optimizer.defaults, "lr": 0.1} if "lr" in optimizer.defaults else optimizer.defaults
    probe = type(optimizer)(parameters, **options)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        probe.step()
    return [parameter.detach() for parameter in parameters]
