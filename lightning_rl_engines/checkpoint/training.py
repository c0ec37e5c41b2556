"""Training checkpoints: sharded folders that load on another number of processes.

A checkpoint is a folder with the shards of ``torch.distributed.checkpoint``, the rest of Lightning's checkpoint as
plain data in ``meta.pt``, and a marker. It is written beside its place and renamed into it, so a folder under the name
of a checkpoint is a whole one.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from lightning_rl_engines.checkpoint.adapter import (
    METADATA_KEY,
    describe_adapter,
    load_trained_state,
    require_same_adapter,
    trained_state,
)
from lightning_rl_engines.checkpoint.folders import METADATA, is_whole, recover_checkpoints
from lightning_rl_engines.checkpoint.module_state import collect_state, engine_models, split_state

Gather = Callable[[Any], list[Any]]
"""Returns the objects of all ranks, in their order; collective over the world."""

_GROUPS = "idle_optimizers"
"""Options of the groups of optimizers that have no state, by index."""


def token_models(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and root of each trainable model that an engine built; frozen references are rebuilt, not saved."""
    for name, root in engine_models(module):
        if any(parameter.requires_grad for parameter in root.parameters()):
            yield name, root


def module_state(module: LightningModule) -> dict[str, Any]:
    """Return the module's ``state_dict`` with its trainable models sharded, by canonical names.

    Collective over the world. Overrides of ``state_dict`` count. Of a model with an adapter, the
    adapter alone.
    """
    return collect_state(module, {name: trained_state(root) for name, root in token_models(module)})


def optimizer_state(module: nn.Module, optimizer: Optimizer, gather: Gather) -> dict[str, Any]:
    """Return the sharded state of an optimizer, keyed by parameter names; collective over the world.

    Args:
        module: The module.
        optimizer: One of its optimizers, possibly in Lightning's wrapper.
        gather: Exchanges objects between the ranks.

    Returns:
        The state, or the options of its groups alone if there is no state on any rank, as before the first step.

    Raises:
        ValueError: The optimizer's parameters belong to none or to several of the models.
    """
    raw = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    owner = _owner(module, raw)
    if not any(gather(bool(raw.state))):
        # torch would take a step to see what a state looks like, and Adam would count it.
        return {_GROUPS: [{key: group[key] for key in group if key != "params"} for group in raw.param_groups]}
    return get_optimizer_state_dict(owner, raw)


def _owner(module: nn.Module, optimizer: Optimizer) -> nn.Module:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    owners = [root for _, root in token_models(module) if held & {id(parameter) for parameter in root.parameters()}]
    if len(owners) != 1 or not held <= {id(parameter) for parameter in owners[0].parameters()}:
        raise ValueError(
            f"{type(optimizer).__name__} holds parameters of {len(owners)} models or of none of them; give each model "
            "an optimizer of its own."
        )
    return owners[0]


def split_checkpoint(module: LightningModule, checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part Lightning's checkpoint into sharded states and plain data, the module's own state among the latter."""
    metadata = dict(checkpoint)
    roots = dict(token_models(module))
    described = {name: describe_adapter(root) for name, root in roots.items()}
    metadata[METADATA_KEY] = {name: found for name, found in described.items() if found is not None}
    models, metadata["state_dict"] = split_state(metadata["state_dict"], roots)
    state: dict[str, Any] = {"model": models}
    for index, value in enumerate(metadata.pop("optimizer_states", [])):
        if _GROUPS in value:
            metadata.setdefault(_GROUPS, {})[index] = value[_GROUPS]
        else:
            state[f"optimizer_{index}"] = value
    return state, metadata


def read_metadata(path: Path) -> dict[str, Any]:
    """Return what a checkpoint holds besides model and optimizer states, loaded as plain data only.

    Raises:
        ValueError: The path is no finished checkpoint.
    """
    recover_checkpoints(path.parent)
    if not is_whole(path):
        state = "was not finished" if path.is_dir() else "is no checkpoint folder"
        raise ValueError(f"ckpt_path={str(path)!r} {state}; name a folder that this strategy saved, such as last.ckpt.")
    metadata: dict[str, Any] = torch.load(path / METADATA, weights_only=True)
    return metadata


def load_training_checkpoint(module: LightningModule, optimizers: list[Optimizer], path: Path) -> dict[str, Any]:
    """Load model states, and the states of the optimizers given, into a set-up module; collective over the world.

    The checkpoint may come from another number of processes or another layout.

    Returns:
        The rest of Lightning's checkpoint; its ``state_dict`` holds what belongs to no engine model.

    Raises:
        ValueError: The path is no finished checkpoint, it holds another number of optimizers or, unless the module's
            ``strict_loading`` is off, other models; or its adapters are others.
    """
    metadata = read_metadata(path)
    saved = set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
    roots = dict(token_models(module))
    for name, root in roots.items():
        require_same_adapter(name, root, metadata.get(METADATA_KEY, {}).get(name), path)
    targets = {name: trained_state(root) for name, root in roots.items()}
    if module.strict_loading:
        _require_same_names(path, saved, {f"{name}.{key}" for name, state in targets.items() for key in state})
    for name, root in roots.items():
        model = {f"{name}.{key}": value for key, value in targets[name].items() if f"model.{name}.{key}" in saved}
        if model:
            dcp.load({"model": model}, checkpoint_id=path)
            # What is not stored stays as it is; tensors are views of the parameters on some layouts only.
            loaded = {key.removeprefix(f"{name}."): value for key, value in model.items()}
            load_trained_state(root, {**targets[name], **loaded})
    idle = metadata.pop(_GROUPS, {})
    count = len({key.split(".")[0] for key in saved if key.startswith("optimizer_")}) + len(idle)
    if optimizers and count != len(optimizers):
        holds = f"{count} optimizers" if count else "weights alone, without optimizers,"
        raise ValueError(
            f"ckpt_path={str(path)!r} holds {holds} and the module configures {len(optimizers)}; resume with the "
            "module that was saved and a checkpoint with its optimizers, or start anew from the weights: "
            "`lightning-rl export` turns them into a folder for ModelConfig(path=...)."
        )
    for index, optimizer in enumerate(optimizers):
        if index in idle:
            for group, options in zip(optimizer.param_groups, idle[index], strict=True):
                group.update(options)
            continue
        root = _owner(module, optimizer)
        state: dict[str, Any] = {f"optimizer_{index}": get_optimizer_state_dict(root, optimizer)}
        dcp.load(state, checkpoint_id=path)
        set_optimizer_state_dict(root, optimizer, state[f"optimizer_{index}"])
    return metadata


def _require_same_names(path: Path, saved: set[str], expected: set[str]) -> None:
    found = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    problems = [("does not hold", expected - found), ("holds, which the module does not have,", found - expected)]
    for problem, names in problems:
        if names:
            raise ValueError(
                f"ckpt_path={str(path)!r} {problem} {min(names)!r} ({len(names)} of {len(expected)} names); resume "
                "with the module that was saved, or set its strict_loading=False to load what fits."
            )
