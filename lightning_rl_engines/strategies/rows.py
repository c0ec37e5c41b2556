"""The passes over the rows of a global batch, one row at a time on every rank."""

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_rl_engines.models.token_model import TokenModel
from lightning_rl_engines.sequence import Experience, MicroBatch, pack_row, return_columns
from lightning_rl_engines.sequence.planner import row_capacity
from lightning_rl_engines.strategies.accumulator import ERROR, MetricAccumulator
from lightning_rl_engines.strategies.engine import Engine
from lightning_rl_engines.strategies.global_batch import GlobalBatch, describe, plan_batch
from lightning_rl_engines.strategies.passes import Forward, LossFunction, collect, connected


class RowPasses(Engine):
    """The part of an engine that runs rows; what differs between engines are a few numbers and contexts."""

    @abstractmethod
    def _gradient_scale(self, model: nn.Module) -> float:
        """Factor on the loss that turns the engine's reduction of gradients into a sum over ranks."""

    @abstractmethod
    def _gradient_sync(self, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Context of a micro-batch; gradients of all but the last one may stay local."""

    @abstractmethod
    def _sum_over_sequence(self, tensor: Tensor) -> None:
        """Sum a host tensor over the ranks of a row, in place."""

    @property
    def _row_multiple(self) -> int:
        """What the length of every row is a multiple of."""
        return self.sequence_parallel_size

    def _row_length(self, model: nn.Module, tokens: int, budget: int | None) -> int | None:
        """Length of a row with its padding, within the budget; ``None`` for the next multiple of ``_row_multiple``."""
        return None

    @override
    def row_capacity(self, budget: int | None) -> int | None:
        return row_capacity(budget, self._row_multiple)

    @property
    def _rows_multiple_of(self) -> int:
        """What the number of rows of a data rank is a multiple of."""
        return 1

    @property
    def _row_order(self) -> Callable[..., Tensor] | None:
        """How the tokens of a row are dealt out to the ranks that share it; ``None`` for equal slices of it."""
        return None

    @property
    def _counts_results(self) -> bool:
        """Whether losses and metrics of this rank count; ranks that only repeat those of another one do not."""
        return True

    @override
    def _gather_results(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        counts = self._counts_results
        return self.all_gather_objects({name: value for name, value in item.items() if counts or name == ERROR})

    @override
    def _train_rows(
        self, model: nn.Module, forward: Forward, batch: GlobalBatch, loss_fn: LossFunction, metrics: MetricAccumulator
    ) -> None:
        with self._loss_scaled(model):
            for index, row in enumerate(batch.rows):
                micro_batch = self._pack(model, batch, row)
                with self._gradient_sync(model, last=index == len(batch.rows) - 1):
                    outputs = forward(micro_batch)
                    result = metrics.evaluate(loss_fn, outputs, micro_batch)
                    scale = self._loss_factor(model) / batch.denominators[result.denominator]
                    (connected(result.total, outputs) * scale).backward()

    def _loss_scaled(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context of backward passes through a loss that is multiplied by :meth:`_loss_factor`."""
        return nullcontext() if self.loss_scale is None else self.loss_scale.applied(model.parameters())

    def _loss_factor(self, model: nn.Module) -> float:
        """Factor on the sums of a loss, besides its denominator."""
        return self._gradient_scale(model) * (1.0 if self.loss_scale is None else self.loss_scale.value)

    @override
    @torch.no_grad()
    def _infer_rows(
        self,
        model: nn.Module,
        forward: Forward,
        batch: GlobalBatch,
        loss_fn: LossFunction | None,
        metrics: MetricAccumulator,
    ) -> dict[str, Tensor]:
        columns: dict[str, Tensor] = {}
        for row in batch.rows:
            micro_batch = self._pack(model, batch, row)
            outputs = forward(micro_batch)
            if loss_fn is not None:
                metrics.evaluate(loss_fn, outputs, micro_batch)
            collect(columns, outputs, micro_batch, batch.experience.num_tokens)
        return self._bring_home(columns, batch)

    def _bring_home(self, columns: dict[str, Tensor], batch: GlobalBatch) -> dict[str, Tensor]:
        """Complete columns over the ranks of a row, and return them to the data rank that their documents are from."""
        for column in columns.values():
            self._sum_over_sequence(column)
        if batch.journey is None or not columns:
            return columns
        return return_columns(
            columns,
            origin=batch.journey.origin,
            received_lengths=batch.experience.lengths,
            destinations=batch.journey.destinations,
            lengths=batch.journey.lengths,
            group=self.data_parallel_group,
        )

    @override
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
        description = describe(
            experience,
            data_rank=self.data_parallel_rank,
            vocab_size=cast(TokenModel, model).config.get_text_config().vocab_size,
            temperature=temperature,
            required_columns=getattr(loss_fn, "required_columns", ()),
            settings=f"max_tokens_per_micro_batch={budget}, temperature={temperature!r}, balance={balance}, {call}",
            checked_columns=getattr(loss_fn, "checked_columns", ()),
            longest=cast(TokenModel, model).longest_document,
        )
        return plan_batch(
            experience,
            description,
            self.all_gather_objects,
            data_group=self.data_parallel_group,
            data_size=self.data_parallel_size,
            budget=budget,
            multiple_of=self._row_multiple,
            rows_multiple_of=self._rows_multiple_of,
            move=balance and self.data_parallel_size > 1,
            cost=cast(TokenModel, model).document_cost,
            groups_share_rows=getattr(loss_fn, "groups_share_rows", False),
            check=getattr(loss_fn, "check_documents", None),
        )

    def _pack(self, model: nn.Module, batch: GlobalBatch, row: tuple[int, ...]) -> MicroBatch:
        return pack_row(
            batch.experience,
            row,
            sequence_size=self.sequence_parallel_size,
            sequence_rank=self.sequence_parallel_rank,
            group=self.sequence_parallel_group,
            device=self.compute_device,
            pad_to=self._row_length(model, batch.row_tokens(row), batch.budget),
            multiple_of=self._row_multiple,
            order=self._row_order,
            longest_document=cast(TokenModel, model).longest_document,
        )
