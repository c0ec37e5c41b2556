import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_rl_engines.export import (
    ExportContext,
    ExportPlan,
    MemorySink,
    ModuleSink,
    WeightSink,
    drain,
    plan_from_hf_model,
    stream_full_parameters,
)
from tests.export.support import Alone, World, assert_same, make_model, shard
from tests.support import WorkerError, run_workers


class Unpicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Recorder(WeightSink):
    """Records calls, and fails where it is told to."""

    def __init__(self, fails_in: str | None = None, error: Exception | None = None) -> None:
        self.fails_in = fails_in
        self.error = error or OSError(28, "No space left on device")
        self.calls: list[str] = []

    def record(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails_in:
            raise self.error

    @property
    @override
    def location(self) -> str:
        return "here"

    @override
    def open(self, plan: ExportPlan | None, context: ExportContext) -> None:
        self.record("open")

    @override
    def write(self, name: str, tensor: Tensor) -> None:
        self.record(f"write {name}")

    @override
    def close(self) -> None:
        self.record("close")

    @override
    def abort(self, error: BaseException) -> None:
        self.calls.append(f"abort {type(error).__name__}")


def pairs(*names: str) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        yield name, torch.zeros(2)


def test_calls_come_in_order_and_the_location_is_returned() -> None:
    sink = Recorder()
    assert drain(pairs("a", "b"), sink, Alone()) == "here"
    assert sink.calls == ["open", "write a", "write b", "close"]


@pytest.mark.parametrize(
    ("fails_in", "calls"),
    [
        ("open", ["open", "abort OSError"]),
        ("write a", ["open", "write a", "abort OSError"]),
        ("close", ["open", "write a", "write b", "close", "abort OSError"]),
    ],
)
def test_an_error_aborts_once_and_the_stream_is_walked_to_its_end(fails_in: str, calls: list[str]) -> None:
    sink, walked = Recorder(fails_in), []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in pairs("a", "b"):
            yield name, tensor
            walked.append(name)

    with pytest.raises(OSError, match="No space left"):
        drain(stream(), sink, Alone())
    assert sink.calls == calls
    # What cannot be opened costs no gathering.
    assert walked == ([] if fails_in == "open" else ["a", "b"])


def test_an_error_of_the_stream_aborts() -> None:
    def stream() -> Iterator[tuple[str, Tensor]]:
        yield from pairs("a")
        raise RuntimeError("lost")

    sink = Recorder()
    with pytest.raises(RuntimeError, match="lost"):
        drain(stream(), sink, Alone())
    assert sink.calls == ["open", "write a", "abort RuntimeError"]


def drain_sharded(fails_in: str | None, error: Exception | None, only_rank_zero: bool) -> tuple[list[str], str | None]:
    model = make_model("llama")
    plan = plan_from_hf_model(model)
    root, world = shard(model), World()
    sink = None if only_rank_zero and world.global_rank else Recorder(fails_in, error)
    location = drain(stream_full_parameters(root, plan), sink, world, plan=plan)
    return ([] if sink is None else sink.calls), location


@pytest.mark.parametrize("only_rank_zero", [True, False])
def test_rank_zero_alone_writes_and_all_ranks_learn_the_location(only_rank_zero: bool) -> None:
    (calls, location), *others = run_workers(2, drain_sharded, None, None, only_rank_zero)
    assert len(calls) == 21 + 2
    assert others == [([], location)]
    assert location == "here"


@pytest.mark.parametrize("fails_in", ["open", "write model.norm.weight", "close"])
def test_an_error_on_rank_zero_is_raised_by_all_ranks(fails_in: str) -> None:
    with pytest.raises(WorkerError) as caught:
        run_workers(2, drain_sharded, fails_in, None, True)
    assert caught.value.all_ranks_raised(OSError)
    assert [str(e.exception) for e in caught.value.errors] == ["[Errno 28] No space left on device"] * 2


def raise_unpicklable() -> str:
    try:
        drain_sharded("close", Unpicklable(1, 2), True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_error_that_cannot_be_pickled_is_quoted() -> None:
    assert run_workers(2, raise_unpicklable) == ["Unpicklable: 1 and 2", "RuntimeError: rank 0: Unpicklable: 1 and 2"]


def no_sink() -> None:
    drain(pairs("a"), None, World())


def test_a_missing_sink_on_rank_zero_is_an_error_on_all_ranks() -> None:
    with pytest.raises(WorkerError, match="sink=None on rank 0") as caught:
        run_workers(2, no_sink)
    assert caught.value.all_ranks_raised(ValueError)


def test_memory_sink_keeps_the_last_finished_export() -> None:
    sink = MemorySink()
    model = make_model("llama_tied")
    plan = plan_from_hf_model(model)
    state = model.state_dict()
    drain(stream_full_parameters(model, plan, prefix=""), sink, Alone(), plan=plan)
    expected = {entry.name: state[entry.name].clone() for entry in plan.entries}
    assert_same(sink.tensors, expected)
    sink.open(plan, ExportContext())
    sink.write("model.norm.weight", torch.zeros(32))
    sink.abort(OSError())
    assert_same(sink.tensors, expected)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen2", "qwen3_moe"])
def test_module_sink_gives_equal_logits(name: str) -> None:
    model, target = make_model(name), make_model(name)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.zero_()
    plan = plan_from_hf_model(model)
    drain(stream_full_parameters(model, plan, prefix=""), ModuleSink(module=target), Alone(), plan=plan)
    ids = torch.arange(10)[None]
    assert torch.equal(target(input_ids=ids).logits, model(input_ids=ids).logits)
    assert_same(dict(target.state_dict()), dict(model.state_dict()))


def test_module_sink_takes_any_module_and_casts() -> None:
    target = nn.Linear(2, 1).to(torch.bfloat16)
    sink = ModuleSink(module=target)
    drain(iter([("weight", torch.full((1, 2), 3.0)), ("bias", torch.ones(1))]), sink, Alone())
    assert target.weight.dtype == torch.bfloat16
    assert target.weight.tolist() == [[3.0, 3.0]]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight": torch.zeros(1, 2), "other": torch.zeros(1)}, r"other of shape \(1,\) does not fit Linear"),
        ({"weight": torch.zeros(2, 2)}, r"weight of shape \(2, 2\) .* one of shape \(1, 2\)"),
        ({"weight": torch.zeros(1, 2)}, r"lacks \['bias'\] of Linear"),
    ],
)
def test_module_sink_names_what_does_not_fit(tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drain(iter(tensors.items()), ModuleSink(module=nn.Linear(2, 1)), Alone())


def test_abort_may_fail_without_hiding_the_first_error() -> None:
    class Worse(Recorder):
        @override
        def abort(self, error: BaseException) -> None:
            raise RuntimeError("worse")

    with pytest.raises(OSError, match="No space") as caught:
        drain(pairs("a"), Worse("open"), Alone())
    assert "worse" in caught.value.__notes__[0]
    assert os.strerror(28) in str(caught.value)
