"""How large models are as a whole, whatever part of them a rank holds."""

import math
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_rl_engines.models.token_model import TokenModel

_FSDP_WRAPPER = "_fsdp_wrapped_module"


def whole_sizes(module: nn.Module) -> dict[int, int]:
    """Return the elements of each parameter as if nothing were sharded, by the parameter's ``id``; local.

    Parameters outside of FSDP1 units say it themselves, also those of FSDP2.
    """
    sizes = {id(parameter): parameter.numel() for parameter in module.parameters()}
    for root in _fsdp_roots(module):
        model = root.module
        assert isinstance(model, TokenModel)
        planned = _planned_sizes(model)
        for name, parameter in root.named_parameters():
            inside = ".".join(part for part in name.split(".") if part != _FSDP_WRAPPER)
            sizes[id(parameter)] = planned.get(inside.removeprefix("hf."), parameter.numel())
    return sizes


def _fsdp_roots(module: nn.Module) -> Iterator[FullyShardedDataParallel]:
    found = (item for item in module.modules() if isinstance(item, FullyShardedDataParallel))
    return (item for item in found if isinstance(item.module, TokenModel))


def _planned_sizes(model: TokenModel) -> dict[str, int]:
    """Elements of each tensor by its name inside the Hugging Face model."""
    adapter, sizes = model.adapter, dict[str, int]()
    inside = {} if adapter is None else {plain: name for name, plain in adapter.base_names.items()}
    plans = [model.export_plan.entries] if adapter is None else [adapter.base_plan.entries, adapter.plan.entries]
    for entries in plans:
        for entry in entries:
            # A stack of experts is exported in pieces.
            name = inside.get(entry.source, entry.source)
            sizes[name] = sizes.get(name, 0) + math.prod(entry.shape)
    return sizes
