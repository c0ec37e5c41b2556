"""Constructor arguments as plain data, in the spelling of LightningCLI: what a checkpoint can hold weights-only."""

import functools
import inspect
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from lightning_rl_engines.data.rewards import Reward
from lightning_rl_engines.models.config import ModelConfig


def import_path(target: Any) -> str:
    """Return ``module.qualified_name`` of a class or function."""
    return f"{target.__module__}.{target.__qualname__}"


def plain(value: Any) -> Any:
    """Turn an argument into numbers, strings, lists and dictionaries.

    Classes and functions become import paths; instances become ``{"class_path": ..., "init_args": ...}`` with the
    constructor arguments that the instance keeps as attributes of the same name, so that LightningCLI can build them
    again. Enums become their values, sets sorted lists, data types their names. Nothing live survives.

    Args:
        value: An argument of a module's constructor.

    Returns:
        Plain data that ``torch.load(weights_only=True)`` accepts.
    """
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, ModelConfig):
        return plain(value.to_dict())
    if isinstance(value, Reward):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return sorted(plain(item) for item in value)
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    if isinstance(value, functools.partial):
        return {"class_path": import_path(value.func), "init_args": plain(value.keywords)}
    if inspect.isclass(value) or inspect.isroutine(value):
        return import_path(value)
    return {"class_path": import_path(type(value)), "init_args": _init_args(value)}


def _init_args(value: Any) -> dict[str, Any]:
    names = inspect.signature(type(value)).parameters
    state = vars(value) if hasattr(value, "__dict__") else {}
    return {name: plain(state[name]) for name in names if name in state}
