"""LoRA adapters of torchtitan models: peft chooses the Hugging Face modules, torchtitan's shard what is trained."""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import spmd_types as spmd
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional as F
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig
from typing_extensions import override

from lightning_rl_engines._compat import sharding_of
from lightning_rl_engines.export.plan import ExportPlan
from lightning_rl_engines.models.lora import ADAPTER, Adapter, inject_adapter, lora_layers, trained_wrappers
from lightning_rl_engines.models.titan.families import loaded
from lightning_rl_engines.models.titan.gpt_oss import RowwiseLinear
from lightning_rl_engines.models.titan.heads import LogProbHead, local_part
from lightning_rl_engines.models.titan.names import HFNames

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

    from lightning_rl_engines.models.config import ModelConfig


class LowRank(Module):
    """The adapter ``s B A`` of a linear layer, in fp32 storage."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Args: in_features, out_features, rank, scaling: Sizes, and the factor ``s``."""

        in_features: int
        out_features: int
        rank: int
        scaling: float

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.scaling = config.scaling
        self.disabled = False
        self.a = nn.Parameter(torch.empty(config.rank, config.in_features, dtype=torch.float32))
        self.b = nn.Parameter(torch.empty(config.out_features, config.rank, dtype=torch.float32))

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Return ``s B A input``, placed as the base layer places its output before it is redistributed."""
        a, b = self.a, self.b
        if not isinstance(a, DTensor) or not a.placements[0].is_shard(1):
            return F.linear(F.linear(input, a), b) * self.scaling
        # Each rank has some input features. Its summand goes through all of B, so that base and adapter are summed
        # over the ranks at once; the summands of the gradient of B add up, too.
        rows = local_part(input, Shard(input.ndim - 1))
        summand = F.linear(F.linear(rows, local_part(a, Shard(1))), local_part(b, Partial())) * self.scaling
        return DTensor.from_local(summand, a.device_mesh, [Partial()]) if isinstance(input, DTensor) else summand


class AdaptedLinear(Linear):
    """A frozen linear layer with an adapter."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Args: rank, scaling: Of the adapter."""

        rank: int
        scaling: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.lora = _low_rank(config)

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Return ``W input + s B A input``."""
        output = super().forward(input)
        return output if self.lora.disabled else output + self.lora(input)


class AdaptedRowwiseLinear(RowwiseLinear):
    """GPT-OSS's frozen output projection with an adapter."""

    @dataclass(kw_only=True, slots=True)
    class Config(RowwiseLinear.Config):
        """Args: rank, scaling: Of the adapter."""

        rank: int
        scaling: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.lora = _low_rank(config)

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's summand of ``W input + s B A input``."""
        output = super().forward(input)
        return output if self.lora.disabled else output + self.lora(input)


class AdaptedHead(LogProbHead):
    """A frozen head with an adapter; it scores ``[h, s A h] @ [W, B].T``, so logits never exist for the row."""

    @dataclass(kw_only=True, slots=True)
    class Config(LogProbHead.Config):
        """Args: rank, scaling: Of the adapter."""

        rank: int
        scaling: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.lora = _low_rank(config)

    @override
    def extend(self, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[h, s A h]`` and this rank's rows of ``[W, B]``."""
        if self.lora.disabled:
            return rows, weight
        low = F.linear(rows, local_part(self.lora.a, Partial())) * self.lora.scaling
        return torch.cat([rows, low], dim=-1), torch.cat([weight, local_part(self.lora.b, Shard(0))], dim=1)


class TrainedCopy(Module):
    """A frozen module and the fp32 copy that is trained and used in its place."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.disabled = False
        self.original = original
        self.trained = copy.deepcopy(original).float().requires_grad_(True)

    @torch.no_grad()
    def start_from_original(self) -> None:
        """Copy the weights of the original, sharded alike; local."""
        for target, source in zip(self.trained.parameters(), self.original.parameters(), strict=True):
            _local(target).copy_(_local(source))

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the copy, or the original where adapters are disabled."""
        return (self.original if self.disabled else self.trained)(*args, **kwargs)


@dataclass(frozen=True)
class TitanAdapter:
    """An adapter of a torchtitan model; the same on every rank.

    Attributes:
        adapter: What every engine knows of it; sources are torchtitan's names.
        layers: Name of each adapted linear layer to its rank and scaling.
        trained: Names of the modules that a copy is trained of.
        sources: Name of each adapter tensor inside peft's model to its name in the torchtitan model.
    """

    adapter: Adapter
    layers: Mapping[str, tuple[int, float]]
    trained: tuple[str, ...]
    sources: Mapping[str, str]

    @property
    def places(self) -> frozenset[str]:
        """Names of the adapter's tensors in the torchtitan model."""
        return frozenset(self.sources.values())

    def plain_name(self, fqn: str) -> str | None:
        """Return the name without an adapter of a tensor of the base; ``None`` for one of the adapter."""
        if fqn in self.places:
            return None
        return self.adapter.base_names.get(fqn, fqn)


def plan_adapter(
    hf: "PreTrainedModel", config: "ModelConfig", lora: "LoraConfig", names: HFNames, base_plan: ExportPlan
) -> TitanAdapter:
    """Choose what is adapted, as peft chooses it on the Hugging Face model; local.

    Args:
        hf: The Hugging Face model on meta; peft's layers are put into it.
        config: What is built.
        lora: The adapter's options.
        names: Where tensors lie.
        base_plan: Export plan of the torchtitan model.

    Raises:
        ValueError: A target that cannot be trained, merged or saved exactly.
    """
    found = inject_adapter(hf, config, lora)
    layers: dict[str, tuple[int, float]] = {}
    sources: dict[str, str] = {}
    for path, layer in lora_layers(hf):
        located = names.locate(f"{path}.weight")
        if located is None or located[1] is not None:
            raise ValueError(
                f"LoraConfig(target_modules={lora.target_modules!r}) targets {path!r}, which is no layer of its own in "
                "torchtitan models; name layers of the attention, such as ['q_proj', 'v_proj']."
            )
        place = located[0].removesuffix(".weight")
        layers[place] = layer.r[ADAPTER], float(layer.scaling[ADAPTER])
        sources[f"{path}.lora_A.{ADAPTER}.weight"] = f"{place}.lora.a"
        sources[f"{path}.lora_B.{ADAPTER}.weight"] = f"{place}.lora.b"
    trained = []
    for path, wrapper in trained_wrappers(hf):
        place, inside = _trained_place(path, list(wrapper.original_module.state_dict()), names, lora)
        trained.append(place)
        sources |= {
            f"{path}.modules_to_save.{ADAPTER}.{name}": f"{place}.trained.{own}" for name, own in inside.items()
        }
    entries = tuple(replace(entry, source=sources[entry.source]) for entry in found.plan.entries)
    moved = {source: next((p for p in trained if source.startswith(f"{p}.")), None) for source in base_plan.by_source}
    adapter = replace(
        found,
        plan=replace(found.plan, entries=entries),
        base_plan=base_plan,
        base_names={_inside(source, place, "original"): source for source, place in moved.items()},
        merged_names={_inside(source, place, "trained"): source for source, place in moved.items()},
        peft_names={own: source for source, own in sources.items()},
    )
    return TitanAdapter(adapter, layers, tuple(trained), sources)


def adapt(model: nn.Module, plan: TitanAdapter) -> None:
    """Freeze a torchtitan model on meta, or one stage of it, and put its part of an adapter in; local.

    Raises:
        ValueError: A module that no exact copy can be trained of.
    """
    model.requires_grad_(False)
    modules = dict(model.named_modules())
    for place, (rank, scaling) in plan.layers.items():
        if place in modules:
            _put(model, place, _adapted(place, cast(Linear, modules[place]), rank, scaling))
    for place in plan.trained:
        if place not in modules:
            continue
        module = modules[place]
        if list(module.children()) and not isinstance(module, FeedForward):
            raise ValueError(
                f"LoraConfig(modules_to_save={plan.adapter.config.modules_to_save!r}) trains the torchtitan module "
                f"{place!r} ({type(module).__name__}), which is more than a layer; name smaller modules, such as "
                "'lm_head', 'norm' or 'up_proj'."
            )
        _put(model, place, TrainedCopy(module))


def require_trained(parts: Sequence[nn.Module], plan: TitanAdapter) -> None:
    """Refuse an adapter that leaves this rank nothing to train: optimizers have no place for that.

    Raises:
        ValueError: The stages of a pipeline that this rank holds have no part of the adapter.
    """
    if not any(parameter.requires_grad for part in parts for parameter in part.parameters()):
        adapted = sorted({*plan.layers, *plan.trained})
        raise ValueError(
            f"LoraConfig(target_modules=..., layers_to_transform={plan.adapter.config.layers_to_transform!r}) trains "
            f"nothing in a stage of the pipeline, only {adapted[:3]} and such elsewhere; adapt layers of every stage, "
            "or use pipeline_parallel_degree=1."
        )


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Run the base model alone; at exit, also after an exception, the adapters are as they were. Local."""
    modules = [module for module in model.modules() if isinstance(module, LowRank | TrainedCopy)]
    before = [module.disabled for module in modules]
    try:
        for module in modules:
            module.disabled = True
        yield
    finally:
        for module, disabled in zip(modules, before, strict=True):
            module.disabled = disabled


def adapters_are_disabled(model: nn.Module) -> bool:
    """Whether the model runs inside :func:`adapters_disabled`."""
    return any(module.disabled for module in model.modules() if isinstance(module, LowRank | TrainedCopy))


def _trained_place(path: str, inside: list[str], names: HFNames, lora: "LoraConfig") -> tuple[str, dict[str, str]]:
    """The torchtitan module that is the Hugging Face module ``path``, and its tensors by their Hugging Face names."""
    located = {name: names.locate(f"{path}.{name}") for name in inside}
    found = {name: place[0] for name, place in located.items() if place is not None and place[1:] == (None, False)}
    if found.keys() != located.keys():
        raise ValueError(
            f"LoraConfig(modules_to_save={lora.modules_to_save!r}) trains {path!r}, which is no module of its own in "
            "torchtitan models; name others, such as 'lm_head' or 'norm'."
        )
    owners = [fqn.split(".")[:-1] for fqn in found.values()]
    place = ".".join(
        part[0] for part in itertools.takewhile(lambda part: len({*part}) == 1, zip(*owners, strict=False))
    )
    return place, {name: fqn.removeprefix(f"{place}.") for name, fqn in found.items()}


def _inside(source: str, place: str | None, part: str) -> str:
    return source if place is None else f"{place}.{part}.{source.removeprefix(f'{place}.')}"


def _adapted(place: str, base: Linear, rank: int, scaling: float) -> Linear:
    kinds: dict[type, Any] = {Linear: AdaptedLinear, RowwiseLinear: AdaptedRowwiseLinear, LogProbHead: AdaptedHead}
    if type(base) not in kinds:
        raise ValueError(
            f"target_modules names {place!r}, a {type(base).__name__}, which cannot be adapted in torchtitan models; "
            "name layers of the attention, such as ['q_proj', 'v_proj']."
        )
    with torch.device("meta"):
        layer: Any = (
            kinds[type(base)]
            .Config(
                in_features=base.in_features,
                out_features=base.out_features,
                bias=base.bias is not None,
                param_init=loaded("weight", "bias"),
                sharding_config=sharding_of(base),
                rank=rank,
                scaling=scaling,
            )
            .build()
        )
    layer.weight, layer.bias = base.weight, base.bias
    return cast(Linear, layer)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _put(model: nn.Module, place: str, module: nn.Module) -> None:
    owner, _, name = place.rpartition(".")
    setattr(model.get_submodule(owner), name, module)


def _low_rank(layer: Any) -> LowRank:
    """Build the adapter of a layer's configuration, sharded as the layer: B by rows, or A by columns."""
    shardings = None
    if layer.sharding_config is not None:
        base = layer.sharding_config.state_shardings["weight"]
        columns, rows, whole = (dense_param_placement(tp=kind) for kind in (spmd.S(1), spmd.S(0), spmd.R))
        if base not in (columns, rows, whole):
            raise RuntimeError(f"the base of an adapter is placed as {base}; it is to be split by one dim, or whole")
        states = {"a": columns if base == columns else whole, "b": rows if base == rows else whole}
        shardings = ShardingConfig(state_shardings=states)
    adapter: LowRank = LowRank.Config(
        in_features=layer.in_features,
        out_features=layer.out_features,
        rank=layer.rank,
        scaling=layer.scaling,
        param_init=loaded("a", "b"),
        sharding_config=shardings,
    ).build()
    return adapter
