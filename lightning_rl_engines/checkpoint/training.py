"""Training checkpoints: sharded folders that load on another number of processes.

A checkpoint is a folder with the shards of ``torch.distributed.checkpoint``, the rest of Lightning's checkpoint as
plain data in ``meta.pt``, and a marker. It is written beside its place and renamed into it, so a folder under the name
of a checkpoint is a whole one.
"""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
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
from lightning_rl_engines.checkpoint.names import saved_names
from lightning_rl_engines.checkpoint.optimizer_state import (
    TENSORS,
    collect_optimizer_state,
    load_optimizer_state,
    plain_optimizer,
)
from lightning_rl_engines.checkpoint.ranks import Gather, gather_distinct

_OPTIMIZERS = "optimizers"
"""Where the plain data holds that of the optimizers, in their order."""


def token_models(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and root of each model that an engine built and that has trainable parameters on this rank."""
    for name, root in engine_models(module):
        if any(parameter.requires_grad for parameter in root.parameters()):
            yield name, root


def saved_models(module: nn.Module, gather: Gather) -> dict[str, nn.Module]:
    """Return the models that checkpoints hold, by name; frozen references are rebuilt, not saved.

    Collective over the world: all parameters of one stage of a pipeline may be frozen.
    """
    trained = {name for names in gather([name for name, _ in token_models(module)]) for name in names}
    return {name: root for name, root in engine_models(module) if name in trained}


def module_state(module: LightningModule, gather: Gather) -> dict[str, Any]:
    """Return the module's ``state_dict`` with its trainable models sharded, by names of checkpoints.

    Collective over the world. Overrides of ``state_dict`` count. Of a model with an adapter, the
    adapter alone.
    """
    return collect_state(module, {name: _model_state(root) for name, root in saved_models(module, gather).items()})


def _model_state(root: nn.Module) -> dict[str, Any]:
    names = saved_names(root)
    # Tied tensors share a name.
    return {names[name]: tensor for name, tensor in trained_state(root).items()}


def _load_model_state(root: nn.Module, state: Mapping[str, Any]) -> None:
    load_trained_state(root, {name: state[saved] for name, saved in saved_names(root).items() if saved in state})


def optimizer_state(module: nn.Module, optimizer: Optimizer, gather: Gather) -> dict[str, Any]:
    """Return the sharded state of an optimizer by parameter names; collective over the world.

    Args:
        module: The module.
        optimizer: One of its optimizers, possibly in Lightning's wrapper.
        gather: Exchanges objects between the ranks.

    Returns:
        What :func:`collect_optimizer_state` does.

    Raises:
        ValueError: The optimizer's parameters belong to none or to several of the models.
    """
    return collect_optimizer_state(_owner(module, optimizer, gather), optimizer, gather)


def _owner(module: nn.Module, optimizer: Optimizer, gather: Gather) -> nn.Module:
    held = {id(item) for group in plain_optimizer(optimizer).param_groups for item in group["params"]}
    inside = {name: {id(item) for item in root.parameters()} for name, root in engine_models(module)}
    own = sorted(name for name, parameters in inside.items() if held & parameters)
    foreign = bool(held - {item for parameters in inside.values() for item in parameters})
    # On a stage of a pipeline that trains nothing it may hold none.
    found = gather((own, foreign))
    owners = sorted({name for names, _ in found for name in names})
    if len(owners) != 1 or any(foreign for _, foreign in found):
        raise ValueError(
            f"{type(optimizer).__name__} holds parameters of {len(owners)} models or of none of them; give each model "
            "an optimizer of its own."
        )
    return dict(engine_models(module))[owners[0]]


def split_checkpoint(
    module: LightningModule, checkpoint: dict[str, Any], gather: Gather
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part Lightning's checkpoint into sharded states and plain data; collective over the world.

    The module's own state is among the latter.
    """
    metadata = dict(checkpoint)
    roots = saved_models(module, gather)
    described = {name: describe_adapter(root) for name, root in roots.items()}
    metadata[METADATA_KEY] = {name: found for name, found in described.items() if found is not None}
    models, metadata["state_dict"] = split_state(metadata["state_dict"], roots)
    state: dict[str, Any] = {"model": models}
    if "optimizer_states" in metadata:
        metadata[_OPTIMIZERS] = []
        for index, value in enumerate(metadata.pop("optimizer_states")):
            state[f"optimizer_{index}"] = {TENSORS: value[TENSORS]}
            metadata[_OPTIMIZERS].append({key: item for key, item in value.items() if key != TENSORS})
    return state, metadata


def read_metadata(path: Path) -> dict[str, Any]:
    """Return what a checkpoint holds besides model and optimizer states, loaded as plain data only.

    Raises:
        ValueError: The path is no finished checkpoint.
    """
    recover_checkpoints(path.parent)
    if not is_whole(path):
        inside = sorted(child.name for child in path.iterdir() if is_whole(child)) if path.is_dir() else []
        state = "was not finished" if path.is_dir() else "is no checkpoint folder"
        state = f"is the folder of {inside}" if inside else state
        raise ValueError(f"ckpt_path={str(path)!r} {state}; name a folder that this strategy saved, such as last.ckpt.")
    with naming_damage(path, RuntimeError):
        metadata: dict[str, Any] = torch.load(path / METADATA, weights_only=True)
    return metadata


@contextmanager
def naming_damage(path: Path, *further: type[Exception]) -> Iterator[None]:
    """Context of reading files of a finished checkpoint: what cannot be read names the checkpoint.

    Args:
        path: The checkpoint.
        further: What else damage looks like; collectives raise ``RuntimeError`` for other reasons.
    """
    damage: tuple[Any, ...] = (EOFError, OSError, CheckpointException, pickle.UnpicklingError, *further)
    try:
        yield
    except damage as error:
        causes = [cause for cause, _ in getattr(error, "failures", {}).values()]
        if any(isinstance(cause, MemoryError | torch.OutOfMemoryError) for cause in causes):
            raise
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        raise ValueError(
            f"ckpt_path={str(path)!r} cannot be read: its files were damaged or removed ({reason[0]}); use another "
            "checkpoint."
        ) from error


def load_training_checkpoint(
    module: LightningModule, optimizers: list[Optimizer], path: Path, gather: Gather
) -> dict[str, Any]:
    """Load model states, and the states of the optimizers given, into a set-up module; collective over the world.

    The checkpoint may come from another number of processes, another layout, and for dense models the other engine.

    Returns:
        The rest of Lightning's checkpoint; its ``state_dict`` holds what belongs to no engine model.

    Raises:
        ValueError: On all ranks: the path is no finished checkpoint, it holds another number of optimizers, tensors of
            other shapes or, unless the module's ``strict_loading`` is off, other models; or its adapters are others.
    """
    metadata = read_metadata(path)
    saved = _saved_shapes(path)
    roots = saved_models(module, gather)
    for name, root in roots.items():
        require_same_adapter(name, root, metadata.get(METADATA_KEY, {}).get(name), path)
    targets = {name: _model_state(root) for name, root in roots.items()}
    shapes = {f"{name}.{key}": tuple(item.shape) for name, state in targets.items() for key, item in state.items()}
    every = {key: shape for found in gather_distinct(gather, shapes) for key, shape in found.items()}
    if module.strict_loading:
        _require_same_names(path, set(saved), set(every))
    _require_same_shapes(path, saved, every)
    for name, root in roots.items():
        model = {f"{name}.{key}": value for key, value in targets[name].items() if f"{name}.{key}" in saved}
        # Also of nothing: other stages of a pipeline may find something.
        with naming_damage(path):
            dcp.load({"model": model}, checkpoint_id=path)
        # What is not stored stays as it is; tensors are views of the parameters on some layouts only.
        loaded = {key.removeprefix(f"{name}."): value for key, value in model.items()}
        _load_model_state(root, {**targets[name], **loaded})
    states = metadata.pop(_OPTIMIZERS, [])
    if optimizers and len(states) != len(optimizers):
        holds = f"{len(states)} optimizers" if states else "weights alone, without optimizers,"
        raise ValueError(
            f"ckpt_path={str(path)!r} holds {holds} and the module configures {len(optimizers)}; resume with the "
            "module that was saved and a checkpoint with its optimizers, or start anew from the weights: "
            "`lightning-rl export` turns them into a folder for ModelConfig(path=...)."
        )
    for index, optimizer in enumerate(optimizers):
        load_optimizer_state(_owner(module, optimizer, gather), optimizer, index, states[index], path, gather)
    return metadata


def _saved_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of models, by name."""
    with naming_damage(path):
        stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in stored.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }


def _require_same_names(path: Path, found: set[str], expected: set[str]) -> None:
    problems = [("does not hold", expected - found), ("holds, which the module does not have,", found - expected)]
    for problem, names in problems:
        if not names:
            continue
        if any(".titan." in name for name in found ^ expected):
            # Each engine keeps the experts of a layer in tensors of its own.
            remedy = (
                "experts are stored as the engine that saved them keeps them, so resume with its strategy, or start "
                "anew from the weights: `lightning-rl export` turns them into a folder for ModelConfig(path=...)."
            )
        else:
            remedy = "resume with the module that was saved, or set its strict_loading=False to load what fits."
        raise ValueError(
            f"ckpt_path={str(path)!r} {problem} {min(names)!r} ({len(names)} of {len(expected)} names); {remedy}"
        )


def _require_same_shapes(
    path: Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    for name, shape in sorted(expected.items()):
        if name in found and found[name] != shape:
            raise ValueError(
                f"ckpt_path={str(path)!r} holds {name!r} of shape {list(found[name])} and the module's is "
                f"{list(shape)}; resume with the model that was saved."
            )
