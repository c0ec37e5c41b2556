"""What lies in memory between and within steps: of whole models and of adapters, and nothing beside."""

from typing import Any

import pytest
import torch
from peft import LoraConfig

from lightning_rl_engines import ModelConfig
from tests.strategies.layouts import titan
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import assert_same, copies, mine, score_loss
from tests.strategies.test_offload import bytes_on_device, require_flat, state_tensors
from tests.support import run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.live import LiveTensors
from tests.support.lora import lora
from tests.support.models import tiny_config, tiny_model_folder

# Large against FSDP's padding, so that bounds mean something.
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 1024}
BOTH = pytest.mark.parametrize("adapter", [None, lora(r=2)], ids=["full", "lora"])


def wide(adapter: LoraConfig | None, **options: Any) -> ModelConfig:
    return ModelConfig(from_config=tiny_config("llama", **WIDE).to_dict(), lora=adapter, **options)


def documents_of_wide() -> Documents:
    return make_documents(tiny_model_folder("llama"), vocabulary=64)


def measure(config: ModelConfig, documents: Documents, precision: str, **strategy: Any) -> dict[str, int]:
    """On a rank: bytes of parameters, of gradients and of AdamW's state, and all that a step leaves behind."""

    def body(module: EngineModule) -> dict[str, int]:
        engine, policy = module.engine, module.policy
        trained = [item for item in policy.parameters() if item.requires_grad]
        optimizer = torch.optim.AdamW(trained, 1e-3)
        experience = mine(engine, documents)
        with engine.train_mode(policy, optimizer):
            engine.forward_backward_batch(policy, experience, score_loss)
            gradients = bytes_on_device([item.grad for item in policy.parameters() if item.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
            engine.train_batch(policy, optimizer, experience, score_loss)
        return {
            "gradients": gradients,
            "state": bytes_on_device([item for item in state_tensors(optimizer) if item.dim()]),
            "left": live.new_bytes(),
        }

    with LiveTensors() as live:
        return with_engine(body, config, precision=precision, **strategy)


@BOTH
@pytest.mark.parametrize(("precision", "size"), [("32-true", 4), ("bf16-mixed", 4), ("bf16-true", 2)])
@pytest.mark.parametrize(("world", "strategy", "shards"), [(2, {}, 2), (2, {"fsdp_size": 1}, 1)])
def test_a_rank_holds_its_shards_and_nothing_else(
    adapter: LoraConfig | None, precision: str, size: int, world: int, strategy: dict[str, Any], shards: int
) -> None:
    config = wide(adapter, gradient_checkpointing=True)
    whole = sum(item.numel() for item in plain(config).parameters())
    trained = sum(item.numel() for item in plain(config).parameters() if item.requires_grad)
    own = 4 if adapter else size  # an adapter's weights are fp32
    stored = ((whole - trained) * size if adapter else 0) + trained * own
    for found in run_workers(world, measure, config, documents_of_wide(), precision, timeout=240, **strategy):
        # A frozen weight in a unit with a trained one would have memory for its gradient, though none is seen.
        assert found["gradients"] <= 1.1 * trained * own / shards
        assert found["state"] <= 1.1 * 2 * trained * own / shards
        # Gradients are gone; rotary tables and the like are small.
        bound = 1.1 * (stored + 2 * trained * own) / shards
        assert 0.9 * stored / shards <= found["left"] <= bound + 40_000, (found, bound)


def plain(config: ModelConfig) -> Any:
    from lightning_rl_engines.models.huggingface import load_hf_model
    from lightning_rl_engines.models.lora import inject_adapter

    hf = load_hf_model(config)
    if config.has_adapter:
        inject_adapter(hf, config, config.lora)  # type: ignore[arg-type]
    return hf


# ---- off-load of adapters ----


def train(folder: str, documents: Documents, cycles: int, **strategy: Any) -> Any:
    """AdamW on an adapter: weights, results, and what was on the device between the phases."""
    notes: dict[str, list[Any]] = {"parameters": [], "state": [], "storages": []}

    def body(module: EngineModule) -> Any:
        engine: Any = module.engine
        policy, experience = module.policy, mine(engine, documents)
        optimizer = torch.optim.AdamW([item for item in policy.parameters() if item.requires_grad], 1e-2)
        with LiveTensors() as live:
            for _ in range(cycles):
                with engine.eval_mode(policy), engine.disable_adapter(policy):
                    reference = engine.infer_batch(policy, experience).columns
                with engine.train_mode(policy, optimizer):
                    engine.train_batch(policy, optimizer, experience, score_loss, max_grad_norm=0.1)
                weights = copies(engine.get_per_tensor_param(policy, mode="merged"))
                notes["parameters"].append(bytes_on_device(policy.parameters()))
                notes["state"].append(bytes_on_device([item for item in state_tensors(optimizer) if item.dim()]))
                notes["storages"].append(len(live.storages()))
        return {**weights, **reference, **copies(engine.get_per_tensor_param(policy, mode="adapter"))}, notes

    config = ModelConfig(path=folder, lora=lora(modules_to_save=["norm"]))
    return with_engine(body, config, **strategy)


@pytest.mark.parametrize(("world", "layout"), [(1, {}), (2, {}), (2, {"fsdp_size": 1})])
def test_off_loading_an_adapters_model_is_bit_equal_and_frees_the_device(world: int, layout: dict[str, Any]) -> None:
    folder = str(tiny_model_folder("llama_tied"))
    documents = make_documents(folder, vocabulary=64)
    stay = run_workers(world, train, folder, documents, 5, timeout=240, **layout)
    moved = run_workers(
        world, train, folder, documents, 5, timeout=240, offload_param=True, offload_optimizer=True, **layout
    )
    for (expected, before), (found, after) in zip(stay, moved, strict=True):
        assert_same(found, expected)
        assert all(count > 0 for count in (*before["parameters"], *before["state"]))
        assert after["parameters"] == after["state"] == [0] * 5
        require_flat(after["storages"][1:])


# ---- streams ----


def peak(config: ModelConfig, mode: Any, **strategy: Any) -> dict[str, int]:
    """On a rank: the most that is alive in a stream beside the tensor that is handed out, and what is left after it."""

    def body(module: EngineModule) -> dict[str, int]:
        policy = module.policy
        next(module.engine.get_per_tensor_param(policy, mode=mode))  # FSDP sets itself up on first use
        with LiveTensors() as alive:
            before, highest = alive.bytes(), 0
            for _, tensor in module.engine.get_per_tensor_param(policy, mode=mode):
                highest = max(highest, alive.bytes() - before - tensor.nbytes)
                del tensor
            return {"highest": highest, "left": alive.bytes() - before}

    return with_engine(body, config, **strategy)


@pytest.mark.parametrize(("adapter", "mode"), [(None, "full"), (lora(r=2), "merged"), (lora(r=2), "adapter")])
def test_a_stream_holds_one_unit_and_the_sums_of_one_tensor(adapter: LoraConfig | None, mode: str) -> None:
    model = plain(wide(None))
    layer = sum(item.nbytes for item in model.model.layers[0].parameters())
    whole = sum(item.nbytes for item in model.parameters())
    unit = max(layer, whole - 4 * layer)
    largest = max(item.nbytes for item in model.parameters())
    for found in run_workers(2, peak, wide(adapter), mode, timeout=240):
        assert found["left"] == 0
        if mode == "adapter":
            assert found["highest"] < 0.1 * layer
        else:
            # Of a merged tensor, the product and what is rounded.
            assert layer <= found["highest"] <= unit + (2 * largest if adapter else 0) + 4096
            assert found["highest"] < 0.75 * whole


@pytest.mark.parametrize("layout", ["ep2", "pp2", pytest.param("ep2-tp2", marks=pytest.mark.exhaustive)])
def test_a_stream_of_experts_holds_one_stack(layout: str) -> None:
    """Stacks are smaller than a bucket here; cutting larger ones is tested where the size of a bucket is given."""
    sizes = {"num_hidden_layers": 6, "moe_intermediate_size": 96, "num_experts": 8}
    config = ModelConfig(from_config=tiny_config("qwen3_moe", **sizes).to_dict())
    model = plain(config)
    whole = sum(item.nbytes for item in model.parameters())
    stack = max(item.nbytes for name, item in model.named_parameters() if "experts" in name)
    world, options = titan(layout)
    for found in run_workers(world, peak, config, "full", timeout=240, **options):
        assert found["left"] == 0
        assert stack // 2 <= found["highest"] <= 2 * stack
        assert found["highest"] < 0.25 * whole
