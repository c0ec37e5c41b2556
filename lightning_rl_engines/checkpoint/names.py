"""Names of parameters in checkpoints, which depend neither on the engine nor on the layout."""

from collections.abc import Mapping
from typing import cast

from torch import Tensor, nn

from lightning_rl_engines.models.token_model import TokenModel

# Modules that sharding, activation checkpointing and compilation put around others; names of states lack them.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


def saved_names(root: nn.Module) -> Mapping[str, str]:
    """Return the name in checkpoints of each tensor of a model, by its name in the model's state."""
    return cast(TokenModel, root).checkpoint_names()


def parameter_names(root: nn.Module) -> dict[Tensor, str]:
    """Return the name in checkpoints of each parameter that this rank holds a part of."""
    names = saved_names(root)
    return {parameter: names[_plain(name)] for name, parameter in root.named_parameters()}


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
