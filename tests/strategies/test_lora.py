"""LoRA under FSDP1: the steps of plain peft on every layout, and nothing but adapters in gradients and state."""

from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_rl_engines import ModelConfig
from lightning_rl_engines.models.huggingface import load_hf_model
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import (
    assert_near,
    assert_same,
    copies,
    mine,
    plain_model,
    plain_score_loss,
    plain_value_loss,
    score_loss,
    value_loss,
)
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.lora import adapter_state, lora, plain_adapter
from tests.support.models import reference_log_probs, tiny_model_folder

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "two": (2, {}),
    "two-sp2": (2, {"ulysses_sp_size": 2}),
    "four-hybrid": (4, {"fsdp_size": 2}),
    "four-sp2": (4, {"ulysses_sp_size": 2, "fsdp_size": 1}),
}


def two_plain_steps(
    folder: str, options: LoraConfig, start: dict[str, Tensor], documents: Documents, lr: float = 0.5
) -> dict[str, Tensor]:
    model = plain_adapter(plain_model(folder), options, start)
    trained = [item for item in model.parameters() if item.requires_grad]
    optimizer = torch.optim.SGD(trained, lr)
    for _ in range(2):
        optimizer.zero_grad()
        plain_score_loss(model, documents).backward()  # type: ignore[arg-type]
        optimizer.step()
    return adapter_state(model)


def run_steps(documents: Documents, config: ModelConfig, layout: dict[str, Any], lr: float = 0.5) -> dict[str, Any]:
    """Two SGD steps: the adapter before and after, its gradients, bytes of gradients and state."""

    def body(module: EngineModule) -> dict[str, Any]:
        engine, policy = module.engine, module.policy
        start = copies(engine.get_per_tensor_param(policy, mode="adapter"))
        with engine.train_mode(policy):
            engine.forward_backward_batch(policy, mine(engine, documents), score_loss)
            gradient_bytes = sum(item.grad.nbytes for item in policy.parameters() if item.grad is not None)
            local = sum(item.numel() for item in policy.parameters() if item.requires_grad)
        outputs = []
        with engine.train_mode(policy, module.optimizers()):
            for _ in range(2):
                outputs.append(engine.train_batch(policy, module.optimizers(), mine(engine, documents), score_loss))
        with engine.eval_mode(policy), engine.disable_adapter(policy):
            base = copies(engine.get_per_tensor_param(policy, mode="full"))
        return {
            "start": start,
            "end": copies(engine.get_per_tensor_param(policy, mode="adapter")),
            "base": base,
            "bytes": (gradient_bytes, local),
            "dtypes": {item.dtype for item in policy.parameters() if item.requires_grad},
            "norms": [output.metrics["grad_norm"] for output in outputs],
        }

    return with_engine(body, config, lr=lr, **layout)


@pytest.mark.parametrize(
    ("layout", "checkpointing", "offload"),
    [
        *((layout, flag, False) for layout in LAYOUTS for flag in (False, True)),
        ("one", False, True),
        ("two", True, True),
    ],
)
def test_two_steps_equal_plain_peft(layout: str, checkpointing: bool, offload: bool) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    world, strategy = LAYOUTS[layout]
    strategy = {**strategy, "offload_param": offload, "offload_optimizer": offload}
    config = ModelConfig(path=folder, lora=lora(), gradient_checkpointing=checkpointing)
    results = run_workers(world, run_steps, documents, config, strategy)
    expected = two_plain_steps(folder, lora(), results[0]["start"], documents)
    total = sum(item.nbytes for item in expected.values())
    for result in results:
        assert_same(result["start"], results[0]["start"])
        assert_near(result["end"], expected)
        # Every tensor has moved, also A, whose first gradient is zero, and in the first layer too.
        for name, tensor in result["end"].items():
            assert not torch.equal(tensor, result["start"][name]), name
        assert result["bytes"][0] <= 1.5 * total / strategy.get("fsdp_size", world)
        assert result["dtypes"] == {torch.float32}
        assert_same(result["base"], {name: item.detach() for name, item in plain_model(folder).state_dict().items()})


VARIANTS: dict[str, tuple[str, LoraConfig]] = {
    "list": ("qwen3", lora(target_modules=["q_proj", "down_proj"], use_rslora=True)),
    "regex-tied": ("qwen2", lora(target_modules=r".*layers\.0.*(v_proj|gate_proj)")),
    "trained-norm-tied": ("llama_tied", lora(modules_to_save=["norm", "input_layernorm"])),
    "patterns": ("one_kv", lora(rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 16}, init_lora_weights=False)),
    "trained-head": ("llama", lora(target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "trained-embedding-mlp": ("llama", lora(target_modules=["v_proj"], modules_to_save=["embed_tokens", "mlp"])),
    "adapted-head": ("odd_vocab", lora(target_modules=["lm_head", "o_proj"], init_lora_weights=False)),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", ["one", "two-sp2"])
def test_two_steps_of_each_kind_of_adapter(variant: str, layout: str) -> None:
    model, options = VARIANTS[variant]
    folder = str(tiny_model_folder(model))
    documents = make_documents(folder, vocabulary=97 if model == "odd_vocab" else 64)
    world, strategy = LAYOUTS[layout]
    results = run_workers(world, run_steps, documents, ModelConfig(path=folder, lora=options), strategy, 0.1)
    start = results[0]["start"]
    # At 0.5 two steps of the plain model in fp32 and in fp64 differ by more than 1e-5 where B does not start at 0.
    expected = two_plain_steps(folder, options, start, documents, lr=0.1)
    base = {name: item.detach() for name, item in plain_model(folder).named_parameters()}
    for result in results:
        assert_near(result["end"], expected)
        for name, tensor in result["end"].items():
            assert not torch.equal(tensor, start[name]), name
        assert_same(result["base"], base)


def run_value(documents: Documents, config: ModelConfig, layout: dict[str, Any]) -> dict[str, Any]:
    def body(module: EngineModule) -> Any:
        engine, policy = module.engine, module.policy
        start = copies(engine.get_per_tensor_param(policy, mode="adapter"))
        with engine.train_mode(policy, module.optimizers()):
            for _ in range(2):
                engine.train_batch(policy, module.optimizers(), mine(engine, documents), value_loss)
        return start, copies(engine.get_per_tensor_param(policy, mode="adapter"))

    return with_engine(body, config, lr=0.05, **layout)


@pytest.mark.parametrize("layout", ["one", "two-sp2"])
def test_two_steps_of_a_critic(layout: str) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    world, strategy = LAYOUTS[layout]
    config = ModelConfig(path=folder, head="value", lora=lora())
    results = run_workers(world, run_value, documents, config, strategy)
    # The base of the plain critic is read like the engine's; its head comes with the adapter.
    base = load_hf_model(ModelConfig(path=folder, head="value"), attn_implementation="eager")
    options = lora(modules_to_save=["score"], exclude_modules=["score"])
    model = plain_adapter(base, options, results[0][0])
    optimizer = torch.optim.SGD([item for item in model.parameters() if item.requires_grad], 0.05)
    for _ in range(2):
        optimizer.zero_grad()
        plain_value_loss(model, documents).backward()  # type: ignore[arg-type]
        optimizer.step()
    for _, end in results:
        assert_near(end, adapter_state(model))


def run_disabled(documents: Documents, config: ModelConfig, base: ModelConfig, layout: dict[str, Any]) -> Any:
    def body(module: EngineModule) -> Any:
        engine, policy = module.engine, module.policy

        def score(model: Any) -> Tensor:
            with engine.eval_mode(model):
                return engine.infer_batch(model, mine(engine, documents)).columns["log_probs"]

        with engine.train_mode(policy, module.optimizers()[0]):
            engine.train_batch(policy, module.optimizers()[0], mine(engine, documents), score_loss)
        trained = score(policy)
        with engine.disable_adapter(policy):
            found = score(policy)
            with engine.disable_adapter(policy):
                again = score(policy)
            still = score(policy)
        after = score(policy)
        try:
            with engine.disable_adapter(policy):
                raise KeyError("stop")
        except KeyError:
            after_exception = score(policy)
        # The adapter still learns, with every tensor.
        with engine.train_mode(policy, module.optimizers()[0]):
            engine.forward_backward_batch(policy, mine(engine, documents), score_loss)
            gradients = dict(engine.get_per_tensor_grad(policy))
        return {
            "trained": trained,
            "base": [found, again, still],
            "plain": score(module.plain),
            "back": [after, after_exception],
            "gradients": all(bool(item.any()) for item in gradients.values()),
        }

    return with_engine(body, {"policy": config, "plain": base}, **layout)


@pytest.mark.parametrize(("world", "layout"), [(1, {}), (2, {}), (2, {"ulysses_sp_size": 2}), (2, {"fsdp_size": 1})])
@pytest.mark.parametrize("variant", ["all-linear", "adapted-head", "trained-head"])
def test_disabled_adapters_are_the_base_exactly_and_come_back(variant: str, world: int, layout: dict[str, Any]) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    options = {
        "all-linear": lora(init_lora_weights=False),
        "adapted-head": lora(target_modules=["lm_head", "q_proj"], init_lora_weights=False),
        "trained-head": lora(modules_to_save=["lm_head"], init_lora_weights=False),
    }[variant]
    base = ModelConfig(path=folder)
    for result in run_workers(world, run_disabled, documents, ModelConfig(path=folder, lora=options), base, layout):
        for found in result["base"]:
            assert torch.equal(found, result["plain"])
        for found in result["back"]:
            assert torch.equal(found, result["trained"])
        assert not torch.equal(result["trained"], result["plain"])
        assert result["gradients"]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def run_precision(documents: Documents, config: ModelConfig, precision: str, **strategy: Any) -> Any:
    """Adam: dtypes of base, adapter, gradients and optimizer state, and what trained."""

    def body(module: EngineModule) -> Any:
        engine, policy = module.engine, module.policy
        optimizer = torch.optim.Adam([item for item in policy.parameters() if item.requires_grad], lr=1e-3)
        start = copies(engine.get_per_tensor_param(policy, mode="adapter"))
        with engine.train_mode(policy, optimizer):
            engine.forward_backward_batch(policy, mine(engine, documents), score_loss)
            gradients = {item.grad.dtype for item in policy.parameters() if item.grad is not None}
            norm = float(engine.clip_grad_norm(policy, 1.0))
            optimizer.step()
        end = copies(engine.get_per_tensor_param(policy, mode="adapter"))
        with engine.eval_mode(policy):
            log_probs = engine.infer_batch(policy, mine(engine, documents)).columns["log_probs"]
        states = [value for state in optimizer.state.values() for value in state.values()]
        return {
            "base": {item.dtype for item in policy.parameters() if not item.requires_grad},
            "adapter": {item.dtype for item in policy.parameters() if item.requires_grad},
            "gradients": gradients,
            "state": {item.dtype for item in states if item.dim()},
            "state_bytes": sum(local(item).nbytes for item in states if item.dim()),
            "adapter_bytes": sum(item.nbytes for item in end.values()),
            "moved": all(not torch.equal(end[name], start[name]) for name in end if ".lora_B." in name),
            "norm": norm,
            "log_probs": engine.all_gather_objects(log_probs, "data"),
            "merged": {item.dtype for _, item in engine.get_per_tensor_param(policy, mode="merged")},
            "rounded": {item.dtype for _, item in engine.get_per_tensor_param(policy, mode="merged", dtype="bfloat16")},
        }

    return with_engine(body, config, precision=precision, **strategy)


@pytest.mark.parametrize(
    ("precision", "dtype", "tolerance"),
    [
        ("32-true", None, 1e-5),
        ("32-true", "bfloat16", 2e-2),
        ("bf16-mixed", "bfloat16", 5e-2),
        ("bf16-true", None, 5e-2),
        ("16-mixed", None, 5e-2),
    ],
)
def test_adapters_are_fp32_over_a_base_of_any_type(precision: str, dtype: Any, tolerance: float) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    config = ModelConfig(path=folder, lora=lora(), dtype=dtype)
    results = run_workers(2, run_precision, documents, config, precision)
    base = torch.bfloat16 if dtype == "bfloat16" or precision == "bf16-true" else torch.float32
    for result in results:
        assert result["base"] == {base}
        assert result["adapter"] == result["gradients"] == result["state"] == {torch.float32}
        assert result["moved"]
        # Two moments of this rank's half of the adapter.
        assert result["state_bytes"] <= 2 * 0.55 * result["adapter_bytes"]
        assert result["merged"] == {torch.float32}
        assert result["rounded"] == {torch.bfloat16}
    # The first step moves B by 1e-3 alone, so log-probabilities are the base's, up to the type's rounding.
    with torch.no_grad():
        expected, _ = reference_log_probs(plain_model(folder), documents.input_ids)
    found, joined = torch.cat(results[0]["log_probs"]), torch.cat(expected)
    joined = torch.where(torch.cat(documents.response_mask), joined, 0.0)
    assert float((found - joined).norm() / joined.norm()) < max(tolerance, 2e-2)


def test_gradients_of_a_bf16_base_in_fp32_compute_equal_plain_peft() -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    config = ModelConfig(path=folder, lora=lora(), dtype="bfloat16")
    results = run_workers(2, run_steps, documents, config, {})
    rounded = plain_model(folder)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    model = plain_adapter(rounded, lora(), results[0]["start"])
    optimizer = torch.optim.SGD([item for item in model.parameters() if item.requires_grad], 0.5)
    for _ in range(2):
        optimizer.zero_grad()
        plain_score_loss(model, documents).backward()  # type: ignore[arg-type]
        optimizer.step()
    for result in results:
        assert_near(result["end"], adapter_state(model))


def run_clip(documents: Documents, config: ModelConfig, layout: dict[str, Any]) -> list[float]:
    def body(module: EngineModule) -> list[float]:
        engine, policy = module.engine, module.policy
        with engine.train_mode(policy):
            engine.forward_backward_batch(policy, mine(engine, documents), score_loss)
            return [float(engine.clip_grad_norm(policy, limit)) for limit in (1e-2, 1.0)]

    return with_engine(body, config, **layout)


def test_clipping_sees_the_adapter_whole() -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    config = ModelConfig(path=folder, lora=lora(init_lora_weights=False))
    norms = [run_workers(world, run_clip, documents, config, layout) for world, layout in LAYOUTS.values()]
    expected = norms[0][0]
    assert expected[1] == pytest.approx(1e-2, rel=1e-5)
    for results in norms:
        for found in results:
            assert found == pytest.approx(expected, rel=1e-5)


def build_only(config: ModelConfig) -> None:
    with_engine(lambda module: None, config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": lora(target_modules=["embed_tokens"])}, "Embedding"),
        ({"adapter": "nowhere"}, "holds no adapter_config"),
    ],
)
def test_what_fails_on_rank_zero_is_raised_on_all_ranks(options: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkerError, match=message) as caught:
        run_workers(2, build_only, ModelConfig(path=str(tiny_model_folder("llama")), **options))
    assert len(caught.value.errors) == 2
