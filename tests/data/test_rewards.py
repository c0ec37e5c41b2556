import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from lightning_rl_engines.data import LengthPenalty, Reward, RewardFunction, compute_rewards, exact_match
from lightning_rl_engines.rollout import Generation, Prompt


def _samples(texts: list[str], columns: list[dict[str, Any]] | None = None) -> tuple[list[Prompt], list[Generation]]:
    rows = columns or [{} for _ in texts]
    prompts = [Prompt(token_ids=[1], columns=row, index=10 + i, text=f"p{i}") for i, row in enumerate(rows)]
    generations = [
        Generation(token_ids=list(range(len(text))), log_probs=[0.0] * len(text), finish_reason="stop", text=text)
        for text in texts
    ]
    return prompts, generations


def single(prompt: str, completion: str, level: int = 1, **columns: Any) -> float | None:
    return None if completion == "skip" else level * len(completion)


def batched(prompts: list[str], completions: list[str], answer: list[Any], **columns: Any) -> list[float | None]:
    assert len(prompts) == len(completions) == len(answer)
    return [None if a is None else float(a == c) for a, c in zip(answer, completions, strict=True)]


async def asynchronous(completion: str) -> int:
    await asyncio.sleep(0.001 * (5 - len(completion)))
    return len(completion)


async def batched_async(completions: list[str], completion_ids: list[list[int]], finish_reason: list[str]) -> list[int]:
    await asyncio.sleep(0)
    assert finish_reason == ["stop"] * len(completions)
    return [len(ids) for ids in completion_ids]


@dataclass
class Instance:
    scale: float = 1.0

    def __call__(self, completion: str, finish_reason: str) -> float:
        assert finish_reason == "stop"
        return self.scale * len(completion)


def test_forms_names_weights_and_none() -> None:
    samples = _samples(["ab", "skip", "xyz"], [{"answer": "ab", "level": 2}, {"answer": None}, {"answer": "q"}])
    rewards = {
        "single": Reward(single, 0.5),
        "batched": Reward(batched, 2.0),
        "async": Reward(asynchronous),
        "batched_async": Reward(batched_async),
        "instance": Reward(Instance(scale=3.0), -1.0),
    }
    total, named = compute_rewards(rewards, *samples)
    assert named == {
        "single": [4.0, None, 3.0],
        "batched": [1.0, None, 0.0],
        "async": [2.0, 4.0, 3.0],
        "batched_async": [2.0, 4.0, 3.0],
        "instance": [6.0, 12.0, 9.0],
    }
    assert total == [0.5 * 4 + 2 + 2 + 2 - 6, 4 + 4 - 12, 0.5 * 3 + 0 + 3 + 3 - 9]


def test_a_sample_without_any_reward_counts_zero_and_is_reported() -> None:
    with pytest.warns(UserWarning, match="No reward applies"):
        total, named = compute_rewards({"single": Reward(single)}, *_samples(["skip", "a"]))
    assert total == [0.0, 1.0] and named == {"single": [None, 1.0]}


def test_no_samples() -> None:
    assert compute_rewards({"b": Reward(batched), "a": Reward(asynchronous)}, [], []) == ([], {"b": [], "a": []})


def test_async_rewards_work_inside_a_running_loop() -> None:
    async def notebook_cell() -> Any:
        return compute_rewards({"a": Reward(asynchronous), "b": Reward(batched_async)}, *_samples(["ab"]))

    assert asyncio.run(notebook_cell()) == ([4.0], {"a": [2.0], "b": [2.0]})


def test_single_async_rewards_run_at_the_same_time() -> None:
    running: list[int] = []

    async def slow(completion: str) -> float:
        running.append(1)
        await asyncio.sleep(0)
        return float(len(running))

    assert compute_rewards({"slow": Reward(slow)}, *_samples(["a", "b", "c"]))[0] == [3.0, 3.0, 3.0]


def test_the_batched_attribute_goes_before_the_names() -> None:
    def odd(**columns: Any) -> list[float]:
        return [1.0] * len(columns["completions"])

    odd.batched = True  # type: ignore[attr-defined]
    assert compute_rewards({"odd": Reward(odd)}, *_samples(["a", "b"]))[0] == [1.0, 1.0]


def _raises(completion: str) -> float:
    raise KeyError(completion)


async def _raises_later(completion: str) -> float:
    if completion == "b":
        raise KeyError(completion)
    return 0.0


def _raises_batched(completions: list[str]) -> list[float]:
    raise KeyError("x")


async def _raises_batched_later(completions: list[str]) -> list[float]:
    raise KeyError("x")


@pytest.mark.parametrize(
    ("function", "where"),
    [
        (_raises, "prompt 10"),
        (_raises_later, "prompt 11"),
        (_raises_batched, r"prompts \[10, 11\]"),
        (_raises_batched_later, r"prompts \[10, 11\]"),
    ],
)
def test_a_function_that_raises_is_named_and_chained(function: RewardFunction, where: str) -> None:
    with pytest.raises(RuntimeError, match=rf"reward 'bad' failed on {where}: KeyError") as caught:
        compute_rewards({"bad": Reward(function)}, *_samples(["a", "b"]))
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", [1.0]])
def test_values_that_are_no_finite_numbers_are_named(value: Any) -> None:
    def bad(prompts: list[str]) -> list[Any]:
        return [1.0, value]

    with pytest.raises(ValueError, match=r"reward 'bad' is .* for prompt 11; return a .*number or None"):
        compute_rewards({"bad": Reward(bad)}, *_samples(["a", "b"]))


def test_wrong_counts_missing_columns_and_clashes_are_named() -> None:
    def short(prompts: list[str]) -> list[float]:
        return [1.0]

    with pytest.raises(ValueError, match=r"reward 'short' is batched and returned \[1.0\] for 2 samples"):
        compute_rewards({"short": Reward(short)}, *_samples(["a", "b"]))
    with pytest.raises(ValueError, match=r"reward 'exact' needs \['answer'\], and prompt 10 offers"):
        compute_rewards({"exact": Reward(exact_match)}, *_samples(["a"]))
    with pytest.raises(ValueError, match=r"reward 'batched' needs \['answer'\], and prompts \[10\] offers"):
        compute_rewards({"batched": Reward(batched)}, *_samples(["a"]))
    with pytest.raises(ValueError, match=r"prompt 10 has columns \['completion'\]"):
        compute_rewards({"single": Reward(single)}, *_samples(["a"], [{"completion": 1}]))
    prompts, generations = _samples(["a", "b"])
    with pytest.raises(ValueError, match="2 prompts and 1 generations"):
        compute_rewards({}, prompts, generations[:1])


def test_reward_arguments_are_checked() -> None:
    assert Reward("lightning_rl_engines.data.exact_match").function is exact_match
    with pytest.raises(ValueError, match=r"'lightning_rl_engines.data.nothing'\) cannot be imported"):
        Reward("lightning_rl_engines.data.nothing")
    with pytest.raises(ValueError, match="cannot be imported"):
        Reward("nothing")
    with pytest.raises(ValueError, match=r"weight=nan"):
        Reward(exact_match, float("nan"))
    with pytest.raises(ValueError, match="must have a parameter prompt or completion"):
        Reward(lambda text: 0.0)
    with pytest.raises(ValueError, match="not both kinds"):
        Reward(lambda prompt, completions: 0.0)
    with pytest.raises(ValueError, match="cannot be called"):
        Reward(3)  # type: ignore[arg-type]


class Consumer:
    """What a module's constructor looks like to LightningCLI."""

    def __init__(self, *, reward: dict[str, Reward] | RewardFunction | None = None) -> None:
        self.reward = reward


def _parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Consumer, "model")
    return parser


_CONFIG = """
model:
  reward:
    exact: {function: lightning_rl_engines.data.exact_match}
    short: {function: {class_path: lightning_rl_engines.data.LengthPenalty, init_args: {max_length: 50}}, weight: 0.1}
"""


def test_configuration_round_trip(tmp_path: Any) -> None:
    (tmp_path / "config.yaml").write_text(_CONFIG)
    parser = _parser()
    config = parser.parse_args([f"--config={tmp_path / 'config.yaml'}", "--model.reward.short.weight=0.7"])
    (tmp_path / "saved.yaml").write_text(parser.dump(config))
    again = parser.parse_args([f"--config={tmp_path / 'saved.yaml'}"])
    assert parser.dump(again) == parser.dump(config)
    for parsed in (config, again):
        reward = parser.instantiate(parsed).model.reward
        assert reward["exact"] == Reward(exact_match)
        assert reward["short"] == Reward(LengthPenalty(max_length=50), 0.7)


def test_one_function_and_none_on_the_command_line() -> None:
    parser = _parser()
    config = parser.parse_args(["--model.reward=lightning_rl_engines.data.exact_match"])
    assert parser.instantiate(config).model.reward is exact_match
    assert "lightning_rl_engines.data" in parser.dump(config)
    assert parser.instantiate(parser.parse_args([])).model.reward is None
