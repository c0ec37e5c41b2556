"""States of optimizers by name: groups may change places, what does not fit is refused, plain numbers come along."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_rl_engines.checkpoint.optimizer_state import TENSORS, collect_optimizer_state, load_optimizer_state
from lightning_rl_engines.checkpoint.ranks import gather_distinct, raise_together
from tests.support import WorkerError, run_workers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Model(nn.Module):
    """Three parameters; names in checkpoints are others."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b", "c"):
            setattr(self, name, nn.Parameter(torch.arange(4.0)))

    def checkpoint_names(self) -> Mapping[str, str]:
        return {name: f"hf.{name}" for name in ("a", "b", "c")}


def alone(item: Any) -> list[Any]:
    return [item]


def stepped(model: Model, optimizer: Optimizer, names: str) -> None:
    for number, name in enumerate(names):
        getattr(model, name).grad = torch.full((4,), number + 1.0)
    optimizer.step()
    optimizer.zero_grad()


def save(model: Model, optimizer: Optimizer, path: Path) -> dict[str, Any]:
    state = collect_optimizer_state(model, optimizer, alone)
    dcp.save({"optimizer_0": {TENSORS: state[TENSORS]}}, checkpoint_id=path, no_dist=True)
    return {key: value for key, value in state.items() if key != TENSORS}


def load(make: Callable[[Model], Optimizer], saved: dict[str, Any], path: Path) -> tuple[Model, Optimizer]:
    model = Model()
    optimizer = make(model)
    load_optimizer_state(model, optimizer, 0, saved, path, alone)
    return model, optimizer


def two_groups(first: str, second: str) -> Callable[[Model], Optimizer]:
    def make(model: Model) -> Optimizer:
        groups = [
            {"params": [getattr(model, name) for name in first], "weight_decay": 0.1},
            {"params": [getattr(model, name) for name in second], "weight_decay": 0.2},
        ]
        return AdamW(groups, lr=0.3)

    return make


def test_options_and_state_follow_the_names(tmp_path: Path) -> None:
    model = Model()
    optimizer = two_groups("ab", "c")(model)
    optimizer.param_groups[1]["lr"] = 0.7
    stepped(model, optimizer, "abc")
    saved = save(model, optimizer, tmp_path)
    other, loaded = load(two_groups("c", "ba"), saved, tmp_path)
    assert [(group["lr"], group["weight_decay"]) for group in loaded.param_groups] == [(0.7, 0.2), (0.3, 0.1)]
    for name in "abc":
        found, expected = loaded.state[getattr(other, name)], optimizer.state[getattr(model, name)]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        assert torch.equal(getattr(other, name), torch.arange(4.0))


def test_a_parameter_without_state_has_none_afterwards(tmp_path: Path) -> None:
    model = Model()
    optimizer = AdamW(model.parameters())
    stepped(model, optimizer, "ac")
    other, loaded = load(lambda it: AdamW(it.parameters()), save(model, optimizer, tmp_path), tmp_path)
    assert set(loaded.state) == {other.get_parameter("a"), other.get_parameter("c")}
    stepped(model, optimizer, "abc")
    stepped(other, loaded, "abc")
    assert [int(loaded.state[item]["step"]) for item in other.parameters()] == [2, 1, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (two_groups("ac", "b"), "other options for 'hf.c' than for 'hf.a'"),
        (lambda model: SGD(model.parameters(), 0.1), "other options for 'hf.c' than for 'hf.a'"),
        (
            lambda model: SGD(two_groups("ab", "c")(model).param_groups, 0.1, momentum=0.9),
            "'momentum_buffer' of 'hf.a'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, make: Callable[[Model], Optimizer], message: str) -> None:
    model = Model()
    optimizer = two_groups("ab", "c")(model)
    stepped(model, optimizer, "abc")
    with pytest.raises(ValueError, match=message):
        load(make, save(model, optimizer, tmp_path), tmp_path)


def test_a_parameter_that_the_optimizer_did_not_hold_is_refused(tmp_path: Path) -> None:
    model = Model()
    optimizer = AdamW([model.get_parameter("a")])
    stepped(model, optimizer, "a")
    with pytest.raises(ValueError, match="was saved without 'hf\\.b'"):
        load(lambda it: AdamW(it.parameters()), save(model, optimizer, tmp_path), tmp_path)


class Counting(Optimizer):
    """Keeps a Python number, and a tensor that is not there at every step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state["mean"] = parameter.grad.clone()


def test_numbers_in_the_state_are_kept(tmp_path: Path) -> None:
    model = Model()
    optimizer = Counting(model.parameters())
    for _ in range(3):
        stepped(model, optimizer, "ab")
    other, loaded = load(lambda it: Counting(it.parameters()), save(model, optimizer, tmp_path), tmp_path)
    assert [loaded.state.get(item, {}).get("count") for item in other.parameters()] == [3, 3, None]
    assert torch.equal(loaded.state[other.get_parameter("b")]["mean"], torch.full((4,), 2.0))


def gathered(kinds: list[str]) -> list[str]:
    import torch.distributed as dist

    def gather(item: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, item)
        return found

    kind = kinds[dist.get_rank()]
    found = gather_distinct(gather, kind)
    raise_together(gather, "something" if kind == "bad" else None)
    return found


def test_ranks_hear_of_each_kind_once_and_raise_together() -> None:
    assert run_workers(4, gathered, ["x", "y", "x", "y"]) == [["x", "y"]] * 4
    with pytest.raises(WorkerError, match="something") as caught:
        run_workers(4, gathered, ["x", "x", "bad", "x"])
    assert caught.value.all_ranks_raised(ValueError)
