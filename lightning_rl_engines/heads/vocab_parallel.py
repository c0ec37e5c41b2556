"""Log-probability and entropy of a vocabulary that is split over the ranks of a group; it is never gathered."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_rl_engines.heads.linear_logprob import (
    DEFAULT_TOKEN_TILE,
    DEFAULT_VOCABULARY_TILE,
    apply_head,
)
from lightning_rl_engines.heads.tiles import HeadSpec, VocabularyStatistics, rebase_statistics


def vocab_parallel_linear_log_prob(
    hidden: Tensor,
    weight_shard: Tensor,
    labels: Tensor,
    *,
    vocabulary_start: int,
    vocabulary_size: int,
    group: ProcessGroup | None,
    inv_temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    calculate_entropy: bool = False,
    token_tile: int = DEFAULT_TOKEN_TILE,
    vocabulary_tile: int = DEFAULT_VOCABULARY_TILE,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probabilities and entropies from one shard of the head per rank.

    Collective over ``group`` in the forward pass (one MAX and one SUM all-reduce of at most ``[3, T]``), not in the
    backward pass. Every rank passes the same ``hidden`` and ``labels`` and receives the same results.

    Gradients: every rank must backpropagate the same loss, counted once and not once per rank. The gradient of
    ``weight_shard`` and of ``bias`` is then complete. The gradient of ``hidden`` is this shard's part only: **the
    caller sums it over the group** (all-reduce, or reduce-scatter where hidden is sequence-sharded).

    Args:
        hidden: ``[T, H]``, the same on all ranks.
        weight_shard: ``[V_local, H]``, this rank's rows; shards may be uneven or empty.
        labels: ``[T]`` int64, indices in the whole vocabulary, the same on all ranks.
        vocabulary_start: Index in the whole vocabulary of the shard's first row.
        vocabulary_size: Entries of the whole vocabulary; rows beyond it are padding, ignored, with zero gradient.
        group: The ranks that hold the other shards, or ``None`` if there are none.
        inv_temperature: As in :func:`~lightning_rl_engines.heads.linear_logprob.linear_log_prob`.
        bias: ``[V_local]``, this rank's part.
        softcap: As in ``linear_log_prob``.
        scale: As in ``linear_log_prob``.
        calculate_entropy: As in ``linear_log_prob``; the same on all ranks.
        token_tile: Tokens per tile.
        vocabulary_tile: Vocabulary rows per tile.

    Returns:
        ``(log_probs, entropy)`` as ``linear_log_prob``, the same on all ranks.

    Raises:
        ValueError: On shapes, dtypes or numbers that do not fit.
    """
    if vocabulary_start < 0:
        raise ValueError(f"vocabulary_start={vocabulary_start} must not be negative; the first shard starts at 0.")
    spec = HeadSpec(
        vocabulary_size=vocabulary_size,
        vocabulary_start=vocabulary_start,
        scale=scale,
        softcap=softcap,
        token_tile=token_tile,
        vocabulary_tile=vocabulary_tile,
        with_entropy=calculate_entropy,
    )

    def merge(statistics: VocabularyStatistics) -> VocabularyStatistics:
        return all_reduce_statistics(statistics, group)

    return apply_head(
        hidden,
        weight_shard,
        labels,
        spec,
        bias=bias,
        inv_temperature=inv_temperature,
        merge=None if group is None else merge,
    )


def all_reduce_statistics(statistics: VocabularyStatistics, group: ProcessGroup | None) -> VocabularyStatistics:
    """Merge the statistics of all shards. Collective over ``group``; ``None`` means there is one shard.

    Args:
        statistics: Those of this rank's shard, each ``[T]`` with the same T on all ranks.
        group: The ranks that hold the other shards.

    Returns:
        The statistics of the whole vocabulary, the same on all ranks.
    """
    if group is None or statistics.maximum.numel() == 0:
        return statistics
    maximum = statistics.maximum.clone()
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    own = rebase_statistics(statistics, maximum)
    sums = torch.stack([part for part in (own.sum_exp, own.label_logit, own.sum_exp_z) if part is not None])
    dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
    return VocabularyStatistics(maximum, sums[0], None if own.sum_exp_z is None else sums[2], sums[1])
