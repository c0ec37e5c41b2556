"""First weights of adapters in sharded torchtitan models, and the fingerprint of the base under them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_rl_engines.export.plan import ExportPlan
from lightning_rl_engines.models.agreement import raise_on_all_ranks
from lightning_rl_engines.models.config import ModelConfig
from lightning_rl_engines.models.fingerprint import fingerprint, sample_bits, sampled
from lightning_rl_engines.models.lora import fresh_weights, read_adapter_weights, require_fit
from lightning_rl_engines.models.lora_config import lora_from_dict, read_adapter_config
from lightning_rl_engines.models.titan.lora import TitanAdapter, TrainedCopy
from lightning_rl_engines.models.titan.names import HFNames, HFPiece
from lightning_rl_engines.models.titan.shards import LocalShard

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

_ABSENT = torch.iinfo(torch.int32).min
"""Less than the bits of any sample."""


def lora_options(config: ModelConfig) -> "LoraConfig | None":
    """Return the options of a model's adapter, a fresh one or that of a folder; ``None`` without one. Local.

    Raises:
        ValueError: The folder holds no adapter, or one that is not exact.
    """
    return config.lora_config if config.adapter is None else lora_from_dict(read_adapter_config(config.adapter))


def start_adapter(
    parts: Sequence[nn.Module],
    plan: TitanAdapter,
    hf: "PreTrainedModel",
    config: ModelConfig,
    names: HFNames,
    gather: Callable[[Any], list[Any]],
) -> TitanAdapter:
    """Give an adapter its first weights and look at the base under it; collective over the world.

    Args:
        parts: This rank's part of the model, its base loaded.
        plan: Where the adapter lies.
        hf: peft's model, on meta; it draws fresh weights.
        config: What is built.
        names: Where tensors of the base lie.
        gather: Returns the host objects of all ranks, in rank order.

    Returns:
        The plan, with the fingerprint of the base.

    Raises:
        ValueError: On all ranks: the tensors of ``config.adapter`` are not those of the adapter.
    """
    error: Exception | None = None
    try:
        fill_adapter(parts, plan, hf, config)
    except Exception as exception:  # of any type: the other ranks go on
        error = exception
    raise_on_all_ranks(config, error, gather)
    held = ((plan.plain_name(name), tensor) for part in parts for name, tensor in part.state_dict().items())
    base = {name: tensor for name, tensor in held if name in plan.adapter.base_plan.by_source}
    found = base_fingerprint(base, plan.adapter.base_plan, names)
    return replace(plan, adapter=replace(plan.adapter, fingerprint=found))


def fill_adapter(parts: Sequence[nn.Module], plan: TitanAdapter, hf: "PreTrainedModel", config: ModelConfig) -> None:
    """Give a sharded adapter its first weights, those of a fresh one in any engine or of ``config.adapter``; local.

    The base is loaded before. Each rank reads or draws one layer at a time.

    Args:
        parts: This rank's part of the model.
        plan: Where the adapter lies.
        hf: peft's model, on meta; it draws fresh weights.
        config: The seed, or the folder.

    Raises:
        ValueError: The folder's tensors are not those of the adapter.
    """
    shards = {fqn: LocalShard(t) for part in parts for fqn, t in part.state_dict().items() if fqn in plan.places}
    if config.adapter is None:
        for source, tensor in fresh_weights(hf, plan.adapter.config, config.seed):
            _fill(shards, plan.sources[source], tensor)
        for part in parts:
            for module in part.modules():
                if isinstance(module, TrainedCopy):
                    module.start_from_original()
        return
    tensors = read_adapter_weights(config.adapter)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    require_fit(plan.adapter.plan, shapes, f"adapter={config.adapter!r}")
    for entry in plan.adapter.plan.entries:
        _fill(shards, entry.source, tensors[entry.name])


def base_fingerprint(base: Mapping[str, Tensor], plan: ExportPlan, names: HFNames) -> str:
    """Return the fingerprint that the base has in every engine and layout; collective over the world.

    Args:
        base: Parameters and persistent buffers of this rank's part of the base, by the plan's sources.
        plan: The whole base.
        names: What each tensor holds.
    """
    indices = [torch.tensor(sampled(entry.shape)) for entry in plan.entries]
    lengths = [len(index) for index in indices]
    bits = torch.full((sum(lengths),), _ABSENT, dtype=torch.int32)
    places = {
        piece.name: (fqn, piece) for fqn, tensor in base.items() for piece in names.pieces(fqn, tuple(tensor.shape))
    }
    shards: dict[str, LocalShard] = {}
    for entry, wanted, own in zip(plan.entries, indices, bits.split(lengths), strict=True):
        if entry.name not in places:
            continue  # of another stage
        fqn, piece = places[entry.name]
        if fqn not in shards:
            shards[fqn] = LocalShard(base[fqn])
        held, values = shards[fqn].sample(piece, wanted)
        own[held] = sample_bits(values).cpu().int()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(bits, dist.ReduceOp.MAX)
    split = bits.to(torch.int16).split(lengths)
    return fingerprint((entry.name, entry.shape, own) for entry, own in zip(plan.entries, split, strict=True))


def _fill(shards: Mapping[str, LocalShard], place: str, tensor: Tensor) -> None:
    if place in shards:
        shards[place].fill(HFPiece(place), tensor)
