"""LoRA of torchtitan models: the steps of plain peft on every layout, the other engine's start, peft's merge."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan")

from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import DataLoader

from lightning_rl_engines import FSDPUlyssesStrategy, HFFolderSink, ModelConfig, TorchTitanStrategy, WeightExport
from lightning_rl_engines.export.plan import plan_from_hf_model
from lightning_rl_engines.models.huggingface import load_hf_model
from lightning_rl_engines.models.lora import inject_adapter
from tests.models.titan import test_deepseek, test_gpt_oss
from tests.models.titan.exactness import hugging_face_model
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import assert_near, assert_same, copies, mine, plain_model, plain_score_loss, score_loss
from tests.strategies.test_lora import VARIANTS, run_clip, run_disabled, run_precision, run_value
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.lightning_env import make_trainer
from tests.support.lora import adapter_state, load_adapter_folder, lora, plain_adapter, saved_name
from tests.support.models import reference_log_probs, tiny_config, tiny_model_folder

_TP, _CP, _EP = "tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree"
_PP, _HSDP = "pipeline_parallel_degree", "data_parallel_replicate_degree"
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {_TP: 2}),
    "cp2": (2, {_CP: 2}),
    "cp2-unbalanced": (2, {_CP: 2, "context_parallel_load_balancer": None}),
    "cp2-ptrr": (2, {_CP: 2, "context_parallel_load_balancer": "ptrr"}),
    "cp2-tp2": (4, {_CP: 2, _TP: 2}),
    "pp2": (2, {_PP: 2}),
    "ep2": (2, {_EP: 2}),
    "ep2-tp2": (2, {_EP: 2, _TP: 2}),
    "dp2-tp2": (4, {_TP: 2}),
    "hsdp": (4, {_HSDP: 2}),
}


def run_two_steps(documents: Documents, config: ModelConfig, strategy: dict[str, Any], lr: float) -> dict[str, Any]:
    """Two SGD steps: every gradient of both, the adapter before and after, and bytes of gradients."""

    def body(module: EngineModule) -> dict[str, Any]:
        engine, policy, optimizer = module.engine, module.policy, module.optimizers()
        start, gradients, sizes = copies(engine.get_per_tensor_param(policy, mode="adapter")), [], []
        for _ in range(2):
            with engine.train_mode(policy, optimizer):
                engine.forward_backward_batch(
                    policy, mine(engine, documents), score_loss, max_tokens_per_micro_batch=48
                )
                gradients.append(copies(engine.get_per_tensor_grad(policy)))
                sizes.append(_bytes(item.grad for item in policy.parameters() if item.grad is not None))
                optimizer.step()
        with engine.disable_adapter(policy):
            base = copies(engine.get_per_tensor_param(policy, mode="full"))
        trained = [item for item in policy.parameters() if item.requires_grad]
        return {
            "start": start,
            "gradients": gradients,
            "end": copies(engine.get_per_tensor_param(policy, mode="adapter")),
            "base": base,
            "bytes": (*sizes, _bytes(trained)),
            "dtypes": {item.dtype for item in trained},
            "fingerprint": policy.adapter.fingerprint,
        }

    return with_engine(body, config, lr=lr, engine="torchtitan", **strategy)


def _bytes(tensors: Any) -> int:
    return sum((item.to_local() if isinstance(item, DTensor) else item).nbytes for item in tensors)


def two_plain_steps(model: Any, documents: Documents, lr: float) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Gradients of two steps of plain peft, and the adapter after them."""
    optimizer = torch.optim.SGD([item for item in model.parameters() if item.requires_grad], lr)
    gradients = []
    for _ in range(2):
        optimizer.zero_grad()
        plain_score_loss(model, documents).backward()
        named = {saved_name(name): item for name, item in model.named_parameters() if item.requires_grad}
        gradients.append({name: item.grad.clone() for name, item in named.items() if item.grad is not None})
        optimizer.step()
    return gradients, adapter_state(model)


def other_engine(config: ModelConfig, options: LoraConfig) -> tuple[dict[str, Tensor], str]:
    """The adapter that fsdp_ulysses starts from, and the fingerprint of its base."""
    hf = load_hf_model(config, attn_implementation="eager")
    adapter, state = inject_adapter(hf, config, options), hf.state_dict()
    return {entry.name: state[entry.source] for entry in adapter.plan.entries}, adapter.fingerprint


def check_two_steps(
    folder: str, layout: str, options: LoraConfig, *, vocabulary: int = 64, lr: float = 0.5, **config: Any
) -> list[dict[str, Any]]:
    """Compare an engine on each rank with plain peft; return what the ranks found."""
    documents = make_documents(folder, vocabulary=vocabulary)
    world, strategy = LAYOUTS[layout]
    kind = config.pop("activation_checkpointing", None)
    if kind is not None:
        strategy = {**strategy, "activation_checkpointing": kind, "offload_param": True, "offload_optimizer": True}
    built = ModelConfig(path=folder, lora=options, gradient_checkpointing=kind is not None, **config)
    results = run_workers(world, run_two_steps, documents, built, strategy, lr)
    start, fingerprint = other_engine(built, options)
    expected, end = two_plain_steps(plain_adapter(plain_model(folder), options, start), documents, lr)
    plan = plan_from_hf_model(plain_model(folder))
    base = {
        name: item for key in plan.by_source for name, item in plan.pieces(key, plain_model(folder).state_dict()[key])
    }
    for result in results:
        assert_same(result["start"], start)
        for found, wanted in zip(result["gradients"], expected, strict=True):
            # The first gradient of A is zero where B is.
            zero = [name for name, item in wanted.items() if not item.any()]
            assert not any(found[name].any() for name in zero)
            kept = {name: item for name, item in wanted.items() if name not in zero}
            assert_near({name: item for name, item in found.items() if name not in zero}, kept)
        assert all(bool(item.any()) for item in result["gradients"][1].values())
        assert_near(result["end"], end)
        assert_same(result["base"], base)
        assert result["dtypes"] == {torch.float32}
        assert result["fingerprint"] == fingerprint
        # Gradients of the adapter, and of nothing else.
        assert result["bytes"][0] == result["bytes"][1] == result["bytes"][2]
    return results


@pytest.mark.parametrize(
    ("layout", "checkpointing"),
    [
        ("one", None),
        pytest.param("one", "full", marks=pytest.mark.exhaustive),
        pytest.param("dp2", None, marks=pytest.mark.exhaustive),
        ("dp2", "full"),
        ("tp2", None),
        pytest.param("tp2", "full", marks=pytest.mark.exhaustive),
        ("tp2", "selective"),
        ("cp2", "full"),
        ("cp2-unbalanced", None),
        ("cp2-ptrr", None),
        pytest.param("cp2-tp2", "full", marks=pytest.mark.exhaustive),
        ("pp2", "full"),
        ("dp2-tp2", "full"),
        ("hsdp", None),
    ],
)
def test_two_steps_equal_plain_peft(layout: str, checkpointing: str | None) -> None:
    folder = str(tiny_model_folder("llama"))
    results = check_two_steps(folder, layout, lora(), activation_checkpointing=checkpointing)
    total = sum(item.nbytes for item in results[0]["end"].values())
    if layout in ("dp2", "pp2", "cp2"):
        assert sum(result["bytes"][0] for result in results) == total
        assert max(result["bytes"][0] for result in results) < 0.6 * total


def count_messages(documents: Documents, config: ModelConfig) -> dict[Any, int]:
    """Functional collectives of one pass, which are those of tensor parallelism."""

    def body(module: EngineModule) -> dict[Any, int]:
        engine, policy = module.engine, module.policy
        with engine.train_mode(policy), CommDebugMode() as counter:
            engine.forward_backward_batch(policy, mine(engine, documents), score_loss)
        return {str(kind).rpartition(".")[2]: count for kind, count in counter.get_comm_counts().items()}

    return with_engine(body, config, engine="torchtitan", tensor_parallel_degree=2)


def test_an_adapter_exchanges_no_activations_of_its_own() -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    plain, adapted = (
        run_workers(2, count_messages, documents, ModelConfig(path=folder, lora=options))[0]
        for options in (None, lora())
    )
    for kind in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        # The embedding is frozen, so its last exchange has no counterpart in the backward pass.
        assert adapted[kind] == plain[kind] - 1, kind
    # The gradients of the factors that are whole on each rank: one of each of the seven layers, in two blocks.
    assert adapted["all_reduce"] == 14


@pytest.mark.parametrize("layout", ["dp2", "ep2", "ep2-tp2"])
def test_two_steps_over_experts(layout: str) -> None:
    check_two_steps(str(tiny_model_folder("qwen3_moe")), layout, lora(target_modules=_ATTENTION))


# One head of keys and values cannot be split.
@pytest.mark.parametrize(("variant", "layout"), [(name, "dp2" if name == "patterns" else "tp2") for name in VARIANTS])
def test_two_steps_of_each_kind_of_adapter(variant: str, layout: str) -> None:
    model, options = VARIANTS[variant]
    # After a longer step the second gradients of the plain model in fp32 and in fp64 differ by 3e-6 and more.
    check_two_steps(str(tiny_model_folder(model)), layout, options, vocabulary=tiny_config(model).vocab_size, lr=0.02)


def test_a_trained_router() -> None:
    options = lora(target_modules=["q_proj"], modules_to_save=["gate", "post_attention_layernorm"])
    check_two_steps(str(tiny_model_folder("qwen3_moe")), "ep2-tp2", options, lr=0.1)


LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        ("deepseek", {}, lora(target_modules=LATENT)),
        pytest.param(
            "deepseek",
            {"attention_bias": True},
            lora(target_modules=["o_proj"], modules_to_save=["shared_experts"]),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("gpt_oss", {}, lora(), marks=pytest.mark.exhaustive),
        ("gpt_oss", {}, lora(target_modules=["o_proj"], modules_to_save=["router", "norm"])),
    ],
)
def test_two_steps_of_other_families(tmp_path: Path, family: str, changes: dict[str, Any], options: LoraConfig) -> None:
    cases: Any = {"deepseek": test_deepseek, "gpt_oss": test_gpt_oss}[family]
    hugging_face_model(cases.config_of(**changes)).save_pretrained(tmp_path)
    check_two_steps(str(tmp_path), "ep2-tp2", options, vocabulary=97, lr=0.1)


def test_a_bf16_base_in_fp32_compute() -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    config = ModelConfig(path=folder, lora=lora(), dtype="bfloat16")
    results = run_workers(2, run_two_steps, documents, config, {_TP: 2}, 0.5)
    rounded = plain_model(folder)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    expected, end = two_plain_steps(plain_adapter(rounded, lora(), results[0]["start"]), documents, 0.5)
    for result in results:
        assert_near(result["gradients"][1], expected[1])
        assert_near(result["end"], end)
        assert result["dtypes"] == {torch.float32}
        # Another type of storage is the same base.
        assert result["fingerprint"] == other_engine(config, lora())[1]


@pytest.mark.parametrize(
    ("precision", "dtype", "layout"),
    [
        ("32-true", None, "tp2"),
        ("bf16-mixed", "bfloat16", "dp2"),
        ("bf16-mixed", "bfloat16", "tp2"),
        ("bf16-true", None, "dp2"),
        ("16-mixed", None, "pp2"),
    ],
)
def test_adapters_are_fp32_over_a_base_of_any_type(precision: str, dtype: Any, layout: str) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    config = ModelConfig(path=folder, lora=lora(), dtype=dtype)
    world, strategy = LAYOUTS[layout]
    results = run_workers(world, run_precision, documents, config, precision, engine="torchtitan", **strategy)
    base = torch.bfloat16 if dtype == "bfloat16" or precision == "bf16-true" else torch.float32
    for result in results:
        assert result["base"] == {base}
        assert result["adapter"] == result["gradients"] == result["state"] == {torch.float32}
        assert result["moved"]
        # Two moments of this rank's part of the adapter; under tensor parallelism one factor of each is replicated.
        assert result["state_bytes"] <= 2 * (0.85 if layout == "tp2" else 0.55) * result["adapter_bytes"]
        assert result["merged"] == {torch.float32}
        assert result["rounded"] == {torch.bfloat16}
    with torch.no_grad():
        expected, _ = reference_log_probs(plain_model(folder), documents.input_ids)
    found, joined = torch.cat(results[0]["log_probs"]), torch.cat(expected)
    joined = torch.where(torch.cat(documents.response_mask), joined, 0.0)
    assert float((found - joined).norm() / joined.norm()) < (2e-2 if precision == "32-true" else 5e-2)


@pytest.mark.parametrize("layout", ["one", "tp2", "pp2"])
def test_two_steps_of_a_critic(layout: str) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    world, strategy = LAYOUTS[layout]
    config = ModelConfig(path=folder, head="value", lora=lora())
    titan = run_workers(world, run_value, documents, config, {"engine": "torchtitan", **strategy})
    ((start, end),) = run_workers(1, run_value, documents, config, {})
    for found_start, found_end in titan:
        assert_same(found_start, start)
        assert_near(found_end, end)


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        ("all-linear", "one"),
        ("trained-head", "dp2"),
        ("all-linear", "tp2"),
        ("adapted-head", "tp2"),
        ("trained-head", "tp2"),
    ],
)
def test_disabled_adapters_are_the_base_exactly_and_come_back(variant: str, layout: str) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    options = {
        "all-linear": lora(init_lora_weights=False),
        "adapted-head": lora(target_modules=["lm_head", "q_proj"], init_lora_weights=False),
        "trained-head": lora(modules_to_save=["lm_head"], init_lora_weights=False),
    }[variant]
    world, strategy = LAYOUTS[layout]
    base, config = ModelConfig(path=folder), ModelConfig(path=folder, lora=options)
    for result in run_workers(world, run_disabled, documents, config, base, {"engine": "torchtitan", **strategy}):
        for found in result["base"]:
            assert torch.equal(found, result["plain"])
        for found in result["back"]:
            assert torch.equal(found, result["trained"])
        assert not torch.equal(result["trained"], result["plain"])
        assert result["gradients"]


def test_clipping_sees_the_adapter_whole() -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    config = ModelConfig(path=folder, lora=lora(init_lora_weights=False))
    (expected,) = run_workers(1, run_clip, documents, config, {})
    for layout in ("one", "dp2", "tp2", "pp2", "hsdp"):
        world, strategy = LAYOUTS[layout]
        for found in run_workers(world, run_clip, documents, config, {"engine": "torchtitan", **strategy}):
            assert found == pytest.approx(expected, rel=1e-5)


def run_merge(documents: Documents, config: ModelConfig, strategy: dict[str, Any]) -> dict[str, Any]:
    """Merge after a step, also half-way, and look at live weights after each."""

    def body(module: EngineModule) -> dict[str, Any]:
        engine, policy = module.engine, module.policy
        with engine.train_mode(policy, module.optimizers()):
            engine.train_batch(policy, module.optimizers(), mine(engine, documents), score_loss)

        def live() -> list[Tensor]:
            local = (item.to_local() if isinstance(item, DTensor) else item for item in policy.parameters())
            return [item.detach().clone() for item in local]

        before = live()
        merged = copies(engine.get_per_tensor_param(policy, mode="merged"))
        stream = engine.get_per_tensor_param(policy, mode="merged")
        for _ in range(len(merged) // 2):
            next(stream)[1].zero_()
        stream.close()
        again = copies(engine.get_per_tensor_param(policy, mode="merged", dtype="bfloat16"))
        try:
            engine.get_per_tensor_param(policy, mode="full")
            refused = ""
        except ValueError as error:
            refused = str(error)
        return {
            "adapter": copies(engine.get_per_tensor_param(policy, mode="adapter")),
            "merged": merged,
            "rounded": again,
            "same": all(torch.equal(a, b) for a, b in zip(before, live(), strict=True)),
            "refused": refused,
        }

    return with_engine(body, config, lr=0.5, engine="torchtitan", **strategy)


@pytest.mark.parametrize(
    ("model", "layout", "options"),
    [
        ("llama", "dp2", lora(use_rslora=True)),
        ("llama", "tp2", lora(modules_to_save=["lm_head"])),
        ("llama", "pp2", lora(modules_to_save=["norm", "embed_tokens"])),
        ("odd_vocab", "tp2", lora(target_modules=["lm_head", "o_proj"])),
        ("llama_tied", "one", lora()),
        ("qwen3_moe", "ep2", lora(target_modules=_ATTENTION)),
    ],
)
def test_merged_weights_are_those_of_merge_and_unload(model: str, layout: str, options: LoraConfig) -> None:
    folder = tiny_model_folder(model)
    documents = make_documents(folder, vocabulary=tiny_config(model).vocab_size)
    world, strategy = LAYOUTS[layout]
    for result in run_workers(world, run_merge, documents, ModelConfig(path=str(folder), lora=options), strategy):
        plain: Any = plain_adapter(plain_model(folder), options, result["adapter"]).merge_and_unload()
        plan, state = plan_from_hf_model(plain), plain.state_dict()
        expected = {name: item for key in plan.by_source for name, item in plan.pieces(key, state[key])}
        assert expected.keys() == load_file(folder / "model.safetensors").keys()
        assert_same(result["merged"], expected)
        assert_same(result["rounded"], {name: item.to(torch.bfloat16) for name, item in expected.items()})
        assert result["same"]
        assert "would leave it out" in result["refused"]


def step_and_export(config: ModelConfig, documents: Documents, path: str, engine: str, strategy: dict[str, Any]) -> Any:
    """Loss, gradients and a step; then the callback's export of the adapter, and log-probabilities of it."""

    class Exporting(EngineModule):
        updates = 0

    def body(module: EngineModule) -> Any:
        own, policy = module.engine, module.policy
        start = copies(own.get_per_tensor_param(policy, mode="adapter"))
        with own.train_mode(policy, module.optimizers()):
            own.forward_backward_batch(policy, mine(own, documents), score_loss)
            gradients = copies(own.get_per_tensor_grad(policy))
        loss = own.train_batch(policy, module.optimizers(), mine(own, documents), score_loss).loss
        with own.eval_mode(policy):
            log_probs = own.infer_batch(policy, mine(own, documents)).columns["log_probs"]
        module.updates += 1  # type: ignore[operator]
        found = own.all_gather_objects(log_probs, "data")
        return {"start": start, "gradients": gradients, "loss": loss, "log_probs": torch.cat(found)}

    module = Exporting({"policy": config}, body, 0.5)
    built: Any = {"torchtitan": TorchTitanStrategy, "fsdp_ulysses": FSDPUlyssesStrategy}[engine](**strategy)
    callback = WeightExport(sink=HFFolderSink(path=path), weights="adapter")
    trainer = make_trainer(built, max_steps=-1, max_epochs=1, limit_train_batches=1, callbacks=[callback])
    trainer.fit(module, DataLoader(range(trainer.world_size)))
    return module.result


def test_an_adapter_goes_from_engine_to_engine_and_to_stock_peft(tmp_path: Path) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    config = ModelConfig(
        path=folder, lora=lora(target_modules=["q_proj", "o_proj", "up_proj"], modules_to_save=["norm"])
    )
    places: list[tuple[int, str, dict[str, Any]]] = [
        (2, "torchtitan", {_TP: 2}),
        (2, "fsdp_ulysses", {"ulysses_sp_size": 2}),
        (2, "torchtitan", {_PP: 2}),
    ]
    texts = set()
    for step, (world, engine, strategy) in enumerate(places):
        path = tmp_path / f"after-{step}"
        here = run_workers(world, step_and_export, config, documents, str(path), engine, strategy)
        # The same step where the adapter came from, in one process of the other engine.
        other = "fsdp_ulysses" if engine == "torchtitan" else "torchtitan"
        (there,) = run_workers(1, step_and_export, config, documents, str(tmp_path / f"other-{step}"), other, {})
        for result in here:
            assert_same(result["start"], there["start"])
            assert result["loss"] == pytest.approx(there["loss"], rel=1e-5)
            gradients = {name: item for name, item in there["gradients"].items() if item.any()}
            assert_near({name: result["gradients"][name] for name in gradients}, gradients)
        assert_near(
            load_file(path / "adapter_model.safetensors"),
            load_file(tmp_path / f"other-{step}" / "adapter_model.safetensors"),
        )
        model = load_adapter_folder(folder, path)
        with torch.no_grad():
            expected, _ = reference_log_probs(model, documents.input_ids)  # type: ignore[arg-type]
        joined = torch.where(torch.cat(documents.response_mask), torch.cat(expected), 0.0)
        torch.testing.assert_close(here[0]["log_probs"], joined, rtol=1e-5, atol=1e-5)
        texts.add(json.dumps(sorted(json.loads((path / "adapter_config.json").read_text()).items())))
        config = ModelConfig(path=folder, adapter=str(path))
    assert len(texts) == 1, "the same from every engine"


def build_only(config: ModelConfig, **strategy: Any) -> None:
    with_engine(lambda module: None, config, engine="torchtitan", **strategy)


@pytest.mark.parametrize(
    ("model", "options", "strategy", "message"),
    [
        ("llama", {"lora": lora(target_modules=["embed_tokens"])}, {}, "Embedding"),
        ("llama", {"adapter": "nowhere"}, {}, "holds no adapter_config"),
        ("llama_tied", {"lora": lora(target_modules=["lm_head"])}, {}, "tied"),
        ("llama", {"lora": lora(target_modules=["q_proj"], layers_to_transform=[1])}, {_PP: 2}, "nothing in a stage"),
        ("qwen3_moe", {"lora": lora(target_modules=["q_proj"], modules_to_save=["experts"])}, {_EP: 2}, "experts"),
        ("llama", {"lora": lora(target_modules=["up_proj"], modules_to_save=["self_attn"])}, {}, "more than a layer"),
    ],
)
def test_what_is_not_exact_is_refused_on_all_ranks(
    model: str, options: dict[str, Any], strategy: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkerError, match=message) as caught:
        run_workers(2, build_only, ModelConfig(path=str(tiny_model_folder(model)), **options), **strategy)
    assert len(caught.value.errors) == 2


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    path = str(tmp_path / "adapter")
    run_workers(1, step_and_export, ModelConfig(path=folder, lora=lora()), documents, path, "torchtitan", {})
    with pytest.raises(WorkerError, match="does not fit the model") as caught:
        run_workers(2, build_only, ModelConfig(path=str(tiny_model_folder("qwen3")), adapter=path))
    assert len(caught.value.errors) == 2
