"""Sharded tiny models and a stand-in for a strategy, for tests of the export."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from tests.support.models import tiny_config, tiny_model


class Holder(nn.Module):
    """Keeps the model under ``.hf`` as token models do, beside a parameter that is not exported."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        self.extra = nn.Linear(2, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.hf(input_ids=ids, use_cache=False).logits + self.extra.weight.sum() * 0


class World:
    """The part of a strategy that ``drain`` uses, over the worker pool."""

    @property
    def global_rank(self) -> int:
        return dist.get_rank()

    def all_gather_objects(self, item: Any) -> list[Any]:
        objects: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(objects, item)
        return objects


class Alone:
    """A world of one process without a process group."""

    global_rank = 0

    def all_gather_objects(self, item: Any) -> list[Any]:
        return [item]


def make_model(name: str) -> PreTrainedModel:
    """A tiny model by name; ``qwen3_moe`` beside those of the shared support."""
    if name != "qwen3_moe":
        return tiny_model(name)
    fields = {k: v for k, v in tiny_config("qwen3").to_dict().items() if k in _MOE_FIELDS}
    config = Qwen3MoeConfig(**fields, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


_MOE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
    "eos_token_id",
    "initializer_range",
)


def shard(model: PreTrainedModel, sharding: str = "FULL_SHARD", *, bf16: bool = False, wrap: bool = False) -> nn.Module:
    """Wrap each decoder layer and the root with FSDP1 on the CPU; ``PLAIN`` leaves the holder as it is."""
    holder = Holder(model)
    if sharding == "PLAIN":
        return holder
    size = dist.get_world_size()
    shape, names = ((size // 2, 2), ("replicate", "shard")) if sharding == "HYBRID_SHARD" else ((size,), ("shard",))
    options: dict[str, Any] = {
        "device_id": torch.device("cpu"),
        "use_orig_params": True,
        "sharding_strategy": ShardingStrategy[sharding],
        "device_mesh": init_device_mesh("cpu", shape, mesh_dim_names=names),
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else None,
    }
    layers = model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = FullyShardedDataParallel(checkpoint_wrapper(layer) if wrap else layer, **options)
    return FullyShardedDataParallel(holder, **options)


def saved_tensors(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of a folder, whatever its shards."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(os.fspath(file), "pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                assert name not in tensors
                tensors[name] = handle.get_tensor(name)
    return tensors


def save(model: PreTrainedModel, folder: str | Path) -> dict[str, Tensor]:
    """Save a model with Hugging Face and return what the files hold."""
    model.save_pretrained(folder)
    return saved_tensors(folder)


def assert_same(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    """Same names, types, shapes and bits."""
    assert sorted(ours) == sorted(reference)
    for name, tensor in reference.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].shape == tensor.shape, name
        assert torch.equal(ours[name], tensor), name
