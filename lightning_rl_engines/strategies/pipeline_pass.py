"""One pass of the rows of a global batch through a pipeline of stages, as one rank sees it.

torch's own schedules are not used: they take rows of one length and at least as many rows as stages, hold a buffer for
every row and direction, keep all outputs of a pass without gradients, and clear gradients of earlier passes.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from lightning_rl_engines.algorithms.outputs import TokenOutputs
from lightning_rl_engines.sequence import MicroBatch
from lightning_rl_engines.strategies.pipeline_order import Action, Kind

if TYPE_CHECKING:
    from lightning_rl_engines.models.titan.build import TitanOptions
    from lightning_rl_engines.models.titan.token_model import TitanTokenModel

Finish = Callable[[TokenOutputs, MicroBatch], Tensor | None]
"""What the last stage does with the results of a row; returns what the backward pass starts from, if there is one."""


class _InFlight(NamedTuple):
    """A row between its forward and its backward pass through a stage."""

    entered: Tensor
    left: Tensor


class PipelinePass:
    """Runs rows through the stages of a model that this rank holds, once.

    Between stages, hidden states and their gradients travel as plain tensors: with tensor parallelism, this rank's part
    of the tokens. A row is held from its forward to its backward pass through a stage, and its results by nobody.

    Args:
        model: The model.
        options: How it is sharded.
        group: The ranks of the pipeline.
        pack: Makes the micro-batch of a row.
        sync: Context of a stage's backward pass: ``sync(stage's module, last=...)``.
        settings: Keyword arguments of the head.
        finish: Called on the last stage with the results of each row; they are dropped afterwards.
    """

    def __init__(
        self,
        model: "TitanTokenModel",
        options: "TitanOptions",
        *,
        group: ProcessGroup,
        pack: Callable[[int], MicroBatch],
        sync: Callable[..., AbstractContextManager[Any]],
        settings: Mapping[str, Any],
        finish: Finish,
    ) -> None:
        self._model = model
        self._options = options
        self._group = group
        self._pack = pack
        self._sync = sync
        self._settings = settings
        self._finish = finish
        self._parts = dict(zip(model.stages, model.parts, strict=True))
        self._tensor_mesh = options.dims.get_mesh("tp") if options.dims.tp_enabled else None
        self._arriving: dict[Action, tuple[Tensor, Work]] = {}
        self._leaving: dict[Action, Tensor] = {}
        self._sent: dict[tuple[int, bool], tuple[Tensor, Work]] = {}
        self._rows: dict[tuple[int, int], MicroBatch] = {}
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._to_come: Counter[int] = Counter()
        self._ran: set[int] = set()

    def run(self, program: Sequence[Action]) -> None:
        """Do this rank's part; collective over the pipeline and over the ranks that share its stages.

        Args:
            program: Of ``pipeline_order``.
        """
        steps = {Kind.RECEIVE: self._receive, Kind.SEND: self._send, Kind.COMPUTE: self._compute}
        self._to_come = Counter(item.stage for item in program if item.kind is Kind.COMPUTE and item.backward)
        try:
            for action in program:
                steps[action.kind](action)
            for _, work in self._sent.values():
                work.wait()
        finally:
            for stage in self._ran:
                for unit in _units(self._parts[stage]):
                    unit.set_reshard_after_backward(True, recurse=False)

    def _compute(self, action: Action) -> None:
        if action.backward:
            self._backward(action)
        else:
            self._forward(action)

    # ---- passes ----

    def _forward(self, action: Action) -> None:
        _, stage, row, _ = action
        micro_batch = self._rows.pop((stage, row), None) or self._pack(row)
        entered = micro_batch.input_ids[None] if stage == 0 else self._arrived(action)
        training = self._to_come[stage] > 0
        if training and stage > 0:
            entered.requires_grad_()
        self._ran.add(stage)
        made = self._model.run_stage(stage, self._enter(entered, stage), micro_batch, **self._settings)
        left: Tensor | None
        if isinstance(made, Tensor):
            left = self._leave(made)
            self._leaving[action._replace(kind=Kind.SEND)] = left.detach()
        else:
            left = self._finish(made, micro_batch)
        if training:
            assert left is not None
            self._in_flight[stage, row] = _InFlight(entered, left)

    def _backward(self, action: Action) -> None:
        _, stage, row, _ = action
        part = self._parts[stage]
        entered, left = self._in_flight.pop((stage, row))
        gradient = None if left.ndim == 0 else self._arrived(action)
        self._to_come[stage] -= 1
        last = self._to_come[stage] == 0
        for unit in _units(part):
            # The stage's parameters stay whole between its passes, unless they are freed after each forward pass too.
            unit.set_reshard_after_backward(last or self._frees_parameters, recurse=False)
        head = cast(Any, part).lm_head
        if isinstance(head, FSDPModule):
            # FSDP2 does so by itself only for units that ran as a whole, and this one holds the norm before the head.
            head.unshard()
        with self._sync(part, last=last):
            if left.requires_grad:  # not where everything up to here is frozen
                left.backward(gradient)
        if stage > 0:
            assert entered.grad is not None
            self._leaving[action._replace(kind=Kind.SEND)] = entered.grad

    @property
    def _frees_parameters(self) -> bool:
        return self._options.parallelism.fsdp_reshard_after_forward == "always"

    def _enter(self, hidden: Tensor, stage: int) -> Tensor:
        if stage == 0 or self._tensor_mesh is None:
            return hidden
        return DTensor.from_local(hidden, self._tensor_mesh, [Shard(1)], run_check=False)

    def _leave(self, hidden: Tensor) -> Tensor:
        if isinstance(hidden, DTensor):
            if hidden.placements != (Shard(1),):
                raise RuntimeError(f"hidden states leave a stage as {hidden.placements}, and not split by tokens")
            hidden = hidden.to_local()
        return hidden.contiguous()

    # ---- messages ----

    def _receive(self, action: Action) -> None:
        _, stage, row, _ = action
        if action.backward:
            buffer = torch.empty_like(self._in_flight[stage, row].left)
        else:
            micro_batch = self._rows[stage, row] = self._pack(row)
            tokens = len(micro_batch.input_ids) // self._options.dims.tp
            width = self._model.config.get_text_config().hidden_size
            buffer = torch.empty(1, tokens, width, dtype=self._options.compute_dtype, device=micro_batch.device)
        source = action.stage + 1 if action.backward else action.stage - 1
        work = dist.irecv(buffer, group=self._group, group_src=source % self._group.size())
        self._arriving[action] = buffer, cast(Work, work)

    def _arrived(self, action: Action) -> Tensor:
        buffer, work = self._arriving.pop(action._replace(kind=Kind.RECEIVE))
        work.wait()
        return buffer

    def _send(self, action: Action) -> None:
        tensor = self._leaving.pop(action)
        channel = action.stage, action.backward
        if channel in self._sent:
            self._sent.pop(channel)[1].wait()
        target = action.stage - 1 if action.backward else action.stage + 1
        work = dist.isend(tensor, group=self._group, group_dst=target % self._group.size())
        self._sent[channel] = tensor, cast(Work, work)


def _units(part: nn.Module) -> list[FSDPModule]:
    return [module for module in part.modules() if isinstance(module, FSDPModule)]
