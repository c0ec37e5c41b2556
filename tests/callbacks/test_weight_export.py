import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning import Callback, LightningModule
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GenerationConfig

from lightning_rl_engines.callbacks.weight_export import WeightExport
from lightning_rl_engines.export import HFFolderSink, MemorySink
from lightning_rl_engines.models.config import ModelConfig
from lightning_rl_engines.strategies.fsdp_ulysses import FSDPUlyssesStrategy
from tests.support import WorkerError, run_workers
from tests.support.lightning_env import make_trainer
from tests.support.models import tiny_model, tiny_model_folder


class Module(LightningModule):
    """Finishes an update on every second batch and adds one to each weight then."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.path = path
        self.batches = 0

    @property
    def updates(self) -> int:
        return self.batches // 2

    def configure_model(self) -> None:
        self.policy = self.trainer.strategy.build_model(ModelConfig(path=self.path))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.policy.parameters(), 0.1)

    def training_step(self, batch: Tensor, index: int) -> None:
        self.batches += 1
        if self.batches % 2 == 0:
            with torch.no_grad():
                for parameter in self.policy.parameters():
                    parameter.add_(1.0)


class Snapshots(MemorySink):
    """Remembers which updates were exported, and one value of each."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, float]] = []

    def open(self, plan: Any, context: Any) -> None:
        super().open(plan, context)
        self.update = context.update
        assert context.config.model_type == "llama"
        assert len(plan.entries) == 21

    def close(self) -> None:
        super().close()
        self.seen.append((self.update, self.tensors["model.norm.weight"][0].item()))


def fit(path: str, batches: int, callback: Callback, strategy: Strategy | None = None) -> None:
    module = Module(path)
    trainer = make_trainer(strategy or FSDPUlyssesStrategy(), max_epochs=1, callbacks=[callback])
    trainer.fit(module, DataLoader(torch.arange(batches * trainer.world_size), num_workers=0))


def exported_updates(path: str, batches: int, options: dict[str, Any]) -> list[tuple[int, float]]:
    sink = Snapshots()
    fit(path, batches, WeightExport(sink=sink, **options))
    return sink.seen


@pytest.mark.parametrize(
    ("world_size", "options", "updates"),
    [
        (1, {}, [1, 2, 3]),
        (2, {"every_n_updates": 2}, [2, 3]),
        (2, {"every_n_updates": 2, "at_end": False}, [2]),
    ],
)
def test_updates_are_counted_and_the_last_one_is_exported_once(
    world_size: int, options: dict[str, Any], updates: list[int]
) -> None:
    path = str(tiny_model_folder("llama"))
    start = tiny_model("llama").state_dict()["model.norm.weight"][0].item()
    first, *others = run_workers(world_size, exported_updates, path, 6, options)
    assert [update for update, _ in first] == updates
    for update, value in first:
        assert value == pytest.approx(start + update, abs=1e-5)
    assert others == [[]] * (world_size - 1)


def export_to_folder(source: str, target: str) -> tuple[str | None, int | None, list[str]]:
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    listener, logger = Listener(), logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    export = WeightExport(sink=HFFolderSink(path=target), dtype="bfloat16")
    try:
        fit(source, 2, export)
    finally:
        logger.removeHandler(listener)
    return export.last_path, export.last_update, [m for m in messages if m.startswith("Exported")]


def test_the_folder_loads_and_its_path_is_known_on_all_ranks(tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = tiny_model("llama_tied")
    model.generation_config = GenerationConfig(eos_token_id=[2, 5])
    model.save_pretrained(source)
    target = str(tmp_path / "out-{update}")
    results = run_workers(2, export_to_folder, str(source), target)
    place = str(tmp_path / "out-1")
    assert [(path, update) for path, update, _ in results] == [(place, 1)] * 2
    (message,) = results[0][2]
    assert message.startswith(f"Exported the weights of update 1 to {place} in ")
    assert results[1][2] == []
    expected = {name: (tensor + 1).bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    ours = load_file(tmp_path / "out-1" / "model.safetensors")
    assert sorted(ours) == sorted(expected)
    assert all(torch.equal(ours[name], expected[name]) for name in ours)
    assert AutoModelForCausalLM.from_pretrained(place, dtype="auto").dtype == torch.bfloat16
    assert GenerationConfig.from_pretrained(place).eos_token_id == [2, 5]


def export_in_shards(source: str, target: str) -> int:
    with patch("safetensors.torch.save_file", wraps=save_file) as save:
        fit(source, 2, WeightExport(sink=HFFolderSink(path=target, max_shard_size=20_000)))
    return save.call_count


def test_all_ranks_write_their_share(tmp_path: Path) -> None:
    source = str(tiny_model_folder("llama"))
    written = run_workers(2, export_in_shards, source, str(tmp_path / "out"))
    count = len(list((tmp_path / "out").glob("*.safetensors")))
    assert written == [(count + 1) // 2, count // 2]
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    expected = AutoModelForCausalLM.from_pretrained(source).state_dict()
    assert all(torch.equal(ours[name], tensor + 1) for name, tensor in expected.items())


def export_over_itself(source: str) -> None:
    fit(source, 2, WeightExport(sink=HFFolderSink(path=f"{source}/../source")))


def test_an_export_over_what_the_model_was_read_from_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny_model("llama").save_pretrained(source)
    before = (source / "model.safetensors").read_bytes()
    with pytest.raises(WorkerError, match=r"would replace .*source', which the model is read from"):
        run_workers(2, export_over_itself, str(source))
    assert (source / "model.safetensors").read_bytes() == before


def fail_to_write(source: str, target: str) -> None:
    fit(source, 2, WeightExport(sink=HFFolderSink(path=target)))


def test_an_error_while_writing_stops_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(WorkerError, match="is a file; name a folder") as caught:
        run_workers(2, fail_to_write, str(tiny_model_folder("llama")), str(tmp_path / "out"))
    assert caught.value.all_ranks_raised(ValueError)


def export_merged(source: str) -> int:
    sink = Snapshots()
    with pytest.raises(ValueError, match="merged"):
        fit(source, 2, WeightExport(sink=sink, weights="merged"))
    return len(sink.seen)


def test_a_mode_that_the_model_has_not_is_refused_before_training() -> None:
    assert run_workers(1, export_merged, str(tiny_model_folder("llama"))) == [0]


def without_engine() -> None:
    with pytest.raises(MisconfigurationException, match="strategy is DDPStrategy; use Trainer"):
        fit("unused", 2, WeightExport(sink=MemorySink()), "ddp")


def test_a_strategy_that_is_no_engine_is_refused() -> None:
    run_workers(1, without_engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_updates": 0}, "every_n_updates=0 must be at least 1"),
        ({"weights": "half"}, r"weights='half' is unknown; use one of \['full', 'merged', 'adapter'\]"),
        ({"dtype": "float64"}, r"dtype='float64' is unknown; use one of \['float32'"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightExport(sink=MemorySink(), **options)


def test_it_can_be_written_in_yaml(tmp_path: Path) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Callback, "callback")
    path = tmp_path / "config.yaml"
    path.write_text(
        "callback: {class_path: lightning_rl_engines.callbacks.WeightExport, init_args: {every_n_updates: 3, dtype: "
        "bfloat16, sink: {class_path: lightning_rl_engines.export.HFFolderSink, init_args: {path: out, "
        "max_shard_size: 1GB}}}}"
    )
    callback = parser.instantiate(parser.parse_path(path)).callback
    assert isinstance(callback, WeightExport)
    assert isinstance(callback.sink, HFFolderSink)
    assert (callback.every_n_updates, callback.dtype, callback.sink.path) == (3, "bfloat16", "out")
