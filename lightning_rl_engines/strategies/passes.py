"""Types and small steps of a pass over a batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from lightning_rl_engines._compat import free_cleared_gradients
from lightning_rl_engines.algorithms.outputs import LossOutput, TokenOutputs
from lightning_rl_engines.sequence import MicroBatch

LossFunction: TypeAlias = Callable[[TokenOutputs, MicroBatch], LossOutput]
"""Maps the outputs of a micro-batch to local sums.

It may carry ``required_columns``, names it reads; ``groups_share_rows``, true where it needs the documents of equal
``group_ids`` in one row; and ``check_documents``, a method that raises ``ValueError`` for a global batch that it cannot
use, with ``checked_columns``, the per-document columns that it wants to see: ``name -> list`` over all data ranks,
and always ``response_lengths``.
"""


Forward: TypeAlias = "partial[TokenOutputs]"
"""Runs a model on one row, ``forward(micro_batch)``, with the options of the call bound."""


@dataclass(frozen=True)
class BatchOutput:
    """Result of one pass over a batch.

    Attributes:
        loss: The global loss, the same number on every rank; ``None`` without a loss function.
        metrics: Global metrics by name, the same on every rank.
        columns: ``log_probs``, ``entropy`` and ``values`` where computed without gradients: fp32 host tensors of shape
            ``[tokens]``, in the order and alignment of the experience that was passed.
        num_tokens: Response tokens of the global batch.
    """

    loss: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)
    num_tokens: int = 0


def connected(total: Tensor, outputs: TokenOutputs) -> Tensor:
    """Tie a loss that reads no output to the graph: ranks must run the same collectives in backward."""
    if total.requires_grad:
        return total
    return total + sum(output.sum() for output in outputs if output is not None) * 0.0


def collect(columns: dict[str, Tensor], outputs: TokenOutputs, micro_batch: MicroBatch, num_tokens: int) -> None:
    """Write this rank's slots of a row into flat host columns; slots of other ranks stay 0."""
    indices = micro_batch.token_indices
    real = indices >= 0
    for name, values in zip(outputs._fields, outputs, strict=True):
        if values is not None:
            column = columns.setdefault(name, torch.zeros(num_tokens))
            column[indices[real]] = values.detach().float().cpu()[real]


@contextmanager
def module_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Training or evaluation mode, and at exit the mode from before and no memory for gradients that were cleared."""
    before = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(before)
        free_cleared_gradients(model)
