"""FSDP1 sharding with Ulysses sequence parallelism, as a Lightning strategy."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import FSDPStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.optim import Optimizer
from typing_extensions import override

from lightning_rl_engines._compat import end_aborted_passes, restore_frozen_parameters
from lightning_rl_engines.export.stream import stream_full_gradients
from lightning_rl_engines.models.config import DTypeName, ModelConfig, torch_dtype
from lightning_rl_engines.models.huggingface import HFTokenModel
from lightning_rl_engines.models.token_model import TokenModel
from lightning_rl_engines.models.weights import stream_weights
from lightning_rl_engines.sequence.attention import select_kernel
from lightning_rl_engines.strategies.base import EngineStrategy
from lightning_rl_engines.strategies.engine import WeightsMode
from lightning_rl_engines.strategies.forward_check import require_plain_outputs
from lightning_rl_engines.strategies.loading import load_on_rank_zero
from lightning_rl_engines.strategies.placing import move_around_models
from lightning_rl_engines.strategies.sharding import FSDPLayout, fsdp_layout, shard
from lightning_rl_engines.strategies.validation import (
    refuse_callbacks,
    require_divisor,
    require_engine_models,
    require_size,
)


class FSDPUlyssesStrategy(EngineStrategy, FSDPStrategy):  # type: ignore[misc]  # EngineStrategy narrows
    """FSDP1 around each token model, Ulysses across the ranks that share a row.

    Ranks form a mesh of data ranks times ``ulysses_sp_size``; neighbouring ranks share a row. Parameters are sharded
    over all ranks, sequence peers included. Runs on CPU (gloo) and on CUDA.

    Args:
        ulysses_sp_size: Ranks that a row is split over; divides the number of ranks and the attention heads.
        fsdp_size: Ranks that parameters are sharded over; smaller than the world gives hybrid sharding (sharded within
            neighbouring ranks, replicated across), 1 gives replicas, ``None`` shards over the world.
        reduce_dtype: Type that gradients are reduced in where compute is in half precision.
        offload_param: Keep parameters, of frozen references too, in host memory outside ``train_mode``, ``eval_mode``
            and exports. On CPU they go to a second buffer, which saves nothing.
        offload_optimizer: Keep optimizer state in host memory outside ``train_mode``.
        defer_gradient_sync: Reduce gradients on the last micro-batch only. Saves communication and keeps an unsharded
            gradient on every rank. Only with ``32-true``: FSDP1 would accumulate it in the type of computation.
        async_checkpoint: Write checkpoints in the background, from a copy of the state in host memory. A checkpoint
            appears under its name once it is whole; the next save, a load and the end of the run wait for it. Name
            checkpoints by step: one that is being written is invisible to the version counter of ``ModelCheckpoint``.
        process_group_backend: Backend of ``torch.distributed``; by default gloo on CPU, gloo and NCCL on CUDA.
        timeout_seconds: How long a collective may take before the run is given up.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        precision_plugin: Set by the Trainer from its ``precision``; see :class:`EnginePrecision`.

    Raises:
        ValueError: A size that is not a positive integer, or an unknown type.
    """

    strategy_name = "fsdp_ulysses"
    # Lightning refuses on CPU every name in its own list, which subclasses would share.
    _registered_strategies: list[str] = []  # noqa: RUF012

    def __init__(
        self,
        ulysses_sp_size: int = 1,
        fsdp_size: int | None = None,
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
        require_size("ulysses_sp_size", ulysses_sp_size)
        if fsdp_size is not None:
            require_size("fsdp_size", fsdp_size)
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds={timeout_seconds} must be positive, such as 1800.")
        self._reduce_dtype = torch_dtype(reduce_dtype)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_seconds),
        )
        self.ulysses_sp_size = ulysses_sp_size
        self.fsdp_size = fsdp_size
        self.defer_gradient_sync = defer_gradient_sync
        self._set_options(
            offload_param=offload_param,
            offload_optimizer=offload_optimizer,
            async_checkpoint=async_checkpoint,
            timeout=timedelta(seconds=timeout_seconds),
        )
        self._layout: FSDPLayout | None = None

    # ---- Lightning: processes, precision, data ----

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(
                cls.strategy_name, cls, description="FSDP1 sharding with Ulysses sequence parallelism for RL"
            )
            strategy_registry.register(
                f"{cls.strategy_name}_offload",
                cls,
                description="The same, with parameters and optimizer state in host memory between phases",
                offload_param=True,
                offload_optimizer=True,
            )

    @override
    def setup_environment(self) -> None:
        refuse_callbacks(self.lightning_module)
        self._check_layout()
        self._join_alone()
        super().setup_environment()
        self._mesh = init_device_mesh(
            self.root_device.type,
            (self.world_size // self.ulysses_sp_size, self.ulysses_sp_size),
            mesh_dim_names=("dp", "sp"),
        )
        mixed_precision = self.precision_plugin.fsdp_mixed_precision
        self._layout = fsdp_layout(
            self.root_device, self.world_size, self.fsdp_size, mixed_precision, self.precision_plugin.compute_dtype
        )
        self._set_timeouts([self._mesh, self._layout.mesh])

    def _check_layout(self) -> None:
        world = self.num_processes * self.num_nodes
        require_divisor("ulysses_sp_size", self.ulysses_sp_size, world)
        require_divisor("fsdp_size", self.fsdp_size or world, world)
        if self.defer_gradient_sync and self.precision_plugin.precision != "32-true":
            raise ValueError(
                f"defer_gradient_sync=True under precision={self.precision_plugin.precision!r} would accumulate "
                "gradients in half precision; use precision='32-true' or defer_gradient_sync=False."
            )
        self._check_reduce_dtype()

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        # The token models inside the LightningModule are FSDP roots; the module itself is not wrapped, so that
        # backward passes inside training_step and several models in one module work.
        require_engine_models(model)
        assert self.lightning_module is not None
        move_around_models(self.lightning_module, self.root_device)
        return model

    # ---- engine: models ----

    @override
    def build_model(self, config: ModelConfig, *, trainable: bool = True) -> TokenModel:
        """Build a Hugging Face model, read by rank 0 and sharded unit by unit; collective over the world.

        Raises:
            ValueError: On all ranks: weights that do not fit, head counts that ``ulysses_sp_size`` cannot split, a
                storage type that contradicts the Trainer's precision.
        """
        dtype = self._storage_dtype(config, trainable=trainable)
        plugin = self.precision_plugin
        requested = "auto" if config.attn_implementation == "auto" else f"packed_{config.attn_implementation}"
        hf, adapter, expected = load_on_rank_zero(
            config,
            dtype=dtype,
            kernel=select_kernel(requested, self.root_device, dtype=plugin.compute_dtype),
            device=self.root_device,
            sequence_group=self.sequence_parallel_group,
            gather=self.all_gather_objects,
        )
        model = HFTokenModel(hf, config, adapter)
        if not trainable:
            model.requires_grad_(False)
        assert self._layout is not None
        root = shard(model, model.units, self._layout)
        if expected is not None:
            checked = cast(TokenModel, root)
            require_plain_outputs(self, checked, expected, compute_dtype=plugin.compute_dtype)
        if self.offload_param:
            self._offloader.offload(model=root)
        return cast(TokenModel, root.train(trainable))

    @override
    def get_per_tensor_param(
        self, model: nn.Module, *, mode: WeightsMode = "full", dtype: DTypeName | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        target = None if dtype is None else torch_dtype(dtype)
        return self._while_loaded(model, stream_weights(model, cast(TokenModel, model), mode, target))

    @override
    def get_per_tensor_grad(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        token_model = cast(TokenModel, model)
        plan = token_model.export_plan if token_model.adapter is None else token_model.adapter.plan
        return self._while_loaded(model, stream_full_gradients(model, plan, prefix="hf."), grad=True)

    @override
    @contextmanager
    def _loaded(self, model: nn.Module, *, optimizer: Optimizer | None = None, grad: bool = False) -> Iterator[None]:
        with super()._loaded(model, optimizer=optimizer, grad=grad):
            try:
                yield
            except BaseException:
                end_aborted_passes(model)  # or weights could be neither saved nor exported
                raise

    # ---- engine: optimizers and gradients ----

    @override
    def _cut_like_parameters(self, matrix: Tensor) -> Sequence[Tensor]:
        # FSDP1 cuts a flat tensor wherever a rank's part ends, in the middle of rows too.
        return matrix.flatten().tensor_split([matrix.numel() // 2 - 1])

    @override
    def _gradient_scale(self, model: nn.Module) -> float:
        # FSDP1 averages gradients over all ranks that reduce them, which is the world in every layout.
        return float(self.world_size)

    @override
    @contextmanager
    def _gradient_sync(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        try:
            with nullcontext() if last or not self.defer_gradient_sync else cast(FSDP, model).no_sync():
                yield
        finally:
            restore_frozen_parameters(model)

    @override
    def _clip_parameters(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        # The squares are summed over the world and divided by the number of replicas.
        chosen = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = [cast(Tensor, parameter.grad) for parameter in chosen]
        squares = torch.zeros((), dtype=torch.float64, device=self.root_device)
        for gradient in gradients:
            squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        if self.world_size > 1:
            dist.all_reduce(squares)
        replicas = self.world_size // (self.fsdp_size or self.world_size)
        norm = (squares / replicas).sqrt()
        if math.isfinite(max_norm) and bool(torch.isfinite(norm)):
            torch.nn.utils.clip_grads_with_norm_(chosen, max_norm, norm.float())
        return norm


FSDPUlyssesStrategy.register_strategies(StrategyRegistry)
