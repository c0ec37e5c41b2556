"""Moving a LightningModule to its device, around the models that an engine has put there."""

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_rl_engines._compat import set_device_of
from lightning_rl_engines.checkpoint.module_state import engine_models


def move_around_models(module: LightningModule, device: torch.device) -> None:
    """Move what a module holds besides engine models, which are where they belong, or in host memory until needed."""
    _move(module, {root for _, root in engine_models(module)}, device)
    set_device_of(module, device)


def _move(module: nn.Module, models: set[nn.Module], device: torch.device) -> None:
    for child in module.children():
        if child in models:
            continue
        if models.isdisjoint(child.modules()):
            child.to(device)
        else:
            _move(child, models, device)
    own = nn.Module()  # with this module's tensors and none of its children
    own._parameters, own._buffers = module._parameters, module._buffers
    own.to(device)
