"""What a model returns for a micro-batch and what a loss returns for it."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

Denominator: TypeAlias = Literal["tokens", "sequences", "groups"] | float
"""A global count by name, or a constant."""

MetricReduction: TypeAlias = Literal["tokens", "sequences", "groups", "max", "min"] | float
"""How a metric is combined over micro-batches and ranks: sum over a global count, or an extremum."""


class TokenOutputs(NamedTuple):
    """Per-token results of one forward pass on this rank's slice of a row.

    Every tensor is fp32 of shape ``[local tokens]``; index ``i`` describes the same token as index ``i`` of the
    per-token columns of the micro-batch. Tokens outside the response hold 0.

    A ``NamedTuple`` and not a dataclass: FSDP1 registers its pre-backward hooks on the tensors it finds in the
    output of a root, and it rebuilds dataclasses by assignment.

    Attributes:
        log_probs: Log-probability of the token under the temperature-scaled distribution.
        entropy: Entropy of the distribution that the token was drawn from, in nats.
        values: Value of the state before the token.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """Sums over this rank's tokens of one micro-batch; the engine divides them by global denominators.

    Attributes:
        total: Scalar sum, connected to the graph.
        denominator: What the engine divides ``total`` by: the number of response tokens, of documents with at least
            one response token or of groups with at least one such document, each over the whole global batch, or a
            constant.
        metrics: ``name -> (value, reduction)``; ``value`` is a detached scalar, ``reduction`` a denominator (the
            values are summed over micro-batches and ranks and divided by it), ``"max"`` or ``"min"``.
    """

    total: Tensor
    denominator: Denominator
    metrics: dict[str, tuple[Tensor, MetricReduction]] = field(default_factory=dict)
