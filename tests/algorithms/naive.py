"""Ragged batches, what the engine does with a loss, and loss formulas written once more, document by document."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_rl_engines.algorithms import LossOutput, TokenOutputs
from lightning_rl_engines.algorithms.losses import TokenLoss
from lightning_rl_engines.sequence.experience import Experience
from lightning_rl_engines.sequence.packing import pack_row

LENGTHS = (5, 2, 9, 3, 14, 1)
"""Documents of the batch; the last has no response, its only token having no prediction."""


@dataclass
class Batch:
    """An experience of fp64 columns, and flat leaf tensors of what a model would return for it."""

    experience: Experience
    log_probs: Tensor
    entropy: Tensor


def make_batch(
    lengths: Sequence[int] = LENGTHS, *, seed: int = 0, spread: float = 0.4, per_token: bool = False
) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def normal(n: int) -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    log_probs = [-2 + 0.5 * normal(n) for n in lengths]
    # The last token of every document is a response token, one in four of the others is not.
    masks = [torch.rand(n, generator=generator) > 0.25 for n in lengths]
    for mask in masks:
        mask[-1] = True
    advantages = [normal(n) for n in lengths] if per_token else normal(len(lengths))
    experience = Experience.from_documents(
        input_ids=[torch.arange(n) for n in lengths],
        response_mask=masks,
        advantages=advantages,
        old_log_probs=[x + spread * normal(len(x)) for x in log_probs],
        ref_log_probs=[x + 0.5 * normal(len(x)) for x in log_probs],
    )
    entropy = normal(sum(lengths)).abs()
    return Batch(experience, torch.cat(log_probs).requires_grad_(), entropy.requires_grad_())


def run_row(
    loss: Callable,
    batch: Batch,
    row: Sequence[int],
    *,
    sequence_size: int = 1,
    sequence_rank: int = 0,
    group: dist.ProcessGroup | None = None,
    garbage: float = math.nan,
) -> LossOutput:
    """Call the loss as the engine would, with ``garbage`` from the model and in columns wherever the mask is off."""
    micro_batch = pack_row(batch.experience, row, sequence_size=sequence_size, sequence_rank=sequence_rank, group=group)
    mask = micro_batch["response_mask"]
    indices = micro_batch.token_indices.clamp(min=0)
    for name in ("old_log_probs", "ref_log_probs"):
        if name in micro_batch:
            micro_batch[name][~mask] = garbage
    bad = torch.full_like(batch.log_probs[indices], garbage)
    # Not where(): the gradient that the loss sends to a masked slot must itself be finite.
    log_probs = batch.log_probs[indices] + torch.where(mask, 0.0, bad.detach())
    entropy = batch.entropy[indices] + torch.where(mask, 0.0, bad.detach())
    return loss(TokenOutputs(log_probs=log_probs, entropy=entropy), micro_batch)


def denominator(name: str | float, experience: Experience) -> float:
    counts = experience.response_lengths
    named = {"tokens": sum(counts), "sequences": sum(n > 0 for n in counts)}
    return float(named[name]) if isinstance(name, str) else name


@dataclass
class Result:
    loss: float
    metrics: dict[str, float]
    log_prob_grad: Tensor
    entropy_grad: Tensor


def combine(outputs: Sequence[LossOutput], batch: Batch) -> Result:
    """Do the engine's part in one process: add sums, divide by global counts, add gradients."""
    batch.log_probs.grad = batch.entropy.grad = None
    total = 0.0
    metrics: dict[str, float] = {}
    for output in outputs:
        assert output.total.dtype == torch.float64 and output.total.dim() == 0
        part = output.total / denominator(output.denominator, batch.experience)
        part.backward()
        total += part.item()
        for name, (value, reduction) in output.metrics.items():
            assert not value.requires_grad and value.dim() == 0
            if reduction == "max":
                metrics[name] = max(metrics.get(name, -math.inf), value.item())
            elif reduction == "min":
                metrics[name] = min(metrics.get(name, math.inf), value.item())
            else:
                share = value.item() / denominator(reduction, batch.experience)
                metrics[name] = metrics.get(name, 0.0) + share
    entropy_grad = batch.entropy.grad
    return Result(
        total,
        metrics,
        batch.log_probs.grad.clone(),
        torch.zeros_like(batch.entropy) if entropy_grad is None else entropy_grad.clone(),
    )


def run(loss: TokenLoss, batch: Batch, rows: Sequence[Sequence[int]], garbage: float = math.nan) -> Result:
    return combine([run_row(loss, batch, row, garbage=garbage) for row in rows], batch)


def documents(batch: Batch) -> list[dict[str, Tensor]]:
    """Response tokens only, of the documents that have any; gradients flow to the leaves of the batch."""
    experience = batch.experience
    masks = experience.documents("response_mask")
    result = []
    start = 0
    for index, length in enumerate(experience.lengths):
        mask = masks[index]
        here = slice(start, start + length)
        start += length
        if not mask.any():
            continue
        advantages = (
            experience.documents("advantages")[index][mask]
            if "advantages" in experience.token_columns
            else experience["advantages"][index].expand(int(mask.sum()))
        )
        result.append(
            {
                "log_probs": batch.log_probs[here][mask],
                "entropy": batch.entropy[here][mask],
                "advantages": advantages,
                "old": experience.documents("old_log_probs")[index][mask],
                "ref": experience.documents("ref_log_probs")[index][mask],
            }
        )
    return result


def naive_mean(per_document: Sequence[Tensor], mode: str, number: float | None = None) -> Tensor:
    """Aggregate lists of response tokens as the papers write it."""
    tokens = sum(len(x) for x in per_document)
    if mode == "token-mean":
        return torch.cat(list(per_document)).sum() / tokens
    if mode == "token-sum-over-constant":
        return torch.cat(list(per_document)).sum() / number
    if mode == "seq-mean-token-mean":
        return torch.stack([x.mean() for x in per_document]).mean()
    if mode == "seq-mean-token-sum":
        return torch.stack([x.sum() for x in per_document]).mean()
    assert mode == "seq-mean-token-sum-norm"
    return torch.stack([x.sum() / number for x in per_document]).mean()


def gradients(value: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    grads = torch.autograd.grad(value, (batch.log_probs, batch.entropy), allow_unused=True)
    return tuple(
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip((batch.log_probs, batch.entropy), grads, strict=True)
    )
