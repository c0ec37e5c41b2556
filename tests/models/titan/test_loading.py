"""Weights in sharded models are, bit for bit, those of the files, in every layout; what does not fit is named."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchtitan")

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.config.configs import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from lightning_rl_engines.export import plan_from_hf_model
from lightning_rl_engines.models import ModelConfig
from lightning_rl_engines.models.huggingface import load_hf_model
from lightning_rl_engines.models.titan import loading
from lightning_rl_engines.models.titan.attention import PackedAttention
from lightning_rl_engines.models.titan.families import linear_config, titan_spec
from lightning_rl_engines.models.titan.loading import load_weights
from lightning_rl_engines.models.titan.names import HFNames
from tests.models.titan.exactness import hugging_face_model, in_saved_names
from tests.models.titan.test_families import config_of
from tests.support import WorkerError, run_workers

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "mlp_only_layers": [0]},
    "two_experts": {"num_experts": 2},
}


def save(family: str, folder: Path, **options: Any) -> dict[str, Tensor]:
    """Save a random model and return what its files hold."""
    config = config_of("qwen3_moe" if family == "two_experts" else family, **FAMILIES[family])
    hugging_face_model(config).save_pretrained(folder, **options)
    return stored(folder)


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the tensors of a folder with one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def gather(item: Any) -> list[Any]:
    if not dist.is_initialized():
        return [item]
    items: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def build(config: ModelConfig, dtype: torch.dtype = torch.float32, **degrees: int) -> tuple[nn.Module, HFNames]:
    """Build and shard a model as an engine does, every parameter NaN, and load its weights."""
    hf_config = config.load_hf_config()
    spec = titan_spec(hf_config, attention=PackedAttention.Config(), max_seq_len=32)
    tied, names = spec.model.enable_weight_tying, spec.names
    if config.head == "value":
        spec.model.lm_head = linear_config(hf_config.hidden_size, 1, bias=True)
        spec.model.enable_weight_tying, names = False, names.for_value_head()
    model = materialised(spec, dtype, degrees)
    caches = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    load_weights(model, spec.names, config, hf_config, gather=gather, tied=tied)
    assert not any(local(parameter).isnan().any() for parameter in model.parameters())
    for name, buffer in model.named_buffers():
        assert torch.equal(local(buffer), local(caches[name]))
    return model, names


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def materialised(spec: Any, dtype: torch.dtype, degrees: dict[str, int]) -> nn.Module:
    if degrees:
        parallelism = ParallelismConfig(spmd_backend="partial_dtensor", **degrees)
        training = TrainingConfig(mixed_precision_param="float32")
        dims = ParallelDims.from_config(parallelism, dist.get_world_size())
        dist_utils.set_spmd_backend("partial_dtensor")
        runtime = SimpleNamespace(parallelism=parallelism, training=training, debug=DebugConfig())
        spec.model.update_from_config(config=runtime)
    with torch.device("meta"):
        model = spec.model.build().to(dtype)
    if degrees:
        model = spec.parallelize(
            model,
            parallel_dims=dims,
            training=training,
            parallelism=parallelism,
            compile_config=CompileConfig(enable=False),
            ac_config=None,
            dump_folder="",
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def loaded_state(config: ModelConfig, dtype: torch.dtype = torch.float32, **degrees: int) -> dict[str, Tensor]:
    """Whole tensors of a loaded model under their saved names; collective."""
    model, names = build(config, dtype, **degrees)
    state = model.state_dict()
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}
    return {name: tensor.clone() for name, tensor in in_saved_names(names, whole.items()).items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


LAYOUTS: list[tuple[int, dict[str, int], list[str]]] = [
    (2, {"data_parallel_shard_degree": 2}, ["llama", "qwen2", "qwen3_moe"]),
    (2, {"data_parallel_shard_degree": 1, "tensor_parallel_degree": 2}, ["llama", "qwen2", "qwen3", "qwen3_moe"]),
    (2, {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2}, ["qwen3_moe"]),
    (4, {"data_parallel_shard_degree": 4}, ["llama", "qwen3", "two_experts"]),
    (4, {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2}, ["llama"]),
    (4, {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}, ["llama", "qwen2", "qwen3"]),
    (4, {"data_parallel_shard_degree": 4, "expert_parallel_degree": 2}, ["qwen3_moe", "two_experts"]),
    (
        4,
        {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2, "expert_parallel_degree": 2},
        ["qwen3_moe", "two_experts"],
    ),
]


@pytest.mark.parametrize(
    ("world_size", "degrees", "family"),
    [(size, degrees, family) for size, degrees, families in LAYOUTS for family in families],
)
def test_every_layout_holds_the_file(world_size: int, degrees: dict[str, int], family: str, tmp_path: Path) -> None:
    expected = save(family, tmp_path)
    for found in run_workers(world_size, loaded_state, ModelConfig(path=str(tmp_path)), **degrees):
        assert_same(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types_are_cast_as_transformers_casts_them(dtype: torch.dtype, tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    if dtype == torch.float32:
        rewrite(tmp_path, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    config = ModelConfig(path=str(tmp_path))
    assert_same(loaded_state(config, dtype), {name: t.to(dtype) for name, t in stored(tmp_path).items()})


def test_a_save_of_several_files(tmp_path: Path) -> None:
    expected = save("qwen3_moe", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert_same(loaded_state(ModelConfig(path=str(tmp_path))), expected)


def test_a_save_of_the_backbone_alone(tmp_path: Path) -> None:
    expected = save("qwen3", tmp_path)
    rewrite(tmp_path, lambda tensors: [tensors.update({n[6:]: tensors.pop(n)}) for n in list(tensors)])
    assert "embed_tokens.weight" in stored(tmp_path)
    assert_same(loaded_state(ModelConfig(path=str(tmp_path))), expected)


def test_a_hub_name_is_downloaded_at_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = save("llama", tmp_path)
    asked = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    config = ModelConfig(path="someone/something", revision="v2")
    monkeypatch.setattr(ModelConfig, "load_hf_config", lambda self: config_of("llama"))
    assert_same(loaded_state(config), expected)
    assert set(asked) == {("someone/something", "v2")}


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_random_weights_are_those_of_the_other_engine(family: str, head: Any) -> None:
    fields = config_of(family, **FAMILIES[family]).to_diff_dict()
    config = ModelConfig(from_config=fields, head=head, seed=3)
    reference = load_hf_model(config, dtype=torch.bfloat16)
    plan, state = plan_from_hf_model(reference), reference.state_dict()
    expected = {name: piece for source in plan.by_source for name, piece in plan.pieces(source, state[source])}
    degrees = {
        "data_parallel_shard_degree": 2,
        **({"expert_parallel_degree": 2} if (family, head) == ("qwen3_moe", "lm") else {}),
    }
    for found in run_workers(2, loaded_state, config, torch.bfloat16, **degrees):
        assert_same(found, expected)


def stage_state(path: str) -> dict[str, Tensor]:
    """Whole tensors of one of two stages: layer 0 and the embedding, or layer 1, the norm and the head."""
    config = ModelConfig(path=path)
    hf_config = config.load_hf_config()
    spec = titan_spec(hf_config, attention=PackedAttention.Config(), max_seq_len=32)
    model: Any = materialised(spec, torch.float32, {})
    if dist.get_rank() == 0:
        model.norm = model.lm_head = None
        del model.layers["1"]
    else:
        model.tok_embeddings = None
        del model.layers["0"]
    # Two parts of a rank, as interleaved schedules have them.
    extra = nn.Module()
    extra.norm, model.norm = model.norm, None
    load_weights([model, extra], spec.names, config, hf_config, gather=gather, tied=False)
    state = {**model.state_dict(), **extra.state_dict()}
    return {name: tensor.clone() for name, tensor in in_saved_names(spec.names, state.items()).items()}


def test_stages_of_a_pipeline_load_what_they_have(tmp_path: Path) -> None:
    expected = save("llama", tmp_path)
    first, second = run_workers(2, stage_state, str(tmp_path))
    assert first.keys().isdisjoint(second)
    assert "model.layers.1.mlp.up_proj.weight" in second
    assert_same({**first, **second}, expected)


def test_stages_refuse_what_no_stage_has(tmp_path: Path) -> None:
    save("llama", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update(stray=torch.ones(2)))
    with pytest.raises(WorkerError, match=r"left over.*stray") as caught:
        run_workers(2, stage_state, str(tmp_path))
    assert caught.value.all_ranks_raised(ValueError)


def damage(kind: str, folder: Path) -> str:
    """Spoil a folder and return what the error says."""
    name = "model.layers.1.mlp.up_proj.weight"
    if kind == "missing":
        rewrite(folder, lambda tensors: tensors.pop(name))
        return rf"missing \['{name}'\], of another shape \[\], left over \[\]"
    if kind == "left over":
        rewrite(folder, lambda tensors: tensors.update({"model.layers.1.mlp.gate.bias": torch.ones(3)}))
        return r"left over \['model.layers.1.mlp.gate.bias'\]"
    if kind == "mixed up":
        rewrite(folder, lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))
        return rf"of another shape \['{name} is \[32, 40\] and should be \[40, 32\]'\]"
    file = folder / "model.safetensors"
    if kind == "cut off":
        file.write_bytes(file.read_bytes()[:-100])
        return "cannot be built"
    file.unlink()
    return "has neither model.safetensors nor model.safetensors.index.json; save it again"


def loads(config: ModelConfig) -> None:
    build(config, data_parallel_shard_degree=2)


@pytest.mark.parametrize("kind", ["missing", "left over", "mixed up", "cut off", "without files"])
def test_files_that_do_not_fit_are_refused_on_all_ranks(kind: str, tmp_path: Path) -> None:
    save("llama", tmp_path)
    message = damage(kind, tmp_path)
    with pytest.raises(WorkerError, match=message) as caught:
        run_workers(2, loads, ModelConfig(path=str(tmp_path)))
    assert caught.value.all_ranks_raised(ValueError)


def test_a_file_missing_on_another_rank_fails_on_all(tmp_path: Path) -> None:
    save("llama", tmp_path)
    with pytest.raises(WorkerError, match=r"cannot be built.*No such file") as caught:
        run_workers(2, loads_where_files_vanish, str(tmp_path))
    assert caught.value.all_ranks_raised(ValueError)


def loads_where_files_vanish(path: str) -> None:
    # Rank 1 sees another folder of that name, as on a node without shared files.
    if dist.get_rank() == 1:
        other = Path(f"{path}-of-rank-1")
        other.mkdir()
        shutil.copy(f"{path}/config.json", other)
        (other / "model.safetensors.index.json").write_text("{}")
        path = str(other)
    build(ModelConfig(path=path), data_parallel_shard_degree=2)


def test_many_names_are_cut_short(tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path)
    rewrite(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if "experts" in name])
    with pytest.raises(ValueError, match=r"missing \[.*\] and 4 more, of another shape"):
        build(ModelConfig(path=str(tmp_path)))


def test_frequencies_of_old_checkpoints_are_left_unread(tmp_path: Path) -> None:
    expected = save("llama", tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.ones(6)}))
    assert_same(loaded_state(ModelConfig(path=str(tmp_path))), expected)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(loading, "rank_zero_info", lines.append)
    monkeypatch.setattr(loading, "rank_zero_warn", lines.append)
    return lines


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def test_a_second_head_of_a_tied_model_is_mentioned(said: list[str], tmp_path: Path) -> None:
    expected = save("qwen3", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    assert_same(loaded_state(ModelConfig(path=str(tmp_path))), expected)
    assert said == []
    rewrite(tmp_path, lambda tensors: tensors[HEAD].add_(1))
    assert_same(loaded_state(ModelConfig(path=str(tmp_path))), expected)
    assert len(said) == 1
    assert "holds lm_head.weight with another value" in said[0]


def test_a_tied_embedding_may_be_saved_as_the_head(tmp_path: Path) -> None:
    expected = save("qwen3", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}))
    assert_same(loaded_state(ModelConfig(path=str(tmp_path))), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_fresh_value_head_is_that_of_the_other_engine(
    family: str, dtype: torch.dtype, said: list[str], tmp_path: Path
) -> None:
    save(family, tmp_path)
    config = ModelConfig(path=str(tmp_path), head="value", seed=5)
    expected = load_hf_model(config, dtype=dtype).state_dict()
    assert_same(loaded_state(config, dtype), expected)
    assert expected["score.weight"].abs().max() > 0
    assert said == [f"The value head of {tmp_path} is freshly initialised: the checkpoint holds none."]


def test_a_fresh_value_head_is_the_same_in_every_layout(tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = ModelConfig(path=str(tmp_path), head="value")
    expected = loaded_state(config)
    for found in run_workers(2, loaded_state, config, data_parallel_shard_degree=2):
        assert_same(found, expected)


def save_critic(factory: Any, folder: Path, labels: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = factory.from_config(config_of("qwen3", num_labels=labels), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return stored(folder)


def test_a_saved_critic_is_restored(said: list[str], tmp_path: Path) -> None:
    expected = save_critic(AutoModelForTokenClassification, tmp_path)
    config = ModelConfig(path=str(tmp_path), head="value")
    for found in [loaded_state(config), *run_workers(2, loaded_state, config, data_parallel_shard_degree=2)]:
        assert_same(found, expected)
    assert said == []


def test_a_critic_without_bias_starts_from_zero(said: list[str], tmp_path: Path) -> None:
    expected = save_critic(AutoModelForSequenceClassification, tmp_path)
    found = loaded_state(ModelConfig(path=str(tmp_path), head="value"))
    assert_same(found, {**expected, "score.bias": torch.zeros(1)})
    assert said == [f"The value head of {tmp_path} has no bias; it starts from 0."]


def test_a_head_of_several_labels_is_refused(tmp_path: Path) -> None:
    save_critic(AutoModelForTokenClassification, tmp_path, labels=3)
    with pytest.raises(ValueError, match=r"score\.weight is \[3, 32\] and should be \[1, 32\].*one label"):
        build(ModelConfig(path=str(tmp_path), head="value"))


@pytest.mark.parametrize("renamed", [("score.weight", "score.bias"), ("score.weight",)])
def test_a_trained_head_under_another_name_is_not_lost(renamed: tuple[str, ...], tmp_path: Path) -> None:
    save_critic(AutoModelForTokenClassification, tmp_path)

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in renamed:
            tensors[name.replace("score", "v_head")] = tensors.pop(name)

    rewrite(tmp_path, rename)
    with pytest.raises(ValueError, match=r"missing \[.*'score\.weight'\], left over \[.*'v_head\.weight'\]"):
        build(ModelConfig(path=str(tmp_path), head="value"))


def test_a_critic_is_no_language_model(tmp_path: Path) -> None:
    save_critic(AutoModelForTokenClassification, tmp_path)
    with pytest.raises(
        ValueError, match=r"missing \['lm_head\.weight'\].*left over \['score\.bias', 'score\.weight'\]"
    ):
        build(ModelConfig(path=str(tmp_path)))


def test_a_parameter_without_a_name_is_refused(tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = ModelConfig(path=str(tmp_path))
    spec = titan_spec(config.load_hf_config(), attention=PackedAttention.Config(), max_seq_len=8)
    model = spec.model.build()
    model.register_parameter("extra", nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match="model's extra has no name in a Hugging Face save"):
        load_weights(model, spec.names, config, config.load_hf_config(), gather=gather, tied=False)
