"""Whether an optimizer takes the same steps on sharded parameters as on whole ones."""

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_STEPS = 12
"""More than ten, after which some optimizers change their way."""


def require_exact_optimizer(
    optimizer: Optimizer, shard: Callable[[Tensor], Sequence[Tensor]], device: torch.device
) -> None:
    """Refuse an optimizer that needs a closure, or whose steps depend on how parameters are sharded.

    A twin of the optimizer takes some steps on a small matrix, whole and sharded, with the options of each group. One
    that cannot step on a whole matrix of fp64 is let through with a warning. Collective over the ranks that ``shard``
    needs.

    Args:
        optimizer: An optimizer of the run.
        shard: Cuts a matrix as the engine does: into DTensors, or into flat pieces one after another.
        device: Where parameters live.

    Raises:
        ValueError: It cannot be used, on all ranks.
    """
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(f"the optimizer {name} evaluates the loss within its steps; use one without, such as AdamW.")
    seen: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        # A schedule may begin at 0.
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")} | {"lr": 0.1}
        # Also of a group that is empty in this rank's stages of a pipeline: what is refused is refused by all ranks.
        if options not in seen:
            seen.append(options)
            _compare(name, optimizer, options, shard, device)


def _compare(
    name: str,
    optimizer: Optimizer,
    options: dict[str, Any],
    shard: Callable[[Tensor], Sequence[Tensor]],
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(0)
    # In fp64, where rounding is no difference.
    values = [torch.randn(6, 4, generator=generator, dtype=torch.float64).to(device) for _ in range(_STEPS + 1)]
    try:
        (expected,) = _train(optimizer, options, [[value] for value in values])
    except Exception as error:  # of any type: the optimizer is somebody else's
        rank_zero_warn(
            f"Whether the optimizer {name} takes the same steps on sharded parameters as on whole ones could not be "
            f"tried ({type(error).__name__}: {error}); if it does not work element by element, training depends on the "
            "number of ranks."
        )
        return
    try:
        pieces = _train(optimizer, options, [shard(value) for value in values])
    except Exception as error:
        raise ValueError(
            f"the optimizer {name} cannot step on sharded parameters ({error}); use one that works element by element, "
            "such as AdamW."
        ) from error
    found = torch.cat([(piece.full_tensor() if isinstance(piece, DTensor) else piece).flatten() for piece in pieces])
    if not torch.allclose(found, expected.flatten(), rtol=1e-9, atol=1e-9):
        raise ValueError(
            f"the optimizer {name} takes other steps on sharded parameters than on whole ones, so that training would "
            "depend on the number of ranks; use one that works element by element, such as AdamW."
        )


def _train(optimizer: Optimizer, options: dict[str, Any], values: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the first values after a step of a twin by each of the others."""
    start, *gradients = values
    parameters = [nn.Parameter(piece.clone()) for piece in start]
    twin = _twin(optimizer, {**options, "params": parameters})
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        twin.step()
    return [parameter.detach() for parameter in parameters]


def _twin(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    kind: Any = type(optimizer)
    known = inspect.signature(kind.__init__).parameters
    try:
        return cast(Optimizer, kind([group], **{key: item for key, item in optimizer.defaults.items() if key in known}))
    except Exception:  # of any type: it may want arguments that are no options of a group
        twin = object.__new__(kind)
        # Without the hooks, and the step that a scheduler puts into its place.
        own = {key: item for key, item in vars(optimizer).items() if key != "step" and type(item) is not OrderedDict}
        twin.__setstate__(
            {**own, "state": defaultdict(dict), "defaults": {**optimizer.defaults}, "param_groups": [group]}
        )
        return cast(Optimizer, twin)
