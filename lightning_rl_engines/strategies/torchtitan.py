"""TorchTitan models under FSDP2, HSDP, tensor, context, expert and pipeline parallelism, as a Lightning strategy."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_rl_engines._compat import join_process_group
from lightning_rl_engines.models.config import DTypeName, ModelConfig, torch_dtype
from lightning_rl_engines.models.titan_library import prepare_torchtitan, require_torchtitan
from lightning_rl_engines.models.token_model import TokenModel
from lightning_rl_engines.sequence.context_parallel import row_multiple, row_order
from lightning_rl_engines.strategies.base import EngineStrategy
from lightning_rl_engines.strategies.degrees import SCHEDULES, LoadBalancer, ParallelDegrees, Schedule
from lightning_rl_engines.strategies.engine import WeightsMode
from lightning_rl_engines.strategies.offload import local_part
from lightning_rl_engines.strategies.pipeline import PipelinePasses
from lightning_rl_engines.strategies.pipeline_order import stages_per_rank
from lightning_rl_engines.strategies.placing import move_around_models
from lightning_rl_engines.strategies.row_lengths import compiled_length, padded_length
from lightning_rl_engines.strategies.validation import refuse_callbacks, require_engine_models

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_rl_engines.models.titan.build import TitanOptions
    from lightning_rl_engines.models.titan.token_model import TitanTokenModel


class TorchTitanStrategy(PipelinePasses, EngineStrategy, ModelParallelStrategy):  # type: ignore[misc]  # EngineStrategy narrows
    """torchtitan's models, built from a Hugging Face configuration and its weights.

    The degrees multiply to the number of ranks; experts are spread over ranks that are counted already. Arguments bear
    torchtitan's names. Runs on CPU (gloo) and on CUDA; needs the extra ``torchtitan``.

    Args:
        data_parallel_shard_degree: Data ranks that parameters are sharded over; -1 for what the world leaves.
        data_parallel_replicate_degree: Groups of data ranks that hold replicas of the shards (HSDP).
        tensor_parallel_degree: Ranks that matrices and the vocabulary are split over, and rows between layers.
        context_parallel_degree: Ranks that a row is split over.
        context_parallel_load_balancer: How a row is dealt out to them: ``"ptrr"`` deals blocks by what attention costs
            them, which suits rows of many documents; ``"headtail"``, torchtitan's default, gives each rank a chunk from
            the front and its mirror image, which suits one long document; ``None`` cuts the row.
        expert_parallel_degree: Ranks that the experts of a layer are spread over.
        pipeline_parallel_degree: Ranks that the layers are split over.
        pipeline_parallel_schedule: ``"1F1B"``, ``"GPipe"``, or ``"Interleaved1F1B"`` with two stages per rank.
        fsdp_reshard_after_forward: Whether parameters are freed after the forward pass: ``"always"``, ``"never"``, or
            ``"default"``, which does so without pipeline parallelism, but for the head.
        activation_checkpointing: What ``ModelConfig(gradient_checkpointing=True)`` recomputes: ``"full"`` layers, or,
            ``"selective"``, what is cheap.
        cpu_offload: Keep parameters, gradients and optimizer state in host memory, and step there (FSDP2's policy).
            Needs an accelerator.
        offload_param: Keep parameters, of frozen references too, in host memory outside ``train_mode``, ``eval_mode``
            and exports. On CPU they go to a second buffer, which saves nothing.
        offload_optimizer: Keep optimizer state in host memory outside ``train_mode``.
        reduce_dtype: Type that gradients are reduced in where compute is in half precision.
        defer_gradient_sync: Reduce gradients on the last micro-batch only. Saves communication and keeps an unsharded
            gradient, in the type of reduction, on every rank.
        async_checkpoint: Write checkpoints in the background; see :class:`FSDPUlyssesStrategy`.
        process_group_backend: Backend of ``torch.distributed``; by default gloo on CPU, gloo and NCCL on CUDA.
        timeout_seconds: How long a collective may take before the run is given up.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        precision_plugin: Set by the Trainer from its ``precision``; see :class:`EnginePrecision`.

    Raises:
        ValueError: A degree that is not a positive integer, or an unknown option.
        ImportError: torchtitan is missing, or of a series that is not supported.
    """

    strategy_name = "torchtitan"

    def __init__(
        self,
        data_parallel_shard_degree: int = -1,
        data_parallel_replicate_degree: int = 1,
        tensor_parallel_degree: int = 1,
        context_parallel_degree: int = 1,
        context_parallel_load_balancer: LoadBalancer | None = "ptrr",
        expert_parallel_degree: int = 1,
        pipeline_parallel_degree: int = 1,
        pipeline_parallel_schedule: Schedule = "1F1B",
        fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default",
        activation_checkpointing: Literal["full", "selective"] = "full",
        cpu_offload: bool = False,
        offload_param: bool = False,
        offload_optimizer: bool = False,
        reduce_dtype: DTypeName = "float32",
        defer_gradient_sync: bool = False,
        async_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout_seconds: float = 1800.0,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        require_torchtitan()
        self.degrees = ParallelDegrees(
            shard=data_parallel_shard_degree,
            replicate=data_parallel_replicate_degree,
            context=context_parallel_degree,
            tensor=tensor_parallel_degree,
            expert=expert_parallel_degree,
            pipeline=pipeline_parallel_degree,
        )
        _require("pipeline_parallel_schedule", pipeline_parallel_schedule, SCHEDULES)
        _require("context_parallel_load_balancer", context_parallel_load_balancer, ("headtail", "ptrr", None))
        _require("fsdp_reshard_after_forward", fsdp_reshard_after_forward, ("default", "always", "never"))
        _require("activation_checkpointing", activation_checkpointing, ("full", "selective"))
        _require("reduce_dtype", reduce_dtype, ("float32", "bfloat16"))
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds={timeout_seconds} must be positive, such as 1800.")
        timeout = timedelta(seconds=timeout_seconds)
        self._reduce_dtype = torch_dtype(reduce_dtype)
        self._set_options(
            offload_param=offload_param,
            offload_optimizer=offload_optimizer,
            async_checkpoint=async_checkpoint,
            timeout=timeout,
        )
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self.accelerator = cast(Any, accelerator)  # Lightning declares it to be there, and starts without
        self.parallel_devices = parallel_devices
        self.cluster_environment = cluster_environment
        self.precision_plugin = precision_plugin
        self.context_parallel_load_balancer = context_parallel_load_balancer
        self.pipeline_parallel_schedule = pipeline_parallel_schedule
        self.fsdp_reshard_after_forward = fsdp_reshard_after_forward
        self.activation_checkpointing = activation_checkpointing
        self.cpu_offload = cpu_offload
        self.defer_gradient_sync = defer_gradient_sync
        self._titan_options: TitanOptions | None = None
        self._peers: dist.ProcessGroup | None = None

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        if cls.strategy_name not in strategy_registry:
            description = "TorchTitan models with FSDP2, tensor, context, expert and pipeline parallelism for RL"
            strategy_registry.register(cls.strategy_name, cls, description=description)

    # ---- Lightning: processes and set-up ----

    @override
    def setup_environment(self) -> None:
        refuse_callbacks(self.lightning_module)
        degrees = self.degrees.resolve(self.num_processes * self.num_nodes)
        self._check_options()
        prepare_torchtitan(self.root_device.type)
        self._join_alone()
        join_process_group(self)
        self.degrees = degrees
        # torchtitan's order of ranks: peers of a row and of a matrix are neighbours.
        self._mesh = init_device_mesh(
            self.root_device.type,
            (degrees.pipeline, degrees.data, degrees.context, degrees.tensor),
            mesh_dim_names=("pp", "dp", "sp", "tp"),
        )
        self._set_timeouts([self._mesh])
        peers, _ = dist.new_subgroups_by_enumeration(degrees.peers(), timeout=self._timeout)
        self._peers = cast(dist.ProcessGroup, peers)  # every rank is in one of them
        self._titan_options = self._make_options()

    def _check_options(self) -> None:
        self._check_reduce_dtype()
        if self.cpu_offload and self.root_device.type == "cpu":
            raise ValueError("cpu_offload=True needs an accelerator to compute on; use cpu_offload=False on CPU.")
        if self.cpu_offload and (self.offload_param or self.offload_optimizer):
            raise ValueError(
                "cpu_offload=True keeps everything in host memory already; leave offload_param and offload_optimizer "
                "out, or use them without cpu_offload."
            )

    def _make_options(self) -> "TitanOptions":
        from lightning_rl_engines.models.titan.build import TitanOptions
        from lightning_rl_engines.models.titan.meshes import build_meshes, parallelism_config

        parallelism = parallelism_config(
            self.degrees,
            schedule=self.pipeline_parallel_schedule,
            load_balancer=self.context_parallel_load_balancer,
            reshard_after_forward=self.fsdp_reshard_after_forward,
        )
        dims = build_meshes(parallelism, self.world_size)
        self._set_timeouts(list(dims.get_all_one_dimensional_meshes().values()))
        return TitanOptions(
            parallelism=parallelism,
            dims=dims,
            stages_per_rank=stages_per_rank(self.pipeline_parallel_schedule),
            device=self.root_device,
            compute_dtype=self.precision_plugin.compute_dtype,
            reduce_dtype=self._reduce_dtype,
            cpu_offload=self.cpu_offload,
            activation_checkpointing=self.activation_checkpointing,
            gather=self.all_gather_objects,
        )

    @override
    def setup(self, trainer: "Trainer") -> None:
        # Tensors of inference mode cannot be used by FSDP2's hooks, nor in training afterwards. Validation within fit
        # never makes any.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        assert self.model is not None
        require_engine_models(self.model)
        super().setup(trainer)

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        move_around_models(self.lightning_module, self.root_device)

    # ---- engine: models ----

    @override
    def build_model(self, config: ModelConfig, *, trainable: bool = True) -> TokenModel:
        """Build a torchtitan model from a Hugging Face configuration and weights; collective over the world.

        Every rank reads its own shards of a folder; it must be on a file system that all of them see.

        Raises:
            ValueError: On all ranks: a family, a field of the configuration or an option that is not supported, sizes
                that the degrees do not divide, weights that do not fit.
        """
        from lightning_rl_engines.models.titan.build import build_titan_model

        assert self._titan_options is not None
        dtype = self._storage_dtype(config, trainable=trainable)
        model = build_titan_model(config, self._titan_options, dtype=dtype, trainable=trainable)
        if self.offload_param:
            self._offloader.offload(model=model)
        return model.train(trainable)

    @override
    def get_per_tensor_param(
        self, model: nn.Module, *, mode: WeightsMode = "full", dtype: DTypeName | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        from lightning_rl_engines.models.titan.weights import stream_titan_weights

        target = None if dtype is None else torch_dtype(dtype)
        stream = stream_titan_weights(cast("TitanTokenModel", model), mode, target, self._pipeline_group)
        return self._while_loaded(model, stream)

    @override
    def get_per_tensor_grad(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        from lightning_rl_engines.models.titan.weights import stream_titan_gradients

        stream = stream_titan_gradients(cast("TitanTokenModel", model), self._pipeline_group)
        return self._while_loaded(model, stream, grad=True)

    # ---- engine: rows ----

    @property
    @override
    def _peer_group(self) -> dist.ProcessGroup | None:
        return self._peers if self.peer_size > 1 else None

    @property
    @override
    def peer_size(self) -> int:
        return self.world_size // self.data_parallel_size

    @property
    @override
    def peer_rank(self) -> int:
        return self.degrees.peers()[self.data_parallel_rank].index(self.global_rank)

    @property
    @override
    def layout(self) -> str:
        return self.degrees.describe()

    @property
    @override
    def _row_multiple(self) -> int:
        # Between layers each tensor-parallel rank holds a part of this rank's tokens.
        chunks = row_multiple(self.context_parallel_load_balancer, self.degrees.context)
        return (chunks if self.degrees.context > 1 else 1) * self.degrees.tensor

    @override
    def _row_length(self, model: nn.Module, tokens: int, budget: int | None) -> int | None:
        if self.degrees.tensor == 1:
            return None
        rounded = compiled_length if cast("TitanTokenModel", model).model_config.compile else padded_length
        return rounded(tokens, multiple_of=self._row_multiple, budget=budget)

    @property
    @override
    def _row_order(self) -> Callable[..., Tensor] | None:
        if self.degrees.context == 1 or self.context_parallel_load_balancer is None:
            return None
        return partial(row_order, self.context_parallel_load_balancer)

    @override
    @contextmanager
    def _loaded(self, model: nn.Module, *, optimizer: Optimizer | None = None, grad: bool = False) -> Iterator[None]:
        titan = cast("TitanTokenModel", model)
        with super()._loaded(model, optimizer=optimizer, grad=grad):
            titan.come_to_rest()  # after a pass of a user's own, the weights may have changed
            try:
                yield
            finally:
                titan.come_to_rest()

    # ---- engine: optimizers and gradients ----

    @override
    def _cut_like_parameters(self, matrix: Tensor) -> Sequence[Tensor]:
        placements = [Replicate(), Shard(0), Replicate(), Shard(1)]  # pp, dp, sp, tp
        return [distribute_tensor(matrix, self.mesh, placements, src_data_rank=None)]

    @override
    def _gradient_scale(self, model: nn.Module) -> float:
        return 1.0  # gradients are summed

    @override
    @contextmanager
    def _gradient_sync(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        deferred = self.defer_gradient_sync and not last
        for module in modules:
            module.set_requires_gradient_sync(not deferred, recurse=False)
        try:
            yield
        finally:
            for module in modules:
                module.set_requires_gradient_sync(True, recurse=False)

    @override
    def _clip_parameters(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        squares = torch.zeros((), dtype=torch.float64, device=self.root_device)
        stage_size = self.world_size // self.degrees.pipeline
        for gradient in gradients:
            # Every rank of a stage holds a part or a replica of every gradient of that stage.
            square = torch.linalg.vector_norm(local_part(gradient), dtype=torch.float64).square()
            squares += square.to(squares.device) * _shards(gradient) / stage_size
        if self.world_size > 1:
            dist.all_reduce(squares)
        norm = squares.sqrt()
        if math.isfinite(max_norm) and bool(torch.isfinite(norm)):
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for gradient in gradients:
                local_part(gradient).mul_(factor.to(gradient.device, local_part(gradient).dtype))
        return norm


def _require(name: str, value: Any, legal: tuple[Any, ...]) -> None:
    if value not in legal:
        raise ValueError(f"{name}={value!r} is unknown; use one of {legal}.")


def _shards(tensor: Tensor) -> int:
    """In how many parts a tensor lies on its mesh."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    # Strided shards are shards, too, and no gradient is partial once it is reduced.
    return math.prod(size for placement, size in sizes if not placement.is_replicate())


TorchTitanStrategy.register_strategies(StrategyRegistry)
