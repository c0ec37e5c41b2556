"""Liger's kernels in a model: the same numbers, the same names, nothing outside the model touched, or a refusal."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_rl_engines import ModelConfig
from lightning_rl_engines.models import liger
from lightning_rl_engines.models.huggingface import load_hf_model
from tests.strategies.checks import assert_gradients
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import (
    assert_near,
    copies,
    gradients_of,
    mine,
    plain_model,
    plain_score_loss,
    score_loss,
)
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.models import tiny_model, tiny_model_folder

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class StubNorm(nn.Module):
    """Computes what Liger's norm does, and counts its calls."""

    calls = 0

    def __init__(self, hidden_size: int, eps: float, offset: float, casting_mode: str, in_place: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps, self.offset = eps, offset
        assert not in_place

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        StubNorm.calls += 1
        return nn.functional.rms_norm(hidden, hidden.shape[-1:], self.weight + self.offset, self.eps)


class StubMLP(nn.Module):
    """Computes what Liger's SwiGLU does, and counts its calls."""

    calls = 0

    def __init__(self, config: Any) -> None:
        super().__init__()
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(self, name, nn.Linear(config.hidden_size, config.intermediate_size, bias=False))

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        StubMLP.calls += 1
        return self.down_proj(nn.functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


STUB = SimpleNamespace(LigerRMSNorm=StubNorm, LigerSwiGLUMLP=StubMLP)


@pytest.fixture
def _stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "load_kernels", lambda device: STUB)


def snapshot(model: nn.Module) -> dict[Any, Any]:
    """Everything that a patch of a module or a class of transformers would change."""
    modules = {name: item for name, item in sys.modules.items() if name.startswith("transformers")}
    found = {(name, key): value for name, item in modules.items() for key, value in list(vars(item).items())}
    classes = {type(item) for item in model.modules()}
    return found | {(item, key): value for item in classes for key, value in vars(item).items()}


@pytest.mark.usefixtures("_stub")
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral_window"])
def test_modules_are_replaced_around_the_same_parameters_and_nothing_else_changes(name: str) -> None:
    model, ids = tiny_model(name), torch.arange(9)[None]
    before, state = dict(model.named_parameters()), snapshot(model)
    expected = model(input_ids=ids).logits.detach()
    random = torch.get_rng_state()
    liger.use_liger_kernels(model, CPU)
    assert torch.equal(torch.get_rng_state(), random)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[key] is before[key] for key in before)
    now = snapshot(model)
    changed = [key for key, value in state.items() if now.get(key, value) is not value]
    assert changed == []
    norms = 2 * 2 + 1 + (2 * 2 if name == "qwen3" else 0)
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(StubNorm), kinds.count(StubMLP)) == (norms, 2)
    assert not any(kind.__name__.endswith(("RMSNorm", "MLP")) and "Stub" not in kind.__name__ for kind in kinds)
    found = model(input_ids=ids).logits.detach()
    assert float((found - expected).norm() / expected.norm()) < 1e-6
    assert not any(isinstance(module, StubNorm) for module in tiny_model(name).modules())


def train(config: ModelConfig, documents: Documents, *, mode: Any = "full", **strategy: Any) -> dict[str, Any]:
    """On a rank: gradients with the stub, weights, and how often each kernel ran in one pass with gradients."""

    def body(module: EngineModule) -> dict[str, Any]:
        engine: Any = module.engine
        StubNorm.calls = StubMLP.calls = 0
        engine.forward_backward_batch(module.policy, mine(engine, documents), score_loss)
        return {
            "calls": (StubNorm.calls, StubMLP.calls),
            "gradients": copies(engine.get_per_tensor_grad(module.policy)),
            "weights": copies(engine.get_per_tensor_param(module.policy, mode=mode)),
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(liger, "load_kernels", lambda device: STUB)
        return with_engine(body, config, **strategy)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("world", "strategy"), [(1, {}), (2, {"ulysses_sp_size": 2})])
def test_kernels_come_before_attention_groups_checkpointing_and_sharding(
    world: int, strategy: dict[str, Any], checkpointing: bool
) -> None:
    folder = str(tiny_model_folder("qwen3"))
    documents = make_documents(folder, vocabulary=64)
    model = plain_model(folder)
    plain_score_loss(model, documents).backward()
    config = ModelConfig(path=folder, use_liger=True, gradient_checkpointing=checkpointing)
    for found in run_workers(world, train, config, documents, **strategy):
        assert_near(found["gradients"], gradients_of(model))
        # Sharded: on each rank only part of a weight is there outside of a pass, so the kernels ran inside the units.
        assert found["weights"].keys() == dict(model.named_parameters()).keys()
        # The last norm is in no layer and is not run again.
        assert found["calls"] == ((2 * 4 + 1, 2) if not checkpointing else (2 * 2 * 4 + 1, 2 * 2))


def test_adapters_are_put_on_the_kernels_modules() -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    options: dict[str, Any] = {"path": folder, "lora": {"r": 2, "target_modules": "all-linear"}}
    plain = run_workers(2, train, ModelConfig(**options), documents, mode="merged")
    found = run_workers(2, train, ModelConfig(**options, use_liger=True), documents, mode="merged")
    for rank, expected in zip(found, plain, strict=True):
        assert any("gate_proj.lora_B" in name for name in expected["gradients"])
        assert_gradients(rank["gradients"], expected["gradients"])
        assert_near(rank["weights"], expected["weights"])
        assert (rank["calls"], expected["calls"]) == ((5, 2), (0, 0))


def test_a_value_model_gets_the_kernels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "load_kernels", lambda device: STUB)
    model = load_hf_model(ModelConfig(path=str(tiny_model_folder("llama")), head="value"))
    liger.use_liger_kernels(model, CPU)
    assert sum(isinstance(module, StubNorm | StubMLP) for module in model.modules()) == 7


# ---- refusals ----


def test_a_device_without_triton_is_refused_on_all_ranks() -> None:
    config = ModelConfig(path=str(tiny_model_folder("llama")), use_liger=True)
    with pytest.raises(WorkerError, match=r"use_liger=True.*Triton.*'cpu'; use use_liger=False") as caught:
        run_workers(2, with_engine, None, config)
    assert caught.value.all_ranks_raised(ValueError)


@pytest.mark.parametrize(("package", "words"), [("liger_kernel", "liger-kernel"), ("triton", "triton")])
def test_a_missing_package_is_refused_with_the_way_to_install_it(
    package: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        liger, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None if name == package else 1))
    )
    with pytest.raises(ValueError, match=rf"package {words}; install.*lightning-rl-engines\[liger\]"):
        liger.load_kernels(CUDA)


@pytest.mark.usefixtures("_stub")
def test_models_that_the_kernels_do_not_compute_are_refused() -> None:
    model = tiny_model("llama", hidden_act="gelu")
    with pytest.raises(ValueError, match=r"'silu', but the model has 'gelu'; use use_liger=False"):
        liger.use_liger_kernels(model, CPU)
    model.config.model_type = "olmoe"
    with pytest.raises(ValueError, match=r"model_type='olmoe'; it serves \['gemma', .*'qwen3'"):
        liger.use_liger_kernels(model, CPU)


def test_liger_and_the_compiler_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"compile=True, use_liger=True.*use one of the two"):
        ModelConfig(path="x", use_liger=True, compile=True)


# ---- the kernels themselves ----


def test_the_kernels_compute_what_transformers_does_in_the_interpreter() -> None:
    pytest.importorskip("liger_kernel")
    program = [sys.executable, "-m", "tests.models.liger_interpreted"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == len(liger._FAMILIES) + 2


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_gradients_on_cuda_are_those_without_the_kernels(name: str) -> None:
    def gradients(model: nn.Module) -> dict[str, Tensor]:
        model.zero_grad()
        ids = torch.arange(40, device="cuda")[None]
        model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[0, :, 3].sum().backward()
        return {key: item.grad.clone() for key, item in model.named_parameters() if item.grad is not None}

    model = tiny_model(name).cuda()
    expected = gradients(model)
    liger.use_liger_kernels(model, CUDA)
    assert any(type(module).__module__.startswith("liger_kernel") for module in model.modules())
    assert_near(gradients(model), expected)
