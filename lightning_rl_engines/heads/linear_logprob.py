"""Fused linear -> log-probability and entropy: the logits of a row never exist as a whole."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_rl_engines.heads.tiles import (
    HeadInputs,
    HeadSpec,
    VocabularyStatistics,
    compute_dtype,
    head_gradients,
    token_statistics,
    vocabulary_statistics,
)

# 32 MiB of fp32 logits. Nearly square, since a tile reads and writes a [tokens, H] and a [vocabulary, H] accumulator,
# and large enough that this traffic stays below the cost of its products.
DEFAULT_TOKEN_TILE = 2048
DEFAULT_VOCABULARY_TILE = 4096


def linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    inv_temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    calculate_entropy: bool = False,
    token_tile: int = DEFAULT_TOKEN_TILE,
    vocabulary_tile: int = DEFAULT_VOCABULARY_TILE,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probabilities of labels, and entropies, of ``softmax(hidden @ weight.T)`` without storing logits.

    Both results are differentiable with respect to ``hidden``, ``weight`` and ``bias`` (once). Logits are computed one
    ``[token_tile, vocabulary_tile]`` tile at a time and again in the backward pass; between the two, only the inputs
    and one or two numbers per token are kept. Sums run in fp32, in fp64 for fp64 inputs; the weight gradient is
    rounded to the weight's dtype once. The weight is used as given, so under FSDP this must run while it is gathered.

    Args:
        hidden: ``[T, H]`` floating point; T may be 0.
        weight: ``[V, H]``, same dtype as ``hidden``.
        labels: ``[T]`` int64. A label outside ``0 .. V - 1`` (such as -100) gives log-probability 0 without gradient;
            its entropy is that of the distribution. Nothing is read back to the host.
        inv_temperature: Factor of the final logits, one number or one per token ``[T]``; not differentiated.
        bias: ``[V]`` added to the raw logits; without soft-cap, ``-inf`` switches an entry off.
        softcap: Bounds the scaled logits by ``softcap * tanh(logits / softcap)`` (Gemma).
        scale: Factor of the raw logits, before the soft-cap (Cohere's ``logit_scale``, 1 / Granite's).
        calculate_entropy: Whether to return entropies.
        token_tile: Tokens per tile.
        vocabulary_tile: Vocabulary rows per tile.

    Returns:
        ``(log_probs, entropy)``, each ``[T]`` fp32 (fp64 for fp64 inputs); ``log_probs <= 0`` and
        ``0 <= entropy <= log V`` always. ``entropy`` is ``None`` unless asked for.

    Raises:
        ValueError: On shapes, dtypes or numbers that do not fit.
    """
    spec = HeadSpec(
        vocabulary_size=weight.shape[0],
        scale=scale,
        softcap=softcap,
        token_tile=token_tile,
        vocabulary_tile=vocabulary_tile,
        with_entropy=calculate_entropy,
    )
    return apply_head(hidden, weight, labels, spec, bias=bias, inv_temperature=inv_temperature)


def apply_head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    spec: HeadSpec,
    *,
    bias: Tensor | None,
    inv_temperature: float | Tensor,
    merge: Callable[[VocabularyStatistics], VocabularyStatistics] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Validate and run the fused head on a weight, or on one shard of it.

    Args:
        hidden: ``[T, H]``.
        weight: ``[V, H]``, the rows from ``spec.vocabulary_start`` on.
        labels: ``[T]`` int64, indices in the whole vocabulary.
        spec: Numbers of the head.
        bias: ``[V]`` or ``None``.
        inv_temperature: A number or ``[T]``.
        merge: Combines the statistics of this shard with those of the others; ``None`` if there are no others.

    Returns:
        ``(log_probs, entropy)`` as :func:`linear_log_prob`. The gradient of ``hidden`` covers this weight's rows only.
    """
    _validate(hidden, weight, labels, spec, bias, inv_temperature)
    factor: Tensor | None
    if isinstance(inv_temperature, Tensor):
        factor = inv_temperature.to(hidden.device, compute_dtype(hidden.dtype)).expand(hidden.shape[0])
    elif inv_temperature == 1.0:
        factor = None
    else:
        factor = hidden.new_full(hidden.shape[:1], inv_temperature, dtype=compute_dtype(hidden.dtype))
    return _LinearLogProb.apply(hidden, weight, bias, labels, factor, spec, merge)


class _LinearLogProb(torch.autograd.Function):
    """Saves the inputs, the log-normalizer and the entropy per token; recomputes tiles of logits in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        inv_temperature: Tensor | None,
        spec: HeadSpec,
        merge: Callable[[VocabularyStatistics], VocabularyStatistics] | None,
    ) -> tuple[Tensor, Tensor | None]:
        with _without_autocast(hidden):
            statistics = vocabulary_statistics(HeadInputs(hidden, weight, labels, bias, inv_temperature), spec)
            if merge is not None:
                statistics = merge(statistics)
            result = token_statistics(statistics, labels, spec)
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        # The entropy is an output: saving it as such makes no reference cycle and notices a change in place.
        ctx.save_for_backward(hidden, weight, bias, labels, inv_temperature, result.log_normalizer, result.entropy)
        return result.log_probs, result.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, log_probs_grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if log_probs_grad is None and entropy_grad is None:
            return (None,) * 7
        hidden, weight, bias, labels, inv_temperature, log_normalizer, entropy = ctx.saved_tensors
        with _without_autocast(hidden):
            gradients = head_gradients(
                HeadInputs(hidden, weight, labels, bias, inv_temperature),
                ctx.spec,
                log_normalizer,
                entropy,
                log_probs_grad=log_probs_grad,
                entropy_grad=entropy_grad,
                needs_grad=ctx.needs_input_grad[:3],
            )
        return *gradients, None, None, None, None


def _without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    # Autocast is on in one of forward and backward only, as a rule; the recomputed logits would then differ.
    device_type = tensor.device.type
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _validate(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    spec: HeadSpec,
    bias: Tensor | None,
    inv_temperature: float | Tensor,
) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit: expected [T, H] and [V, H]."
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(
            f"hidden is {hidden.dtype} and weight is {weight.dtype}: both must be of one floating-point dtype; "
            f"cast hidden with hidden.to({weight.dtype})."
        )
    tokens, rows = hidden.shape[0], weight.shape[0]
    if labels.shape != (tokens,) or labels.dtype != torch.int64:
        raise ValueError(f"labels is {labels.dtype} {tuple(labels.shape)}: expected torch.int64 ({tokens},).")
    if bias is not None and bias.shape != (rows,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}: expected ({rows},), one per row of weight.")
    if spec.softcap is not None and not 0.0 < spec.softcap < math.inf:
        raise ValueError(f"softcap={spec.softcap} must be positive and finite, such as 30.0, or None.")
    if not math.isfinite(spec.scale):
        raise ValueError(f"scale={spec.scale} must be finite, such as 1.0.")
    for name, size in (("token_tile", spec.token_tile), ("vocabulary_tile", spec.vocabulary_tile)):
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1, such as 1024.")
    if spec.vocabulary_size < 1:
        raise ValueError(f"the vocabulary has {spec.vocabulary_size} entries: at least 1 is needed.")
    if isinstance(inv_temperature, Tensor):
        if inv_temperature.ndim > 0 and inv_temperature.shape != (tokens,):
            raise ValueError(f"inv_temperature has shape {tuple(inv_temperature.shape)}: expected ({tokens},) or ().")
        if inv_temperature.requires_grad:
            raise ValueError("inv_temperature requires a gradient, which is not computed: pass it detached.")
    elif not 0.0 < inv_temperature < math.inf:
        raise ValueError(f"inv_temperature={inv_temperature} must be positive and finite, such as 1.0.")
