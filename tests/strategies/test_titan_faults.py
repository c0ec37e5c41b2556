"""Faults that users of other engines met, each looked for where the torchtitan engine could have it."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan")

from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_rl_engines import Experience, ModelConfig, PolicyLoss
from lightning_rl_engines.models.titan.sources import FolderSource
from tests.checkpoint.test_titan import contents
from tests.checkpoint.test_titan import train as train_and_save
from tests.strategies.checks import assert_gradients, assert_number, backward, require_flat_memory, soak_steps
from tests.strategies.reference import Documents, make_documents, reference_gradients
from tests.strategies.steps import (
    assert_near,
    assert_same,
    copies,
    mine,
    plain_model,
    score_loss,
    train_plain,
    weights_of,
)
from tests.strategies.test_titan_lora import step_and_export
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule, share, with_engine
from tests.support.lora import lora
from tests.support.models import random_documents, reference_log_probs, tiny_model, tiny_model_folder

TP, CP, EP, PP = (f"{name}_parallel_degree" for name in ("tensor", "context", "expert", "pipeline"))
BALANCER = "context_parallel_load_balancer"
LENGTHS = (7, 8, 9, 22, 2, 13, 5)


def names_of(stream: Any) -> list[str]:
    return [name for name, _ in stream]


# ---- norms, steps and numbers ----


def clipped_steps(folder: str, documents: Documents, max_norm: float, strategy: dict[str, Any]) -> Any:
    """On a rank: the norms of three clipped steps of SGD, each after a pass without gradients, and the weights then."""

    def body(module: EngineModule) -> Any:
        engine, policy, optimizer, norms = module.engine, module.policy, module.optimizers(), []
        for _ in range(3):
            with engine.eval_mode(policy):
                engine.infer_batch(policy, mine(engine, documents), calculate_entropy=True)
            with engine.train_mode(policy, optimizer):
                output = engine.train_batch(
                    policy, optimizer, mine(engine, documents), score_loss, max_grad_norm=max_norm
                )
            norms.append(output.metrics["grad_norm"])
        return norms, copies(engine.get_per_tensor_param(policy))

    return with_engine(body, ModelConfig(path=folder), lr=0.5, engine="torchtitan", **strategy)


@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        (2, {}),
        pytest.param(4, {TP: 4}, marks=pytest.mark.exhaustive),
        (4, {TP: 2}),
        (4, {"data_parallel_replicate_degree": 2}),
        (2, {"activation_checkpointing": "full", "offload_param": True, "offload_optimizer": True}),
        (2, {PP: 2, "activation_checkpointing": "full", "offload_param": True}),
    ],
)
def test_the_norm_that_clips_is_the_global_one_in_every_layout(world: int, strategy: dict[str, Any]) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    model, start = plain_model(folder), weights_of(plain_model(folder))
    expected = train_plain(model, documents, steps=3, lr=0.5, max_norm=0.2)
    assert min(expected) > 0.4, "every step is clipped"
    moved = {name: item - start[name] for name, item in weights_of(model).items()}
    results = run_workers(world, clipped_steps, folder, documents, 0.2, strategy)
    for norms, weights in results:
        assert norms == results[0][0]
        assert all(isinstance(norm, float) for norm in norms)
        assert norms == pytest.approx(expected, rel=1e-5)
        assert_near({name: item - start[name] for name, item in weights.items()}, moved, 1e-4)


def look_everywhere(folder: str, budget: int | None, strategy: dict[str, Any]) -> Any:
    """On a rank: its documents' numbers, and log-probabilities and entropies of all of their tokens."""

    def body(module: EngineModule) -> Any:
        engine = module.engine
        chosen = share(range(len(LENGTHS)), engine.data_parallel_rank, engine.data_parallel_size)
        documents = [random_documents(LENGTHS)[index] for index in chosen]
        masks = [[True] * len(item) for item in documents]
        columns = engine.infer_batch(
            module.policy,
            Experience.from_documents(input_ids=documents, response_mask=masks),
            calculate_entropy=True,
            max_tokens_per_micro_batch=budget,
        ).columns
        return chosen, columns

    return with_engine(body, ModelConfig(path=folder), engine="torchtitan", **strategy)


@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        (2, {TP: 2}),
        (4, {TP: 4}),
        (2, {CP: 2, BALANCER: None}),
        (2, {CP: 2, BALANCER: "headtail"}),
        (2, {CP: 2, BALANCER: "ptrr"}),
        pytest.param(4, {CP: 2, TP: 2}, marks=pytest.mark.exhaustive),
    ],
)
def test_rows_of_odd_lengths_have_the_log_probs_of_every_token_also_beside_a_cut(
    world: int, strategy: dict[str, Any]
) -> None:
    folder = str(tiny_model_folder("llama"))
    with torch.no_grad():
        plain = reference_log_probs(plain_model(folder), random_documents(LENGTHS))
    # Each document by itself, some of them together, and all in one row of 66 tokens.
    for budget in (24, 32, None):
        for chosen, columns in run_workers(world, look_everywhere, folder, budget, strategy):
            for name, values in zip(("log_probs", "entropy"), plain, strict=True):
                expected = torch.cat([values[index] for index in chosen])
                torch.testing.assert_close(columns[name], expected, rtol=1e-5, atol=1e-5)


def five_steps(config: ModelConfig, documents: Documents, precision: str, strategy: dict[str, Any]) -> Any:
    """On a rank: weights after five steps, and the log-probabilities that the engine finds with them."""

    def body(module: EngineModule) -> Any:
        engine, policy = module.engine, module.policy
        for _ in range(5):
            engine.train_batch(policy, module.optimizers(), mine(engine, documents), score_loss, max_grad_norm=1.0)
        found = engine.infer_batch(policy, mine(engine, documents)).columns["log_probs"]
        return copies(engine.get_per_tensor_param(policy)), torch.cat(engine.all_gather_objects(found, "data"))

    return with_engine(body, config, precision=precision, engine="torchtitan", **strategy)


@pytest.mark.parametrize(
    ("degree", "precision", "bound"),
    [
        pytest.param(1, "32-true", 1.001, marks=pytest.mark.exhaustive),
        (1, "bf16-mixed", 1.02),
        (2, "32-true", 1.001),
        (2, "bf16-mixed", 1.02),
        pytest.param(4, "32-true", 1.001, marks=pytest.mark.exhaustive),
        pytest.param(4, "bf16-mixed", 1.02, marks=pytest.mark.exhaustive),
    ],
)
def test_an_exported_model_gives_the_probabilities_of_the_trainer(degree: int, precision: str, bound: float) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    results = run_workers(degree, five_steps, ModelConfig(path=folder), documents, precision, {TP: degree})
    response = torch.cat(documents.response_mask)
    for weights, found in results:
        model = plain_model(folder)
        model.load_state_dict(weights)
        with torch.no_grad():
            expected = torch.cat(reference_log_probs(model, documents.input_ids)[0])
        gap = (found - expected)[response].abs().exp().mean()
        assert gap < bound
        assert_same(weights, results[0][0])


# ---- ties ----


def train_tied(folder: str, documents: Documents, strategy: dict[str, Any]) -> Any:
    """On a rank: whether head and embedding are one, after set-up, after a pass and after steps; and the weights."""

    def body(module: EngineModule) -> Any:
        engine, policy = module.engine, module.policy
        tied: list[bool] = []

        def look() -> None:
            (part,) = policy.parts
            tied.append(part.lm_head.weight is part.tok_embeddings.weight)
            tied.append(sum(item is part.lm_head.weight for item in policy.parameters()) == 1)

        look()
        engine.infer_batch(policy, mine(engine, documents))
        look()
        for _ in range(3):
            engine.train_batch(policy, module.optimizers(), mine(engine, documents), score_loss)
        look()
        stream = list(engine.get_per_tensor_param(policy))
        return tied, [name for name, _ in stream], copies(stream)

    return with_engine(body, ModelConfig(path=folder), engine="torchtitan", **strategy)


@pytest.mark.parametrize(("world", "strategy"), [(2, {}), (2, {TP: 2})])
def test_a_tied_head_stays_the_embedding(world: int, strategy: dict[str, Any]) -> None:
    folder = str(tiny_model_folder("llama_tied"))
    documents = make_documents(folder, vocabulary=64)
    model = plain_model(folder)
    train_plain(model, documents, steps=3)
    for tied, names, weights in run_workers(world, train_tied, folder, documents, strategy):
        assert tied == [True] * 6
        assert sorted(names) == sorted(load_file(Path(folder) / "model.safetensors"))
        assert_near(weights, weights_of(model), 3e-5)


class Counted:
    """A part of a file that counts what is read of it."""

    def __init__(self, opened: Any, into: list[int]) -> None:
        self.opened, self.into = opened, into

    def __getitem__(self, indices: Any) -> Tensor:
        part: Tensor = self.opened[indices]
        self.into.append(part.numel())
        return part


def count_reading(folder: str, strategy: dict[str, Any]) -> tuple[int, int]:
    """On a rank: how many numbers it reads of the files, and how many it holds."""
    read: list[int] = []
    original = FolderSource.open

    def count(*args: Any, **kwargs: Any) -> Any:
        opened = original(*args, **kwargs)
        return None if opened is None else Counted(opened, read)

    def body(module: EngineModule) -> int:
        local = (item.to_local() if isinstance(item, DTensor) else item for item in module.policy.parameters())
        return sum(item.numel() for item in local)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderSource, "open", count)
        held = with_engine(body, ModelConfig(path=folder), engine="torchtitan", **strategy)
    return sum(read), held


@pytest.mark.parametrize(("world", "strategy"), [(2, {}), (2, {TP: 2})])
def test_a_rank_reads_no_more_of_the_files_of_a_tied_model_than_it_holds(world: int, strategy: dict[str, Any]) -> None:
    folder = tiny_model_folder("llama_tied")
    whole = sum(item.numel() for item in load_file(folder / "model.safetensors").values())
    for read, held in run_workers(world, count_reading, str(folder), strategy):
        assert read == held < 0.6 * whole


# ---- masked positions ----


def poison(folder: str, documents: Documents, strategy: dict[str, Any]) -> Any:
    """On a rank: a pass, and one whose hidden states are NaN, then infinite, where no token is scored."""

    def body(module: EngineModule) -> Any:
        policy, score, found = module.policy, module.policy.score, []

        def poisoned(garbage: float) -> Callable[..., Any]:
            def run(head: Any, hidden: Tensor, micro_batch: Any, **options: Any) -> Any:
                scored = torch.zeros(hidden.shape[1], dtype=torch.bool)
                scored[micro_batch.predicted] = True
                assert not scored.all()
                return score(head, torch.where(scored[None, :, None], hidden, garbage), micro_batch, **options)

            return run

        loss = PolicyLoss(entropy_coef=0.1, kl_coef=0.1)
        for garbage in (None, math.nan, math.inf):
            if garbage is not None:
                policy.score = poisoned(garbage)
            found.append(backward(module, mine(module.engine, documents), loss, calculate_entropy=True))
        return found

    return with_engine(body, ModelConfig(path=folder), engine="torchtitan", **strategy)


@pytest.mark.parametrize(("world", "strategy"), [(1, {}), (2, {CP: 2})])
def test_infinities_at_masked_positions_change_nothing(world: int, strategy: dict[str, Any]) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    for clean, *others in run_workers(world, poison, folder, documents, strategy):
        assert math.isfinite(clean[0]) and all(math.isfinite(value) for value in clean[1].values())
        for found in others:
            assert found[:2] == clean[:2]
            assert_same(found[2], clean[2])


# ---- adapters ----


def merge_between_passes(config: ModelConfig, documents: Documents, strategy: dict[str, Any]) -> Any:
    """On a rank: log-probabilities before and after a merged export, what the parameters are, and a step after it."""

    def body(module: EngineModule) -> Any:
        engine, policy = module.engine, module.policy

        def look() -> tuple[Tensor, list[Any]]:
            kinds = [
                (name, type(item), getattr(item, "placements", None), tuple(item.shape), item.dtype)
                for name, item in policy.named_parameters()
            ]
            return engine.infer_batch(policy, mine(engine, documents)).columns["log_probs"], kinds

        before = look()
        assert len(list(engine.get_per_tensor_param(policy, mode="merged"))) > 0
        after = look()
        engine.train_batch(policy, module.optimizers(), mine(engine, documents), score_loss)
        return torch.equal(before[0], after[0]), before[1] == after[1], not torch.equal(look()[0], after[0])

    return with_engine(body, config, engine="torchtitan", **strategy)


@pytest.mark.parametrize(("world", "strategy"), [(2, {}), (2, {TP: 2})])
def test_a_merged_export_leaves_passes_and_sharded_parameters_as_they_were(
    world: int, strategy: dict[str, Any]
) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    config = ModelConfig(path=folder, lora=lora(init_lora_weights=False))
    assert run_workers(world, merge_between_passes, config, documents, strategy) == [(True, True, True)] * world


def exported_names(config: ModelConfig, mode: Any) -> list[str]:
    return with_engine(
        lambda module: names_of(module.engine.get_per_tensor_param(module.policy, mode=mode)),
        config,
        engine="torchtitan",
    )


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("adapter", [None, lora()], ids=["full", "lora"])
def test_exported_names_are_those_of_a_hugging_face_save_whatever_wraps_the_layers(
    adapter: LoraConfig | None, head: Any
) -> None:
    folder = tiny_model_folder("llama")
    expected = set(load_file(folder / "model.safetensors"))
    if head == "value":
        expected = expected - {"lm_head.weight"} | {"score.weight", "score.bias"}
    config = ModelConfig(path=str(folder), lora=adapter, head=head, gradient_checkpointing=True)
    for names in run_workers(2, exported_names, config, "merged" if adapter else "full"):
        assert sorted(names) == sorted(expected)


def test_the_file_of_an_adapter_is_the_same_from_every_world_and_lists_nothing_of_the_base(tmp_path: Path) -> None:
    folder = str(tiny_model_folder("qwen3_moe"))
    documents = make_documents(folder, vocabulary=64)
    config = ModelConfig(path=folder, lora=lora(target_modules=["q_proj", "o_proj"]))
    expected = {
        f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{factor}.weight"
        for layer in range(2)
        for module in ("q_proj", "o_proj")
        for factor in "AB"
    }
    places: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, {EP: 2}), (4, {EP: 2, TP: 2})]
    texts = set()
    for world, strategy in places:
        path = tmp_path / str(world)
        run_workers(world, step_and_export, config, documents, str(path), "torchtitan", strategy)
        assert set(load_file(path / "adapter_model.safetensors")) == expected
        saved = json.loads((path / "adapter_config.json").read_text())
        assert sorted(saved["target_modules"]) == ["o_proj", "q_proj"]
        assert not saved["modules_to_save"]
        texts.add(json.dumps({**saved, "target_modules": sorted(saved["target_modules"])}, sort_keys=True))
    assert len(texts) == 1


# ---- experts ----


def train_with_idle_experts(folder: str, document: Tensor) -> Any:
    """On a rank: loss and gradients of one short document, and whether a step of AdamW touches the idle experts."""

    def body(module: EngineModule) -> Any:
        policy = module.policy
        experience = Experience.from_documents(
            input_ids=[document], response_mask=[[True] * len(document)], advantages=[torch.ones(len(document))]
        )
        loss, _, gradients = backward(module, experience, score_loss)
        optimizer = torch.optim.AdamW(policy.parameters(), 1e-3, weight_decay=0.1)
        before = copies(module.engine.get_per_tensor_param(policy))
        module.engine.train_batch(policy, optimizer, experience, score_loss)
        assert all(optimizer.state[item] for item in policy.parameters()), "a parameter was skipped"
        after = copies(module.engine.get_per_tensor_param(policy))
        return loss, gradients, {name for name in after if not torch.equal(after[name], before[name])}

    return with_engine(body, ModelConfig(path=folder), engine="torchtitan", **{EP: 2})


def test_experts_without_tokens_have_gradients_of_zero_and_step_with_the_others(tmp_path: Path) -> None:
    folder = str(tmp_path)
    tiny_model("qwen3_moe", num_experts=12).save_pretrained(folder)
    # The same two tokens on both ranks reach four of twelve experts.
    document = random_documents([2])[0]
    expected_loss, expected = reference_gradients(
        folder, lambda model: -reference_log_probs(model, [document])[0][0][1:].mean()
    )
    idle = {name for name, item in expected.items() if "experts" in name and not item.any()}
    busy = {name for name in expected if "experts" in name} - idle
    assert idle and busy
    results = run_workers(2, train_with_idle_experts, folder, document)
    for loss, gradients, changed in results:
        assert_number(loss, expected_loss)
        assert_gradients(gradients, expected)
        assert all(item.any() for name, item in gradients.items() if name.endswith("mlp.gate.weight"))
        assert idle | busy <= changed, "weight decay reaches all"
        assert changed == results[0][2]


def read_out(folder: str, strategy: dict[str, Any]) -> list[tuple[str, Tensor]]:
    return with_engine(
        lambda module: [(name, item.clone()) for name, item in module.engine.get_per_tensor_param(module.policy)],
        ModelConfig(path=folder),
        engine="torchtitan",
        **strategy,
    )


@pytest.mark.parametrize(("world", "strategy"), [(2, {EP: 2}), (4, {EP: 4}), (4, {EP: 2, TP: 2})])
def test_every_rank_exports_every_expert_once(world: int, strategy: dict[str, Any]) -> None:
    folder = tiny_model_folder("qwen3_moe")
    expected = load_file(folder / "model.safetensors")
    assert sum("experts" in name for name in expected) == 2 * 4 * 3
    for stream in run_workers(world, read_out, str(folder), strategy):
        assert len(stream) == len(expected)
        assert_same(copies(stream), expected)


# ---- memory, checkpoints, options ----


def soak(config: ModelConfig, documents: Documents, steps: int) -> list[tuple[int, int, int]]:
    def body(module: EngineModule) -> list[tuple[int, int, int]]:
        trained = [item for item in module.policy.parameters() if item.requires_grad]
        optimizer = torch.optim.AdamW(trained, 1e-3, fused=True)
        return soak_steps(module, optimizer, documents.experience([1, 8]), score_loss, steps)

    return with_engine(body, config, engine="torchtitan")


@pytest.mark.parametrize("steps", [60, pytest.param(500, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("adapter", [None, lora(target_modules=["q_proj"])], ids=["full", "lora"])
def test_memory_is_flat_over_many_recomputed_steps_with_exports(adapter: LoraConfig | None, steps: int) -> None:
    folder = str(tiny_model_folder("llama_tied"))
    documents = make_documents(folder, vocabulary=64)
    config = ModelConfig(path=folder, lora=adapter, gradient_checkpointing=True)
    for seen in run_workers(2, soak, config, documents, steps, timeout=280):
        require_flat_memory(seen, steps)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_of_compiled_and_recomputed_layers_has_clean_names_and_loads_without_them(tmp_path: Path) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    wrapped = ModelConfig(path=folder, compile=True, compile_backend="aot_eager", gradient_checkpointing=True)
    first, second = str(tmp_path / "first.ckpt"), str(tmp_path / "second.ckpt")
    run_workers(2, train_and_save, wrapped, documents, "torchtitan", {}, steps=1, save=(1, first), timeout=180)
    run_workers(
        2, train_and_save, ModelConfig(path=folder), documents, "torchtitan", {TP: 2}, steps=2, resume=first,
        save_at_start=second,
    )  # fmt: skip
    found = contents(first)
    assert not any(word in name for name in found for word in ("_orig_mod", "_checkpoint_wrapped", "_fsdp"))
    saved = set(load_file(Path(folder) / "model.safetensors"))
    assert {name.partition("policy.hf.")[2] for name in found if "policy.hf." in name} == saved
    assert_same(contents(second), found)


def kernel(config: ModelConfig) -> str:
    return with_engine(lambda module: module.policy.attention.kernel, config, engine="torchtitan")


def test_the_kind_of_attention_is_honoured_or_refused() -> None:
    folder = str(tiny_model_folder("llama"))
    for name in ("auto", "sdpa"):
        assert run_workers(1, kernel, ModelConfig(path=folder, attn_implementation=name)) == ["packed_sdpa"]
    for name in ("flex", "varlen", "flash"):
        with pytest.raises(WorkerError, match=f"packed_{name}.*(CPU|CUDA)"):
            run_workers(1, kernel, ModelConfig(path=folder, attn_implementation=name))
