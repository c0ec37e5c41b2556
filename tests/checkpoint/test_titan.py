"""Checkpoints of torchtitan models: resumed on the same layout, on others, and by the other engine; exported."""

import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan")

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_rl_engines import ModelConfig
from lightning_rl_engines.checkpoint import export_checkpoint, read_metadata
from lightning_rl_engines.checkpoint.names import parameter_names
from lightning_rl_engines.models.titan.names import HFPiece
from lightning_rl_engines.models.titan.shards import LocalShard
from tests.checkpoint.cases import ENGINES, Everything, SaveAfter, run_and_resume
from tests.models.titan.test_deepseek import config_of
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import assert_same, copies
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.lightning_env import make_trainer
from tests.support.lora import lora
from tests.support.models import tiny_config, tiny_model_folder

_TP, _CP, _EP = "tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree"
_HSDP, _PP = "data_parallel_replicate_degree", "pipeline_parallel_degree"
_OFFLOAD = {"offload_param": True, "offload_optimizer": True}

Place = tuple[str, int, dict[str, Any]]
"""Engine, number of ranks, arguments of the strategy."""


def titan(world: int, **options: Any) -> Place:
    return "torchtitan", world, options


def ulysses(world: int, **options: Any) -> Place:
    return "fsdp_ulysses", world, options


def inputs(model: str) -> tuple[ModelConfig, Documents]:
    """A configuration and documents by the name of a tiny model, with an adapter by ``"name with adapter"``."""
    name, _, adapter = model.partition(" with ")
    folder = str(tiny_model_folder(name))
    options = lora(r=2, target_modules=["q_proj", "v_proj", "up_proj"], modules_to_save=["norm"]) if adapter else None
    return ModelConfig(path=folder, lora=options), make_documents(folder, vocabulary=tiny_config(name).vocab_size)


@pytest.mark.parametrize(
    ("model", "world", "strategy"),
    [
        ("odd_vocab", 2, {_TP: 2}),
        ("qwen3_moe", 2, {_EP: 2, "async_checkpoint": True}),
        ("llama_tied", 4, {_HSDP: 2, "async_checkpoint": True, **_OFFLOAD}),
    ],
)
def test_the_rest_of_a_run_is_equal_to_the_last_bit(
    tmp_path: Path, model: str, world: int, strategy: dict[str, Any]
) -> None:
    config, documents = inputs(model)
    path = str(tmp_path / "run.ckpt")
    ranks = run_workers(world, run_and_resume, config.path, documents, path, engine="torchtitan", **strategy)
    for whole, resumed in ranks:
        assert [step["step"] for step in resumed] == [4, 5, 6]
        assert resumed == whole


class Grouped(Everything):
    """Two groups of parameters with rates of their own; a larger epsilon keeps steps smooth."""

    saves_at_start: str | None = None

    def configure_optimizers(self) -> Any:
        # By name: FSDP1's parameters have one dimension.
        groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "lr": 2e-2, "weight_decay": 0.0}]
        for name, parameter in self.policy.named_parameters():
            if parameter.requires_grad:
                groups["norm" in name]["params"].append(parameter)
        optimizer = torch.optim.AdamW(groups, 1e-2, eps=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.saves_at_start is not None:
            self.trainer.save_checkpoint(self.saves_at_start)


def train(
    config: ModelConfig,
    documents: Documents,
    engine: str,
    strategy: dict[str, Any],
    *,
    steps: int,
    resume: str | None = None,
    save_at_start: str | None = None,
    save: tuple[int, str] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """What each step saw, and the weights at the end."""
    module = Grouped(config, documents)
    module.saves_at_start = save_at_start
    callbacks = [SaveAfter(*save)] if save else []
    trainer = make_trainer(ENGINES[engine](**strategy), max_steps=steps, callbacks=callbacks)
    trainer.fit(module, DataLoader(range(64)), ckpt_path=resume)
    built: Any = trainer.strategy
    mode = "merged" if config.has_adapter else "full"
    return module.steps, copies(built.get_per_tensor_param(module.policy, mode=mode))


def contents(path: str) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole."""
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert all(isinstance(item, TensorStorageMetadata) for item in stored.values())
    state = {name: torch.empty(item.size, dtype=item.properties.dtype) for name, item in stored.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def options_by_name(path: str) -> dict[str, dict[str, Any]]:
    (optimizer,) = read_metadata(Path(path))["optimizers"]
    assert optimizer["values"] == {}
    return {
        name: {key: value for key, value in group.items() if key != "params"}
        for group in optimizer["groups"]
        for name in group["params"]
    }


@pytest.fixture(scope="module")
def in_one_piece() -> Callable[[str], Any]:
    @cache
    def make(model: str) -> Any:
        return run_workers(1, train, *inputs(model), "torchtitan", {}, steps=4)[0]

    return make


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("model", "saved_on", "resumed_on"),
    [
        ("odd_vocab", titan(2, **{_TP: 2}), titan(1)),
        ("qwen3_moe", titan(2, **{_EP: 2}), titan(4, **{_EP: 4})),
        pytest.param("qwen3_moe", titan(4, **{_EP: 2, _TP: 2}), titan(2), marks=pytest.mark.exhaustive),
        ("qwen2", titan(4), titan(4, **{_CP: 2}, **_OFFLOAD)),
        ("llama", titan(4, **{_HSDP: 2}, **_OFFLOAD), titan(4, **{_TP: 2})),
        ("llama_tied", titan(4, **{_TP: 2}), ulysses(2)),
        ("qwen2", ulysses(4, fsdp_size=2), titan(2, **{_TP: 2})),
        ("llama", titan(2, **{_PP: 2}), titan(2)),
        ("llama_tied with adapter", titan(2, **{_TP: 2}), ulysses(2)),
        pytest.param("llama_tied with adapter", ulysses(1), titan(2), marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_resumes_elsewhere(
    tmp_path: Path, in_one_piece: Callable[[str], Any], model: str, saved_on: Place, resumed_on: Place
) -> None:
    first, second = str(tmp_path / "first.ckpt"), str(tmp_path / "second.ckpt")
    engine, world, strategy = saved_on
    run_workers(world, train, *inputs(model), engine, strategy, steps=2, save=(2, first))
    engine, world, strategy = resumed_on
    ranks = run_workers(world, train, *inputs(model), engine, strategy, steps=4, resume=first, save_at_start=second)
    # What was loaded there and saved again has the same bits, and the same names.
    assert_same(contents(second), contents(first))
    assert any(name.startswith("optimizer_0.state.hf.") for name in contents(first))
    assert options_by_name(second) == options_by_name(first)
    expected, weights = in_one_piece(model)
    for steps, found in ranks:
        for step, whole in zip(steps, expected[2:], strict=True):
            assert (step["step"], step["rate"]) == (whole["step"], whole["rate"])
            assert (step["loss"], step["norm"]) == pytest.approx((whole["loss"], whole["norm"]), rel=2e-5)
        assert found.keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-6, msg=name)
    assert ranks[0][0][0]["drawn"] == expected[2]["drawn"]


class ByHand(Grouped):
    """Takes gradients that depend on names alone, so a step is the same to the last bit wherever parameters lie."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for parameter, name in parameter_names(self.policy).items():
            if parameter.requires_grad:
                seed = zlib.crc32(f"{name} {self.trainer.global_step}".encode())
                whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
                parameter.grad = torch.zeros_like(parameter)
                LocalShard(parameter.grad).fill(HFPiece(name), whole)
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]


def step_by_hand(
    config: ModelConfig, documents: Documents, strategy: dict[str, Any], steps: int, path: str, resume: str | None
) -> list[int]:
    module = ByHand(config, documents)
    built = ENGINES["torchtitan"](**strategy)
    trainer = make_trainer(built, max_steps=steps, callbacks=[SaveAfter(steps, path)])
    trainer.fit(module, DataLoader(range(64)), ckpt_path=resume)
    return [len(group["params"]) for group in trainer.optimizers[0].param_groups]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("saved_on", "resumed_on", "freeze"),
    [
        ((2, {_PP: 2}), (1, {}), []),
        ((1, {}), (4, {_PP: 2, _TP: 2, "pipeline_parallel_schedule": "Interleaved1F1B"}), []),
        ((4, {_PP: 2}), (2, {_PP: 2, "async_checkpoint": True}), ["model.embed_tokens.*", "model.layers.[01].*"]),
    ],
    ids=["to-one-stage", "to-interleaved-stages", "frozen-stage"],
)
def test_stages_of_a_pipeline_are_saved_and_loaded(
    tmp_path: Path, saved_on: tuple[int, Any], resumed_on: tuple[int, Any], freeze: list[str]
) -> None:
    _, documents = inputs("llama")
    architecture = tiny_config("llama", num_hidden_layers=4).to_dict()
    config = ModelConfig(from_config=architecture, freeze=freeze)
    first, second, straight = (str(tmp_path / f"{name}.ckpt") for name in ("first", "second", "straight"))
    run_workers(1, step_by_hand, config, documents, {}, 4, straight, None)
    world, strategy = saved_on
    stages = run_workers(world, step_by_hand, config, documents, strategy, 2, first, None)
    assert ([0, 0] in stages) == bool(freeze)
    world, strategy = resumed_on
    run_workers(world, step_by_hand, config, documents, strategy, 4, second, first)
    assert_same(contents(second), contents(straight))
    assert options_by_name(second) == options_by_name(straight)
    names = {name for name in contents(second) if name.startswith("optimizer_0.state.")}
    assert any("layers.3." in name for name in names) and any("layers.0." in name for name in names) != bool(freeze)


def test_experts_resume_with_the_engine_that_saved_them(tmp_path: Path) -> None:
    path = str(tmp_path / "run.ckpt")
    for (engine, other), held in (
        (("torchtitan", "fsdp_ulysses"), "hf.model.layers.0.mlp.experts"),
        (("fsdp_ulysses", "torchtitan"), "titan.layers.0."),
    ):
        run_workers(2, train, *inputs("qwen3_moe"), engine, {}, steps=1, save=(1, path))
        with pytest.raises(WorkerError, match="resume with its strategy") as caught:
            run_workers(2, train, *inputs("qwen3_moe"), other, {}, steps=2, resume=path)
        assert caught.value.all_ranks_raised(ValueError)
        assert f"does not hold 'policy.{held}" in caught.value.errors[0].message
        assert "lightning-rl export" in caught.value.errors[0].message


@pytest.mark.parametrize("model", ["llama_tied", "qwen3_moe", "qwen2 with adapter"])
def test_an_export_is_what_the_run_had(tmp_path: Path, model: str) -> None:
    path = tmp_path / "run.ckpt"
    _, weights = run_workers(2, train, *inputs(model), "torchtitan", {}, steps=1, save=(1, str(path)))[0]
    export = export_checkpoint(path, tmp_path / "hf")
    assert_same(load_file(export / "model.safetensors"), weights)
    assert AutoModelForCausalLM.from_pretrained(export).config.vocab_size == 64


def corrected(config: ModelConfig, path: str, strategy: dict[str, Any], *, save: bool) -> list[float]:
    """Values of the buffers that correct the choice of experts, written by hand and saved, or loaded."""

    def body(module: EngineModule) -> list[float]:
        buffers = [item for name, item in module.policy.named_buffers() if name.endswith("expert_bias_E")]
        for number, buffer in enumerate(buffers):
            buffer.fill_(number + 0.5)
        if save:
            module.trainer.save_checkpoint(path)
        for buffer in buffers:
            buffer.zero_()
        module.engine.load_checkpoint(path)  # type: ignore[attr-defined]
        return [float(item.double().mean()) for item in buffers]

    return with_engine(body, config, engine="torchtitan", **strategy)


def test_buffers_that_a_model_keeps_are_saved_and_counters_are_not(tmp_path: Path) -> None:
    path = str(tmp_path / "run.ckpt")
    config = ModelConfig(from_config=config_of(num_hidden_layers=3).to_dict())
    saved = run_workers(2, corrected, config, path, {_EP: 2}, save=True)
    assert len(saved[0]) > 1 and saved == [[number + 0.5 for number in range(len(saved[0]))]] * 2
    assert run_workers(1, corrected, config, path, {}, save=False) == saved[:1]
    names = set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
    assert sum(name.endswith("e_score_correction_bias") for name in names) == len(saved[0])
    assert not any("tokens_per_expert" in name for name in names)
