"""The state of an optimizer by names of parameters, whatever the engine and the layout.

Tensors go to the shards of a checkpoint. Numbers in the state and the options of groups are plain data, kept by
parameter: stages of a pipeline hold groups of different parameters, and a resumed run may group them anew.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from lightning_rl_engines.checkpoint.names import parameter_names, saved_names
from lightning_rl_engines.checkpoint.quiet import without_shard_warnings
from lightning_rl_engines.checkpoint.ranks import Gather, gather_distinct, raise_together

TENSORS, VALUES, GROUPS = "state", "values", "groups"

_State = dict[str, dict[str, Any]]
"""Name of a parameter -> key -> tensor or plain value."""


def collect_optimizer_state(root: nn.Module, optimizer: Optimizer, gather: Gather) -> dict[str, Any]:
    """Return the state of an optimizer of one model; collective over the world.

    Args:
        root: The model.
        optimizer: Its optimizer, possibly in Lightning's wrapper.
        gather: Exchanges objects between the ranks.

    Returns:
        ``"state"``: sharded tensors of this rank's parameters; nothing if no rank has any, as before the first step.
        ``"values"``: the rest of the state, and ``"groups"``: options, with names under ``"params"``; both of all
        ranks.
    """
    raw = plain_optimizer(optimizer)
    names = parameter_names(root)
    state: _State = {}
    # Without any, torch would take a step to see what a state looks like, and Adam would count it.
    if any(gather(bool(raw.state))):
        if isinstance(root, FullyShardedDataParallel):
            state = _flat_state(root, raw)
        else:
            state = {names[parameter]: own for parameter, own in raw.state.items()}
    groups = [{**group, "params": [names[parameter] for parameter in group["params"]]} for group in raw.param_groups]
    found = gather_distinct(gather, (groups, _part(state, tensors=False)))
    return {
        TENSORS: _part(state, tensors=True),
        VALUES: {name: own for _, values in found for name, own in values.items()},
        GROUPS: _merge(groups for groups, _ in found),
    }


def load_optimizer_state(
    root: nn.Module, optimizer: Optimizer, index: int, saved: Mapping[str, Any], path: Path, gather: Gather
) -> None:
    """Load what :func:`collect_optimizer_state` returned, from any layout; collective over the world.

    Args:
        root: The model.
        optimizer: Its optimizer.
        index: Its number in the checkpoint.
        saved: The plain data: ``"groups"`` and ``"values"``.
        path: The checkpoint.
        gather: Exchanges objects between the ranks.

    Raises:
        ValueError: On all ranks: the state is one of other parameters or of another kind of optimizer.
    """
    raw = plain_optimizer(optimizer)
    names = parameter_names(root)
    options, problem = _options(names, raw, saved[GROUPS], path)
    raise_together(gather, problem)
    stored = _stored(path, f"optimizer_{index}.{TENSORS}.")
    if stored or saved[VALUES]:
        is_flat = isinstance(root, FullyShardedDataParallel)
        state = _flat_state(root, raw) if is_flat else _live_state(root, raw)
        tensors = _part(state, tensors=True)
        with_state = {name for name, key in stored} | set(saved[VALUES])
        if not is_flat:
            # What had no state when it was saved, as a parameter without gradients, has none now.
            tensors = {name: own for name, own in tensors.items() if name in with_state}
        raise_together(gather, _first_missing(tensors, stored, path))
        dcp.load({f"optimizer_{index}": {TENSORS: tensors}}, checkpoint_id=path)
        for name, own in state.items():
            own.update(saved[VALUES].get(name, {}))
        if is_flat:
            _set_flat_state(root, raw, state)
        else:
            for parameter in list(raw.state):
                if names[parameter] not in with_state:
                    del raw.state[parameter]
    for group, found in zip(raw.param_groups, options, strict=True):
        group.update(found)


def plain_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer without Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _live_state(root: nn.Module, optimizer: Optimizer) -> _State:
    """The optimizer's own dictionaries and tensors; makes them where there are none yet."""
    get_optimizer_state_dict(root, optimizer)
    names = parameter_names(root)
    return {names[parameter]: own for parameter, own in optimizer.state.items()}


def _flat_state(root: nn.Module, optimizer: Optimizer) -> _State:
    """The state under FSDP1, whose optimizers see slices of flattened parameters."""
    names = saved_names(root)
    with without_shard_warnings():
        found: Any = get_optimizer_state_dict(root, optimizer)
    return {names[name]: dict(own) for name, own in found["state"].items()}


def _set_flat_state(root: nn.Module, optimizer: Optimizer, state: _State) -> None:
    names = saved_names(root)
    with without_shard_warnings():
        target: Any = get_optimizer_state_dict(root, optimizer)
        target["state"] = {name: state[names[name]] for name in target["state"]}
        set_optimizer_state_dict(root, optimizer, target)


def _part(state: _State, *, tensors: bool) -> _State:
    """Tensors of a state, or the rest of it."""
    parts = {
        name: {key: item for key, item in own.items() if isinstance(item, Tensor) == tensors}
        for name, own in state.items()
    }
    return {name: part for name, part in parts.items() if part}


def _stored(path: Path, prefix: str) -> set[tuple[str, str]]:
    """Names of parameters, with keys of their state, that a checkpoint holds tensors of."""
    names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    pairs = (name.removeprefix(prefix).rpartition(".") for name in names if name.startswith(prefix))
    return {(name, key) for name, _, key in pairs}


def _first_missing(tensors: _State, stored: set[tuple[str, str]], path: Path) -> str | None:
    missing = [(name, key) for name, own in tensors.items() for key in own if (name, key) not in stored]
    if not missing:
        return None
    name, key = missing[0]
    return (
        f"ckpt_path={str(path)!r} does not hold {key!r} of {name!r} in its optimizer's state; resume with the "
        "optimizer of the run that saved it, or start anew from the weights: `lightning-rl export` turns them into a "
        "folder for ModelConfig(path=...)."
    )


def _merge(found: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Join the groups of all stages: those with the same place and options, and others behind them."""
    merged: list[dict[str, Any]] = []
    further: list[dict[str, Any]] = []
    for groups in found:
        for index, group in enumerate(groups):
            if index == len(merged):
                merged.append(group)
            elif _without_names(merged[index]) == _without_names(group):
                known = set(merged[index]["params"])
                names = [name for name in group["params"] if name not in known]
                merged[index] = {**group, "params": [*merged[index]["params"], *names]}
            else:
                further.append(group)
    return [*merged, *further]


def _without_names(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _options(
    names: Mapping[Tensor, str], optimizer: Optimizer, groups: list[dict[str, Any]], path: Path
) -> tuple[list[dict[str, Any]], str | None]:
    """The saved options of each group, and what is wrong with them."""
    by_name = {name: group for group in groups for name in group["params"]}
    found: list[dict[str, Any]] = []
    for index, group in enumerate(optimizer.param_groups):
        own = [names[parameter] for parameter in group["params"]]
        if unknown := [name for name in own if name not in by_name]:
            return [], (
                f"ckpt_path={str(path)!r} was saved without {unknown[0]!r} in its optimizer, which now holds it; "
                "resume with the parameters of the run that saved it."
            )
        # Without parameters in this stage of a pipeline, a group still has a learning rate that is logged.
        candidates = [by_name[name] for name in own] or groups[index : index + 1]
        kinds = [_without_names(group) for group in candidates]
        if different := [name for name, kind in zip(own, kinds, strict=False) if kind != kinds[0]]:
            return [], (
                f"ckpt_path={str(path)!r} holds other options for {different[0]!r} than for {own[0]!r}, which are now "
                "in one group of the optimizer; resume with the groups of the run that saved it."
            )
        found.append(dict(kinds[0]) if kinds else {})
    return found, None
