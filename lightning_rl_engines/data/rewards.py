"""Rewards: plain functions of a prompt and a completion, one by one or batched, sync or async."""

import asyncio
import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from lightning.pytorch.utilities import rank_zero_warn

from lightning_rl_engines.rollout.base import Generation, Prompt

RewardFunction: TypeAlias = Callable[..., Any]
"""A function or an instance with ``__call__``; see :class:`Reward`."""

_SINGLE = frozenset({"prompt", "completion"})
_BATCHED = frozenset({"prompts", "completions"})
_RESERVED = _SINGLE | _BATCHED | {"completion_ids", "finish_reason"}


@dataclass
class Reward:
    """A reward function and its weight.

    A function is called with keywords in one of two forms:

    - one by one: ``f(prompt: str, completion: str, **columns) -> float | None``;
    - batched, as TRL has it: ``f(prompts: list[str], completions: list[str], **columns) -> list[float | None]``, where
      each column is a list too.

    It is batched when a parameter is called ``prompts`` or ``completions``, one by one when one is called ``prompt``
    or ``completion``; an attribute ``batched`` (true or false) of the function or instance goes before that. Both
    forms may be ``async``. ``columns`` are the further columns of the data set, and ``completion_ids`` (token ids) and
    ``finish_reason`` (``"stop"`` or ``"length"``). A function without ``**kwargs`` gets the ones it names.
    ``None`` as a reward means that it does not apply to this sample.

    Args:
        function: The function, an instance with ``__call__``, or the import path of a function.
        weight: Factor in the total.

    Raises:
        ValueError: The import path leads nowhere, or the form cannot be told from the parameters.
    """

    function: RewardFunction | str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.function, str):
            self.function = _import_function(self.function)
        if not callable(self.function):
            raise ValueError(
                f"Reward(function={self.function!r}) cannot be called; give a function or its import path."
            )
        if not math.isfinite(self.weight):
            raise ValueError(f"Reward(weight={self.weight}) is not finite; use a number such as 1.0.")
        is_batched(self.function)


def compute_rewards(
    rewards: Mapping[str, Reward], prompts: Sequence[Prompt], generations: Sequence[Generation]
) -> tuple[list[float], dict[str, list[float | None]]]:
    """Reward samples.

    Works inside a running event loop, as notebooks have one: async functions then run in a thread.

    Args:
        rewards: By name.
        prompts: The prompt of each sample; a prompt with several generations comes several times.
        generations: The response of each sample.

    Returns:
        The weighted sum for each sample over the rewards that apply to it (0 when none does, as in TRL, with a
        warning), and for each name the rewards before weighting, ``None`` where one does not apply.

    Raises:
        ValueError: A reward is not a finite number or ``None``, or a function needs a column that the data lacks.
        RuntimeError: A function raised; its exception is the cause. Both name the reward and the prompt's index.
    """
    if len(prompts) != len(generations):
        raise ValueError(f"{len(prompts)} prompts and {len(generations)} generations: repeat each prompt per sample.")
    for prompt in prompts:
        if clash := sorted(_RESERVED & prompt.columns.keys()):
            raise ValueError(
                f"prompt {prompt.index} has columns {clash}, which rewards need for themselves; rename them."
            )
    named = {
        name: _scores(name, cast(RewardFunction, reward.function), prompts, generations)
        for name, reward in rewards.items()
    }
    totals = []
    for index in range(len(prompts)):
        terms = [reward.weight * value for name, reward in rewards.items() if (value := named[name][index]) is not None]
        if not terms:
            rank_zero_warn(
                f"No reward applies to some samples: {sorted(rewards)} returned None for them, and their total is 0. "
                "If a function returns nothing for any sample, a return is missing."
            )
        totals.append(math.fsum(terms))
    return totals, named


def is_batched(function: RewardFunction) -> bool:
    """Return whether a reward function takes all samples at once; :class:`Reward` says how that is decided.

    Raises:
        ValueError: Its parameters do not tell.
    """
    explicit = getattr(function, "batched", None)
    if isinstance(explicit, bool):
        return explicit
    names = inspect.signature(function).parameters.keys()
    if bool(names & _BATCHED) == bool(names & _SINGLE):
        raise ValueError(
            f"reward function {_name_of(function)}({', '.join(names)}) must have a parameter prompt or completion (one "
            "sample), or prompts or completions (batched), not both kinds; or give it an attribute batched = True."
        )
    return bool(names & _BATCHED)


def _scores(
    name: str, function: RewardFunction, prompts: Sequence[Prompt], generations: Sequence[Generation]
) -> list[float | None]:
    indices = [prompt.index for prompt in prompts]
    if not prompts:
        return []
    if not is_batched(function):
        values = _call_each(name, function, prompts, generations)
    else:
        shown = f"{indices[:8]}{'...' if len(indices) > 8 else ''}"
        arguments = _arguments(name, function, _batched_arguments(prompts, generations), f"prompts {shown}")
        try:
            result = function(**arguments)
            values = _run([result])[0] if inspect.isawaitable(result) else result
        except Exception as error:
            raise RuntimeError(f"reward {name!r} failed on prompts {shown}: {error!r}") from error
        if isinstance(values, BaseException):
            raise RuntimeError(f"reward {name!r} failed on prompts {shown}: {values!r}") from values
        if not hasattr(values, "__len__") or len(values) != len(prompts):
            raise ValueError(
                f"reward {name!r} is batched and returned {values!r} for {len(prompts)} samples; return one number or "
                "None for each."
            )
    return [_number(name, index, value) for index, value in zip(indices, values, strict=True)]


def _call_each(
    name: str, function: RewardFunction, prompts: Sequence[Prompt], generations: Sequence[Generation]
) -> list[Any]:
    values: list[Any] = []
    for prompt, generation in zip(prompts, generations, strict=True):
        offered = {
            **prompt.columns,
            "prompt": prompt.text,
            "completion": generation.text,
            "completion_ids": generation.token_ids,
            "finish_reason": generation.finish_reason,
        }
        arguments = _arguments(name, function, offered, f"prompt {prompt.index}")
        try:
            values.append(function(**arguments))
        except Exception as error:
            raise RuntimeError(f"reward {name!r} failed on prompt {prompt.index}: {error!r}") from error
    if not any(inspect.isawaitable(value) for value in values):
        return values
    values = _run(values)
    for prompt, value in zip(prompts, values, strict=True):
        if isinstance(value, BaseException):
            raise RuntimeError(f"reward {name!r} failed on prompt {prompt.index}: {value!r}") from value
    return values


def _batched_arguments(prompts: Sequence[Prompt], generations: Sequence[Generation]) -> dict[str, Any]:
    # Rows may have different columns; a row without one gives None.
    columns = dict.fromkeys(column for prompt in prompts for column in prompt.columns)
    return {
        **{column: [prompt.columns.get(column) for prompt in prompts] for column in columns},
        "prompts": [prompt.text for prompt in prompts],
        "completions": [generation.text for generation in generations],
        "completion_ids": [generation.token_ids for generation in generations],
        "finish_reason": [generation.finish_reason for generation in generations],
    }


def _arguments(name: str, function: RewardFunction, offered: dict[str, Any], where: str) -> dict[str, Any]:
    """Choose what the function takes."""
    parameters = inspect.signature(function).parameters
    keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {key: parameter for key, parameter in parameters.items() if parameter.kind in keywords}
    missing = [key for key, parameter in named.items() if parameter.default is parameter.empty and key not in offered]
    if missing:
        raise ValueError(
            f"reward {name!r} needs {missing}, and {where} offers {sorted(offered)}; add the column to the data, or "
            "give the parameter a default."
        )
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return offered
    return {key: offered[key] for key in named if key in offered}


def _run(values: Sequence[Any]) -> list[Any]:
    """Wait for awaitables, all at once; exceptions are returned in their places."""

    async def settle(value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value

    async def gather() -> list[Any]:
        return await asyncio.gather(*map(settle, values), return_exceptions=True)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(gather())
    # A notebook's own loop is running in this thread and cannot be entered again.
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(lambda: asyncio.run(gather())).result()


def _number(name: str, index: int, value: Any) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text is no number")
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"reward {name!r} is {value!r} for prompt {index}; return a number or None.") from error
    if not math.isfinite(number):
        raise ValueError(f"reward {name!r} is {number} for prompt {index}; return a finite number or None.")
    return number


def _import_function(path: str) -> RewardFunction:
    module, _, name = path.rpartition(".")
    try:
        function: RewardFunction = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"Reward(function={path!r}) cannot be imported ({error}); give a path such as "
            "'lightning_rl_engines.exact_match'."
        ) from error
    return function


def _name_of(function: RewardFunction) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
