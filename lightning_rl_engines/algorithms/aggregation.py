"""From per-token values to one sum and the denominator that the engine divides it by.

Every mode is a per-token weight and a denominator, so that sums over micro-batches, ranks and slices of a row add up
to the same number however the documents were packed.

==========================  ==============================  =====================================
mode                        weight of a response token      denominator
==========================  ==============================  =====================================
token-mean                  1                               response tokens of the global batch
seq-mean-token-mean         1 / its document's tokens       documents with a response
seq-mean-token-sum          1                               documents with a response
seq-mean-token-sum-norm     1 / ``loss_scale_factor``       documents with a response
token-sum-over-constant     1                               ``constant``
==========================  ==============================  =====================================

``token-mean`` is DAPO's (Yu et al. 2025), ``seq-mean-token-mean`` GRPO's (Shao et al. 2024), and
``seq-mean-token-sum-norm`` with the maximal response length as factor is Dr. GRPO's (Liu et al. 2025).
"""

import math
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from lightning_rl_engines.algorithms.outputs import Denominator

if TYPE_CHECKING:
    from lightning_rl_engines.sequence.packing import MicroBatch

AggregationMode: TypeAlias = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum-over-constant"
]
"""Names accepted by :func:`aggregate`."""


def check_aggregation(mode: str, loss_scale_factor: float | None = None, constant: float | None = None) -> None:
    """Refuse an unknown mode, and a mode whose number is missing, out of range or not used.

    Args:
        mode: Name of the mode.
        loss_scale_factor: Positive number that ``"seq-mean-token-sum-norm"`` needs and no other mode takes.
        constant: Positive number that ``"token-sum-over-constant"`` needs and no other mode takes.

    Raises:
        ValueError: Any of the above; the message names the argument, its value and one that works.
    """
    if mode not in get_args(AggregationMode):
        raise ValueError(f"aggregation={mode!r} is unknown; use one of {', '.join(get_args(AggregationMode))}")
    numbers = {
        "loss_scale_factor": ("seq-mean-token-sum-norm", loss_scale_factor),
        "constant": ("token-sum-over-constant", constant),
    }
    for name, (needed_by, number) in numbers.items():
        if mode == needed_by:
            if number is None or not math.isfinite(number) or number <= 0:
                raise ValueError(
                    f"{name}={number} does not work with aggregation={mode!r}, which needs a positive number; "
                    f"use for instance {name}=1024.0"
                )
        elif number is not None:
            raise ValueError(
                f"{name}={number} has no effect with aggregation={mode!r}; leave it None or use "
                f"aggregation={needed_by!r}"
            )


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Replace values outside the mask by zero, whatever they are, in the forward and in the backward pass.

    A product with the mask would let NaN and infinity through, for ``nan * 0`` is NaN. Half precision is widened to
    fp32; fp64 is kept.

    Args:
        values: Floating-point tensor.
        mask: Bool tensor of the same shape.

    Returns:
        Tensor of the same shape, fp32 or fp64.
    """
    wide = values if values.dtype == torch.float64 else values.float()
    return torch.where(mask, wide, torch.zeros_like(wide))


def aggregate(
    values: Tensor,
    micro_batch: "MicroBatch",
    mode: AggregationMode = "token-mean",
    *,
    loss_scale_factor: float | None = None,
    constant: float | None = None,
) -> tuple[Tensor, Denominator]:
    """Sum per-token values over this rank's response tokens, with the weights of the mode.

    No communication. Values outside the response mask have no influence on the sum or on its gradient. Without any
    response token the sum is a zero that is still connected to the graph.

    Args:
        values: ``[local]``, floating point.
        micro_batch: The row that the values belong to.
        mode: Name of the mode.
        loss_scale_factor: Divisor of ``"seq-mean-token-sum-norm"``, in tokens.
        constant: Denominator of ``"token-sum-over-constant"``.

    Returns:
        Scalar sum (fp32, or fp64 for fp64 values) and the denominator of the global batch that it is to be divided by.

    Raises:
        ValueError: The mode is unknown, or its number is missing, out of range or not used.
    """
    check_aggregation(mode, loss_scale_factor, constant)
    values = masked(values, micro_batch["response_mask"].bool())
    if mode == "token-mean":
        return values.sum(), "tokens"
    if mode == "token-sum-over-constant":
        assert constant is not None
        return values.sum(), float(constant)
    if mode == "seq-mean-token-mean":
        # The lengths are those of the whole row, also where this rank holds only a part of the document.
        lengths = micro_batch.response_lengths.clamp(min=1)[micro_batch.document_ids]
        return (values / lengths).sum(), "sequences"
    if mode == "seq-mean-token-sum-norm":
        assert loss_scale_factor is not None
        return values.sum() / loss_scale_factor, "sequences"
    return values.sum(), "sequences"
