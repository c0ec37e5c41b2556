"""Training checkpoints: sharded folders that load on another number of processes.

A checkpoint is a folder with the shards of ``torch.distributed.checkpoint``, the rest of Lightning's checkpoint as
plain data in ``meta.pt``, and a marker. It is written beside its place and renamed into it, so a folder under the name
of a checkpoint is a whole one.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lightning_rl_engines.models.token_model import TokenModel

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

METADATA = "meta.pt"
MARKER = "complete"


def token_models(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and root of each trainable model that an engine built; frozen references are rebuilt, not saved."""
    for name, child in module.named_children():
        if isinstance(getattr(child, "module", child), TokenModel):
            if any(parameter.requires_grad for parameter in child.parameters()):
                yield name, child
        else:
            for inner, root in token_models(child):
                yield f"{name}.{inner}", root


def model_state(module: nn.Module) -> dict[str, Any]:
    """Return the sharded state of all trainable models of a module, by canonical names; collective over the world."""
    return {
        f"{name}.{key}": value
        for name, root in token_models(module)
        for key, value in get_model_state_dict(root).items()
    }


def optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the sharded state of an optimizer, keyed by parameter names; collective over the world.

    Raises:
        ValueError: The optimizer's parameters belong to none or to several of the models.
    """
    raw = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    return get_optimizer_state_dict(_owner(module, raw), raw)


def _owner(module: nn.Module, optimizer: Optimizer) -> nn.Module:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    owners = [root for _, root in token_models(module) if held & {id(parameter) for parameter in root.parameters()}]
    if len(owners) != 1 or not held <= {id(parameter) for parameter in owners[0].parameters()}:
        raise ValueError(
            f"{type(optimizer).__name__} holds parameters of {len(owners)} models or of none of them; give each model "
            "an optimizer of its own."
        )
    return owners[0]


def save_training_checkpoint(strategy: "Strategy", checkpoint: dict[str, Any], path: Path) -> None:
    """Write Lightning's checkpoint as a folder; collective over the world.

    Args:
        strategy: The strategy of the run.
        checkpoint: Lightning's dictionary, its model and optimizer states sharded.
        path: The folder; an existing checkpoint under this name is replaced once the new one is whole.
    """
    metadata = dict(checkpoint)
    state = {"model": metadata.pop("state_dict")}
    for index, value in enumerate(metadata.pop("optimizer_states", [])):
        state[f"optimizer_{index}"] = value
    scratch = path.with_name(f".{path.name}.part")
    if strategy.is_global_zero:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    strategy.barrier()
    dcp.save(state, checkpoint_id=scratch)
    if strategy.is_global_zero:
        torch.save(metadata, scratch / METADATA)
        (scratch / MARKER).touch()
        replace_folder(scratch, path)
    strategy.barrier()


def replace_folder(scratch: Path, path: Path) -> None:
    """Put the folder ``scratch`` in the place of ``path``, whatever stands there."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.is_dir():
        path.rename(old)
    elif path.exists():
        path.unlink()
    scratch.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def read_metadata(path: Path) -> dict[str, Any]:
    """Return what a checkpoint holds besides model and optimizer states, loaded as plain data only.

    Raises:
        ValueError: The path is no finished checkpoint.
    """
    if not (path / MARKER).is_file():
        state = "was not finished" if path.is_dir() else "is no checkpoint folder"
        raise ValueError(f"ckpt_path={str(path)!r} {state}; name a folder that this strategy saved, such as last.ckpt.")
    metadata: dict[str, Any] = torch.load(path / METADATA, weights_only=True)
    return metadata


def load_training_checkpoint(module: LightningModule, optimizers: list[Optimizer], path: Path) -> dict[str, Any]:
    """Load model states, and the states of the optimizers given, into a set-up module; collective over the world.

    The checkpoint may come from another number of processes or another layout.

    Returns:
        The rest of Lightning's checkpoint.

    Raises:
        ValueError: The path is no finished checkpoint, or it holds another number of optimizers.
    """
    metadata = read_metadata(path)
    for name, root in token_models(module):
        model = {f"{name}.{key}": value for key, value in get_model_state_dict(root).items()}
        dcp.load({"model": model}, checkpoint_id=path)
        set_model_state_dict(root, {key.removeprefix(f"{name}."): value for key, value in model.items()})
    saved = {key.split(".")[0] for key in dcp.FileSystemReader(path).read_metadata().state_dict_metadata}
    count = sum(1 for key in saved if key.startswith("optimizer_"))
    if optimizers and count != len(optimizers):
        raise ValueError(
            f"ckpt_path={str(path)!r} holds {count} optimizers, the module configures {len(optimizers)}; resume with "
            "the module that was saved, or load it without fit."
        )
    for index, optimizer in enumerate(optimizers):
        root = _owner(module, optimizer)
        state: dict[str, Any] = {f"optimizer_{index}": get_optimizer_state_dict(root, optimizer)}
        dcp.load(state, checkpoint_id=path)
        set_optimizer_state_dict(root, optimizer, state[f"optimizer_{index}"])
    return metadata
