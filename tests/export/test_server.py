"""Weights for an inference server: the order of calls, whole modules in a bucket, and a server that goes on."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_rl_engines.export import ExportContext, drain, plan_from_hf_model, stream_full_parameters
from lightning_rl_engines.export.server import InferenceClient, InferenceServerSink
from tests.support.models import tiny_model


class Recorder(InferenceClient):
    """An inference engine that notes what it is asked, and fails where told."""

    def __init__(self, fails_in: str | None = None) -> None:
        self.calls: list[Any] = []
        self.weights: dict[str, Tensor] = {}
        self.buckets: list[list[str]] = []
        self.fails_in = fails_in

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails_in:
            raise ConnectionError(call)

    @override
    def pause(self) -> None:
        self._note("pause")

    @override
    def begin_update(self, plan: Any) -> None:
        self._note("begin_update")

    @override
    def receive(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self._note("receive")
        self.weights.update(tensors)
        self.buckets.append([name for name, _ in tensors])

    @override
    def finish_update(self, version: int) -> None:
        self._note(f"finish_update {version}")

    @override
    def reset_prefix_cache(self) -> None:
        self._note("reset_prefix_cache")

    @override
    def resume(self) -> None:
        self._note("resume")


class OneRank:
    global_rank = 0

    def all_gather_objects(self, item: Any) -> list[Any]:
        return [item]


def export(client: Recorder, update: int = 1, megabytes: float = 0.01) -> dict[str, Tensor]:
    model = tiny_model("qwen3")
    plan = plan_from_hf_model(model)
    sink = InferenceServerSink(client=client, bucket_megabytes=megabytes)
    stream = stream_full_parameters(model, plan, prefix="")
    drain(stream, sink, OneRank(), plan=plan, context=ExportContext(update=update))
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def test_every_update_pauses_sends_and_resets_the_cache_before_it_resumes() -> None:
    client = Recorder()
    expected = export(client, update=7)
    buckets = client.calls.count("receive")
    assert buckets > 2
    once = ["pause", "begin_update", *["receive"] * buckets, "finish_update 7", "reset_prefix_cache", "resume"]
    assert client.calls == once
    assert client.weights.keys() == expected.keys()
    assert all(torch.equal(client.weights[name], tensor) for name, tensor in expected.items())
    export(client, update=8)
    assert client.calls == [*once, *[call.replace("7", "8") for call in once]]


def test_projections_that_a_server_fuses_travel_in_one_bucket() -> None:
    client = Recorder()
    export(client)
    for members in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for layer in (0, 1):
            found = {
                index
                for index, bucket in enumerate(client.buckets)
                for name in bucket
                if f"layers.{layer}." in name and any(member in name for member in members)
            }
            assert len(found) == 1


@pytest.mark.parametrize("call", ["pause", "begin_update", "receive", "finish_update 1", "reset_prefix_cache"])
def test_a_server_that_fails_is_resumed_once_and_the_error_is_raised(call: str) -> None:
    client = Recorder(fails_in=call)
    with pytest.raises(ConnectionError, match=call):
        export(client)
    assert client.calls[-2:] == [call, "resume"]
    assert client.calls.count("resume") == 1
    client.fails_in = None
    client.calls.clear()
    expected = export(client)
    assert client.calls[0] == "pause"
    assert all(torch.equal(client.weights[name], tensor) for name, tensor in expected.items())


def test_a_bucket_of_no_size_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket_megabytes=0"):
        InferenceServerSink(client=Recorder(), bucket_megabytes=0)
