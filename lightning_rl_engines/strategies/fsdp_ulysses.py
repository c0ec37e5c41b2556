"""FSDP1 sharding with Ulysses sequence parallelism, as a Lightning strategy."""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import FSDPPrecision, Precision
from lightning.pytorch.strategies import FSDPStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import set_timeout
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.optim import Optimizer
from typing_extensions import override

from lightning_rl_engines._compat import IS_INTERACTIVE, restore_frozen_parameters
from lightning_rl_engines.export.stream import stream_full_gradients
from lightning_rl_engines.models.config import DTypeName, ModelConfig, torch_dtype
from lightning_rl_engines.models.huggingface import HFTokenModel
from lightning_rl_engines.models.token_model import TokenModel
from lightning_rl_engines.models.weights import stream_weights
from lightning_rl_engines.sequence import Experience
from lightning_rl_engines.sequence.attention import select_kernel
from lightning_rl_engines.strategies.checkpoints import ShardedCheckpoints
from lightning_rl_engines.strategies.engine import WeightsMode
from lightning_rl_engines.strategies.launcher import ForkLauncher, HereLauncher, ScriptLauncher, follow_launcher
from lightning_rl_engines.strategies.loading import load_on_rank_zero
from lightning_rl_engines.strategies.loss_scale import LossScale
from lightning_rl_engines.strategies.offload import Offloader
from lightning_rl_engines.strategies.precision import EnginePrecision
from lightning_rl_engines.strategies.ranks import MeshRanks
from lightning_rl_engines.strategies.sharding import FSDPLayout, fsdp_layout, shard
from lightning_rl_engines.strategies.validation import require_divisor, require_engine_models, require_size


class FSDPUlyssesStrategy(MeshRanks, ShardedCheckpoints, FSDPStrategy):
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
        self.offload_param = offload_param
        self.offload_optimizer = offload_optimizer
        self.defer_gradient_sync = defer_gradient_sync
        self.async_checkpoint = async_checkpoint
        self.checkpoint_timeout = timedelta(seconds=timeout_seconds)
        self._offloader = Offloader()
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

    @property
    @override
    def precision_plugin(self) -> EnginePrecision:
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, EnginePrecision) else self._engine_precision("32-true")

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None and not isinstance(precision_plugin, EnginePrecision):
            if type(precision_plugin) not in (FSDPPrecision, Precision):
                raise TypeError(
                    f"precision_plugin={precision_plugin!r} does not fit this strategy; set Trainer(precision=...)."
                )
            precision_plugin = self._engine_precision(str(precision_plugin.precision))
        self._precision_plugin = precision_plugin

    def _engine_precision(self, precision: str) -> EnginePrecision:
        return EnginePrecision(precision, self._reduce_dtype, self._clip_parameters)

    @override
    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        follow_launcher()
        # With one process there is nothing to start, so a notebook can use the strategy as it is.
        if environment.creates_processes_externally or self.num_processes * self.num_nodes == 1:
            self._launcher = HereLauncher()
        elif IS_INTERACTIVE:
            self._launcher = ForkLauncher(self)
        else:
            self._launcher = ScriptLauncher(environment, self.num_processes, self.num_nodes)

    @override
    def _get_process_group_backend(self) -> str:
        # Host objects and host tensors travel without a detour over the device.
        if self.root_device.type == "cuda":
            chosen = self._process_group_backend or "cpu:gloo,cuda:nccl"
            if "gloo" not in chosen:
                raise ValueError(
                    f"process_group_backend={chosen!r} cannot send host tensors; use 'cpu:gloo,cuda:nccl', the default."
                )
            return chosen
        return super()._get_process_group_backend()

    @override
    def setup_environment(self) -> None:
        self._check_layout()
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
        for mesh in (self._mesh, self._layout.mesh):
            for group in mesh.get_all_groups() if mesh is not None else ():
                set_timeout(cast(timedelta, self._timeout), group)  # meshes make their groups with torch's default

    def _check_layout(self) -> None:
        world = self.num_processes * self.num_nodes
        require_divisor("ulysses_sp_size", self.ulysses_sp_size, world)
        require_divisor("fsdp_size", self.fsdp_size or world, world)
        if self.defer_gradient_sync and self.precision_plugin.precision != "32-true":
            raise ValueError(
                f"defer_gradient_sync=True under precision={self.precision_plugin.precision!r} would accumulate "
                "gradients in half precision; use precision='32-true' or defer_gradient_sync=False."
            )
        if self._reduce_dtype != torch.float32 and self.precision_plugin.precision == "32-true":
            name = str(self._reduce_dtype).removeprefix("torch.")
            raise ValueError(
                f"reduce_dtype={name!r} has no effect under precision='32-true'; leave it out, or use 'bf16-mixed'."
            )

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        self._restore_random_state()
        # Rows are cut on the host, and each goes to the device on its own.
        return batch if isinstance(batch, Experience) else super().batch_to_device(batch, device, dataloader_idx)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        # The token models inside the LightningModule are FSDP roots; the module itself is not wrapped, so that
        # backward passes inside training_step and several models in one module work.
        require_engine_models(model)
        return model.to(self.root_device) if self.root_device.type != "cpu" else model

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        if reduce_op == "sum" and group is None:  # from self.log; Lightning's votes pass ReduceOp.SUM
            # Sequence peers log the same value, which counts once.
            return tensor if self.data_parallel_size == 1 else super().reduce(tensor, self.data_parallel_group, "sum")
        return super().reduce(tensor, group, reduce_op)

    @override
    def model_sharded_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()

    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()

    @property
    @override
    def compute_device(self) -> torch.device:
        return self.root_device

    # ---- engine: models ----

    @override
    def build_model(self, config: ModelConfig, *, trainable: bool = True) -> TokenModel:
        """Build a Hugging Face model, read by rank 0 and sharded unit by unit; collective over the world.

        Raises:
            ValueError: On all ranks: weights that do not fit, head counts that ``ulysses_sp_size`` cannot split, a
                storage type that contradicts the Trainer's precision.
        """
        storage = self.precision_plugin.storage_dtype
        dtype = storage if config.dtype is None else torch_dtype(config.dtype)
        if trainable and dtype != storage and not config.has_adapter:
            raise ValueError(
                f"ModelConfig(dtype={config.dtype!r}) contradicts precision={self.precision_plugin.precision!r}, which "
                f"trains {str(storage).removeprefix('torch.')} weights; leave dtype=None, or train an adapter (lora)."
            )
        plugin = self.precision_plugin
        requested = "auto" if config.attn_implementation == "auto" else f"packed_{config.attn_implementation}"
        hf, adapter = load_on_rank_zero(
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
        if self.offload_param:
            self._offloader.offload(model=root)
        return cast(TokenModel, root.train(trainable))

    @override
    def get_per_tensor_param(
        self, model: nn.Module, *, mode: WeightsMode = "full", dtype: DTypeName | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        target = None if dtype is None else torch_dtype(dtype)
        return self._offloader.while_loaded(model, stream_weights(model, cast(TokenModel, model), mode, target))

    @override
    def get_per_tensor_grad(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        token_model = cast(TokenModel, model)
        plan = token_model.export_plan if token_model.adapter is None else token_model.adapter.plan
        return stream_full_gradients(model, plan, prefix="hf.")

    # ---- engine: memory ----

    @override
    def to(
        self,
        device: torch.device | str,
        *,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        grad: nn.Module | None = None,
    ) -> None:
        kind = str(device).partition(":")[0]
        if kind == "cpu":
            self._offloader.offload(model=model, optimizer=optimizer, grad=grad)
        elif kind in ("device", self.root_device.type):
            self._offloader.load(model=model, optimizer=optimizer, grad=grad)
        else:
            raise ValueError(f"device={str(device)!r} is unknown here; use 'cpu' or 'device'.")

    @contextmanager
    def _on_device(self, model: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
        self._offloader.load(model=model, optimizer=optimizer)
        try:
            yield
        finally:
            self._offloader.offload(
                model=model if self.offload_param else None, optimizer=optimizer if self.offload_optimizer else None
            )

    # ---- engine: gradients ----

    @property
    @override
    def loss_scale(self) -> LossScale | None:
        return self.precision_plugin.loss_scale

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
    def clip_grad_norm(self, model: nn.Module, max_norm: float | None) -> Tensor:
        return self._clip_parameters(model.parameters(), math.inf if max_norm is None else max_norm)

    def _clip_parameters(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scale gradients of parameters of our models to a global 2-norm of at most ``max_norm``; return the norm.

        The squares are summed over the world and divided by the number of replicas, so that every rank holds the same
        number to the last bit.
        """
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
