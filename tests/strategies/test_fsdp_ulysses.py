"""The strategy as a Lightning user meets it: by name, instance and YAML; sizes; samplers; logging; optimizers."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler
from typing_extensions import override

from lightning_rl_engines import FSDPUlyssesStrategy, ModelConfig
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import assert_near, assert_same, copies, mine, plain_model, score_loss, train_plain
from tests.strategies.steps import weights_of as plain_weights
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule, sharing_strategy, with_engine
from tests.support.lightning_env import make_trainer
from tests.support.models import tiny_model_folder

# ---- how it is named ----


def fit_by_every_spelling(folder: str, documents: Documents) -> list[dict[str, torch.Tensor]]:
    """On a rank: weights after a step, for the registered name and an instance, each with both kinds of accelerator."""

    def body(module: EngineModule) -> None:
        engine = module.engine
        engine.train_batch(module.policy, module.optimizers(), mine(engine, documents), score_loss)

    found = []
    for strategy in ("fsdp_ulysses", FSDPUlyssesStrategy()):
        for accelerator in ("cpu", CPUAccelerator()):
            chosen = strategy if isinstance(strategy, str) else FSDPUlyssesStrategy()
            module = EngineModule({"policy": ModelConfig(path=folder)}, body, 0.1)
            trainer = make_trainer(chosen, accelerator=accelerator, max_epochs=1)
            trainer.fit(module, DataLoader(range(trainer.world_size)))
            assert type(trainer.strategy) is FSDPUlyssesStrategy
            assert trainer.global_step == 1
            found.append(copies(module.engine.get_per_tensor_param(module.policy)))
    return found


def test_name_and_instance_with_either_accelerator_take_the_same_step() -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    model = plain_model(folder)
    train_plain(model, documents)
    for found in run_workers(2, fit_by_every_spelling, folder, documents):
        assert len(found) == 4
        for weights in found:
            assert_near(weights, plain_weights(model))
            assert_same(weights, found[0])


class Nothing(LightningModule):
    """A module that is never trained."""

    @override
    def configure_optimizers(self) -> None:
        return None

    @override
    def training_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError("refused before")


CLASS_PATHS = ("FSDPUlyssesStrategy", "lightning_rl_engines.FSDPUlyssesStrategy")


@pytest.fixture(autouse=True)
def _command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["prog"])
    # LightningCLI 2.6 calls a function that jsonargparse has renamed.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def cli(*args: str) -> LightningCLI:
    return LightningCLI(
        Nothing,
        LightningDataModule,
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
        trainer_defaults={"accelerator": "cpu", "devices": 4, "logger": False, "enable_checkpointing": False},
        args=list(args),
    )


@pytest.mark.parametrize("class_path", CLASS_PATHS)
def test_the_command_line_takes_the_class_with_arguments(class_path: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    arguments = {"ulysses_sp_size": 2, "fsdp_size": 4, "timeout_seconds": 60.0}
    strategy = {"class_path": class_path, "init_args": arguments}
    config.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    flags = [f"--trainer.strategy={class_path}", "--trainer.strategy.ulysses_sp_size=2"]
    for found in (cli(f"--config={config}"), cli(*flags, "--trainer.strategy.fsdp_size=4")):
        assert type(found.trainer.strategy) is FSDPUlyssesStrategy
        assert (found.trainer.strategy.ulysses_sp_size, found.trainer.strategy.fsdp_size) == (2, 4)
    assert type(cli("--trainer.strategy=fsdp_ulysses").trainer.strategy) is FSDPUlyssesStrategy


def test_a_printed_config_builds_the_same_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli(f"--trainer.strategy={CLASS_PATHS[0]}", "--trainer.strategy.ulysses_sp_size=2", "--print_config")
    config = tmp_path / "config.yaml"
    config.write_text(capsys.readouterr().out)
    strategy = cli(f"--config={config}").trainer.strategy
    assert type(strategy) is FSDPUlyssesStrategy
    assert strategy.ulysses_sp_size == 2


def test_the_command_line_names_a_misspelt_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli(f"--trainer.strategy={CLASS_PATHS[0]}", "--trainer.strategy.ulyses_sp_size=2")
    assert "ulyses_sp_size" in capsys.readouterr().err


def test_a_trainer_on_one_device_has_nothing_to_launch() -> None:
    for strategy in ("fsdp_ulysses", FSDPUlyssesStrategy()):
        trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False)
        assert type(trainer.strategy) is FSDPUlyssesStrategy
        assert trainer.strategy.launcher.is_interactive_compatible


# ---- what is refused ----


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ulysses_sp_size": 0}, "ulysses_sp_size=0.* such as 1 or 2"),
        ({"ulysses_sp_size": True}, "ulysses_sp_size=True.* such as 1 or 2"),
        ({"ulysses_sp_size": 2.0}, r"ulysses_sp_size=2\.0.* such as 1 or 2"),
        ({"fsdp_size": -1}, "fsdp_size=-1.* such as 1 or 2"),
        ({"fsdp_size": "2"}, "fsdp_size='2'.* such as 1 or 2"),
        ({"reduce_dtype": "fp32"}, "dtype='fp32'.*'float32'"),
        ({"timeout_seconds": 0}, "timeout_seconds=0.* such as 1800"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds=nan.* such as 1800"),
    ],
)
def test_impossible_arguments_are_refused_with_a_legal_value(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FSDPUlyssesStrategy(**arguments)


def test_a_misspelt_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="ulyses_sp_size"):
        FSDPUlyssesStrategy(ulyses_sp_size=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("arguments", "precision", "words"),
    [
        ({"ulysses_sp_size": 3}, "32-true", r"ulysses_sp_size=3 does not divide the 1 processes.*use one of \[1\]"),
        ({"fsdp_size": 2}, "32-true", r"fsdp_size=2 does not divide the 1 processes.*use one of \[1\]"),
        ({"defer_gradient_sync": True}, "bf16-mixed", "defer_gradient_sync=True.*use precision='32-true'"),
        ({"reduce_dtype": "bfloat16"}, "32-true", "reduce_dtype='bfloat16'.*precision='32-true'.*'bf16-mixed'"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_before_any_process_group(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], precision: str, words: str
) -> None:
    # An earlier test may have left this process in a group.
    started: list[Any] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: started.append(kwargs))
    trainer = make_trainer(FSDPUlyssesStrategy(**arguments), precision=precision, max_epochs=1)
    with pytest.raises(ValueError, match=words):
        trainer.fit(Nothing(), DataLoader(range(1)))
    assert started == []


@pytest.mark.parametrize("name", ["ulysses_sp_size", "fsdp_size"])
def test_a_size_that_does_not_divide_the_world_is_refused_on_all_ranks(name: str) -> None:
    folder = str(tiny_model_folder("llama"))
    with pytest.raises(WorkerError) as caught:
        run_workers(4, with_engine, None, ModelConfig(path=folder), **{name: 3})
    assert caught.value.all_ranks_raised(ValueError)
    for error in caught.value.errors:
        assert f"{name}=3 does not divide the 4 processes of this run; use one of [1, 2, 4]." in error.message


# ---- data ----


class Backwards(Sampler[int]):
    """A user's own order."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Any:
        return iter(range(self.size - 1, -1, -1))


class Recorder(LightningModule):
    """Keeps the ids it sees, by epoch, and logs a number that depends on the data rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.ids: list[list[int]] = []

    @override
    def configure_model(self) -> None:
        """There is none; Lightning asks for the hook under torchtitan."""

    @override
    def configure_optimizers(self) -> None:
        return None

    @override
    def on_train_epoch_start(self) -> None:
        self.ids.append([])

    @override
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.ids[-1].extend(batch.tolist())
        value = 1.0 + self.trainer.strategy.data_parallel_rank  # type: ignore[attr-defined]
        self.log("mean", value, sync_dist=True)
        for reduction in ("sum", "max", "min"):
            self.log(reduction, value, sync_dist=True, reduce_fx=reduction)


def record(make_loader: Any, split: str = "sp", **trainer: Any) -> dict[str, Any]:
    """On a rank: the ids of two epochs, and what was logged."""
    module = Recorder()
    built = make_trainer(sharing_strategy(2, split), max_epochs=2, log_every_n_steps=1, **trainer)
    built.fit(module, make_loader())
    logged = {name: float(built.logged_metrics[name]) for name in ("mean", "sum", "max", "min")}
    decisions = [
        built.strategy.reduce_boolean_decision(built.global_rank < limit, all=every)
        for limit in (0, 3, 4)
        for every in (True, False)
    ]
    return {"ids": module.ids, "logged": logged, "decisions": decisions}


SPLITS = ("sp", "tp", "cp", "pp")


def default_loader() -> DataLoader:
    return DataLoader(range(8), batch_size=2, shuffle=True)


def own_distributed_loader() -> DataLoader:
    rank = dist.get_rank()
    return DataLoader(range(8), sampler=DistributedSampler(range(8), 2, rank // 2, shuffle=False))


def own_loader() -> DataLoader:
    return DataLoader(range(8), sampler=Backwards(8), batch_size=2)


def own_batches_loader() -> DataLoader:
    return DataLoader(range(8), batch_sampler=BatchSampler(Backwards(8), 4, drop_last=False))


@pytest.mark.parametrize("split", SPLITS)
def test_peers_read_the_same_samples_and_data_ranks_share_them_out(split: str) -> None:
    ids = [result["ids"] for result in run_workers(4, record, default_loader, split)]
    # The stages of a pipeline lie as far apart as possible.
    (first, peer), (second, other) = ((0, 2), (1, 3)) if split == "pp" else ((0, 1), (2, 3))
    assert ids[first] == ids[peer]
    assert ids[second] == ids[other]
    for epoch in range(2):
        assert len(ids[first][epoch]) == len(ids[second][epoch]) == 4
        assert sorted(ids[first][epoch] + ids[second][epoch]) == list(range(8))
    assert ids[0][0] != ids[0][1], "the second epoch is shuffled anew"


def test_a_users_own_sampler_is_left_alone() -> None:
    for result, expected in zip(run_workers(4, record, own_distributed_loader), (0, 0, 1, 1), strict=True):
        assert result["ids"] == [[expected + 2 * index for index in range(4)]] * 2
    backwards = [list(range(7, -1, -1))] * 2
    for make_loader in (own_loader, own_batches_loader):
        for result in run_workers(4, record, make_loader, use_distributed_sampler=False):
            assert result["ids"] == backwards
    # Otherwise Lightning deals what a sampler gives out to the data ranks, here as everywhere.
    ids = [result["ids"] for result in run_workers(4, record, own_loader)]
    assert (ids[0], ids[2]) == (ids[1], ids[3])
    assert [sorted(left + right) for left, right in zip(ids[0], ids[2], strict=True)] == [list(range(8))] * 2


@pytest.mark.parametrize("split", SPLITS)
def test_a_logged_value_counts_each_data_rank_once(split: str) -> None:
    for result in run_workers(4, record, default_loader, split):
        # Two data ranks log 1 and 2, each on two peers: a mean over the world is the mean over data ranks.
        assert result["logged"] == {"mean": 1.5, "sum": 3.0, "max": 2.0, "min": 1.0}
        # Lightning's own votes still count every rank.
        assert result["decisions"] == [False, False, False, True, True, True]


# ---- optimizers ----


class OptimizerModule(EngineModule):
    """Optimizers written the ordinary way."""

    way = "all"

    @override
    def configure_optimizers(self) -> Any:
        if self.way == "all":
            return torch.optim.SGD(self.parameters(), 0.1)
        if self.way == "trainable":
            return torch.optim.SGD([item for item in self.parameters() if item.requires_grad], 0.1)
        norms = [item for name, item in self.named_parameters() if "norm" in name]
        others = [item for name, item in self.named_parameters() if "norm" not in name]
        return torch.optim.SGD([{"params": others, "lr": 0.1}, {"params": norms, "lr": 0.3}])


def train_with(way: str, config: ModelConfig, documents: Documents) -> Any:
    def body(module: EngineModule) -> None:
        engine = module.engine
        engine.train_batch(module.policy, module.optimizers(), mine(engine, documents), score_loss)

    module = OptimizerModule({"policy": config}, body, 0.1)
    module.way = way
    trainer = make_trainer(FSDPUlyssesStrategy(), max_epochs=1)
    trainer.fit(module, DataLoader(range(2 * trainer.world_size)))
    return copies(module.engine.get_per_tensor_param(module.policy))


@pytest.mark.parametrize("way", ["all", "groups", "trainable"])
def test_optimizers_written_the_ordinary_way_train(way: str) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    freeze = ["*mlp*"] if way == "trainable" else []
    model = plain_model(folder)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (freeze and "mlp" in name))
    train_plain(model, documents, steps=2, lr=lambda name: 0.3 if way == "groups" and "norm" in name else 0.1)
    for found in run_workers(2, train_with, way, ModelConfig(path=folder, freeze=freeze), documents):
        assert_near(found, plain_weights(model))


class OutsideModule(EngineModule):
    """Trains a layer that no engine has built: nothing would reduce its gradients."""

    @override
    def configure_model(self) -> None:
        super().configure_model()
        self.judge = torch.nn.Linear(2, 2)


def fit_outside(config: ModelConfig) -> None:
    trainer = make_trainer(FSDPUlyssesStrategy(), max_epochs=1)
    trainer.fit(OutsideModule({"policy": config}, print, 0.1), DataLoader(range(2)))


@pytest.mark.parametrize("world", [1, 2])
def test_a_trainable_parameter_outside_the_models_is_refused(world: int) -> None:
    with pytest.raises(WorkerError, match=re.escape("judge.weight")) as caught:
        run_workers(world, fit_outside, ModelConfig(path=str(tiny_model_folder("llama"))))
    assert len(caught.value.errors) == world
    assert "build_model" in caught.value.errors[0].message
