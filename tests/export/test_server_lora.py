"""Adapters for an inference server: the base once and when it is lost, else the adapter alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_rl_engines import ModelConfig, WeightExport
from lightning_rl_engines.export import InferenceServerSink, LoRAInferenceClient
from tests.export.test_server import Recorder
from tests.strategies.steps import assert_same, copies, plain_model
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.lora import lora
from tests.support.models import tiny_model_folder


class Engine(Recorder, LoRAInferenceClient):
    """An inference engine that starts empty, counts bytes, and may lose its weights."""

    def __init__(self, fails_in: str | None = None) -> None:
        super().__init__(fails_in)
        self.adapter: dict[str, Tensor] = {}
        self.rank = 0
        self.sent: list[int] = []

    def start_counting(self) -> None:
        self.calls.clear()
        self.sent.append(0)

    def lose_weights(self) -> None:
        self.weights, self.adapter = {}, {}

    @override
    def receive(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        super().receive(tensors)
        self.sent[-1] += sum(tensor.nbytes for _, tensor in tensors)

    @override
    def holds_base(self) -> bool:
        self._note("holds_base")
        return bool(self.weights)  # also when they are not complete: the engine cannot know

    @override
    def load_adapter(self, tensors: Sequence[tuple[str, Tensor]], config: Mapping[str, Any], version: int) -> None:
        assert self.weights, "an adapter without its base"
        self._note(f"load_adapter {version}")
        self.adapter, self.rank = dict(tensors), config["r"]
        self.sent[-1] += sum(tensor.nbytes for _, tensor in tensors)


ADAPTER = ["pause", "load_adapter 0", "reset_prefix_cache", "resume"]


def whole(buckets: int) -> list[str]:
    """Calls of an update with base and adapter: one pause, so the base alone answers nothing."""
    sends = ["receive"] * buckets
    return ["holds_base", "pause", "begin_update", *sends, "finish_update 0", *ADAPTER[1:]]


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def updates_in_a_row(module: EngineModule) -> list[int]:
    module.updates = 0  # type: ignore[assignment] # what a module of this package counts
    client = Engine()
    # Another rank's client is never asked.
    client.fails_in = None if module.global_rank == 0 else "holds_base"
    export = WeightExport(sink=InferenceServerSink(client=client, bucket_megabytes=0.01), weights="adapter")
    engine, policy = module.engine, module.policy
    live = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    base = dict(plain_model(tiny_model_folder("llama")).state_dict())
    for change, sends_base in ((None, True), ("train", False), (None, False), ("lose", True), (None, False)):
        if change == "train":
            with torch.no_grad():
                for parameter in policy.parameters():
                    if parameter.requires_grad:
                        parameter.add_(1.0)
            live = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
        if change == "lose":
            client.lose_weights()
        client.start_counting()
        export.export(module.trainer, module)
        adapter = copies(engine.get_per_tensor_param(policy, mode="adapter"))
        if module.global_rank == 0:
            buckets = client.calls.count("receive")
            assert client.calls == (whole(buckets) if sends_base else ["holds_base", *ADAPTER])
            assert (buckets > 1) == sends_base
            assert client.sent[-1] == num_bytes(adapter) + sends_base * num_bytes(base)
            assert_same(client.weights, base)
            assert_same(client.adapter, adapter)
            assert client.rank == 4
        assert_same(dict(policy.state_dict()), live)
    return client.sent


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_base_goes_once_and_again_after_it_is_lost(world_size: int) -> None:
    config = ModelConfig(path=str(tiny_model_folder("llama")), lora=lora())
    first, *others = run_workers(world_size, with_engine, updates_in_a_row, config)
    full, adapter, same, again, last = first
    assert full == again > adapter == same == last > 0
    assert others == [[0] * 5] * (world_size - 1)


def export_that_fails(module: EngineModule) -> list[Any]:
    """An export whose call fails, and what the next one sends."""
    module.updates = 0  # type: ignore[assignment]
    client = Engine(module.trainer.fails_in)
    client.start_counting()
    export = WeightExport(sink=InferenceServerSink(client=client, bucket_megabytes=0.01), weights="adapter")
    with pytest.raises(ConnectionError, match=str(client.fails_in)):
        export.export(module.trainer, module)
    calls, client.fails_in = list(client.calls), None
    client.start_counting()
    export.export(module.trainer, module)
    return [calls, list(client.calls)]


def run_failing(fails_in: str) -> list[Any]:
    def body(module: EngineModule) -> list[Any]:
        module.trainer.fails_in = fails_in  # type: ignore[attr-defined]
        return export_that_fails(module)

    return with_engine(body, ModelConfig(path=str(tiny_model_folder("llama")), lora=lora()))


@pytest.mark.parametrize(
    ("fails_in", "sends_base"),
    [
        ("holds_base", True),
        ("pause", True),
        # The engine has a part of the base by now, and calls it one.
        ("receive", True),
        ("finish_update 0", True),
        ("load_adapter 0", False),
        ("reset_prefix_cache", False),
    ],
)
def test_a_base_that_did_not_arrive_whole_is_sent_again(fails_in: str, sends_base: bool) -> None:
    ((failed, retried),) = run_workers(1, run_failing, fails_in)
    assert failed.count("resume") == (fails_in != "holds_base")
    assert fails_in in failed[-2:]
    assert ("begin_update" in retried) == sends_base
    assert retried[-4:] == ["finish_update 0" if sends_base else "pause", *ADAPTER[1:]]


def export_through(client: Any) -> None:
    def body(module: EngineModule) -> None:
        module.updates = 0  # type: ignore[assignment]
        WeightExport(sink=InferenceServerSink(client=client), weights="adapter").on_fit_start(module.trainer, module)

    with_engine(body, ModelConfig(path=str(tiny_model_folder("llama")), lora=lora()))


def test_a_client_that_cannot_load_adapters_is_refused_before_training() -> None:
    with pytest.raises(WorkerError, match="derive it from LoRAInferenceClient") as caught:
        run_workers(2, export_through, Recorder())
    assert caught.value.all_ranks_raised(MisconfigurationException)
