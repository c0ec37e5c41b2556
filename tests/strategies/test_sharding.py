"""Weights on the ranks: who reads them, ties, buffers, names, frozen parts, and that all ranks stay together."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from lightning_rl_engines import ModelConfig
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import (
    assert_near,
    assert_same,
    copies,
    gradients_of,
    mine,
    plain_model,
    plain_score_loss,
    score_loss,
    train_plain,
    weights_of,
)
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.models import MODEL_NAMES, tiny_model, tiny_model_folder


def train(config: ModelConfig, documents: Documents, steps: int, **strategy: Any) -> dict[str, Any]:
    """On a rank: gradients of a first pass, the norm, weights after SGD steps, and whether the tie still holds."""

    def body(module: EngineModule) -> dict[str, Any]:
        engine: Any = module.engine
        experience = mine(engine, documents)
        engine.forward_backward_batch(module.policy, experience, score_loss)
        found: dict[str, Any] = {"gradients": copies(engine.get_per_tensor_grad(module.policy))}
        found["norm"] = float(engine.clip_grad_norm(module.policy, None))
        for _ in range(steps):
            engine.train_batch(module.policy, module.optimizers(), experience, score_loss)
        found["weights"] = copies(engine.get_per_tensor_param(module.policy))
        hf = module.policy.hf
        with FSDP.summon_full_params(module.policy):
            head, embedding = hf.get_output_embeddings().weight, hf.get_input_embeddings().weight
            found["tied"] = head is embedding
            found["head"], found["embedding"] = head.detach().clone(), embedding.detach().clone()
        return found

    return with_engine(body, config, **strategy)


def plain_results(folder: Any, documents: Documents, steps: int, freeze: str = "") -> dict[str, Any]:
    model = plain_model(folder)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (freeze and name.startswith(freeze)))
    plain_score_loss(model, documents).backward()
    gradients = gradients_of(model)
    norms = train_plain(model, documents, steps=steps)
    return {"gradients": gradients, "norm": norms[0], "weights": weights_of(model)}


@pytest.mark.parametrize(
    ("world", "strategy"),
    [(2, {"ulysses_sp_size": 2}), (2, {}), (4, {"ulysses_sp_size": 2, "fsdp_size": 2}), (4, {"ulysses_sp_size": 4})],
)
@pytest.mark.parametrize("name", ["llama_tied", "llama"])
def test_three_steps_keep_ranks_and_ties_together(name: str, world: int, strategy: dict[str, Any]) -> None:
    folder = str(tiny_model_folder(name))
    documents = make_documents(folder, vocabulary=64)
    expected = plain_results(folder, documents, 3)
    results = run_workers(world, train, ModelConfig(path=folder), documents, 3, **strategy)
    for found in results:
        # For a tied model the embedding's gradient has two halves: its rows as inputs, and as the head.
        assert_near(found["gradients"], expected["gradients"])
        assert_near(found["weights"], expected["weights"], 3e-5)
        assert_same(found["weights"], results[0]["weights"])
        assert found["tied"] == (name == "llama_tied")
        assert torch.equal(found["head"], found["embedding"]) == (name == "llama_tied")
        assert torch.equal(found["embedding"], found["weights"]["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("llama", "lm_head.*"), ("llama", "model.embed_tokens.*"), ("llama_tied", "model.embed_tokens.*")],
)
@pytest.mark.parametrize("strategy", [{}, {"fsdp_size": 1, "ulysses_sp_size": 2}])
def test_frozen_parts_stay_and_the_others_train_as_before(name: str, pattern: str, strategy: dict[str, Any]) -> None:
    folder = str(tiny_model_folder(name))
    documents = make_documents(folder, vocabulary=64)
    expected = plain_results(folder, documents, 2, freeze=pattern.removesuffix("*"))
    frozen = expected["weights"].keys() - expected["gradients"].keys()
    assert len(frozen) == 1
    original = weights_of(plain_model(folder))
    for found in run_workers(2, train, ModelConfig(path=folder, freeze=[pattern]), documents, 2, **strategy):
        assert_near(found["gradients"], expected["gradients"])
        assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        assert_near(found["weights"], expected["weights"], 3e-5)
        for item in frozen:
            assert torch.equal(found["weights"][item], original[item])


@pytest.mark.parametrize(
    ("name", "pattern", "words"),
    [
        ("llama", "lm_haed.*", r"freeze=\['lm_haed.\*'\].*'lm_head.weight'"),
        ("llama_tied", "lm_head.*", r"freeze=\['lm_head.\*'\].*tied.*'model.embed_tokens.weight'"),
    ],
)
def test_a_pattern_that_freezes_nothing_is_refused_on_all_ranks(name: str, pattern: str, words: str) -> None:
    config = ModelConfig(path=str(tiny_model_folder(name)), freeze=[pattern])
    with pytest.raises(WorkerError, match=words) as caught:
        run_workers(2, with_engine, None, config)
    assert caught.value.all_ranks_raised(ValueError)


# ---- reading ----


def export(folders: list[str], **strategy: Any) -> dict[str, torch.Tensor]:
    """On a rank: what it exports, each rank given a folder of its own."""

    def body(module: EngineModule) -> dict[str, torch.Tensor]:
        return copies(module.engine.get_per_tensor_param(module.policy))

    folder = folders[torch.distributed.get_rank() % len(folders)]
    return with_engine(body, ModelConfig(path=folder), **strategy)


@pytest.fixture
def without_weights(tmp_path: Path) -> str:
    folder = tmp_path / "config_only"
    folder.mkdir()
    shutil.copy(tiny_model_folder("llama_tied") / "config.json", folder)
    return str(folder)


@pytest.mark.parametrize("strategy", [{}, {"fsdp_size": 1}])
def test_rank_zero_alone_reads_the_weights(without_weights: str, strategy: dict[str, Any]) -> None:
    folder = str(tiny_model_folder("llama_tied"))
    for found in run_workers(2, export, [folder, without_weights], **strategy):
        assert_same(found, weights_of(plain_model(folder)))


def test_weights_that_rank_zero_cannot_read_are_refused_on_all_ranks(without_weights: str) -> None:
    good = str(tiny_model_folder("llama_tied"))
    broken = Path(without_weights).with_name("broken")
    shutil.copytree(good, broken)
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    missing = str(broken.with_name("missing"))
    for folder in (without_weights, str(broken), missing):
        with pytest.raises(WorkerError, match="cannot be built") as caught:
            run_workers(2, export, [folder, good])
        assert caught.value.all_ranks_raised(ValueError), caught.value
        assert folder in caught.value.errors[0].message


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_the_export_has_the_names_and_shapes_of_a_save(name: str) -> None:
    folder = tiny_model_folder(name)
    with safe_open(folder / "model.safetensors", "pt") as file:
        expected = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for found in run_workers(2, export, [str(folder)]):
        assert_same(found, expected)


def buffers(config: ModelConfig, **strategy: Any) -> dict[str, torch.Tensor]:
    return with_engine(
        lambda module: {name: item.clone() for name, item in module.policy.hf.named_buffers()}, config, **strategy
    )


def test_buffers_that_no_file_holds_are_those_of_a_plain_model_on_all_ranks(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = tiny_model("llama", rope_parameters=scaling)
    folder = str(tmp_path / "llama3")
    model.save_pretrained(folder)
    expected = dict(model.named_buffers())
    plain = dict(tiny_model("llama").named_buffers())
    name = next(iter(expected))
    assert not torch.equal(expected[name], plain[name]), "the scaling does something"
    for found in run_workers(2, buffers, ModelConfig(path=folder)):
        assert_same(found, expected)
