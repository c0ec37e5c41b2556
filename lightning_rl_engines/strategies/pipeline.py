"""The passes of an engine over the rows of a global batch where the model is a pipeline of stages."""

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from typing_extensions import override

from lightning_rl_engines.algorithms.outputs import TokenOutputs
from lightning_rl_engines.sequence import MicroBatch
from lightning_rl_engines.strategies.accumulator import MetricAccumulator
from lightning_rl_engines.strategies.degrees import ParallelDegrees, Schedule
from lightning_rl_engines.strategies.global_batch import GlobalBatch
from lightning_rl_engines.strategies.passes import Forward, LossFunction, collect, connected
from lightning_rl_engines.strategies.pipeline_order import pipeline_order, rows_multiple_of
from lightning_rl_engines.strategies.pipeline_pass import Finish, PipelinePass
from lightning_rl_engines.strategies.ranks import MeshRanks

if TYPE_CHECKING:
    from lightning_rl_engines.models.titan.build import TitanOptions
    from lightning_rl_engines.models.titan.token_model import TitanTokenModel


class PipelinePasses(MeshRanks):
    """The part of an engine that runs rows through a pipeline, where the mesh has an axis ``pp`` of several ranks."""

    degrees: ParallelDegrees
    pipeline_parallel_schedule: Schedule
    _titan_options: "TitanOptions | None"

    @property
    def _pipeline_group(self) -> ProcessGroup | None:
        return self.mesh.get_group("pp") if self.degrees.pipeline > 1 else None

    @property
    @override
    def _rows_multiple_of(self) -> int:
        return rows_multiple_of(self.pipeline_parallel_schedule, self.degrees.pipeline)

    @property
    @override
    def _counts_results(self) -> bool:
        # Tensor-parallel peers find the same losses; only the last stage of a pipeline finds any.
        last_stage = self.mesh.get_local_rank("pp") == self.degrees.pipeline - 1
        return last_stage and self.mesh.get_local_rank("tp") == 0

    @property
    @override
    def _loss_place(self) -> str:
        return ", the last stage of a pipeline" if self.degrees.pipeline > 1 else ""

    @override
    def _train_rows(
        self, model: nn.Module, forward: Forward, batch: GlobalBatch, loss_fn: LossFunction, metrics: MetricAccumulator
    ) -> None:
        if self.degrees.pipeline == 1:
            super()._train_rows(model, forward, batch, loss_fn, metrics)
            return

        def loss(outputs: TokenOutputs, micro_batch: MicroBatch) -> Tensor:
            result = metrics.evaluate(loss_fn, outputs, micro_batch)
            scale = self._loss_factor(model) / batch.denominators[result.denominator]
            return connected(result.total, outputs) * scale

        with self._loss_scaled(model):
            self._run_pipeline(model, forward, batch, loss, forward_only=False)

    @override
    def _infer_rows(
        self,
        model: nn.Module,
        forward: Forward,
        batch: GlobalBatch,
        loss_fn: LossFunction | None,
        metrics: MetricAccumulator,
    ) -> dict[str, Tensor]:
        if self.degrees.pipeline == 1:
            return super()._infer_rows(model, forward, batch, loss_fn, metrics)
        columns: dict[str, Tensor] = {}

        def keep(outputs: TokenOutputs, micro_batch: MicroBatch) -> None:
            if loss_fn is not None:
                metrics.evaluate(loss_fn, outputs, micro_batch)
            collect(columns, outputs, micro_batch, batch.experience.num_tokens)

        with torch.no_grad():
            self._run_pipeline(model, forward, batch, keep, forward_only=True)
        return self._bring_home(self._from_last_stage(columns), batch)

    def _from_last_stage(self, item: Any) -> Any:
        items = [item]
        dist.broadcast_object_list(items, group=self._pipeline_group, group_src=self.degrees.pipeline - 1)
        return items[0]

    def _run_pipeline(
        self, model: nn.Module, forward: Forward, batch: GlobalBatch, finish: Finish, *, forward_only: bool
    ) -> None:
        assert self._titan_options is not None
        rows = PipelinePass(
            cast("TitanTokenModel", model),
            self._titan_options,
            group=self.mesh.get_group("pp"),
            pack=lambda row: self._pack(model, batch, batch.rows[row]),
            sync=self._gradient_sync,
            settings=forward.keywords,
            finish=finish,
        )
        order = pipeline_order(
            self.pipeline_parallel_schedule, self.degrees.pipeline, len(batch.rows), forward_only=forward_only
        )
        rows.run(order[self.mesh.get_local_rank("pp")])
