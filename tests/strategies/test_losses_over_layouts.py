"""Every loss, also ones of a user's own over whole sequences, has the plain model's gradients on every layout."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_rl_engines import Experience, ModelConfig, PolicyLoss
from lightning_rl_engines.algorithms import (
    CISPOLoss,
    GSPOLoss,
    LossOutput,
    ReinforceLoss,
    SFTLoss,
    TokenOutputs,
    masked,
)
from lightning_rl_engines.sequence import MicroBatch
from tests.strategies.checks import assert_gradients, assert_number, backward
from tests.strategies.layouts import titan
from tests.strategies.reference import Documents, make_documents, reference_gradients
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule, share, with_engine
from tests.support.models import random_documents, reference_log_probs, tiny_model_folder

MODEL = "one_kv"
PAIRS = (0, 0, 1, 9, 1, 2, 2, 3, 3)
SIGNS = (1.0, -1.0, 1.0, 0.0, -1.0, -1.0, 1.0, 1.0, -1.0)
# Pairs stay on a rank however the documents are shared over one or two.
PAIRED_ORDER = (0, 1, 3, 2, 4, 5, 6, 7, 8)


class SequenceLoss:
    """A user's loss of whole responses: one term per document from the sum of its log-probabilities."""

    required_columns = ("response_mask", "advantages", "ref_log_probs", "old_log_probs")

    def __init__(self, kind: str, denominator: Any) -> None:
        self.kind, self.denominator = kind, denominator

    def __call__(self, outputs: TokenOutputs, micro_batch: MicroBatch) -> LossOutput:
        mask = micro_batch["response_mask"]
        assert outputs.log_probs is not None
        log_probs = masked(outputs.log_probs, mask)
        owned, advantages = micro_batch.owned_documents, micro_batch["advantages"]
        if self.kind == "reinforce":
            terms = -advantages * micro_batch.segment_sum(log_probs)
        elif self.kind == "ratio":
            sums = micro_batch.segment_sum(log_probs - masked(micro_batch["old_log_probs"], mask))
            terms = -advantages * (sums / micro_batch.response_lengths.clamp(min=1)).exp()
            terms = torch.where(micro_batch.response_lengths > 0, terms, 0.0)
        else:
            sums = micro_batch.segment_sum(log_probs - masked(micro_batch["ref_log_probs"], mask))
            margins = 0.3 * micro_batch["sign"][owned] * sums[owned]
            pairs, inverse = micro_batch["pair"][owned].unique(return_inverse=True)
            margins = margins.new_zeros(len(pairs)).index_add(0, inverse, margins)
            total = -F.logsigmoid(margins[pairs != 9]).sum()
            return LossOutput(total=total, denominator=self.denominator)
        return LossOutput(total=terms[owned].sum(), denominator=self.denominator)


LOSSES: dict[str, tuple[Callable[..., LossOutput], bool]] = {
    "gspo": (GSPOLoss(sequence_clip_low=0.03, sequence_clip_high=0.04), False),
    "gspo_token_mean": (GSPOLoss(sequence_clip_low=0.03, sequence_clip_high=0.04, aggregation="token-mean"), False),
    "cispo": (CISPOLoss(is_weight_low=0.3, is_weight_high=0.4), False),
    "reinforce": (ReinforceLoss(aggregation="seq-mean-token-sum"), False),
    "sft": (SFTLoss(), False),
    "sft_by_sequence": (SFTLoss(aggregation="seq-mean-token-mean"), False),
    "sequence_reinforce": (SequenceLoss("reinforce", "groups"), False),
    "sequence_ratio": (SequenceLoss("ratio", "sequences"), False),
    "dpo": (SequenceLoss("dpo", "groups"), True),
}
"""Loss, and whether documents must stay together in pairs."""


def experience_of(documents: Documents, indices: list[int]) -> Experience:
    """One advantage per document instead of one per token, and pairs that are the groups."""
    experience = documents.experience(indices).drop("advantages", "group_ids")
    return experience.with_document_columns(
        advantages=torch.stack([documents.advantages[index][0] for index in indices]),
        group_ids=torch.tensor([PAIRS[index] for index in indices]),
        pair=torch.tensor([PAIRS[index] for index in indices]),
        sign=torch.tensor([SIGNS[index] for index in indices]),
    )


def plain_loss(model: Any, documents: Documents, name: str) -> Tensor:
    """The formula of each loss, on one document after the other."""
    log_probs, _ = reference_log_probs(model, documents.input_ids)
    terms: dict[int, Tensor] = {}
    for index, mask in enumerate(documents.response_mask):
        if not mask.any():
            continue
        now, advantage = log_probs[index][mask], documents.advantages[index][0]
        gap = now - documents.old_log_probs[index][mask]
        if name.startswith("gspo"):
            ratio = gap.mean().exp()
            clipped = -torch.min(ratio * advantage, ratio.clamp(0.97, 1.04) * advantage)
            if name == "gspo_token_mean":
                # The ratio of a token has the sequence's value and the gradient of that token alone.
                bound = clipped.detach() != (-ratio * advantage).detach()
                token = clipped if bound else -ratio.detach() * advantage * (now - now.detach()).exp()
                terms[index] = token.expand(len(now)).sum()
            else:
                terms[index] = clipped
        elif name == "cispo":
            terms[index] = (-gap.exp().clamp(0.7, 1.4).detach() * advantage * now).sum()
        elif name in ("reinforce", "sequence_reinforce"):
            terms[index] = -advantage * now.sum()
        elif name == "sft":
            terms[index] = -now.sum()
        elif name == "sft_by_sequence":
            terms[index] = -now.mean()
        elif name == "sequence_ratio":
            terms[index] = -advantage * gap.mean().exp()
        else:
            terms[index] = SIGNS[index] * (now - documents.ref_log_probs[index][mask]).sum()
    tokens = sum(int(mask.sum()) for mask in documents.response_mask)
    if name == "dpo":
        margins = [sum(terms[i] for i in terms if PAIRS[i] == pair) for pair in range(4)]
        return sum(-F.logsigmoid(0.3 * margin) for margin in margins) / 4  # type: ignore[return-value]
    by_token = {"gspo_token_mean": tokens, "cispo": tokens, "sft": tokens}
    return torch.stack(list(terms.values())).sum() / by_token.get(name, 4 if name == "sequence_reinforce" else 8)


@cache
def expected_of(name: str, model: str = MODEL) -> tuple[float, dict[str, Tensor]]:
    folder = str(tiny_model_folder(model))
    documents = make_documents(folder, vocabulary=64)
    return reference_gradients(folder, lambda model: plain_loss(model, documents, name))


def run_losses(folder: str, documents: Documents, layout: dict[str, Any]) -> Any:
    """On a rank: every loss, packed in one row and in several."""

    def body(module: EngineModule) -> Any:
        engine, found = module.engine, {}
        for name, (loss, paired) in LOSSES.items():
            order = PAIRED_ORDER if paired else range(documents.size)
            mine = share(order, engine.data_parallel_rank, engine.data_parallel_size)
            for budget in (None,) if paired else (None, 32):
                found[name, budget] = backward(
                    module, experience_of(documents, mine), loss, max_tokens_per_micro_batch=budget
                )
        return found

    return with_engine(body, ModelConfig(path=folder), **layout)


def check_losses(model: str, world: int, layout: dict[str, Any]) -> None:
    """Compare every loss on ``world`` ranks with the plain model."""
    folder = str(tiny_model_folder(model))
    documents = make_documents(folder, vocabulary=64)
    for found in run_workers(world, run_losses, folder, documents, layout):
        for (name, budget), (loss, metrics, gradients) in found.items():
            expected_loss, expected = expected_of(name, model)
            assert_number(loss, expected_loss, (name, budget))
            assert_gradients(gradients, expected, (name, budget))
            if name in ("gspo", "cispo"):
                assert 0 < metrics["clip_fraction"] < 1, name


@pytest.mark.parametrize(("world", "sp"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)])
def test_every_loss_has_the_gradients_of_the_plain_model(world: int, sp: int) -> None:
    check_losses(MODEL, world, {"ulysses_sp_size": sp})


# One head of keys and values cannot be split.
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("dp2", MODEL),
        ("replicate2", MODEL),
        ("tp2", "llama"),
        ("cp2", MODEL),
        ("cp2-headtail", MODEL),
        ("cp2-ptrr", MODEL),
        ("ep2", "qwen3_moe"),
        ("pp2", "llama"),
        pytest.param("cp2-tp2", "llama", marks=pytest.mark.exhaustive),
        pytest.param("ep2-tp2", "qwen3_moe", marks=pytest.mark.exhaustive),
    ],
)
def test_every_loss_has_the_gradients_of_the_plain_model_under_torchtitan(layout: str, model: str) -> None:
    check_losses(model, *titan(layout))


def run_with(folder: str, shapes: dict[str, Any], sequence_size: int, budget: int | None) -> Any:
    """On a rank: one SFT pass over documents of these (prompt, response) shapes, and the responses per row seen."""

    def body(module: EngineModule) -> Any:
        engine, seen = module.engine, []
        mine = share(range(len(shapes["ids"])), engine.data_parallel_rank, engine.data_parallel_size)
        if shapes["even"]:
            mine = [engine.data_parallel_rank] if engine.data_parallel_size == 2 else [0, 1]
        experience = Experience.from_documents(
            input_ids=[shapes["ids"][index] for index in mine], response_mask=[shapes["masks"][index] for index in mine]
        )

        def loss(outputs: TokenOutputs, micro_batch: MicroBatch) -> LossOutput:
            seen.append(int(micro_batch["response_mask"].sum()))
            return SFTLoss()(outputs, micro_batch)

        return *backward(module, experience, loss, max_tokens_per_micro_batch=budget), seen

    return with_engine(body, ModelConfig(path=folder), ulysses_sp_size=sequence_size)


def _shapes(pairs: list[tuple[int, int]], *, even: bool = False) -> dict[str, Any]:
    return {
        "ids": random_documents([prompt + response for prompt, response in pairs], seed=3),
        "masks": [torch.tensor([False] * prompt + [True] * response) for prompt, response in pairs],
        "even": even,
    }


def _plain_nll(folder: str, shapes: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    def loss(model: Any) -> Tensor:
        log_probs, _ = reference_log_probs(model, shapes["ids"])
        return -torch.cat([item[mask] for item, mask in zip(log_probs, shapes["masks"], strict=True)]).mean()

    return reference_gradients(folder, loss)


@pytest.mark.parametrize("world", [1, 2])
def test_micro_batches_with_three_and_seventeen_response_tokens(world: int) -> None:
    folder = str(tiny_model_folder("llama"))
    shapes = _shapes([(9, 3), (4, 17)], even=True)
    expected_loss, expected = _plain_nll(folder, shapes)
    results = run_workers(world, run_with, folder, shapes, 1, 24)
    assert sorted(count for *_, seen in results for count in seen) == [3, 17]
    for loss, _, gradients, _ in results:
        assert_number(loss, expected_loss)
        assert_gradients(gradients, expected)


@pytest.mark.parametrize(("world", "sp"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("budget", [None, 48])
def test_a_sequence_rank_without_response_tokens(world: int, sp: int, budget: int | None) -> None:
    folder = str(tiny_model_folder("llama"))
    shapes = _shapes([(40, 4), (34, 6), (36, 5)])
    expected_loss, expected = _plain_nll(folder, shapes)
    results = run_workers(world, run_with, folder, shapes, sp, budget)
    if budget is not None:
        assert all(0 in seen for *_, seen in results[::sp]), "no first rank of a row was left without response"
    for loss, _, gradients, _ in results:
        assert_number(loss, expected_loss)
        assert_gradients(gradients, expected)


def run_masked(folder: str, documents: Documents, sequence_size: int) -> Any:
    """On a rank: every loss with a document all masked, without it, and with nothing but masked documents."""

    def body(module: EngineModule) -> Any:
        engine, found = module.engine, {}
        rank, size = engine.data_parallel_rank, engine.data_parallel_size
        whole = experience_of(documents, list(range(documents.size)))
        ids, lengths = whole.documents("input_ids"), whole.lengths
        dead = torch.zeros(whole.num_tokens, dtype=torch.bool)
        silent = whole.with_token_columns(response_mask=dead)
        # Document 2 has the budget's length, so it is a micro-batch of its own.
        assert lengths[2] == len(ids[2]) == 29
        mixed = [index for index in range(documents.size) if index != 2]
        kept = Experience.cat([whole.select(mixed), silent.select([2])])
        for name, (loss, _) in LOSSES.items():
            budget = None if name == "dpo" else 32
            order = {"with": range(len(kept)), "without": range(len(mixed))}
            runs = {
                key: backward(module, kept.select(share(items, rank, size)), loss, max_tokens_per_micro_batch=budget)
                for key, items in order.items()
            }
            nothing = silent.select(share(range(documents.size), rank, size))
            runs["nothing"] = backward(module, nothing, loss, max_tokens_per_micro_batch=budget)
            found[name] = runs
        before = dict(engine.get_per_tensor_param(module.policy))
        output = engine.train_batch(module.policy, module.optimizers(), nothing, PolicyLoss(), max_grad_norm=1.0)
        after = dict(engine.get_per_tensor_param(module.policy))
        return found, output, all(torch.equal(before[key], after[key]) for key in before)

    return with_engine(body, ModelConfig(path=folder), ulysses_sp_size=sequence_size)


@pytest.mark.parametrize(("world", "sp"), [(1, 1), (4, 2)])
def test_masked_micro_batches_leave_the_others_alone(world: int, sp: int) -> None:
    folder = str(tiny_model_folder(MODEL))
    documents = make_documents(folder, vocabulary=64)
    for found, output, unchanged in run_workers(world, run_masked, folder, documents, sp):
        for name, runs in found.items():
            if name != "dpo":  # a masked half of a pair does change the pair
                assert_number(runs["with"][0], runs["without"][0], name)
                assert_gradients(runs["with"][2], runs["without"][2], name)
            assert all(math.isfinite(runs["with"][0]) and value.isfinite().all() for value in runs["with"][2].values())
            loss, _, gradients = runs["nothing"]
            assert name == "dpo" or loss == 0
            assert all(not gradient.any() for gradient in gradients.values()), name
        assert output.loss == 0 and output.metrics["grad_norm"] == 0 and output.metrics["skipped_step"] == 0
        assert unchanged


def run_garbage(folder: str, documents: Documents, sequence_size: int) -> Any:
    """On a rank: every loss with clean columns, and with NaN and infinities where the mask is off."""

    def body(module: EngineModule) -> Any:
        engine, found = module.engine, {}
        mine = share(range(documents.size), engine.data_parallel_rank, engine.data_parallel_size)
        clean = documents.experience(mine)
        losses = {
            "policy": PolicyLoss(entropy_coef=0.1, kl_coef=0.1),
            **{name: LOSSES[name][0] for name in ("gspo", "cispo", "reinforce", "sft", "sequence_ratio")},
        }
        off = ~clean["response_mask"]
        for name, loss in losses.items():
            if name == "sequence_ratio":
                clean = experience_of(documents, mine)
            runs = []
            for garbage in (None, math.nan, math.inf, -math.inf):
                columns = ("advantages", "old_log_probs", "ref_log_probs")
                dirty = {
                    key: clean[key].masked_fill(off, garbage)
                    for key in columns
                    if garbage is not None and key in clean.token_columns
                }
                runs.append(backward(module, clean.with_token_columns(**dirty), loss, calculate_entropy=True))
            found[name] = runs
        return found

    return with_engine(body, ModelConfig(path=folder), ulysses_sp_size=sequence_size)


@pytest.mark.parametrize(("world", "sp"), [(1, 1), (2, 2)])
def test_garbage_at_masked_positions_changes_nothing(world: int, sp: int) -> None:
    folder = str(tiny_model_folder(MODEL))
    documents = make_documents(folder, vocabulary=64)
    for found in run_workers(world, run_garbage, folder, documents, sp):
        for name, (clean, *others) in found.items():
            assert math.isfinite(clean[0])
            for dirty in others:
                assert dirty[:2] == clean[:2], name
                assert all(torch.equal(dirty[2][key], value) for key, value in clean[2].items()), name


def run_unknown_denominator(
    folder: str, documents: Documents, denominator: Any, forward_only: bool, in_metric: bool
) -> None:
    def body(module: EngineModule) -> None:
        engine = module.engine
        mine = share(range(documents.size), engine.data_parallel_rank, engine.data_parallel_size)
        experience = documents.experience(mine).drop("group_ids")

        def loss(outputs: TokenOutputs, micro_batch: MicroBatch) -> LossOutput:
            assert outputs.log_probs is not None
            total = outputs.log_probs.sum()
            metrics = {"sum": (total.detach(), denominator)} if in_metric else {}
            return LossOutput(total=total, denominator="tokens" if in_metric else denominator, metrics=metrics)

        with engine.train_mode(module.policy):
            engine.forward_backward_batch(module.policy, experience, loss, forward_only=forward_only)

    with_engine(body, ModelConfig(path=folder))


@pytest.mark.parametrize(
    ("denominator", "message"),
    [
        ("documents", r"denominator='documents' is unknown; use 'tokens', 'sequences', 'groups' or a positive number"),
        ("groups", r"denominator='groups' needs a per-document column 'group_ids'"),
        ("max", r"denominator='max' is unknown"),
        (0.0, r"denominator=0.0 is unknown"),
        (-2, r"denominator=-2 is unknown"),
        (math.nan, r"denominator=nan is unknown"),
    ],
)
@pytest.mark.parametrize("forward_only", [False, True])
def test_an_unknown_denominator_is_refused_on_all_ranks(denominator: Any, message: str, forward_only: bool) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    for in_metric in (False, True):
        if in_metric and denominator == "max":
            continue  # a reduction, but no denominator
        with pytest.raises(WorkerError, match=message) as error:
            run_workers(2, run_unknown_denominator, folder, documents, denominator, forward_only, in_metric)
        assert error.value.all_ranks_raised(ValueError)


def run_disagreement(folder: str, documents: Documents, in_metric: bool) -> None:
    def body(module: EngineModule) -> None:
        engine = module.engine
        mine = share(range(documents.size), engine.data_parallel_rank, engine.data_parallel_size)
        odd = "sequences" if engine.data_parallel_rank else "tokens"

        def loss(outputs: TokenOutputs, micro_batch: MicroBatch) -> LossOutput:
            assert outputs.log_probs is not None
            total = outputs.log_probs.sum()
            return LossOutput(
                total=total, denominator="tokens" if in_metric else odd, metrics={"sum": (total.detach(), odd)}
            )

        backward(module, documents.experience(mine), loss)

    with_engine(body, ModelConfig(path=folder))


@pytest.mark.parametrize("in_metric", [False, True])
def test_ranks_that_divide_by_different_counts_are_refused(in_metric: bool) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    name = "sum" if in_metric else "loss"
    with pytest.raises(WorkerError, match=f"ranks reduce '{name}' by 'tokens' and by 'sequences'") as error:
        run_workers(2, run_disagreement, folder, documents, in_metric)
    assert error.value.all_ranks_raised(ValueError)
