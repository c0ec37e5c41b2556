"""The contract that both engines implement, and the part of it that they share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_rl_engines.models.config import DTypeName, ModelConfig
from lightning_rl_engines.models.token_model import TokenModel
from lightning_rl_engines.sequence import Experience
from lightning_rl_engines.strategies.accumulator import MetricAccumulator
from lightning_rl_engines.strategies.global_batch import GlobalBatch
from lightning_rl_engines.strategies.loss_scale import LossScale
from lightning_rl_engines.strategies.passes import BatchOutput, Forward, LossFunction, module_mode

GroupName: TypeAlias = Literal["data", "sequence", "peers", "world"]
"""Ranks with other documents, ranks that share a row, ranks that share a data rank in any way, and all ranks."""

WeightsMode: TypeAlias = Literal["full", "merged", "adapter"]
"""Which weights are streamed: those of the model, base plus adapter, or the adapter alone."""


class Engine(ABC):
    """What a LightningModule may ask of a training engine.

    An ``Experience`` that is passed holds this data rank's documents; ranks may hold different numbers of them, also
    none, and ranks that share a data rank pass the same ones. Every method is collective over the world.
    """

    # ---- what an engine provides ----

    @property
    @abstractmethod
    def data_parallel_size(self) -> int:
        """Number of ranks that hold different documents."""

    @property
    @abstractmethod
    def data_parallel_rank(self) -> int:
        """This rank's place among them."""

    @property
    @abstractmethod
    def data_parallel_group(self) -> ProcessGroup | None:
        """Ranks that hold different documents and share the place within their row; ``None`` for one."""

    @property
    @abstractmethod
    def sequence_parallel_size(self) -> int:
        """Number of ranks that a row is split over."""

    @property
    @abstractmethod
    def sequence_parallel_rank(self) -> int:
        """This rank's place within its row."""

    @property
    @abstractmethod
    def sequence_parallel_group(self) -> ProcessGroup | None:
        """Ranks that share a row; ``None`` for one."""

    @property
    def peer_size(self) -> int:
        """Number of ranks that share this data rank: sequence, context, tensor and pipeline peers."""
        return self.sequence_parallel_size

    @property
    def peer_rank(self) -> int:
        """This rank's place among them."""
        return self.sequence_parallel_rank

    @property
    def layout(self) -> str:
        """What the ranks are to each other, in words, such as ``"2 data x 2 sequence ranks"``."""
        return f"{self.data_parallel_size} data x {self.sequence_parallel_size} sequence ranks"

    @property
    @abstractmethod
    def compute_device(self) -> torch.device:
        """Device that rows are moved to."""

    @abstractmethod
    def row_capacity(self, budget: int | None) -> int | None:
        """Return the most tokens that documents of a row may have; ``None`` for no limit.

        Args:
            budget: ``max_tokens_per_micro_batch``.

        Raises:
            ValueError: The budget holds no row.
        """

    @abstractmethod
    def build_model(self, config: ModelConfig, *, trainable: bool = True) -> TokenModel:
        """Build and shard a model; call it in ``configure_model``.

        Args:
            config: What to build.
            trainable: ``False`` for a frozen reference.
        """

    @abstractmethod
    def clip_grad_norm(self, model: nn.Module, max_norm: float | None) -> Tensor:
        """Return the global 2-norm of the gradients, the same on every rank, and scale them down to ``max_norm``.

        Nothing is scaled when ``max_norm`` is ``None`` or the norm is not finite.
        """

    @abstractmethod
    def get_per_tensor_param(
        self, model: nn.Module, *, mode: WeightsMode = "full", dtype: DTypeName | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield full weights under their Hugging Face names, one at a time, as copies; every rank walks to the end.

        Live weights are never changed, also when the iterator is left half-way.

        Args:
            model: A model that :meth:`build_model` returned.
            mode: ``"full"`` for a model without an adapter; with one, its base, and only inside
                :meth:`disable_adapter`. ``"merged"`` adds the adapter to the base in fp32, and rounds each sum once;
                ``"adapter"`` is the adapter under the names of a PEFT folder.
            dtype: Type of floating-point tensors; ``None`` keeps the stored one, and fp32 for ``"merged"``.

        Raises:
            ValueError: The model has no such weights.
        """

    @abstractmethod
    def get_per_tensor_grad(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield full gradients as :meth:`get_per_tensor_param` does weights; of an adapter where there is one."""

    @abstractmethod
    def all_gather_objects(self, item: Any, group: GroupName = "world") -> list[Any]:
        """Return the host objects of all ranks of a group, in rank order."""

    @abstractmethod
    def to(
        self,
        device: torch.device | str,
        *,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        grad: nn.Module | None = None,
    ) -> None:
        """Move parameters, optimizer state and gradients by hand; idempotent.

        Args:
            device: ``"cpu"`` puts them into host buffers, also where the device is the CPU itself; ``"device"``, or
                the accelerator's type, brings them back.
            model: Model whose parameters move.
            optimizer: Optimizer whose state moves; scalars stay.
            grad: Model whose gradients move.
        """

    @abstractmethod
    def _on_device(self, model: nn.Module, optimizer: Optimizer | None) -> AbstractContextManager[None]:
        """Context in which model and optimizer are on the device; at exit what is off-loaded by option leaves it."""

    @abstractmethod
    def _loaded(
        self, model: nn.Module, *, optimizer: Optimizer | None = None, grad: bool = False
    ) -> AbstractContextManager[None]:
        """Context in which a model's parameters are on the device; what was off-loaded before goes back at exit.

        Args:
            model: The model.
            optimizer: Its state, too.
            grad: The model's gradients, too.
        """

    @abstractmethod
    def _plan(
        self,
        model: nn.Module,
        experience: Experience,
        loss_fn: LossFunction | None,
        *,
        temperature: float | str,
        budget: int | None,
        balance: bool,
        call: str,
    ) -> GlobalBatch:
        """Agree with all ranks on the rows of a global batch."""

    @abstractmethod
    def _train_rows(
        self, model: nn.Module, forward: Forward, batch: GlobalBatch, loss_fn: LossFunction, metrics: MetricAccumulator
    ) -> None:
        """Forward and backward pass of each row."""

    @abstractmethod
    def _infer_rows(
        self,
        model: nn.Module,
        forward: Forward,
        batch: GlobalBatch,
        loss_fn: LossFunction | None,
        metrics: MetricAccumulator,
    ) -> dict[str, Tensor]:
        """Forward pass of each row; per-token results in the order of the experience that was passed."""

    @abstractmethod
    def _gather_results(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        """All-gather what each rank found over the world, from each part of the batch once."""

    @property
    def _loss_place(self) -> str:
        """What a message adds to the rank on which a loss failed."""
        return ""

    @property
    def loss_scale(self) -> LossScale | None:
        """Scale of the loss in fp16; ``None`` where gradients need none."""
        return None

    # ---- what engines share ----

    @contextmanager
    def disable_adapter(self, model: nn.Module) -> Iterator[None]:
        """Run the base model without its adapter, on all ranks together; at exit, however it is left, all is as before.

        Raises:
            ValueError: The model has no adapter.
        """
        with cast(TokenModel, model).disable_adapter():
            yield

    def forward_backward_batch(
        self,
        model: nn.Module,
        experience: Experience,
        loss_fn: LossFunction | None,
        *,
        forward_only: bool = False,
        calculate_entropy: bool = False,
        temperature: float | str = 1.0,
        max_tokens_per_micro_batch: int | None = None,
        balance: bool = False,
    ) -> BatchOutput:
        """Run a global batch as micro-batches, and add its gradients to those of the parameters.

        Loss, metrics and gradients are those of the whole global batch, whatever layout, packing and micro-batching.

        Args:
            model: A model that :meth:`build_model` returned.
            experience: This data rank's documents.
            loss_fn: Local sums of a micro-batch; ``None`` only with ``forward_only``.
            forward_only: No gradients; per-token results come back as columns.
            calculate_entropy: Compute entropies.
            temperature: What logits are divided by: a number, or the name of a column.
            max_tokens_per_micro_batch: The most tokens in a row, counted over all ranks that share it; ``None`` packs
                everything a rank has into one row.
            balance: Let documents change their data rank for the pass where that balances the load.

        Raises:
            ValueError: On all ranks together: unusable documents or arguments, a document over the budget.
        """
        if loss_fn is None and not forward_only:
            raise ValueError("loss_fn=None needs forward_only=True; pass a loss, such as PolicyLoss().")
        experience = experience.to("cpu")  # rows are cut on the host; Lightning may have moved the batch
        call = f"forward_only={forward_only}, calculate_entropy={calculate_entropy}"
        batch = self._plan(
            model,
            experience,
            loss_fn,
            temperature=temperature,
            budget=max_tokens_per_micro_batch,
            balance=balance,
            call=call,
        )
        metrics = MetricAccumulator(batch.denominators, place=self._loss_place)
        columns: dict[str, Tensor] = {}
        forward = partial(model, calculate_entropy=calculate_entropy, temperature=temperature)
        with self._loaded(model, grad=not forward_only), batch.explaining_memory():
            if forward_only:
                columns = self._infer_rows(model, forward, batch, loss_fn, metrics)
            else:
                self._train_rows(model, forward, batch, cast(LossFunction, loss_fn), metrics)
        found = metrics.finish(self._gather_results, trained=not forward_only)
        return BatchOutput(found.get("loss"), found, columns, batch.denominators.tokens)

    def train_batch(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        experience: Experience,
        loss_fn: LossFunction,
        *,
        max_grad_norm: float | None = None,
        calculate_entropy: bool = False,
        temperature: float | str = 1.0,
        max_tokens_per_micro_batch: int | None = None,
        balance: bool = False,
    ) -> BatchOutput:
        """Run :meth:`forward_backward_batch`, clip, and step the optimizer.

        A gradient norm that is not finite skips the step on all ranks, and a global batch without any response token
        takes none. Gradients are cleared in any case.

        Args:
            model: The model that is trained.
            optimizer: Lightning's optimizer (``self.optimizers()``), so that ``global_step`` counts the step.
            experience: This data rank's documents.
            loss_fn: Local sums of a micro-batch.
            max_grad_norm: Largest global gradient norm; ``None`` does not clip.
            calculate_entropy: Compute entropies, with gradients.
            temperature: What logits are divided by: a number, or the name of a column.
            max_tokens_per_micro_batch: The most tokens in a row.
            balance: Let documents change their data rank for the pass.

        Returns:
            The batch's loss and metrics, with ``grad_norm`` before clipping, ``skipped_step`` (0 or 1) and, in fp16,
            ``loss_scale``.
        """
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={max_grad_norm} must be positive, such as 1.0, or None for no clipping.")
        optimizer.zero_grad()
        try:
            with self._loaded(model, optimizer=optimizer):  # the step needs all of them
                output = self.forward_backward_batch(
                    model,
                    experience,
                    loss_fn,
                    calculate_entropy=calculate_entropy,
                    temperature=temperature,
                    max_tokens_per_micro_batch=max_tokens_per_micro_batch,
                    balance=balance,
                )
                norm = float(self.clip_grad_norm(model, max_grad_norm))
                finite = math.isfinite(norm)  # one all-reduced number: every rank takes the same branch
                # Momentum and weight decay alone, without a response token, are no training.
                if finite and output.num_tokens:
                    optimizer.step()
        finally:
            optimizer.zero_grad()
        metrics = {**output.metrics, "grad_norm": norm, "skipped_step": float(not finite)}
        if self.loss_scale is not None:
            metrics["loss_scale"] = self.loss_scale.value
            self.loss_scale.update(finite)
        return BatchOutput(output.loss, metrics, num_tokens=output.num_tokens)

    def infer_batch(
        self,
        model: nn.Module,
        experience: Experience,
        *,
        calculate_entropy: bool = False,
        temperature: float | str = 1.0,
        max_tokens_per_micro_batch: int | None = None,
        balance: bool = False,
    ) -> BatchOutput:
        """Compute per-token results without gradients; arguments are those of :meth:`forward_backward_batch`."""
        return self.forward_backward_batch(
            model,
            experience,
            None,
            forward_only=True,
            calculate_entropy=calculate_entropy,
            temperature=temperature,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            balance=balance,
        )

    @contextmanager
    def train_mode(self, model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[None]:
        """Put the model into training mode, on the device.

        At exit, also after an exception, gradients are cleared, the mode is restored, and what the strategy off-loads
        leaves the device.
        """
        with self._on_device(model, optimizer), module_mode(model, training=True):
            try:
                yield
            finally:
                (optimizer or model).zero_grad()
                cast(TokenModel, model).forget_graphs()

    @contextmanager
    def eval_mode(self, model: nn.Module) -> Iterator[None]:
        """Put the model into evaluation mode without gradients, on the device; undone at exit as in training mode."""
        with self._on_device(model, None), module_mode(model, training=False), torch.no_grad():
            yield
