"""Parts of a torchtitan model: all of it, or the stages of a pipeline that a rank holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchtitan.config.configs import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.rope import RoPE

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Stage:
    """A part of a model.

    Attributes:
        index: Its number among all stages, from 0.
        count: Number of stages of the whole model.
        model: The part, on meta; what it lacks is ``None``, and absent from ``layers``.
    """

    index: int
    count: int
    model: nn.Module


def cut_stages(
    config: Decoder.Config,
    parallelism: ParallelismConfig,
    dims: ParallelDims,
    *,
    stages_per_rank: int,
    dtype: torch.dtype,
) -> list[Stage]:
    """Build the stages that this rank holds, on meta; without pipeline parallelism the whole model.

    Args:
        config: The whole model.
        parallelism: Names the schedule, for messages.
        dims: The meshes.
        stages_per_rank: How many stages the schedule wants of each rank.
        dtype: Type of the parameters; buffers are as the modules make them.

    Raises:
        ValueError: There are fewer layers than stages.
    """
    count = dims.pp * stages_per_rank if dims.pp_enabled else 1
    if len(config.layers) < count:
        raise ValueError(
            f"pipeline_parallel_degree={dims.pp} with {parallelism.pipeline_parallel_schedule!r} makes {count} stages "
            f"of {len(config.layers)} layers; use at most {len(config.layers) // stages_per_rank}."
        )
    rank = dims.get_mesh("pp").get_local_rank() if dims.pp_enabled else 0
    layers = stage_layers(len(config.layers), count)
    stages = []
    for index in range(rank, count, dims.pp):
        with torch.device("meta"), _default_dtype(dtype):
            model = config.build()
        _prune(model, layers[index], first=index == 0, last=index == count - 1)
        stages.append(Stage(index, count, model))
    return stages


def stage_layers(layers: int, stages: int) -> list[range]:
    """Split layers over stages as evenly as they go, the embedding and the head weighing as much as a layer.

    Args:
        layers: Number of layers, at least that of the stages.
        stages: Number of stages.
    """
    extra = [0] * stages
    if stages > 1:
        extra[0], extra[-1] = 1, 1
    sizes = [1] * stages
    for _ in range(layers - stages):
        # The lightest stage takes the next layer; among equals the last, which then holds less in flight.
        lightest = min(range(stages), key=lambda stage: (sizes[stage] + extra[stage], -stage))
        sizes[lightest] += 1
    bounds = [sum(sizes[:index]) for index in range(stages + 1)]
    return [range(bounds[index], bounds[index + 1]) for index in range(stages)]


def _prune(model: Any, layers: range, *, first: bool, last: bool) -> None:
    for name in list(model.layers):
        if int(name) not in layers:
            del model.layers[name]
    if not first:
        model.tok_embeddings = None
    if not last:
        model.norm, model.lm_head = None, None


def share_rotary(model: nn.Module) -> None:
    """Let layers share the rotary embedding where its configuration is the same: each holds a cache of all positions.

    To be called once the model is sharded, and before its buffers exist.
    """
    known: list[RoPE] = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(child, RoPE):
                continue
            same = next((item for item in known if type(item) is type(child) and item.config == child.config), None)
            if same is None:
                known.append(child)
            else:
                setattr(module, name, same)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def check_sizes(hf_config: "PretrainedConfig", model: Decoder.Config, dims: ParallelDims) -> None:
    """Refuse degrees that a model cannot be split by.

    Args:
        hf_config: The Hugging Face configuration.
        model: The torchtitan configuration.
        dims: The degrees.

    Raises:
        ValueError: With the size and the degree.
    """
    if model.enable_weight_tying and dims.pp_enabled:
        raise ValueError(
            f"tie_word_embeddings=True and pipeline_parallel_degree={dims.pp} do not go together: the first and the "
            "last stage would hold one weight; use pipeline_parallel_degree=1, or a model that is not tied."
        )
    heads, kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
    for name, size in (("num_attention_heads", heads), ("num_key_value_heads", kv_heads)):
        if size % dims.tp:
            raise ValueError(
                f"tensor_parallel_degree={dims.tp} does not divide {name}={size}; use one of "
                f"{[degree for degree in range(1, size + 1) if heads % degree == 0 and kv_heads % degree == 0]}."
            )
    experts = {layer.moe.num_experts for layer in model.layers if layer.moe is not None}
    if dims.ep > 1 and not experts:
        raise ValueError(
            f"expert_parallel_degree={dims.ep} has nothing to spread: model_type={hf_config.model_type!r} has no "
            "experts; use expert_parallel_degree=1."
        )
    for count in experts:
        if count % dims.ep:
            raise ValueError(
                f"expert_parallel_degree={dims.ep} does not divide the {count} experts of a layer; use one of "
                f"{[degree for degree in range(1, count + 1) if count % degree == 0]}."
            )
