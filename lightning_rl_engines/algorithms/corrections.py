"""Off-policy corrections between the sampler and the trainer, applied once per update.

An inference engine computes the log-probabilities of its samples with other kernels, another precision or older weights
than the trainer, so the samples come from another policy than the one that the update starts from. With
``w = exp(old_log_probs - rollout_log_probs)``, the trainer's probability over the sampler's:

=========  =============================================================================================
kind       weight of the policy term
=========  =============================================================================================
``none``   1: nothing is weighted; for metrics and rejection alone
``is``     ``w``: unbiased, of high variance
``tis``    ``min(w, upper)``: truncated importance sampling (Yao et al. 2025, "Your efficient RL framework
           secretly brings you off-policy training")
``mis``    ``w`` where ``lower <= w <= upper``, else 0: masked importance sampling; at the token level this is
           IcePop (Ling team 2025)
=========  =============================================================================================

At level ``token`` each token has its own ``w``; at ``sequence`` all tokens of a document share the product of theirs,
the ratio of the whole response; at ``geometric`` the geometric mean, that ratio per token.

PPO's loss on ``old_log_probs`` times these weights is decoupled PPO (Hilton et al. 2021, "Batch size-invariance for
policy optimization"; Fu et al. 2025, "AReaL"): the proximal policy, around which ratios are clipped, is that of
``old_log_probs``, the behaviour policy that of ``rollout_log_probs``. AReaL's cap on the weight is ``mis`` with
``lower=0``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from lightning_rl_engines.algorithms.kl import LOG_RATIO_BOUND, kl_k1, kl_k3

if TYPE_CHECKING:
    from lightning_rl_engines.sequence.experience import Experience

CorrectionKind: TypeAlias = Literal["none", "is", "tis", "mis"]
"""What the importance weight is bounded by."""

CorrectionLevel: TypeAlias = Literal["token", "sequence", "geometric"]
"""What the importance weight is a ratio of."""

REQUIRED_COLUMNS = ("response_mask", "old_log_probs", "rollout_log_probs")


@dataclass(frozen=True, kw_only=True)
class CorrectionSums:
    """What one rank adds to the metrics: sums, and the extrema ``ratio_min``, ``ratio_max``, ``gap_max``.

    Attributes:
        tokens: Response tokens with finite log-probabilities.
        unusable: Response tokens without.
        documents: Documents with at least one usable token.
        rejected: Documents that were rejected.
        kept: Usable tokens of the others.
        bounded: Usable tokens whose ratio is beyond a bound of the kind.
        ratio: Sum of ``w`` over usable tokens.
        weight: Sum of weights over kept tokens.
        weight_square: Sum of their squares.
        k1: Sum of k1 of KL(sampler || trainer) over usable tokens.
        k3: Sum of k3.
        perplexity_ratio: Sum over documents of the trainer's perplexity over the sampler's.
        ratio_min: Smallest ``w``.
        ratio_max: Largest ``w``.
        gap_max: Largest absolute difference of log-probabilities, in nats.
    """

    tokens: int = 0
    unusable: int = 0
    documents: int = 0
    rejected: int = 0
    kept: int = 0
    bounded: int = 0
    ratio: float = 0.0
    weight: float = 0.0
    weight_square: float = 0.0
    k1: float = 0.0
    k3: float = 0.0
    perplexity_ratio: float = 0.0
    ratio_min: float = math.inf
    ratio_max: float = -math.inf
    gap_max: float = -math.inf

    @staticmethod
    def merge(parts: "Sequence[CorrectionSums]") -> "CorrectionSums":
        """Combine the sums of several ranks, whatever their order.

        Args:
            parts: One or more.

        Returns:
            The sums of all of them.
        """
        combined = {}
        for field in fields(CorrectionSums):
            values = [getattr(part, field.name) for part in parts]
            if field.name == "ratio_min":
                combined[field.name] = min(values)
            elif field.name.endswith("_max"):
                combined[field.name] = max(values)
            else:
                combined[field.name] = sum(values) if field.type is int else math.fsum(values)
        return CorrectionSums(**combined)


class CorrectionResult(NamedTuple):
    """What a correction makes of the columns.

    Attributes:
        weights: ``[T]`` fp32 factor of each token's policy term, zero outside ``response_mask``.
        response_mask: ``[T]`` bool, without rejected documents and tokens of unknown probability.
        sums: This rank's part of the metrics.
    """

    weights: Tensor
    response_mask: Tensor
    sums: CorrectionSums


class RolloutCorrection:
    """Weighs tokens and rejects documents by what the sampler and the trainer think of them.

    Apply it once per update, after advantages and old log-probabilities are there; the policy losses multiply their
    policy term with the column ``rollout_weights``. A token of weight 0 (``mis``) stays in the denominators, and
    entropy and KL terms still act on it; a rejected document leaves the response mask and so the denominators, as does
    a token whose log-probability is not finite.

    Rejection compares the mean over the response of k1 or k3 of KL(sampler || trainer) with a threshold. With ``k1``
    and ``reject_negative_only`` it is the off-policy sequence masking of DeepSeek-V3.2 (2025), at the start of an
    update.

    Metrics (:meth:`metrics`), all over the global batch: ``rollout_ratio_mean``, ``_min`` and ``_max`` of ``w`` at this
    level before any bound; ``rollout_weight_mean`` and the effective sample size ``rollout_ess``,
    ``(sum w)^2 / (n * sum w^2)`` from 0 to 1, of the weights of kept tokens; ``rollout_truncated_fraction`` or
    ``rollout_masked_fraction`` of tokens; ``rollout_rejected_fraction`` of documents; ``rollout_unusable_fraction`` of
    tokens; ``rollout_kl_k1``, ``rollout_kl_k3``, mean per token; ``rollout_log_prob_gap_max``;
    ``rollout_perplexity_ratio``, mean over documents.
    """

    required_columns = REQUIRED_COLUMNS

    def __init__(
        self,
        *,
        kind: CorrectionKind = "tis",
        level: CorrectionLevel = "token",
        lower: float | None = None,
        upper: float | None = None,
        reject_kl: Literal["k1", "k3"] | None = None,
        reject_threshold: float | None = None,
        reject_negative_only: bool = False,
    ) -> None:
        """Configure the correction.

        Args:
            kind: How weights are bounded.
            level: Ratio of a token, of the whole response, or per token of the whole response.
            lower: Smallest ratio that ``mis`` keeps, not negative; ``None`` for 0.5.
            upper: Largest weight of ``tis``, largest ratio that ``mis`` keeps; ``None`` for 2.0 and 5.0.
            reject_kl: Estimator of the KL by which documents are rejected; ``None`` rejects none.
            reject_threshold: Mean KL per token, in nats, above which a document is rejected; goes with ``reject_kl``.
            reject_negative_only: Reject only documents with a negative advantage; needs the column ``advantages``.

        Raises:
            ValueError: A value is unknown, out of range or without effect.
        """
        for name, choice, known in (("kind", kind, CorrectionKind), ("level", level, CorrectionLevel)):
            if choice not in get_args(known):
                raise ValueError(f"{name}={choice!r} is unknown; use one of {', '.join(get_args(known))}")
        if reject_kl not in (None, "k1", "k3"):
            raise ValueError(f"reject_kl={reject_kl!r} is unknown; use 'k1', 'k3' or None")
        self.kind: CorrectionKind = kind
        self.level: CorrectionLevel = level
        self.lower, self.upper = _check_bounds(kind, lower, upper)
        if reject_kl is None and (reject_threshold is not None or reject_negative_only):
            raise ValueError(
                f"reject_threshold={reject_threshold} and reject_negative_only={reject_negative_only} have no effect "
                "without reject_kl; set it to 'k1' or 'k3', or leave them out"
            )
        if reject_kl is not None and not (reject_threshold is not None and 0 < reject_threshold < math.inf):
            raise ValueError(
                f"reject_threshold={reject_threshold} must be positive and finite with reject_kl={reject_kl!r}; use "
                "for instance 0.05"
            )
        self.reject_kl: Literal["k1", "k3"] | None = reject_kl
        self.reject_threshold = reject_threshold
        self.reject_negative_only = reject_negative_only

    def __call__(
        self,
        *,
        rollout_log_probs: Tensor,
        old_log_probs: Tensor,
        response_mask: Tensor,
        lengths: Sequence[int],
        advantages: Tensor | None = None,
    ) -> CorrectionResult:
        """Correct flat columns, documents one after another. Pure; computed on the host in fp64.

        Args:
            rollout_log_probs: ``[T]`` of the sampler.
            old_log_probs: ``[T]`` of the trainer at the start of the update.
            response_mask: ``[T]`` bool.
            lengths: Tokens per document.
            advantages: ``[N]``, needed with ``reject_negative_only``.

        Returns:
            Weights, mask and sums; tensors on the device of ``rollout_log_probs``.

        Raises:
            ValueError: Shapes do not match, or advantages are missing.
        """
        _check_columns(rollout_log_probs, old_log_probs, response_mask, lengths)
        sampler, trainer = (item.detach().to("cpu", torch.float64) for item in (rollout_log_probs, old_log_probs))
        mask = response_mask.to("cpu", torch.bool)
        usable = mask & sampler.isfinite() & trainer.isfinite()
        sampler, trainer = (torch.where(usable, item, torch.zeros_like(item)) for item in (sampler, trainer))
        documents = _Documents(lengths, usable)
        ratio = self._log_ratio(trainer - sampler, documents).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        k1, k3 = kl_k1(sampler, trainer), kl_k3(sampler, trainer)
        rejected = self._rejected(documents, k1 if self.reject_kl == "k1" else k3, advantages)
        kept = usable & ~rejected[documents.ids]
        beyond = usable & ((ratio > self.upper) | (ratio < self.lower))
        weights = torch.where(kept, self._weights(ratio), torch.zeros_like(ratio))
        any_usable = bool(usable.any())
        sums = CorrectionSums(
            tokens=int(usable.sum()),
            unusable=int((mask & ~usable).sum()),
            documents=int((documents.counts > 0).sum()),
            rejected=int(rejected.sum()),
            kept=int(kept.sum()),
            bounded=int(beyond.sum()),
            ratio=float(ratio[usable].sum()),
            weight=float(weights.sum()),
            weight_square=float(weights.square().sum()),
            k1=float(k1.sum()),
            k3=float(k3.sum()),
            perplexity_ratio=float(documents.mean(k1).clamp(max=LOG_RATIO_BOUND).exp()[documents.counts > 0].sum()),
            ratio_min=float(ratio[usable].min()) if any_usable else math.inf,
            ratio_max=float(ratio[usable].max()) if any_usable else -math.inf,
            gap_max=float(k1[usable].abs().max()) if any_usable else -math.inf,
        )
        device = rollout_log_probs.device
        return CorrectionResult(weights.to(device, torch.float32), kept.to(device), sums)

    def apply(self, experience: "Experience") -> "tuple[Experience, CorrectionSums]":
        """Correct the documents of this rank. No communication: pass the sums of all ranks to :meth:`metrics`.

        Args:
            experience: Documents with the ``required_columns``.

        Returns:
            The experience with the reduced ``response_mask`` and, unless the kind is ``"none"``, the column
            ``rollout_weights``; and this rank's sums. An experience without documents is returned as it is.

        Raises:
            ValueError: A column is missing, or the experience has been corrected before.
        """
        if not len(experience):
            return experience, CorrectionSums()
        needed = (*self.required_columns, *(("advantages",) if self.reject_negative_only else ()))
        missing = [name for name in needed if name not in experience]
        if missing:
            raise ValueError(
                f"the off-policy correction needs the column {missing[0]!r}, which the experience lacks; it needs "
                f"{', '.join(needed)}. Sample with a rollout engine that returns log-probabilities, or leave it out"
            )
        if "rollout_weights" in experience:
            raise ValueError("the experience has a column 'rollout_weights': correct it once per update, or drop it")
        advantages = experience["advantages"] if self.reject_negative_only else None
        if advantages is not None and "advantages" in experience.token_columns:
            advantages = _Documents(experience.lengths, experience.response_mask_host).mean(advantages.cpu().double())
        result = self(
            rollout_log_probs=experience["rollout_log_probs"],
            old_log_probs=experience["old_log_probs"],
            response_mask=experience["response_mask"],
            lengths=experience.lengths,
            advantages=advantages,
        )
        columns = {} if self.kind == "none" else {"rollout_weights": result.weights}
        return experience.with_token_columns(response_mask=result.response_mask, **columns), result.sums

    def metrics(self, parts: Sequence[CorrectionSums]) -> dict[str, float]:
        """Turn the sums of all ranks into the metrics that the class describes.

        Args:
            parts: The sums of each rank, in any order.

        Returns:
            Metrics by name; extrema are left out when there is no token.
        """
        total = CorrectionSums.merge(parts)
        tokens, kept, documents = max(total.tokens, 1), max(total.kept, 1), max(total.documents, 1)
        square = kept * total.weight_square
        bounded = {"tis": "rollout_truncated_fraction", "mis": "rollout_masked_fraction"}.get(self.kind)
        found = {
            "rollout_ratio_mean": total.ratio / tokens,
            "rollout_ratio_min": total.ratio_min,
            "rollout_ratio_max": total.ratio_max,
            "rollout_weight_mean": total.weight / kept,
            "rollout_ess": total.weight**2 / square if square > 0 else 0.0,
            "rollout_rejected_fraction": total.rejected / documents,
            "rollout_unusable_fraction": total.unusable / max(total.tokens + total.unusable, 1),
            "rollout_kl_k1": total.k1 / tokens,
            "rollout_kl_k3": total.k3 / tokens,
            "rollout_log_prob_gap_max": total.gap_max,
            "rollout_perplexity_ratio": total.perplexity_ratio / documents,
        }
        if bounded is not None:
            found[bounded] = total.bounded / tokens
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def _log_ratio(self, log_ratio: Tensor, documents: "_Documents") -> Tensor:
        if self.level == "token":
            return log_ratio
        shared = documents.sum(log_ratio) if self.level == "sequence" else documents.mean(log_ratio)
        return shared[documents.ids]

    def _weights(self, ratio: Tensor) -> Tensor:
        if self.kind == "none":
            return torch.ones_like(ratio)
        if self.kind == "mis":
            return torch.where((ratio >= self.lower) & (ratio <= self.upper), ratio, torch.zeros_like(ratio))
        return ratio.clamp(max=self.upper)

    def _rejected(self, documents: "_Documents", kl: Tensor, advantages: Tensor | None) -> Tensor:
        if self.reject_threshold is None:
            return torch.zeros(len(documents.counts), dtype=torch.bool)
        rejected = documents.mean(kl) > self.reject_threshold
        if not self.reject_negative_only:
            return rejected
        if advantages is None or advantages.shape != rejected.shape:
            raise ValueError(
                f"advantages={None if advantages is None else tuple(advantages.shape)} with reject_negative_only=True; "
                f"pass one number per document, shape ({len(rejected)},)"
            )
        return rejected & (advantages.detach().cpu() < 0)


class _Documents:
    """Sums and means of flat columns per document, over the tokens of a mask."""

    def __init__(self, lengths: Sequence[int], mask: Tensor) -> None:
        self.ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
        self.number = len(lengths)
        self.mask = mask
        self.counts = self.sum(torch.ones(len(mask), dtype=torch.float64))

    def sum(self, values: Tensor) -> Tensor:
        counted = torch.where(self.mask, values, torch.zeros_like(values))
        return torch.zeros(self.number, dtype=torch.float64).index_add_(0, self.ids, counted)

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.counts.clamp(min=1)


def _check_bounds(kind: str, lower: float | None, upper: float | None) -> tuple[float, float]:
    """The bounds of a kind with its defaults; those that it does not have are 0 and infinity."""
    if upper is not None and kind not in ("tis", "mis"):
        raise ValueError(f"upper={upper} has no effect with kind={kind!r}; leave it out, or use kind='tis'")
    if lower is not None and kind != "mis":
        raise ValueError(f"lower={lower} has no effect with kind={kind!r}; leave it out, or use kind='mis'")
    low, high = (0.5, 5.0) if kind == "mis" else (0.0, 2.0 if kind == "tis" else math.inf)
    low, high = low if lower is None else lower, high if upper is None else upper
    if not 0 <= low < math.inf:
        raise ValueError(f"lower={lower} must be finite and not negative; use for instance 0.5")
    if not low < high or (upper is not None and high == math.inf):
        raise ValueError(f"upper={upper} must be finite and above lower={low}; use for instance {max(2.0, 10 * low)}")
    return low, high


def _check_columns(sampler: Tensor, trainer: Tensor, mask: Tensor, lengths: Sequence[int]) -> None:
    for name, column in (("rollout_log_probs", sampler), ("old_log_probs", trainer), ("response_mask", mask)):
        if column.shape != (sum(lengths),):
            raise ValueError(
                f"{name} of shape {tuple(column.shape)} does not match lengths, which sum to {sum(lengths)}; pass the "
                "tokens of all documents one after another"
            )
