"""The tile arithmetic of the fused head: statistics of softmax(hidden @ weight.T), and their gradients, tile by tile.

Shapes: T tokens, H hidden size, V rows of the weight (shard) at hand. ``z`` are the logits after every transform:

    x = hidden @ weight.T + bias        u = scale * x        z = inv_temperature * softcap * tanh(u / softcap)

With ``p = softmax(z)``, ``log_prob = z[label] - log Z`` and ``entropy = log Z - sum(p * z)``, upstream gradients ``g``
(log-prob) and ``e`` (entropy) give ``dz_j = g * (1[j = label] - p_j) - e * p_j * (log p_j + entropy)``.

Everything here is a pure function of tensors. The weight may be one shard of a vocabulary: the statistics of shards
merge exactly, and the gradients need nothing but the merged statistics.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """Plain numbers that describe a head and how it is tiled.

    Attributes:
        vocabulary_size: Entries of the whole vocabulary; rows at and beyond this index are padding and do not count.
        vocabulary_start: Index in the whole vocabulary of the first row of the weight at hand.
        scale: Multiplier of the raw logits.
        softcap: Bound of the logits, ``softcap * tanh(u / softcap)``, or ``None``.
        token_tile: Tokens per tile.
        vocabulary_tile: Vocabulary rows per tile.
        with_entropy: Whether the statistics carry what the entropy needs.
    """

    vocabulary_size: int
    vocabulary_start: int = 0
    scale: float = 1.0
    softcap: float | None = None
    token_tile: int
    vocabulary_tile: int
    with_entropy: bool

    def token_slices(self, tokens: int) -> Iterator[slice]:
        """Yield the slices that cover ``tokens`` rows of the hidden states."""
        for start in range(0, tokens, self.token_tile):
            yield slice(start, min(start + self.token_tile, tokens))

    def vocabulary_slices(self, rows: int) -> Iterator[slice]:
        """Yield the slices that cover the rows of the weight at hand, padding of the vocabulary left out."""
        valid = min(rows, max(self.vocabulary_size - self.vocabulary_start, 0))
        for start in range(0, valid, self.vocabulary_tile):
            yield slice(start, min(start + self.vocabulary_tile, valid))


class HeadInputs(NamedTuple):
    """Tensors that make up the logits.

    Attributes:
        hidden: ``[T, H]``.
        weight: ``[V, H]``, same dtype as ``hidden``.
        labels: ``[T]`` int64, indices in the whole vocabulary.
        bias: ``[V]`` or ``None``.
        inv_temperature: ``[T]`` in the compute dtype, or ``None`` for 1.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None
    inv_temperature: Tensor | None


class VocabularyStatistics(NamedTuple):
    """What a range of the vocabulary says about each token; every tensor is ``[T]`` in the compute dtype.

    Attributes:
        maximum: Largest ``z`` of the range, a very small finite number for an empty range.
        sum_exp: Sum of ``exp(z - maximum)``.
        sum_exp_z: Sum of ``exp(z - maximum) * (z - maximum)``, or ``None`` without entropy. Taken relative to the
            maximum, so that a constant added to all logits costs the entropy no digits.
        label_logit: ``z[label]`` if the label lies in the range, else 0.
    """

    maximum: Tensor
    sum_exp: Tensor
    sum_exp_z: Tensor | None
    label_logit: Tensor


class TokenStatistics(NamedTuple):
    """Results per token over the whole vocabulary; every tensor is ``[T]`` in the compute dtype.

    Attributes:
        log_probs: Log-probability of the label, at most 0; exactly 0 for a label outside the vocabulary.
        entropy: Entropy in nats between 0 and ``log(vocabulary size)``, or ``None``.
        log_normalizer: ``log Z``.
    """

    log_probs: Tensor
    entropy: Tensor | None
    log_normalizer: Tensor


class HeadGradients(NamedTuple):
    """Gradients of the inputs in the inputs' dtypes; ``None`` where not asked for."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics and accumulators: fp64 for fp64 inputs, else fp32."""
    return torch.promote_types(dtype, torch.float32)


def vocabulary_statistics(inputs: HeadInputs, spec: HeadSpec) -> VocabularyStatistics:
    """Compute the statistics of the vocabulary range that ``inputs.weight`` covers.

    The largest vocabulary-sized temporaries are two of ``[token_tile, vocabulary_tile]`` (one without entropy).
    """
    tokens, dtype = inputs.hidden.shape[0], compute_dtype(inputs.hidden.dtype)
    total = _empty_statistics(inputs.hidden.new_zeros(tokens, dtype=dtype), spec.with_entropy)
    for vocabulary in spec.vocabulary_slices(inputs.weight.shape[0]):
        for token in spec.token_slices(tokens):
            so_far = _rows(total, token)
            update = merge_statistics(so_far, _tile_statistics(inputs, spec, token, vocabulary))
            for destination, source in zip(so_far, update, strict=True):
                if destination is not None and source is not None:
                    destination.copy_(source)
    return total


def merge_statistics(left: VocabularyStatistics, right: VocabularyStatistics) -> VocabularyStatistics:
    """Combine the statistics of two disjoint ranges of the vocabulary."""
    maximum = torch.maximum(left.maximum, right.maximum)
    left, right = rebase_statistics(left, maximum), rebase_statistics(right, maximum)
    sum_exp_z = None
    if left.sum_exp_z is not None and right.sum_exp_z is not None:
        sum_exp_z = left.sum_exp_z + right.sum_exp_z
    return VocabularyStatistics(maximum, left.sum_exp + right.sum_exp, sum_exp_z, left.label_logit + right.label_logit)


def rebase_statistics(statistics: VocabularyStatistics, maximum: Tensor) -> VocabularyStatistics:
    """Express the sums relative to ``maximum`` ``[T]``, which is nowhere below the statistics' own maximum."""
    shift = statistics.maximum - maximum
    factor = shift.exp()
    sum_exp_z = statistics.sum_exp_z
    if sum_exp_z is not None:
        sum_exp_z = (sum_exp_z + statistics.sum_exp * shift) * factor
    return VocabularyStatistics(maximum, statistics.sum_exp * factor, sum_exp_z, statistics.label_logit)


def token_statistics(statistics: VocabularyStatistics, labels: Tensor, spec: HeadSpec) -> TokenStatistics:
    """Turn the statistics of the whole vocabulary into log-probabilities and entropies, clamped against rounding."""
    log_sum = statistics.sum_exp.log()
    log_normalizer = statistics.maximum + log_sum
    # Relative to the maximum: both differences are small where the result is.
    log_probs = ((statistics.label_logit - statistics.maximum) - log_sum).clamp(max=0.0)
    log_probs = torch.where(_in_vocabulary(labels, spec), log_probs, 0.0)
    entropy = None
    if statistics.sum_exp_z is not None:
        # One ulp below log V, so that the bound also holds for the unrounded logarithm.
        bound = math.log(spec.vocabulary_size) * (1.0 - torch.finfo(log_sum.dtype).eps)
        entropy = (log_sum - statistics.sum_exp_z / statistics.sum_exp).clamp(0.0, bound)
    return TokenStatistics(log_probs, entropy, log_normalizer)


def head_gradients(
    inputs: HeadInputs,
    spec: HeadSpec,
    log_normalizer: Tensor,
    entropy: Tensor | None,
    *,
    log_probs_grad: Tensor | None,
    entropy_grad: Tensor | None,
    needs_grad: tuple[bool, bool, bool],
) -> HeadGradients:
    """Compute the gradients of hidden, weight and bias, recomputing the logits one tile at a time.

    The vocabulary loop is the outer one: each tile of the weight gradient is complete in fp32 (fp64) before it is cast.

    Args:
        inputs: What the forward pass saw.
        spec: As in the forward pass.
        log_normalizer: ``log Z`` of the whole vocabulary ``[T]``.
        entropy: Entropy ``[T]`` of the whole vocabulary; needed with ``entropy_grad``.
        log_probs_grad: Upstream gradient ``[T]`` or ``None``.
        entropy_grad: Upstream gradient ``[T]`` or ``None``.
        needs_grad: Whether the gradient of hidden, weight and bias is wanted.

    Returns:
        Gradients in the dtypes of the inputs. That of ``hidden`` covers this weight's rows only.
    """
    hidden, weight, bias = inputs.hidden, inputs.weight, inputs.bias
    tokens, dtype = hidden.shape[0], compute_dtype(hidden.dtype)
    upstream = _Upstream.build(inputs, spec, log_normalizer, entropy, log_probs_grad, entropy_grad)
    hidden_grad = torch.zeros_like(hidden, dtype=dtype) if needs_grad[0] else None
    weight_grad = torch.zeros_like(weight) if needs_grad[1] else None
    bias_grad = torch.zeros_like(bias) if needs_grad[2] and bias is not None else None
    for vocabulary in spec.vocabulary_slices(weight.shape[0]):
        weight_tile = None if weight_grad is None else torch.zeros_like(weight[vocabulary], dtype=dtype)
        bias_tile = None if bias_grad is None else torch.zeros_like(bias_grad[vocabulary], dtype=dtype)
        for token in spec.token_slices(tokens):
            logits_grad = _tile_logits_grad(inputs, spec, upstream, token, vocabulary)
            if bias_tile is not None:
                bias_tile += logits_grad.sum(0)
            if hidden_grad is not None:
                _add_product(hidden_grad[token], logits_grad, weight[vocabulary])
            if weight_tile is not None:
                _add_product(weight_tile, logits_grad.t(), hidden[token])
            # The name would keep this tile alive while the next one is computed.
            del logits_grad
        if weight_grad is not None and weight_tile is not None:
            weight_grad[vocabulary] = weight_tile
        if bias_grad is not None and bias_tile is not None:
            bias_grad[vocabulary] = bias_tile
    return HeadGradients(None if hidden_grad is None else hidden_grad.to(hidden.dtype), weight_grad, bias_grad)


class _Upstream(NamedTuple):
    """Per-token factors of the gradient, ``[T]``; the constant factors of dz -> dx are already in ``g`` and ``e``."""

    log_normalizer: Tensor
    entropy: Tensor | None
    g: Tensor | None
    e: Tensor | None

    @classmethod
    def build(
        cls,
        inputs: HeadInputs,
        spec: HeadSpec,
        log_normalizer: Tensor,
        entropy: Tensor | None,
        log_probs_grad: Tensor | None,
        entropy_grad: Tensor | None,
    ) -> "_Upstream":
        factor = spec.scale if inputs.inv_temperature is None else spec.scale * inputs.inv_temperature
        g = e = None
        if log_probs_grad is not None:
            g = torch.where(_in_vocabulary(inputs.labels, spec), log_probs_grad, 0.0) * factor
        if entropy_grad is not None:
            e = entropy_grad * factor
        return cls(log_normalizer, entropy, g, e)


def _empty_statistics(zeros: Tensor, with_entropy: bool) -> VocabularyStatistics:
    # Finite, because 0 * -inf would poison the sums; half of the range, so that a difference cannot overflow.
    maximum = torch.full_like(zeros, torch.finfo(zeros.dtype).min / 2)
    return VocabularyStatistics(maximum, zeros.clone(), zeros.clone() if with_entropy else None, zeros.clone())


def _rows(statistics: VocabularyStatistics, token: slice) -> VocabularyStatistics:
    """Return views of some tokens' statistics."""
    sum_exp_z = None if statistics.sum_exp_z is None else statistics.sum_exp_z[token]
    return VocabularyStatistics(
        statistics.maximum[token], statistics.sum_exp[token], sum_exp_z, statistics.label_logit[token]
    )


def _tile_statistics(inputs: HeadInputs, spec: HeadSpec, token: slice, vocabulary: slice) -> VocabularyStatistics:
    z, _ = _tile_logits(inputs, spec, token, vocabulary, with_slope=False)
    index, inside = _tile_labels(inputs, spec, token, vocabulary)
    label_logit = torch.where(inside, z.gather(1, index).squeeze(1), 0.0)
    maximum = z.amax(1)
    z.sub_(maximum.unsqueeze(1))
    if not spec.with_entropy:
        return VocabularyStatistics(maximum, z.exp_().sum(1), None, label_logit)
    weights = z.exp()
    return VocabularyStatistics(maximum, weights.sum(1), z.mul_(weights).sum(1), label_logit)


def _tile_logits(
    inputs: HeadInputs, spec: HeadSpec, token: slice, vocabulary: slice, *, with_slope: bool
) -> tuple[Tensor, Tensor | None]:
    """Return ``z`` of a tile and, on request, the slope of the soft-cap at each logit (``None`` without soft-cap)."""
    z = _product(inputs.hidden[token], inputs.weight[vocabulary].t())
    if inputs.bias is not None:
        # A bias of -inf switches an entry off; kept finite, because 0 * -inf would turn the sums into NaN.
        z.add_(inputs.bias[vocabulary]).clamp_(min=-1e30)
    if spec.scale != 1.0:
        z.mul_(spec.scale)
    slope = None
    if spec.softcap is not None:
        z.div_(spec.softcap).tanh_()
        slope = z.square().neg_().add_(1.0) if with_slope else None
        z.mul_(spec.softcap)
    if inputs.inv_temperature is not None:
        z.mul_(inputs.inv_temperature[token].unsqueeze(1))
    return z, slope


def _tile_logits_grad(
    inputs: HeadInputs, spec: HeadSpec, upstream: _Upstream, token: slice, vocabulary: slice
) -> Tensor:
    """Return the gradient of the raw logits ``x`` of a tile, in the compute dtype."""
    z, slope = _tile_logits(inputs, spec, token, vocabulary, with_slope=True)
    log_p = z.sub_(upstream.log_normalizer[token].unsqueeze(1))
    if upstream.e is not None and upstream.entropy is not None:
        p = log_p.exp()
        factor = log_p.add_(upstream.entropy[token].unsqueeze(1)).mul_(upstream.e[token].neg().unsqueeze(1))
        if upstream.g is not None:
            factor.sub_(upstream.g[token].unsqueeze(1))
        grad = factor.mul_(p)
    elif upstream.g is not None:
        grad = log_p.exp_().mul_(upstream.g[token].neg().unsqueeze(1))
    else:
        raise AssertionError("no upstream gradient")
    if upstream.g is not None:
        index, inside = _tile_labels(inputs, spec, token, vocabulary)
        grad.scatter_add_(1, index, torch.where(inside, upstream.g[token], 0.0).unsqueeze(1))
    return grad if slope is None else grad.mul_(slope)


def _tile_labels(inputs: HeadInputs, spec: HeadSpec, token: slice, vocabulary: slice) -> tuple[Tensor, Tensor]:
    """Return the labels' columns ``[tokens, 1]``, clamped into the tile, and whether they lie in it ``[tokens]``."""
    columns = inputs.labels[token] - (spec.vocabulary_start + vocabulary.start)
    width = vocabulary.stop - vocabulary.start
    return columns.clamp(0, width - 1).unsqueeze(1), (columns >= 0) & (columns < width)


def _in_vocabulary(labels: Tensor, spec: HeadSpec) -> Tensor:
    return (labels >= 0) & (labels < spec.vocabulary_size)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply two matrices of one dtype; the result is in the compute dtype and never rounded to a 16-bit one."""
    dtype = compute_dtype(left.dtype)
    if left.dtype == dtype:
        return left @ right
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=dtype)
    # Other devices have no kernel with 16-bit inputs and an fp32 result; products of 16-bit numbers are exact in fp32.
    return left.to(dtype) @ right.to(dtype)


def _add_product(accumulator: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to an accumulator; both it and ``left`` are in the compute dtype, ``right`` may not be."""
    if right.dtype != accumulator.dtype and right.device.type == "cuda":
        # Tensor cores take 16-bit operands only; the sum stays in fp32.
        accumulator += _product(left.to(right.dtype), right)
    else:
        accumulator.addmm_(left, right.to(accumulator.dtype))
