"""What both strategies do with Lightning: processes, precision, data, off-load."""

import atexit
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import set_timeout
from torch.optim import Optimizer
from typing_extensions import override

from lightning_rl_engines._compat import IS_INTERACTIVE, destroy_group_at_exit
from lightning_rl_engines.models.config import ModelConfig, torch_dtype
from lightning_rl_engines.sequence import Experience
from lightning_rl_engines.strategies.checkpoints import ShardedCheckpoints
from lightning_rl_engines.strategies.launcher import ForkLauncher, HereLauncher, ScriptLauncher, follow_launcher
from lightning_rl_engines.strategies.loss_scale import LossScale
from lightning_rl_engines.strategies.offload import Offloader
from lightning_rl_engines.strategies.optimizer_check import require_exact_optimizer
from lightning_rl_engines.strategies.precision import EnginePrecision
from lightning_rl_engines.strategies.ranks import MeshRanks

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# What Lightning itself makes of Trainer(precision=...) for its own strategies.
_FROM_TRAINER = (Precision, FSDPPrecision, HalfPrecision, MixedPrecision)


class EngineStrategy(MeshRanks, ShardedCheckpoints, ParallelStrategy):
    """The part of a strategy that does not depend on how models are sharded; comes before Lightning's in the bases.

    Call :meth:`_set_options` at construction.
    """

    offload_param: bool
    offload_optimizer: bool
    _reduce_dtype: torch.dtype
    _process_group_backend: str | None
    _timeout: timedelta | None

    def _set_options(
        self,
        *,
        offload_param: bool,
        offload_optimizer: bool,
        async_checkpoint: bool,
        timeout: timedelta,
    ) -> None:
        self.offload_param = offload_param
        self.offload_optimizer = offload_optimizer
        self.async_checkpoint = async_checkpoint
        self.checkpoint_timeout = timeout
        self._offloader = Offloader()

    # ---- precision ----

    @property
    @override
    def precision_plugin(self) -> EnginePrecision:
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, EnginePrecision) else self._attached(EnginePrecision("32-true"))

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None and not isinstance(precision_plugin, EnginePrecision):
            if type(precision_plugin) not in _FROM_TRAINER:
                raise TypeError(
                    f"precision_plugin={precision_plugin!r} does not fit this strategy; set Trainer(precision=...)."
                )
            precision_plugin = EnginePrecision(cast(Any, precision_plugin.precision))
        self._precision_plugin = precision_plugin if precision_plugin is None else self._attached(precision_plugin)

    def _attached(self, plugin: EnginePrecision) -> EnginePrecision:
        plugin.attach(reduce_dtype=self._reduce_dtype, clip=self._clip_parameters)
        return plugin

    @property
    @override
    def loss_scale(self) -> LossScale | None:
        return self.precision_plugin.loss_scale

    def _check_reduce_dtype(self) -> None:
        if self._reduce_dtype != torch.float32 and self.precision_plugin.precision == "32-true":
            name = str(self._reduce_dtype).removeprefix("torch.")
            raise ValueError(
                f"reduce_dtype={name!r} has no effect under precision='32-true'; leave it out, or use 'bf16-mixed'."
            )

    def _storage_dtype(self, config: ModelConfig, *, trainable: bool) -> torch.dtype:
        """Type that a model's weights are stored in.

        Raises:
            ValueError: The configuration contradicts the Trainer's precision.
        """
        storage = self.precision_plugin.storage_dtype
        dtype = storage if config.dtype is None else torch_dtype(config.dtype)
        if trainable and dtype != storage and not config.has_adapter:
            raise ValueError(
                f"ModelConfig(dtype={config.dtype!r}) contradicts precision={self.precision_plugin.precision!r}, which "
                f"trains {str(storage).removeprefix('torch.')} weights; leave dtype=None, or train an adapter (lora)."
            )
        return dtype

    # ---- processes ----

    @override
    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        follow_launcher()
        # With one process there is nothing to start, so a notebook can use the strategy as it is.
        own = cast(Any, self)  # Lightning's own strategies know the numbers of processes and nodes
        if environment.creates_processes_externally or own.num_processes * own.num_nodes == 1:
            self._launcher = HereLauncher()
        elif IS_INTERACTIVE:
            self._launcher = ForkLauncher(own)
        else:
            self._launcher = ScriptLauncher(environment, own.num_processes, own.num_nodes)

    def _get_process_group_backend(self) -> str:
        # Host objects and host tensors travel without a detour over the device.
        if self.root_device.type == "cuda":
            chosen = self._process_group_backend or "cpu:gloo,cuda:nccl"
            if "gloo" not in chosen:
                raise ValueError(
                    f"process_group_backend={chosen!r} cannot send host tensors; use 'cpu:gloo,cuda:nccl', the default."
                )
            return chosen
        return cast(str, cast(Any, super())._get_process_group_backend())

    def _join_alone(self) -> None:
        """Start the process group of a run of one process; does nothing for others, or where there is a group.

        It needs no port, which another program could have taken, and which Lightning would keep for the next run.
        """
        own = cast(Any, self)
        if own.num_processes * own.num_nodes != 1 or dist.is_initialized():
            return
        device = None if self.root_device.type == "cpu" else self.root_device
        dist.init_process_group(
            self._get_process_group_backend(),
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            timeout=self._timeout,
            device_id=device,
        )
        if device is not None:
            atexit.register(destroy_group_at_exit)  # NCCL warns about groups that outlive the program

    def _set_timeouts(self, meshes: Sequence[DeviceMesh | None]) -> None:
        # Meshes make their groups with torch's default.
        for mesh in meshes:
            for group in mesh.get_all_groups() if mesh is not None else ():
                set_timeout(cast(timedelta, self._timeout), group)

    # ---- data and logging ----

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
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        parent = cast(Any, super())
        if reduce_op == "sum" and group is None:  # from self.log; Lightning's votes pass ReduceOp.SUM
            # Ranks that share a data rank log the same value, which counts once.
            return tensor if self.data_parallel_size == 1 else parent.reduce(tensor, self.data_parallel_group, "sum")
        return parent.reduce(tensor, group, reduce_op)

    # Models are built by build_model, on the device and in their types; Lightning's contexts would change both.

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

    # ---- memory ----

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

    @override
    @contextmanager
    def _on_device(self, model: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
        self._offloader.load(model=model, optimizer=optimizer)
        try:
            yield
        finally:
            self._offloader.offload(
                model=model if self.offload_param else None, optimizer=optimizer if self.offload_optimizer else None
            )

    @override
    def _loaded(
        self, model: nn.Module, *, optimizer: Optimizer | None = None, grad: bool = False
    ) -> AbstractContextManager[None]:
        return self._offloader.loaded(model=model, optimizer=optimizer, grad=model if grad else None)

    def _while_loaded(
        self, model: nn.Module, stream: Iterator[tuple[str, Tensor]], *, grad: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate over what needs the parameters on the device."""
        with self._offloader.loaded(model=model, grad=model if grad else None):
            yield from stream

    # ---- optimizers and gradients ----

    @override
    def setup_optimizers(self, trainer: "Trainer") -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            require_exact_optimizer(optimizer, self._cut_like_parameters, self.root_device)

    @abstractmethod
    def _cut_like_parameters(self, matrix: Tensor) -> Sequence[Tensor]:
        """Cut a matrix, the same on all ranks, as the parameters of models are; without communication."""

    @override
    def clip_grad_norm(self, model: nn.Module, max_norm: float | None) -> Tensor:
        with self._loaded(model, grad=True):
            return self._clip_parameters(model.parameters(), math.inf if max_norm is None else max_norm)

    @abstractmethod
    def _clip_parameters(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scale gradients of parameters of our models to a global 2-norm of at most ``max_norm``; return the norm.

        Collective over the world; every rank receives the same number to the last bit.
        """
