"""Builds, shards and fills torchtitan models from Hugging Face configurations and weights."""

import copy
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config.configs import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import RoutedExperts

from lightning_rl_engines._compat import return_hidden_states, without_checkpoint
from lightning_rl_engines.export.plan import ExportEntry, ExportPlan, plan_from_hf_model
from lightning_rl_engines.models.agreement import raise_on_all_ranks
from lightning_rl_engines.models.compile import check_backend, compile_layers
from lightning_rl_engines.models.huggingface import load_hf_model
from lightning_rl_engines.models.titan.attention import PackedAttention, select_titan_kernel
from lightning_rl_engines.models.titan.families import TitanSpec, titan_spec
from lightning_rl_engines.models.titan.heads import log_prob_head, value_head
from lightning_rl_engines.models.titan.loading import load_weights
from lightning_rl_engines.models.titan.lora import TitanAdapter, adapt, plan_adapter, require_trained
from lightning_rl_engines.models.titan.lora_weights import lora_options, start_adapter
from lightning_rl_engines.models.titan.moe import give_experts_their_input
from lightning_rl_engines.models.titan.names import HFNames
from lightning_rl_engines.models.titan.stages import Stage, check_sizes, cut_stages, share_rotary
from lightning_rl_engines.models.titan.token_model import AttentionOptions, TitanTokenModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lightning_rl_engines.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class TitanOptions:
    """What a strategy decides for all of its models.

    Attributes:
        parallelism: Degrees, schedule and back-end.
        dims: The meshes.
        stages_per_rank: Pipeline stages that each rank holds.
        device: Where models live.
        compute_dtype: Type of weights and activations in passes.
        reduce_dtype: Type that gradients are reduced in.
        cpu_offload: Keep parameters, gradients and optimizer state in host memory always, by FSDP2's own policy.
        activation_checkpointing: What ``ModelConfig(gradient_checkpointing=True)`` means.
        gather: Returns the host objects of all ranks, in rank order.
    """

    parallelism: ParallelismConfig
    dims: ParallelDims
    stages_per_rank: int
    device: torch.device
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    cpu_offload: bool
    activation_checkpointing: Literal["full", "selective"]
    gather: Callable[[Any], list[Any]]


def build_titan_model(
    config: "ModelConfig", options: TitanOptions, *, dtype: torch.dtype, trainable: bool = True
) -> TitanTokenModel:
    """Build a model, shard it and read its weights; collective over the world.

    No rank ever holds more than its own shards, and one tensor.

    Args:
        config: What to build.
        options: How to shard it.
        dtype: Type that parameters are stored in; buffers are fp32.
        trainable: ``False`` for a frozen reference.

    Raises:
        ValueError: On all ranks: a configuration or weights that do not fit, or sizes that the layout cannot split.
    """
    prepared, error = None, None
    try:
        prepared = _prepare(config, options, dtype, trainable=trainable)
    except Exception as exception:  # of any type: the other ranks wait
        error = exception
    raise_on_all_ranks(config, error, options.gather)
    assert prepared is not None
    spec = prepared.spec
    parts = [_shard(stage.model, spec, options, config) for stage in prepared.stages]
    load_weights(
        parts,
        spec.names,
        config,
        prepared.hf.config,
        gather=options.gather,
        tied=spec.model.enable_weight_tying,
        plain_name=str if prepared.adapter is None else prepared.adapter.plain_name,
    )
    adapter = None
    if prepared.adapter is not None:
        adapter = start_adapter(parts, prepared.adapter, prepared.hf, config, prepared.names, options.gather)
    return TitanTokenModel(
        parts,
        stages=[stage.index for stage in prepared.stages],
        model_config=config,
        config=prepared.hf.config,
        export_plan=prepared.plan,
        names=prepared.names,
        attention=AttentionOptions(prepared.kernel, options.dims.cp_enabled, _sliding_window(spec.model)),
        adapter=adapter,
    )


@dataclass(frozen=True)
class _Prepared:
    """What is known of a model before any collective."""

    hf: "PreTrainedModel"
    spec: TitanSpec
    names: HFNames
    plan: ExportPlan
    kernel: str
    stages: Sequence[Stage]
    adapter: TitanAdapter | None


def _prepare(config: "ModelConfig", options: TitanOptions, dtype: torch.dtype, *, trainable: bool) -> _Prepared:
    _refuse_options(config)
    if config.compile:
        check_backend(config.compile_backend, options.device)
    # It never runs, and not every family has another kernel.
    hf = load_hf_model(config, dtype=dtype, device="meta", attn_implementation="eager", empty=True)
    dims = options.dims
    spec = titan_spec(hf.config, attention=PackedAttention.Config(), max_seq_len=hf.config.max_position_embeddings)
    critic = config.head == "value"
    if critic:
        spec = replace(spec, model=replace(spec.model, enable_weight_tying=False))
    check_sizes(hf.config, spec.model, dims)
    model = copy.deepcopy(spec.model)
    model.update_from_config(
        config=SimpleNamespace(parallelism=options.parallelism, training=_training(options), debug=DebugConfig())
    )
    bias = critic and hf.get_submodule("score").bias is not None
    model.lm_head = value_head(model.lm_head, bias=bias) if critic else log_prob_head(model.lm_head)
    kernel = select_titan_kernel(
        "auto" if config.attn_implementation == "auto" else f"packed_{config.attn_implementation}",
        options.device,
        dtype=options.compute_dtype,
        context_parallel=dims.cp_enabled,
        sinks=hf.config.model_type == "gpt_oss",
    )
    names = spec.names.for_value_head() if critic else spec.names
    plan = _plan(hf, names)
    stages = cut_stages(model, options.parallelism, dims, stages_per_rank=options.stages_per_rank, dtype=dtype)
    lora = lora_options(config)
    adapter = None if lora is None else plan_adapter(hf, config, lora, names, plan)
    _require_matches(config.freeze, plan)
    for stage in stages:
        if adapter is not None:
            adapt(stage.model, adapter)
        _freeze(stage.model, names, config.freeze)
        if not trainable:
            stage.model.requires_grad_(False)
    if adapter is not None and trainable:
        require_trained([stage.model for stage in stages], adapter)
    return _Prepared(hf, replace(spec, model=model), names, plan, kernel, stages, adapter)


def _refuse_options(config: "ModelConfig") -> None:
    if config.check_forward:
        raise ValueError(
            "ModelConfig(check_forward=True) has the whole model on one rank, which strategy='torchtitan' never does; "
            "leave check_forward out."
        )
    if config.use_liger:
        raise ValueError(
            "ModelConfig(use_liger=True) replaces modules of Hugging Face models; use use_liger=False, or "
            "compile=True, under strategy='torchtitan'."
        )


def _plan(hf: "PreTrainedModel", names: HFNames) -> ExportPlan:
    """The tensors of a Hugging Face save, with the torchtitan tensors that hold them as sources."""
    saved = plan_from_hf_model(hf)
    entries = []
    for entry in saved.entries:
        place = names.locate(entry.name)
        if place is None:
            raise ValueError(f"{entry.name!r} of a Hugging Face save has no place in the torchtitan model.")
        entries.append(ExportEntry(entry.name, entry.shape, entry.dtype, place[0]))
    return ExportPlan(tuple(entries), num_parameters=saved.num_parameters, architecture=saved.architecture)


def _require_matches(patterns: Iterable[str], plan: ExportPlan) -> None:
    """Refuse a pattern that freezes nothing; of the whole model, since a rank may hold some of its stages."""
    names = [entry.name for entry in plan.entries]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                f"ModelConfig(freeze=[{pattern!r}]) matches no tensor of the model's save; names are like "
                f"{names[-1]!r}."
            )


def _freeze(model: nn.Module, names: HFNames, patterns: Iterable[str]) -> None:
    for fqn, parameter in model.named_parameters():
        pieces = [piece.name for piece in names.pieces(fqn, tuple(parameter.shape))]
        for pattern in patterns:
            chosen = fnmatch.filter(pieces, pattern)
            if chosen and len(chosen) < len(pieces):
                raise ValueError(
                    f"ModelConfig(freeze=[{pattern!r}]) freezes {chosen[0]!r} and not {len(pieces) - len(chosen)} "
                    "other experts of the layer, which share one parameter here; freeze all of them or none."
                )
            if chosen:
                parameter.requires_grad_(False)


def _training(options: TitanOptions) -> TrainingConfig:
    return TrainingConfig(
        # torchtitan's annotations leave fp16 out, its table of types does not.
        mixed_precision_param=cast(Any, str(options.compute_dtype).removeprefix("torch.")),
        mixed_precision_reduce=cast(Any, str(options.reduce_dtype).removeprefix("torch.")),
        enable_cpu_offload=options.cpu_offload,
    )


def _shard(model: nn.Module, spec: TitanSpec, options: TitanOptions, config: "ModelConfig") -> nn.Module:
    """Shard one part, and give it storage on the device; its weights hold nothing yet."""
    checkpointing = {"full": FullAC.Config, "selective": SelectiveAC.Config}[options.activation_checkpointing]
    model = spec.parallelize(
        model,
        parallel_dims=options.dims,
        training=_training(options),
        parallelism=options.parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=checkpointing() if config.gradient_checkpointing else None,
        dump_folder="",
    )
    if options.dims.tp_enabled and not options.dims.ep_enabled:
        give_experts_their_input(model)
    if config.compile:
        # The compiler cannot trace DTensors of any length; the strategy lets few lengths occur.
        _compile(model, config.compile_backend, dynamic=not options.dims.tp_enabled)
    share_rotary(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are sums; gloo has no other reduction, and none is wanted.
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu" if options.cpu_offload else options.device)
    if cast(Any, model).enable_weight_tying:
        model.get_submodule("tok_embeddings").weight = model.get_submodule("lm_head").weight
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        cast(Any, model).init_weights(buffer_device=options.device if options.cpu_offload else None)
    return_hidden_states(model)
    return model


def _compile(model: nn.Module, backend: str, *, dynamic: bool) -> None:
    """Compile the layers around what depends on a row's documents or on where its tokens are routed."""
    for module in model.modules():
        if isinstance(module, PackedAttention | RoutedExperts):
            # The wrapped method: exchanges of a layout happen in there, too.
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
    compile_layers(map(without_checkpoint, cast(Any, model).layers.values()), backend=backend, dynamic=dynamic)


def _sliding_window(model: Decoder.Config) -> int | None:
    windows = {getattr(layer.attention, "sliding_window_size", None) for layer in model.layers} - {None}
    return next(iter(windows), None)
