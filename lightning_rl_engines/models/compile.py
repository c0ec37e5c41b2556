"""``torch.compile`` of decoder layers, one by one and in place.

A layer is compiled around its attention: the packed kernel and its collectives run outside the graphs, so that neither
the documents of a row nor the sequence group are baked into one. Names of parameters stay as they are.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_rl_engines._compat import compile_in_place

# Layers of one class share their graphs, and so do policy, critic and reference: four graphs each, with and without
# gradients, for one number of tokens and for any; or two for each of a few numbers.
_RECOMPILE_LIMIT = 128


def check_backend(backend: str, device: torch.device) -> None:
    """Compile a small function, so that a backend that cannot work here fails now and not in a training step.

    Args:
        backend: A name that ``torch.compile`` takes.
        device: Where the model computes.

    Raises:
        ValueError: The backend is unknown, or does not compile on this device, with its own reason.
    """
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        raise ValueError(
            f"ModelConfig(compile_backend={backend!r}) is unknown; use one of {torch.compiler.list_backends()}."
        )

    def probe(values: torch.Tensor) -> torch.Tensor:
        return values * 2 + 1

    try:
        torch.compile(probe, backend=backend)(torch.ones(2, device=device))
    except Exception as error:  # of any type: compilers differ in what they raise
        reason = " ".join(str(error).split("\n")[:2])  # the compiler's name, and what it said
        raise ValueError(
            f"ModelConfig(compile=True, compile_backend={backend!r}) does not work on {device.type!r} here: "
            f"{reason} Use compile=False, or another compile_backend."
        ) from error


def compile_layers(layers: Iterable[nn.Module], *, backend: str, dynamic: bool = True) -> None:
    """Compile the forward pass of each layer in place; to be called before FSDP1 shards them, FSDP2 may have done so.

    Graphs are made in the first passes, anew for passes without gradients, and for any number of tokens from the second
    number on. A graph rounds differently than the plain layer, and one without gradients than one with.

    Args:
        layers: Modules that are called as a whole.
        backend: A name that :func:`check_backend` has passed.
        dynamic: Make graphs for any number of tokens; False: for each number its own.
    """
    # None: the first number of tokens gets a graph of its own, in case that it stays the only one.
    options: dict[str, Any] = {"backend": backend, "dynamic": None if dynamic else False}
    for layer in layers:
        compile_in_place(layer, _with_own_weights, recompile_limit=_RECOMPILE_LIMIT, **options)


def _with_own_weights(layer: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _aliased_weights(layer):
            return compiled(*args, **kwargs)

    return call


@contextmanager
def _aliased_weights(layer: nn.Module) -> Iterator[None]:
    """Show aliases instead of FSDP1's views of its flat parameter.

    The compiler follows a view to the flat parameter, which is whole at this moment while the gradient of earlier
    micro-batches, which it follows as well, is a shard: tracing fails as soon as gradients accumulate.
    """
    found = [
        (vars(module), name, tensor)
        for module in layer.modules()
        for name, tensor in vars(module).items()
        if isinstance(tensor, Tensor)
    ]
    for namespace, name, tensor in found:
        namespace[name] = _Alias.apply(tensor)
    try:
        yield
    finally:
        for namespace, name, tensor in found:
            namespace[name] = tensor


class _Alias(torch.autograd.Function):
    """The same storage in a tensor that is no view; the storage is freed and filled again for both."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
