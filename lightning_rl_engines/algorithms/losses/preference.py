"""Losses on preference pairs and on scores: DPO, pairwise reward models, regression.

A pair is two documents with equal ``group_ids``, one of them ``preferred``. Its loss reads a sum over each document, so
both share a row (``groups_share_rows``; the planner keeps them together), and the mean over pairs is a sum divided by
the count ``"groups"``. Sums over documents run over the whole row, so every sequence rank sees the same ones; the term
of a pair is counted on the rank that owns its documents, and the backward pass carries the gradient to all.

The score of a document is its value at the last response token. As everywhere, that is the value of the state *before*
the token: the model has read all tokens up to it. So end documents with an end-of-sequence token inside the response
mask; it says nothing about the response, and the score has then seen everything that does.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from typing_extensions import override

from lightning_rl_engines.algorithms.aggregation import masked
from lightning_rl_engines.algorithms.losses.base import Metrics, require_columns
from lightning_rl_engines.algorithms.outputs import LossOutput, TokenOutputs

if TYPE_CHECKING:
    from lightning_rl_engines.sequence.packing import MicroBatch

PreferenceKind: TypeAlias = Literal["sigmoid", "ipo"]
"""What :class:`DPOLoss` makes of a margin."""


class Pairs(NamedTuple):
    """The preference pairs of a row.

    Attributes:
        chosen: ``[pairs]`` int64, document of the row that is preferred.
        rejected: ``[pairs]`` int64, the other one.
        owned: ``[pairs]`` bool, True where this rank accounts for the pair.
    """

    chosen: Tensor
    rejected: Tensor
    owned: Tensor

    def sum(self, terms: Tensor) -> Tensor:
        """Sum the terms of the pairs that this rank accounts for; connected to the graph also where it has none."""
        return torch.where(self.owned, terms, torch.zeros_like(terms)).sum()


class DocumentLoss(ABC):
    """Base of losses that are a sum of one term per document or pair.

    Attributes:
        needs_entropy: The forward pass has to compute the entropy.
        needs_reference: The experience needs the column ``ref_log_probs``.
        required_columns: Columns that the experience needs.
        checked_columns: Per-document columns that :meth:`check_documents` looks at.
        groups_share_rows: Documents of equal ``group_ids`` have to be in one row.
    """

    needs_entropy: bool = False
    needs_reference: bool = False
    required_columns: tuple[str, ...] = ("response_mask",)
    checked_columns: tuple[str, ...] = ()
    groups_share_rows: bool = False

    @abstractmethod
    def __call__(self, outputs: TokenOutputs, micro_batch: "MicroBatch") -> LossOutput:
        """Compute the sums of the loss and of its metrics. Collective over the sequence group of the row.

        Args:
            outputs: Results of the forward pass on this micro-batch.
            micro_batch: The micro-batch, with the columns named by ``required_columns``.

        Returns:
            Sums and the denominators that the engine divides them by.
        """

    def check_documents(self, documents: Mapping[str, Sequence[Any]]) -> None:
        """Refuse a global batch that the loss cannot use; the engine calls it on all ranks with the same columns.

        Args:
            documents: ``response_lengths`` and the ``checked_columns``, one value per document of all data ranks.

        Raises:
            ValueError: A document has no response token.
        """
        lengths = documents["response_lengths"]
        if 0 in lengths:
            raise ValueError(
                f"document {list(lengths).index(0)} of the global batch has no response token, so "
                f"{type(self).__name__} has nothing to judge; give it one, for instance an end-of-sequence token"
            )

    def require_columns(self, micro_batch: "MicroBatch") -> None:
        """Check that the required columns are there.

        Args:
            micro_batch: The micro-batch.

        Raises:
            ValueError: One is missing.
        """
        require_columns(type(self).__name__, self.required_columns, micro_batch)

    def scores(self, outputs: TokenOutputs, micro_batch: "MicroBatch") -> Tensor:
        """Return the value at the last response token of each document. Collective over the sequence group.

        Args:
            outputs: Results of the forward pass.
            micro_batch: The micro-batch.

        Returns:
            ``[num_documents]`` fp32 or fp64, with gradient.

        Raises:
            ValueError: The model returned no values.
        """
        if outputs.values is None:
            raise ValueError(
                f"{type(self).__name__} needs outputs.values, got None; use a model with head='value', not 'lm'"
            )
        return micro_batch.segment_last(masked(outputs.values, micro_batch["response_mask"].bool()))


class PairLoss(DocumentLoss):
    """Base of losses on preference pairs, given by the per-document columns ``group_ids`` and ``preferred`` (bool)."""

    required_columns: tuple[str, ...] = ("response_mask", "group_ids", "preferred")
    checked_columns = ("group_ids", "preferred")
    groups_share_rows = True

    @override
    def check_documents(self, documents: Mapping[str, Sequence[Any]]) -> None:
        """Refuse a global batch whose groups are not pairs; the engine calls it on all ranks with the same columns.

        Args:
            documents: ``response_lengths``, ``group_ids`` and ``preferred``, one per document of all data ranks.

        Raises:
            ValueError: A document has no response token, or a group is no pair with one preferred document.
        """
        super().check_documents(documents)
        groups: dict[int, list[bool]] = {}
        for group, preferred in zip(documents["group_ids"], documents["preferred"], strict=True):
            groups.setdefault(group, []).append(bool(preferred))
        for group, flags in groups.items():
            if sorted(flags) != [False, True]:
                raise ValueError(
                    f"group_ids={group} has {len(flags)} documents, {sum(flags)} of them preferred, over all ranks; "
                    f"{type(self).__name__} needs pairs of two documents, one of them preferred"
                )

    def pairs(self, micro_batch: "MicroBatch") -> Pairs:
        """Find the pairs of a row, without waiting for the device.

        Args:
            micro_batch: A row with whole pairs.

        Returns:
            Documents of each pair.

        Raises:
            ValueError: The row has an odd number of documents.
        """
        # Real documents come first in a row, a dummy and padding after them.
        count = sum(document >= 0 for document in micro_batch.documents)
        if count % 2:
            raise ValueError(
                f"a row of {count} documents holds no whole pairs; run {type(self).__name__} through an engine, which "
                "keeps pairs together"
            )
        order = torch.arange(count, device=micro_batch.device)
        # Sorted by group, the preferred document first: a stable sort keeps the order of the sort before it.
        order = order[torch.argsort(micro_batch["preferred"][order].to(torch.int8), descending=True, stable=True)]
        order = order[torch.argsort(micro_batch["group_ids"][order], stable=True)]
        chosen, rejected = order[0::2], order[1::2]
        return Pairs(chosen, rejected, micro_batch.owned_documents[chosen])

    def margins(self, values: Tensor, pairs: Pairs, micro_batch: "MicroBatch") -> Tensor:
        """Subtract the value of the rejected document from that of the chosen one.

        Args:
            values: ``[num_documents]``.
            pairs: The pairs of the row.
            micro_batch: The row.

        Returns:
            ``[pairs]``; NaN where the two documents are no pair, so that no step is taken on them.
        """
        group_ids, preferred = micro_batch["group_ids"], micro_batch["preferred"].bool()
        real = (group_ids[pairs.chosen] == group_ids[pairs.rejected]) & preferred[pairs.chosen]
        real &= ~preferred[pairs.rejected]
        margins = values[pairs.chosen] - values[pairs.rejected]
        return torch.where(real, margins, torch.full_like(margins, torch.nan))


def _pair_metrics(pairs: Pairs, rewards: Tensor, margins: Tensor, total: Tensor) -> Metrics:
    rewards, margins = rewards.detach(), margins.detach()
    terms = {
        "reward_margin": margins,
        "reward_accuracy": (margins > 0).to(margins.dtype),
        "chosen_reward": rewards[pairs.chosen],
        "rejected_reward": rewards[pairs.rejected],
    }
    found: Metrics = {name: (pairs.sum(value), "groups") for name, value in terms.items()}
    return {"preference_loss": (total.detach(), "groups"), **found}


class DPOLoss(PairLoss):
    """Direct preference optimization (Rafailov et al. 2023, equation 7), its smoothed form, and IPO.

    With ``h`` the log-ratio of policy and reference of the preferred response minus that of the other one:

    - ``"sigmoid"``: ``-(1 - s) * log sigmoid(beta * h) - s * log sigmoid(-beta * h)``, ``s`` being ``label_smoothing``
      (conservative DPO, Mitchell 2023; 0 is DPO);
    - ``"ipo"``: ``(h - 1 / (2 * beta))^2`` (Azar et al. 2023, equation 17).

    Log-ratios are sums over response tokens, or with ``average_log_probs`` means, as TRL takes them for IPO. Needs the
    columns ``group_ids``, ``preferred`` and ``ref_log_probs``. The loss is the mean over pairs (``"groups"``).

    Metrics, means over pairs: ``preference_loss``; ``reward_margin``, ``chosen_reward``, ``rejected_reward``, the
    implicit rewards ``beta * log-ratio``; ``reward_accuracy``; ``chosen_log_prob``, ``rejected_log_prob`` of whole
    responses.
    """

    needs_reference = True
    required_columns = (*PairLoss.required_columns, "ref_log_probs")

    def __init__(
        self,
        *,
        beta: float = 0.1,
        kind: PreferenceKind = "sigmoid",
        label_smoothing: float = 0.0,
        average_log_probs: bool = False,
    ) -> None:
        """Configure the loss.

        Args:
            beta: Strength of the pull towards the reference, positive.
            kind: ``"sigmoid"`` or ``"ipo"``.
            label_smoothing: Probability that a label is wrong, from 0 to below 0.5; only with ``"sigmoid"``.
            average_log_probs: Divide the log-ratio of a response by its tokens.

        Raises:
            ValueError: A value is unknown, out of range or without effect.
        """
        if kind not in get_args(PreferenceKind):
            raise ValueError(f"kind={kind!r} is unknown; use one of {', '.join(get_args(PreferenceKind))}")
        if not 0 < beta < math.inf:
            raise ValueError(f"beta={beta} must be positive and finite, for instance 0.1")
        if not 0 <= label_smoothing < 0.5:
            raise ValueError(f"label_smoothing={label_smoothing} must be at least 0 and below 0.5, for instance 0.0")
        if kind == "ipo" and label_smoothing:
            raise ValueError(f"label_smoothing={label_smoothing} has no effect with kind='ipo'; leave it 0.0")
        self.beta = beta
        self.kind: PreferenceKind = kind
        self.label_smoothing = label_smoothing
        self.average_log_probs = average_log_probs

    @override
    def __call__(self, outputs: TokenOutputs, micro_batch: "MicroBatch") -> LossOutput:
        self.require_columns(micro_batch)
        if outputs.log_probs is None:
            raise ValueError("DPOLoss needs outputs.log_probs, got None; use a model with head='lm', not 'value'")
        mask = micro_batch["response_mask"].bool()
        log_probs = masked(outputs.log_probs, mask)
        reference = masked(micro_batch.per_token("ref_log_probs"), mask)
        # Summed after the subtraction: the small difference of two large sums would lose its digits.
        log_ratios = micro_batch.segment_sum(log_probs - reference)
        sums = micro_batch.segment_sum(log_probs.detach())
        if self.average_log_probs:
            log_ratios = log_ratios / micro_batch.response_lengths.clamp(min=1)
        pairs = self.pairs(micro_batch)
        margins = self.margins(log_ratios, pairs, micro_batch)
        total = pairs.sum(self._terms(margins))
        metrics = _pair_metrics(pairs, self.beta * log_ratios, self.beta * margins, total)
        metrics["chosen_log_prob"] = (pairs.sum(sums[pairs.chosen]), "groups")
        metrics["rejected_log_prob"] = (pairs.sum(sums[pairs.rejected]), "groups")
        return LossOutput(total=total, denominator="groups", metrics=metrics)

    def _terms(self, margins: Tensor) -> Tensor:
        if self.kind == "ipo":
            return (margins - 1 / (2 * self.beta)).square()
        scaled = self.beta * margins
        return -(1 - self.label_smoothing) * logsigmoid(scaled) - self.label_smoothing * logsigmoid(-scaled)


class RewardModelLoss(PairLoss):
    """Pairwise loss of a reward model: ``-log sigmoid(score_chosen - score_rejected)``, the mean over pairs.

    The likelihood of the Bradley-Terry model (Bradley & Terry 1952; Ouyang et al. 2022, equation 1). A model with
    ``head="value"`` gives the scores, at the last response token (see the top of this module). Needs the columns
    ``group_ids`` and ``preferred``.

    Metrics, means over pairs: ``preference_loss`` (with the centering term), ``reward_margin``, ``reward_accuracy``,
    ``chosen_reward``, ``rejected_reward``.
    """

    def __init__(self, *, center_coef: float = 0.0) -> None:
        """Configure the loss.

        Args:
            center_coef: Weight of ``(score_chosen + score_rejected)^2``, which keeps scores near zero, since the
                likelihood leaves their offset free (Eisenstein et al. 2023, section 2); not negative.

        Raises:
            ValueError: ``center_coef`` is out of range.
        """
        if not 0 <= center_coef < math.inf:
            raise ValueError(f"center_coef={center_coef} must be finite and not negative, for instance 0.01")
        self.center_coef = center_coef

    @override
    def __call__(self, outputs: TokenOutputs, micro_batch: "MicroBatch") -> LossOutput:
        self.require_columns(micro_batch)
        scores = self.scores(outputs, micro_batch)
        pairs = self.pairs(micro_batch)
        margins = self.margins(scores, pairs, micro_batch)
        sums = scores[pairs.chosen] + scores[pairs.rejected]
        total = pairs.sum(-logsigmoid(margins) + self.center_coef * sums.square())
        metrics = _pair_metrics(pairs, scores, margins, total)
        return LossOutput(total=total, denominator="groups", metrics=metrics)


class RewardRegressionLoss(DocumentLoss):
    """Squared error of scores against the per-document column ``targets``, the mean over documents.

    A model with ``head="value"`` gives the scores, at the last response token (see the top of this module).

    Metrics, means over documents: ``regression_loss``, ``score_mean``, ``target_mean``, ``absolute_error``.
    """

    required_columns = ("response_mask", "targets")

    @override
    def __call__(self, outputs: TokenOutputs, micro_batch: "MicroBatch") -> LossOutput:
        self.require_columns(micro_batch)
        scores = self.scores(outputs, micro_batch)
        targets = micro_batch["targets"].to(scores.dtype)
        owned = micro_batch.owned_documents

        def count(terms: Tensor) -> Tensor:
            return torch.where(owned, terms, torch.zeros_like(terms)).sum()

        errors = scores - targets
        total = count(errors.square())
        metrics: Metrics = {
            "regression_loss": (total.detach(), "sequences"),
            "score_mean": (count(scores.detach()), "sequences"),
            "target_mean": (count(targets), "sequences"),
            "absolute_error": (count(errors.detach().abs()), "sequences"),
        }
        return LossOutput(total=total, denominator="sequences", metrics=metrics)
