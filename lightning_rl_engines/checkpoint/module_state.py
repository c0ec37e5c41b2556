"""The state of a LightningModule around its sharded models: buffers, metrics, small frozen networks."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from typing_extensions import override

from lightning_rl_engines.models.token_model import TokenModel


def engine_models(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and root of each model that an engine built."""
    for name, child in module.named_children():
        if isinstance(getattr(child, "module", child), TokenModel):
            yield name, child
        else:
            for inner, root in engine_models(child):
                yield f"{name}.{inner}", root


def collect_state(module: LightningModule, shards: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the module's ``state_dict`` returns, its engine models sharded instead of gathered.

    An override sees, and may leave out, names of both kinds.

    Args:
        module: The module.
        shards: Name of a model -> its sharded state by names of its own. Models without one add nothing.
    """
    with _stand_ins(module, shards):
        return dict(module.state_dict())


def load_own_state(module: LightningModule, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load what is not part of an engine model through the module's ``load_state_dict``.

    Raises:
        RuntimeError: With ``strict``: missing or unexpected names.
    """
    with _stand_ins(module, {}):
        module.load_state_dict(state, strict=strict)


def split_state(state: Mapping[str, Any], models: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part a module's state into that of its sharded models and the rest, copied to the host."""
    prefixes = tuple(f"{name}." for name in models)
    sharded = {name: value for name, value in state.items() if name.startswith(prefixes)}
    rest = {name: _host_copy(value) for name, value in state.items() if name not in sharded}
    return sharded, rest


class _Shards(nn.Module):
    """Stands in for a sharded model, whose own ``state_dict`` would gather it."""

    def __init__(self, shards: Mapping[str, Any]) -> None:
        super().__init__()
        self._shards = shards

    @override
    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        found = {} if destination is None else destination
        found.update({f"{prefix}{name}": value for name, value in self._shards.items()})
        return found


@contextmanager
def _stand_ins(module: nn.Module, shards: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    places = []
    for name, root in list(engine_models(module)):
        parent, _, child = name.rpartition(".")
        places.append((module.get_submodule(parent), child, root))
        setattr(places[-1][0], child, _Shards(shards.get(name, {})))
    try:
        yield
    finally:
        for owner, child, root in places:
            setattr(owner, child, root)


def _host_copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
