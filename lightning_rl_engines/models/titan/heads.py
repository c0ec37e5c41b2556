"""Heads of torchtitan models: the fused log-probability over a split vocabulary, and a value per token.

Shapes: B = 1 row, L tokens of this rank, D hidden, P predicted tokens, V vocabulary.
"""

from dataclasses import dataclass

import spmd_types as spmd
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.sharding import ShardingConfig
from typing_extensions import override

from lightning_rl_engines.heads.vocab_parallel import vocab_parallel_linear_log_prob


class LogProbHead(Linear):
    """A language-model head that returns log-probabilities of given tokens; logits never exist for the row.

    Under tensor parallelism each rank holds a part of the vocabulary, and only statistics of tokens are exchanged.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """As of a linear layer."""

    @override
    def forward(
        self,
        hidden: Tensor,
        *,
        predicted: Tensor,
        labels: Tensor,
        inv_temperature: Tensor | float,
        calculate_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Score tokens; collective over the tensor-parallel group.

        Every rank of that group must backpropagate the same loss, counted once.

        Args:
            hidden: ``[1, L, D]``, the same on all tensor-parallel ranks.
            predicted: int64 ``[P]``, the places that are scored.
            labels: int64 ``[P]``, the tokens.
            inv_temperature: A number, or ``[P]``.
            calculate_entropy: Also return entropies.

        Returns:
            Log-probabilities and entropies, fp32 ``[P]``.
        """
        # Each rank's shard gives one summand of the gradient of the hidden states.
        rows = local_part(hidden, Partial())[0].index_select(0, predicted)
        weight, bias = self.weight, self.bias
        start, group = 0, None
        if isinstance(weight, DTensor):
            start, group = _first_row(weight), weight.device_mesh.get_group()
            weight = weight.to_local(grad_placements=weight.placements)
            bias = None if bias is None else bias.to_local(grad_placements=bias.placements)
        rows, weight = self.extend(rows, weight)
        return vocab_parallel_linear_log_prob(
            rows,
            weight,
            labels,
            vocabulary_start=start,
            vocabulary_size=self.out_features,
            group=group,
            bias=bias,
            inv_temperature=inv_temperature,
            calculate_entropy=calculate_entropy,
        )

    def extend(self, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is multiplied: ``[P, D]`` and this rank's ``[V, D]``, or both with further columns."""
        return rows, weight


class ValueHead(Linear):
    """A head of one number per token, the same on all tensor-parallel ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """As of a linear layer with one output."""

    @override
    def forward(self, hidden: Tensor, *, predicted: Tensor) -> Tensor:
        """Return values, fp32 ``[P]``.

        Args:
            hidden: ``[1, L, D]``, the same on all tensor-parallel ranks.
            predicted: int64 ``[P]``, the places that are valued.
        """
        rows = local_part(hidden, Replicate())[0].index_select(0, predicted)
        bias = None if self.bias is None else local_part(self.bias, Replicate())
        return F.linear(rows, local_part(self.weight, Replicate()), bias)[:, 0].float()


def log_prob_head(plain: Linear.Config) -> LogProbHead.Config:
    """Return the configuration of the fused head in the place of a plain one."""
    states = {name: dense_param_placement(tp=spmd.S(0)) for name in ("weight", "bias")}
    return LogProbHead.Config(
        in_features=plain.in_features,
        out_features=plain.out_features,
        bias=plain.bias,
        param_init=plain.param_init,
        sharding_config=ShardingConfig(state_shardings=states),
    )


def value_head(plain: Linear.Config, *, bias: bool) -> ValueHead.Config:
    """Return the configuration of a value head in the place of a language-model head."""
    states = {name: dense_param_placement(tp=spmd.R) for name in ("weight", "bias")}
    return ValueHead.Config(
        in_features=plain.in_features,
        out_features=1,
        bias=bias,
        param_init=plain.param_init,
        sharding_config=ShardingConfig(state_shardings=states),
    )


def local_part(tensor: Tensor, gradient: Placement) -> Tensor:
    """Return the tensor on this rank; ``gradient`` says what the ranks' gradients of it are to each other."""
    return tensor.to_local(grad_placements=[gradient]) if isinstance(tensor, DTensor) else tensor


def _first_row(weight: DTensor) -> int:
    """Index in the whole vocabulary of the first row of this rank's shard."""
    (placement,) = weight.placements
    if not isinstance(placement, Shard) or placement.dim != 0:
        raise RuntimeError(f"the head's weight is placed as {placement}; it is to be sharded by rows")
    mesh = weight.device_mesh
    _, start = Shard.local_shard_size_and_offset(weight.shape[0], mesh.size(), mesh.get_local_rank())
    return int(start or 0)
