"""Other architectures of transformers: exact under sequence parallelism, or refused when they are built."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_rl_engines import Experience, ModelConfig
from lightning_rl_engines.models.forward_check import COVERED, difference, probe_documents
from lightning_rl_engines.models.huggingface import load_hf_model
from tests.models.architectures import VOCABULARY, save_small_model
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import score_loss
from tests.strategies.test_invariance import compare_with_reference
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.lora import lora
from tests.support.models import tiny_config, tiny_model, tiny_model_folder

EXACT = ("cohere2", "deepseek_v3", "gemma3_text", "glm4_moe", "gpt2", "granite", "mixtral", "olmo2", "phi3")
MORE = (
    *("arcee", "bitnet", "codegen", "cohere", "cwm", "diffllama", "dots1", "ernie4_5", "exaone4"),
    *("flex_olmo", "gemma", "glm", "glm4", "gpt_bigcode", "gpt_neox", "gptj", "granitemoe", "helium"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "jais2", "jetmoe", "minimax_m2", "ministral", "nanochat", "olmo", "olmo3"),
    *("olmoe", "persimmon", "phi", "qwen2_moe", "seed_oss", "smollm3", "solar_open", "starcoder2"),
)

# Sizes that depend on each other.
_CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}


@pytest.mark.parametrize("model_type", [*EXACT, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)])
def test_gradients_under_sequence_parallelism_are_those_of_the_plain_model(tmp_path: Path, model_type: str) -> None:
    folder = save_small_model(tmp_path, model_type, **_CHANGES.get(model_type, {}))
    case = {"folder": folder, "balance": False, "checkpointing": False, "defer": False}
    compare_with_reference(case, [("token-mean", "several")], 2, "fsdp_ulysses", {"ulysses_sp_size": 2})


def build(folder: str, documents: Documents | None, config: dict[str, Any], options: dict[str, Any]) -> bool:
    def body(module: EngineModule) -> bool:
        if documents is not None:
            module.engine.forward_backward_batch(module.policy, documents.experience([0, 1]), score_loss)
        return module.policy.training

    return with_engine(body, ModelConfig(path=folder, **config), **options)


REFUSED: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "a head that scales": ("dory", {}, 1, {}),
    "noise in training": ("mixtral", {"router_jitter_noise": 0.3}, 1, {}),
    "attention of its own": ("falcon", {}, 2, {"ulysses_sp_size": 2}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_is_not_itself_in_packed_rows_is_refused(tmp_path: Path, name: str) -> None:
    model_type, changes, world, options = REFUSED[name]
    folder = save_small_model(tmp_path, model_type, **changes)
    with pytest.raises(WorkerError, match=r"gives other log_probs in packed rows than by itself.*check_forward=False"):
        run_workers(world, build, folder, None, {}, options)
    assert run_workers(world, build, folder, None, {"check_forward": False}, options) == [True] * world


def test_a_model_that_keeps_the_row_from_its_attention_is_refused(tmp_path: Path) -> None:
    folder = save_small_model(tmp_path, "stablelm")
    with pytest.raises(WorkerError, match=r"StableLmConfig of .* does not run on packed rows: .*use another model"):
        run_workers(1, build, folder, None, {}, {})


@pytest.mark.parametrize("model_type", ["gpt2", "gptj", "opt"])
def test_a_document_beyond_a_table_of_positions_is_refused(tmp_path: Path, model_type: str) -> None:
    folder = save_small_model(tmp_path, model_type)
    ids = [torch.arange(20) % VOCABULARY, torch.arange(257) % VOCABULARY]
    with pytest.raises(WorkerError, match=r"document 1 has 257 tokens, and the model has max_position_embeddings=256"):
        run_workers(2, infer, folder, ids)
    ((found, _), _) = run_workers(2, infer, folder, [ids[0], ids[1][:256]])
    assert found > 0


def infer(folder: str, ids: list[torch.Tensor]) -> tuple[int, Any]:
    def body(module: EngineModule) -> tuple[int, Any]:
        mine = ids if module.engine.data_parallel_rank == 0 else ids[:1]
        experience = Experience.from_documents(
            input_ids=mine, response_mask=[torch.arange(len(item)) > 0 for item in mine]
        )
        return len(module.engine.infer_batch(module.policy, experience).columns["log_probs"]), None

    return with_engine(body, ModelConfig(path=folder))


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, {}),
        ({"head": "value"}, {}),
        ({"lora": lora()}, {}),
        ({"dtype": "bfloat16", "lora": lora()}, {"precision": "bf16-mixed"}),
        ({}, {"precision": "16-mixed"}),
        ({}, {"offload_param": True}),
    ],
    ids=str,
)
def test_a_check_that_is_asked_for_leaves_the_model_as_it_was(config: dict[str, Any], options: dict[str, Any]) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    loss = None if config.get("head") == "value" else documents
    assert run_workers(2, build, folder, loss, {**config, "check_forward": True}, options) == [True] * 2


def test_a_check_of_a_whole_model_is_refused_where_no_rank_holds_one() -> None:
    folder = str(tiny_model_folder("llama"))
    with pytest.raises(WorkerError, match=r"check_forward=True.*torchtitan.*leave check_forward out"):
        run_workers(1, build, folder, None, {"check_forward": True}, {"engine": "torchtitan"})


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("part", ["model", "backbone"])
def test_weights_that_a_configuration_has_no_place_for_are_refused(tmp_path: Path, part: str, head: Any) -> None:
    # Tied, so that a save of the backbone alone lacks nothing.
    model = tiny_model("llama_tied")
    (model if part == "model" else model.model).save_pretrained(tmp_path)
    tiny_config("llama_tied", num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"missing \[\], of another shape \[\], left over \['(model\.)?layers.1"):
        load_hf_model(ModelConfig(path=str(tmp_path), head=head))


def test_masks_of_old_checkpoints_are_no_weights(tmp_path: Path) -> None:
    folder = Path(save_small_model(tmp_path, "gpt2", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))
    weights = load_file(folder / "model.safetensors")
    weights |= {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4), "transformer.h.0.attn.masked_bias": torch.ones(1)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_hf_model(ModelConfig(path=str(folder)))


def test_what_counts_as_rounding() -> None:
    found, expected = torch.tensor([-2.0, 2.5]), torch.tensor([-2.0, 2.0])
    assert difference(found, expected, torch.float32) == (0.5, 1e-3)
    assert difference(found, expected, torch.bfloat16) == (0.25, 0.2)
    # Of values that lie close together, in another order.
    gap, limit = difference(found / 50, found.flip(0) / 50, torch.bfloat16)
    assert gap > 3 * limit > 0
    documents = probe_documents(VOCABULARY)
    assert all(int(ids.min()) >= 0 and int(ids.max()) < VOCABULARY for ids in documents)
    assert "llama" in COVERED


def decay(folder: str, documents: Documents, options: dict[str, Any]) -> tuple[list[str], float, float]:
    """Trained names, and how far the frozen parameter and another one are moved by an optimizer with weight decay."""

    def body(module: EngineModule) -> Any:
        engine, model = module.engine, module.policy
        trained = [name for name, item in model.named_parameters() if item.requires_grad]
        before = dict(engine.get_per_tensor_param(model))
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=1.0)
        with engine.train_mode(model):
            engine.forward_backward_batch(model, documents.experience([0, 1]), score_loss)
            gradients = {name for name, _ in engine.get_per_tensor_grad(model)}
            optimizer.step()
        moved = {name: float((item - before[name]).abs().max()) for name, item in engine.get_per_tensor_param(model)}
        return len(trained), FROZEN in gradients, moved[FROZEN], moved["model.norm.weight"]

    return with_engine(body, ModelConfig(path=folder), **options)


FROZEN = "model.layers.1.mlp.expert_bias"


@pytest.mark.parametrize(("world", "options"), [(1, {}), (2, {}), (2, {"fsdp_size": 1})], ids=str)
def test_what_an_architecture_does_not_train_is_frozen_on_all_ranks(
    tmp_path: Path, world: int, options: dict[str, Any]
) -> None:
    folder = save_small_model(tmp_path, "afmoe")
    documents = make_documents(folder, vocabulary=VOCABULARY)
    results = run_workers(world, decay, folder, documents, options)
    for trained, listed, frozen, other in results:
        assert trained == results[0][0]
        assert not listed
        assert frozen == 0.0 < other
