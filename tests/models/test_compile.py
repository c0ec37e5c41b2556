"""Compiled decoder layers: the same gradients in every layout, clean names, few graphs, or a refusal."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch._dynamo import register_backend
from torch._dynamo.utils import counters

from lightning_rl_engines import ModelConfig
from lightning_rl_engines.models.compile import check_backend, compile_layers
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import (
    assert_near,
    copies,
    gradients_of,
    mine,
    plain_model,
    plain_score_loss,
    score_loss,
    weights_of,
)
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.models import tiny_model_folder


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def train(config: ModelConfig, documents: Documents, **strategy: Any) -> dict[str, Any]:
    """On a rank: gradients by ever smaller micro-batches, and what was compiled on the way."""
    torch.compiler.reset()

    def body(module: EngineModule) -> dict[str, Any]:
        engine: Any = module.engine
        experience, policy = mine(engine, documents), module.policy
        found: dict[str, Any] = {"gradients": [], "graphs": [-graphs()], "log_probs": []}
        for budget in (64, 40, 32):
            policy.zero_grad()
            output = engine.infer_batch(policy, experience, max_tokens_per_micro_batch=budget)
            found["log_probs"].append(output.columns["log_probs"])
            engine.forward_backward_batch(policy, experience, score_loss, max_tokens_per_micro_batch=budget)
            # With gradients there: a trace of now must not stumble over them.
            engine.infer_batch(policy, experience)
            found["gradients"].append(copies(engine.get_per_tensor_grad(policy)))
            found["graphs"].append(graphs())
        found["weights"] = copies(engine.get_per_tensor_param(policy))
        found["state"] = list(module.state_dict())
        return found

    return with_engine(body, config, **strategy)


CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {}, {"compile_backend": "inductor"}),
    (2, {"ulysses_sp_size": 2}, {"compile_backend": "aot_eager", "gradient_checkpointing": True}),
    (
        2,
        {"engine": "torchtitan", "activation_checkpointing": "selective"},
        {"compile_backend": "aot_eager", "gradient_checkpointing": True},
    ),
    (
        2,
        {"engine": "torchtitan", "context_parallel_degree": 2},
        {"compile_backend": "aot_eager", "gradient_checkpointing": True},
    ),
]


MORE_CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {}, {"compile_backend": "aot_eager", "gradient_checkpointing": True}),
    (2, {"fsdp_size": 1}, {"compile_backend": "aot_eager"}),
    (2, {"engine": "torchtitan"}, {"compile_backend": "aot_eager", "gradient_checkpointing": True}),
    (
        1,
        {"engine": "torchtitan", "activation_checkpointing": "selective"},
        {"compile_backend": "aot_eager", "gradient_checkpointing": True},
    ),
    (2, {"engine": "torchtitan", "context_parallel_degree": 2}, {"compile_backend": "aot_eager"}),
    (2, {"engine": "torchtitan", "pipeline_parallel_degree": 2}, {"compile_backend": "aot_eager"}),
]


@pytest.mark.parametrize(
    ("world", "strategy", "options"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE_CASES)],
)
def test_gradients_are_those_of_the_plain_model(world: int, strategy: dict[str, Any], options: dict[str, Any]) -> None:
    folder = str(tiny_model_folder("qwen3"))
    documents = make_documents(folder, vocabulary=64)
    model = plain_model(folder)
    plain_score_loss(model, documents).backward()
    plain = run_workers(world, train, ModelConfig(path=folder), documents, **strategy)
    config = ModelConfig(path=folder, compile=True, **options)
    found = run_workers(world, train, config, documents, timeout=240, **strategy)
    for rank, before in zip(found, plain, strict=True):
        for gradients in rank["gradients"]:
            assert_near(gradients, gradients_of(model))
        for log_probs, expected in zip(rank["log_probs"], before["log_probs"], strict=True):
            assert (log_probs - expected).abs().max() < 1e-5
        assert rank["state"] == before["state"]
        assert rank["weights"].keys() == weights_of(model).keys()
        assert before["graphs"][0] + before["graphs"][-1] == 0, "nothing is compiled without the option"
        assert rank["graphs"][0] + rank["graphs"][1] > 0
        assert rank["graphs"][-1] == rank["graphs"][-2], "other lengths need no further graphs"


PAIRS = list(itertools.product([False, True], [False, True], [(), ("*mlp*",), ("*self_attn.q_proj*", "lm_head*")]))


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_checkpointing_compiler_and_frozen_parts_go_together(world: int) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    model = plain_model(folder)
    plain_score_loss(model, documents).backward()
    expected = gradients_of(model)
    for checkpointing, compiled, freeze in PAIRS:
        options: dict[str, Any] = {"compile": True, "compile_backend": "aot_eager"} if compiled else {}
        config = ModelConfig(path=folder, gradient_checkpointing=checkpointing, freeze=freeze, **options)
        for found in run_workers(world, step, config, documents, timeout=240):
            assert found.keys() < expected.keys() if freeze else found.keys() == expected.keys()
            assert_near(found, {name: expected[name] for name in found})


def step(config: ModelConfig, documents: Documents, **strategy: Any) -> dict[str, Any]:
    def body(module: EngineModule) -> dict[str, Any]:
        engine: Any = module.engine
        engine.forward_backward_batch(module.policy, mine(engine, documents), score_loss)
        return copies(engine.get_per_tensor_grad(module.policy))

    return with_engine(body, config, **strategy)


@pytest.mark.parametrize("strategy", [{}, {"offload_param": True, "ulysses_sp_size": 2}])
def test_half_precision_and_weights_on_the_host_compile_too(strategy: dict[str, Any]) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    options: dict[str, Any] = {"compile": True, "compile_backend": "aot_eager"}
    plain = run_workers(2, step, ModelConfig(path=folder), documents, precision="bf16-mixed", **strategy)
    found = run_workers(2, step, ModelConfig(path=folder, **options), documents, precision="bf16-mixed", **strategy)
    for rank, expected in zip(found, plain, strict=True):
        assert_near(rank, expected, 2e-2)


def test_experts_are_left_out_of_the_graphs() -> None:
    folder = str(tiny_model_folder("qwen3_moe"))
    documents = make_documents(folder, vocabulary=64)
    layout: dict[str, Any] = {"engine": "torchtitan", "expert_parallel_degree": 2}
    plain = run_workers(2, step, ModelConfig(path=folder), documents, **layout)
    options: dict[str, Any] = {"compile": True, "compile_backend": "aot_eager"}
    found = run_workers(2, step, ModelConfig(path=folder, **options), documents, timeout=240, **layout)
    for rank, expected in zip(found, plain, strict=True):
        assert_near(rank, expected)


def lengths_and_graphs(config: ModelConfig, documents: Documents, **strategy: Any) -> dict[str, Any]:
    """On a rank: gradients of rows of two lengths, and the number of graphs after each pass."""
    torch.compiler.reset()

    def body(module: EngineModule) -> dict[str, Any]:
        engine: Any = module.engine
        found: dict[str, Any] = {"graphs": [graphs()], "gradients": {}}
        for count in (1, 3, 2, 4):
            module.policy.zero_grad()
            experience = documents.experience(list(range(count)))
            engine.forward_backward_batch(module.policy, experience, score_loss, max_tokens_per_micro_batch=121)
            found["gradients"][count] = copies(engine.get_per_tensor_grad(module.policy))
            found["graphs"].append(graphs())
        return found

    return with_engine(body, config, **strategy)


TENSOR_PARALLEL = [
    (2, "llama", {}, {}),
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in (
            (2, "llama_tied", {"activation_checkpointing": "selective"}, {"gradient_checkpointing": True}),
            (4, "qwen3_moe", {"expert_parallel_degree": 2}, {}),
            (4, "llama", {"context_parallel_degree": 2}, {"gradient_checkpointing": True}),
            (4, "qwen3_moe", {"expert_parallel_degree": 2, "context_parallel_degree": 2}, {}),
            (4, "llama", {"pipeline_parallel_degree": 2}, {}),
        )
    ),
]


@pytest.mark.parametrize(("world", "model", "strategy", "options"), TENSOR_PARALLEL)
def test_tensor_parallel_layers_compile_for_a_few_lengths(
    world: int, model: str, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    folder = str(tiny_model_folder(model))
    documents = make_documents(folder, vocabulary=64)
    strategy = {"engine": "torchtitan", "tensor_parallel_degree": 2, **strategy}
    plain = run_workers(world, lengths_and_graphs, ModelConfig(path=folder), documents, **strategy)
    config = ModelConfig(path=folder, compile=True, compile_backend="aot_eager", **options)
    found = run_workers(world, lengths_and_graphs, config, documents, timeout=240, **strategy)
    for rank, expected in zip(found, plain, strict=True):
        for count, gradients in expected["gradients"].items():
            used = {name: item for name, item in gradients.items() if item.any()}  # not every expert by each document
            assert_near({name: rank["gradients"][count][name] for name in used}, used)
            assert not any(rank["gradients"][count][name].any() for name in gradients.keys() - used.keys())
        before, first, second, *others = rank["graphs"]
        assert before < first < second == others[0] == others[1]


def test_names_stay_and_a_copy_is_a_plain_model() -> None:
    model = plain_model(tiny_model_folder("llama"))
    before = list(model.state_dict())
    layers = list(model.model.layers)
    compile_layers(layers, backend="eager")
    assert list(model.state_dict()) == before
    assert not any("_orig_mod" in name for name, _ in model.named_modules())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ids = torch.arange(9)[None]
    expected = plain_model(tiny_model_folder("llama"))(input_ids=ids).logits
    assert torch.allclose(twin(input_ids=ids).logits, expected, atol=1e-5)


# ---- refusals ----


def test_an_unknown_backend_is_refused_on_all_ranks() -> None:
    config = ModelConfig(path=str(tiny_model_folder("llama")), compile=True, compile_backend="inductr")
    with pytest.raises(WorkerError, match=r"compile_backend='inductr'.*'inductor'") as caught:
        run_workers(2, with_engine, None, config)
    assert caught.value.all_ranks_raised(ValueError)


def fail_to_compile(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no compiler found")


def test_a_backend_that_does_not_compile_here_is_refused_with_its_reason() -> None:
    torch.compiler.reset()
    register_backend(fail_to_compile, "fails_in_tests")
    with pytest.raises(ValueError, match=r"compile_backend='fails_in_tests'.* no compiler found Use compile=False"):
        check_backend("fails_in_tests", torch.device("cpu"))


def test_a_backend_without_the_compiler_is_refused() -> None:
    with pytest.raises(ValueError, match=r"compile_backend='eager'.*no effect with compile=False"):
        ModelConfig(path="x", compile_backend="eager")


@pytest.mark.cuda
def test_inductor_compiles_on_cuda() -> None:
    check_backend("inductor", torch.device("cuda"))
