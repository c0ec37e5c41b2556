"""Documents do not see each other or the padding; every number describes its own token, wherever a row is cut."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_rl_engines import Experience, ModelConfig
from lightning_rl_engines.algorithms import LossOutput, TokenOutputs
from lightning_rl_engines.sequence import MicroBatch, pack_row
from tests.strategies.checks import assert_gradients, assert_number, backward
from tests.strategies.reference import make_documents, reference_gradients
from tests.support import run_workers
from tests.support.engine import EngineModule, share, with_engine
from tests.support.models import random_documents, reference_log_probs, tiny_model_folder

LENGTHS = (7, 13, 2, 22, 1, 9, 5)
# Ids of documents of the isolation tests come from disjoint halves of the vocabulary.
FIRST = random_documents([11], vocabulary=30, seed=1)[0]
OTHER = random_documents([11], vocabulary=30, seed=2)[0]
SECOND = random_documents([14], vocabulary=30, seed=3)[0] + 30


def whole(documents: list[Tensor], **columns: Any) -> Experience:
    """Documents whose every token, the first apart, counts as response."""
    masks = [[True] * len(document) for document in documents]
    return Experience.from_documents(input_ids=documents, response_mask=masks, **columns)


def plain(folder: str, documents: list[Tensor], temperature: Any = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        return reference_log_probs(model, documents, temperature)


def in_one_row(module: EngineModule, experience: Experience, order: list[int], **changes: Any) -> tuple[Any, Any]:
    """Outputs and micro-batch of this rank's slice of a row of documents in a given order, bypassing the planner."""
    engine = module.engine
    micro_batch = pack_row(
        experience,
        order,
        sequence_size=engine.sequence_parallel_size,
        sequence_rank=engine.sequence_parallel_rank,
        group=engine.sequence_parallel_group,
    )
    for name, change in changes.items():
        micro_batch = dataclasses.replace(micro_batch, **{name: change(micro_batch)})
    return module.policy(micro_batch, calculate_entropy=True), micro_batch


def by_document(outputs: TokenOutputs, micro_batch: MicroBatch, document: int) -> dict[str, Tensor]:
    """This rank's log-probabilities and entropies of the ``document``-th document of the row."""
    here = micro_batch.document_ids == document
    assert outputs.log_probs is not None and outputs.entropy is not None
    return {"log_probs": outputs.log_probs[here].detach(), "entropy": outputs.entropy[here].detach()}


def run_isolation(folder: str, sequence_size: int, checkpointing: bool) -> Any:
    """On a rank: what the second document gives beside other first documents, paddings, and on its own."""

    def body(module: EngineModule) -> Any:
        engine, found = module.engine, {}
        row = [SECOND, FIRST, SECOND]
        with engine.train_mode(module.policy):
            outputs = {
                "as it is": in_one_row(module, whole([FIRST, SECOND]), [0, 1]),
                "other first": in_one_row(module, whole([OTHER, SECOND]), [0, 1]),
                "other padding": in_one_row(module, whole([FIRST, SECOND]), [0, 1], input_ids=_noisy_padding),
            }
            found["second"] = {name: by_document(*pair, 1) for name, pair in outputs.items()}
            found["padded"] = outputs["as it is"][1].documents[-1] == -1
            found["first"] = [by_document(*outputs[name], 0) for name in ("as it is", "other first", "other padding")]
            twice = in_one_row(module, whole(row), [0, 1, 2])
            found["places"] = [by_document(*twice, place) for place in (0, 2)]
            del outputs, twice
            rotary = next(part for name, part in module.policy.named_modules() if name.endswith("rotary_emb"))
            handle = rotary.register_forward_hook(_feel_positions, with_kwargs=True)
            felt = in_one_row(module, whole(row), [0, 1, 2])
            found["felt"] = [by_document(*felt, place) for place in (0, 2)]
            handle.remove()
            del felt

            def only_second(outputs: TokenOutputs, micro_batch: MicroBatch) -> LossOutput:
                assert outputs.log_probs is not None and outputs.entropy is not None
                wanted = micro_batch.per_token("wanted")
                return LossOutput(total=(wanted * (outputs.log_probs + outputs.entropy)).sum(), denominator="sequences")

            experience = whole([FIRST, SECOND], wanted=torch.tensor([0.0, 1.0]))
            found["gradients"] = backward(module, experience, only_second, calculate_entropy=True)[2]
        return found

    config = ModelConfig(path=folder, gradient_checkpointing=checkpointing)
    return with_engine(body, config, ulysses_sp_size=sequence_size)


def _feel_positions(part: Any, args: Any, kwargs: Any, output: Any) -> Any:
    """Rotary embeddings are relative, so a shift of all positions would go unseen; make the place itself matter."""
    growth = 1 + 0.02 * kwargs["position_ids"][..., None]
    return tuple(item * growth for item in output)


def _noisy_padding(micro_batch: MicroBatch) -> Tensor:
    """Other ids in the document at the end that is padding, on the ranks that hold a part of it."""
    local = len(micro_batch.input_ids)
    bounds = micro_batch.row.cu_seqlens_host
    rank = 0 if micro_batch.group is None else torch.distributed.get_rank(micro_batch.group)
    place = torch.arange(local) + rank * local
    padding = place >= bounds[-2] if micro_batch.documents[-1] == -1 else torch.zeros(local, dtype=torch.bool)
    return torch.where(padding, 17 + place % 40, micro_batch.input_ids)


@pytest.mark.parametrize(("world", "sp"), [(1, 1), (2, 2), (4, 4)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_documents_do_not_see_each_other_or_the_padding(world: int, sp: int, checkpointing: bool) -> None:
    folder = str(tiny_model_folder("llama"))
    (expected,), (expected_entropy,) = plain(folder, [SECOND])
    results = run_workers(world, run_isolation, folder, sp, checkpointing)
    # 11 + 14 tokens: padding under 2 and 4 sequence ranks.
    assert all(found["padded"] == (sp > 1) for found in results)
    for found in results:
        second = found["second"]
        for name in ("other first", "other padding"):
            for key in ("log_probs", "entropy"):
                assert torch.equal(second[name][key], second["as it is"][key]), (name, key)
        as_it_is, other_first, other_padding = found["first"]
        assert torch.equal(as_it_is["log_probs"], other_padding["log_probs"])
        # The change is one that the changed document itself does feel.
        assert len(as_it_is["log_probs"]) < 2 or not torch.equal(as_it_is["log_probs"], other_first["log_probs"])
        embeddings = found["gradients"]["model.embed_tokens.weight"]
        inputs = SECOND[:-1].unique()
        absent = torch.ones(len(embeddings), dtype=torch.bool)
        absent[inputs] = False
        assert torch.equal(embeddings[absent], torch.zeros_like(embeddings[absent]))
        assert (embeddings[inputs] != 0).any(1).all()
    for place in (0, 1):
        rows = torch.cat([found["places"][place]["log_probs"] for found in results])
        # The slot before a document describes its first token: at the front of a row it comes last.
        values = rows[:-1] if place == 0 else rows[1:]
        torch.testing.assert_close(values, expected[1:], rtol=1e-6, atol=1e-6)
    front, back = (torch.cat([found["felt"][place]["log_probs"] for found in results]) for place in (0, 1))
    torch.testing.assert_close(front[:-1], back[1:], rtol=1e-6, atol=1e-6)
    assert (front[:-1] - expected[1:]).abs().max() > 1e-3
    entropy = torch.cat([found["places"][1]["entropy"] for found in results])
    torch.testing.assert_close(entropy[1:], expected_entropy[1:], rtol=1e-6, atol=1e-6)


def run_infer(folder: str, sequence_size: int, temperature: Any) -> Any:
    """On a rank: columns of its documents by ``infer_batch``, and the tokens at the edges of its slices of rows."""

    def body(module: EngineModule) -> Any:
        engine = module.engine
        mine = share(range(len(LENGTHS)), engine.data_parallel_rank, engine.data_parallel_size)
        documents = random_documents(LENGTHS)
        heat = [0.7 + 0.2 * index for index in mine]
        experience = whole([documents[index] for index in mine], heat=torch.tensor(heat))
        edges: list[int] = []

        def watch(outputs: TokenOutputs, micro_batch: MicroBatch) -> LossOutput:
            tokens = micro_batch.token_indices.tolist()
            edges.extend([*tokens[:2], *tokens[-2:]])
            assert outputs.log_probs is not None
            return LossOutput(total=outputs.log_probs.sum(), denominator=1.0)

        with engine.eval_mode(module.policy):
            columns = engine.infer_batch(
                module.policy, experience, calculate_entropy=True, temperature=temperature
            ).columns
            engine.forward_backward_batch(module.policy, experience, watch, forward_only=True, temperature=temperature)
        return mine, columns, {edge for edge in edges if edge >= 0}

    return with_engine(body, ModelConfig(path=folder), ulysses_sp_size=sequence_size)


@pytest.mark.parametrize(("world", "sp"), [(1, 1), (2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("temperature", [0.7, "heat"])
@pytest.mark.parametrize("name", ["odd_vocab", "qwen3"])
def test_every_token_has_its_own_log_prob_and_entropy(world: int, sp: int, temperature: Any, name: str) -> None:
    folder = str(tiny_model_folder(name))
    documents = random_documents(LENGTHS)
    heat = [0.7 + 0.2 * index for index in range(len(LENGTHS))]
    log_probs, entropy = plain(folder, documents, heat if temperature == "heat" else temperature)
    results = run_workers(world, run_infer, folder, sp, temperature)
    bound = math.log(97 if name == "odd_vocab" else 64)
    for first in range(0, world, sp):
        peers = results[first : first + sp]
        mine, columns, _ = peers[0]
        expected = {"log_probs": log_probs, "entropy": entropy}
        edges = sorted(set().union(*(edge for *_, edge in peers)))
        assert len(edges) >= min(4 * sp, sum(LENGTHS[index] for index in mine)) - 3
        lasts = torch.tensor([LENGTHS[index] for index in mine]).cumsum(0) - 1
        starts = torch.tensor([0, *(lasts[:-1] + 1).tolist()])
        for key, values in expected.items():
            flat = torch.cat([values[index] for index in mine])
            for indices in (torch.tensor(edges), lasts, torch.arange(len(flat))):
                torch.testing.assert_close(columns[key][indices], flat[indices], rtol=1e-5, atol=1e-5)
            assert not columns[key][starts].any()
        assert (columns["log_probs"] <= 0).all()
        assert (columns["entropy"] >= 0).all() and (columns["entropy"] <= bound).all()
        for _, other, _ in peers[1:]:
            assert all(torch.equal(other[key], columns[key]) for key in columns)


def run_three_passes(folder: str, sequence_size: int, checkpointing: bool) -> Any:
    """On a rank: old, reference and current log-probabilities of unchanged weights."""

    def body(module: EngineModule) -> Any:
        engine = module.engine
        frozen = engine.build_model(ModelConfig(path=folder), trainable=False)
        mine = share(range(len(LENGTHS)), engine.data_parallel_rank, engine.data_parallel_size)
        documents = random_documents(LENGTHS)
        experience = whole([documents[index] for index in mine], heat=torch.tensor([0.7 + 0.2 * i for i in mine]))
        options: Any = {"temperature": "heat", "max_tokens_per_micro_batch": 36, "calculate_entropy": True}
        old, ref = (
            engine.infer_batch(model, experience, **options).columns["log_probs"] for model in (module.policy, frozen)
        )
        current = torch.zeros(experience.num_tokens)

        def capture(outputs: TokenOutputs, micro_batch: MicroBatch) -> LossOutput:
            assert outputs.log_probs is not None
            real = micro_batch.token_indices >= 0
            current[micro_batch.token_indices[real]] = outputs.log_probs.detach()[real]
            return LossOutput(total=outputs.log_probs.sum(), denominator="tokens")

        _, _, gradients = backward(module, experience, capture, **options)
        gathered = engine.all_gather_objects(current, "sequence")
        frozen_has = [parameter.requires_grad or parameter.grad is not None for parameter in frozen.parameters()]
        return old, ref, torch.stack(gathered).sum(0), any(frozen_has), any(item.any() for item in gradients.values())

    config = ModelConfig(path=folder, gradient_checkpointing=checkpointing)
    return with_engine(body, config, ulysses_sp_size=sequence_size)


@pytest.mark.parametrize(("world", "sp", "checkpointing"), [(1, 1, False), (2, 1, True), (2, 2, False), (4, 2, True)])
def test_old_reference_and_current_log_probs_are_bit_equal(world: int, sp: int, checkpointing: bool) -> None:
    for old, ref, current, frozen_trains, trains in run_workers(
        world, run_three_passes, str(tiny_model_folder("qwen2")), sp, checkpointing
    ):
        assert old.count_nonzero() == len(old) - (old == 0).sum() and (old < 0).sum() > 5
        assert torch.equal(old, ref) and torch.equal(old, current)
        assert trains and not frozen_trains


def run_order(folder: str, balance: bool, counts: tuple[int, ...], sequence_size: int) -> Any:
    """On a rank: the log-probabilities of its documents from micro-batches of two, and the documents per row."""

    def body(module: EngineModule) -> Any:
        engine, rows = module.engine, []
        documents = random_documents([8, 7, 8, 6, 8], seed=7)
        start = sum(counts[: engine.data_parallel_rank])
        mine = list(range(start, start + counts[engine.data_parallel_rank]))
        experience = whole(documents).select(mine)

        def watch(outputs: TokenOutputs, micro_batch: MicroBatch) -> LossOutput:
            rows.append(sum(1 for index in micro_batch.documents if index >= 0))
            assert outputs.log_probs is not None
            return LossOutput(total=outputs.log_probs.sum(), denominator=1.0)

        options: Any = {"max_tokens_per_micro_batch": 16, "balance": balance}
        columns = engine.infer_batch(module.policy, experience, **options).columns
        engine.forward_backward_batch(module.policy, experience, watch, forward_only=True, **options)
        return mine, columns["log_probs"], rows

    return with_engine(body, ModelConfig(path=folder), ulysses_sp_size=sequence_size)


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize(
    ("world", "counts", "sp"), [(1, (5,), 1), (2, (5, 0), 1), (2, (2, 3), 1), (2, (5,), 2), (4, (0, 5), 2)]
)
def test_results_come_back_once_and_in_order(world: int, counts: tuple[int, ...], sp: int, balance: bool) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = random_documents([8, 7, 8, 6, 8], seed=7)
    expected, _ = plain(folder, documents)
    results = run_workers(world, run_order, folder, balance, counts, sp)
    assert {len(rows) for *_, rows in results} == {len(results[0][2])}
    assert max(max(rows) for *_, rows in results) == 2
    assert sum(sum(rows) for *_, rows in results[::sp]) == 5
    for mine, found, rows in results:
        if balance and len(counts) == 2:
            assert sum(rows) in (2, 3)
        flat = torch.cat([torch.zeros(0), *(expected[index] for index in mine)])
        assert found.shape == flat.shape
        torch.testing.assert_close(found, flat, rtol=1e-5, atol=1e-5)


def run_uneven(folder: str, sequence_size: int) -> Any:
    """On a rank: five long documents on one data rank, five short ones on the other; inference, then a step."""

    def body(module: EngineModule) -> Any:
        engine = module.engine
        lengths = [24, 21, 26, 23, 25] if engine.data_parallel_rank == 0 else [3, 2, 4, 3, 2]
        experience = whole(random_documents(lengths, seed=engine.data_parallel_rank))
        found = []
        for balance in (False, True):
            options: Any = {"max_tokens_per_micro_batch": 28, "balance": balance}
            columns = engine.infer_batch(module.policy, experience, **options).columns

            def loss(outputs: TokenOutputs, micro_batch: MicroBatch) -> LossOutput:
                assert outputs.log_probs is not None
                return LossOutput(total=-outputs.log_probs.sum(), denominator="tokens")

            value, _, gradients = backward(module, experience, loss, **options)
            found.append((columns["log_probs"], value, gradients))
        output = engine.train_batch(module.policy, module.optimizers(), experience, loss, **options)
        weights = dict(engine.get_per_tensor_param(module.policy))
        return experience["input_ids"].split(list(experience.lengths)), found, output, weights

    return with_engine(body, ModelConfig(path=folder), ulysses_sp_size=sequence_size)


@pytest.mark.parametrize(("world", "sp"), [(2, 1), (4, 2)])
def test_long_documents_on_one_rank_and_short_ones_on_the_other(world: int, sp: int) -> None:
    folder = str(tiny_model_folder("llama"))
    results = run_workers(world, run_uneven, folder, sp)
    documents = [document for ids, *_ in results[::sp] for document in ids]
    tokens = sum(len(document) - 1 for document in documents)

    def loss(model: Any) -> Tensor:
        return -torch.cat(reference_log_probs(model, documents)[0]).sum() / tokens

    expected_loss, expected = reference_gradients(folder, loss)
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for ids, found, output, weights in results:
        flat = torch.cat(plain(folder, list(ids))[0])
        for columns, value, gradients in found:
            torch.testing.assert_close(columns, flat, rtol=1e-5, atol=1e-5)
            assert_number(value, expected_loss)
            assert_gradients(gradients, expected)
        assert_number(output.loss, expected_loss)
        assert output.metrics["skipped_step"] == 0
        for name, gradient in expected.items():
            torch.testing.assert_close(weights[name], before[name] - 0.1 * gradient, rtol=1e-5, atol=1e-6)


def run_training_temperature(folder: str, sequence_size: int, temperature: Any) -> Any:
    def body(module: EngineModule) -> Any:
        engine = module.engine
        documents = make_documents(folder, vocabulary=64)
        mine = share(range(documents.size), engine.data_parallel_rank, engine.data_parallel_size)

        def loss(outputs: TokenOutputs, micro_batch: MicroBatch) -> LossOutput:
            assert outputs.log_probs is not None and outputs.entropy is not None
            return LossOutput(total=(outputs.log_probs + outputs.entropy.square()).sum(), denominator="tokens")

        return backward(
            module,
            documents.experience(mine),
            loss,
            calculate_entropy=True,
            temperature=temperature,
            max_tokens_per_micro_batch=32,
        )

    return with_engine(body, ModelConfig(path=folder), ulysses_sp_size=sequence_size)


@pytest.mark.parametrize("temperature", [0.7, "temperature"])
@pytest.mark.parametrize(("world", "sp"), [(1, 1), (2, 2), (4, 2)])
def test_temperatures_reach_the_gradients(world: int, sp: int, temperature: Any) -> None:
    folder = str(tiny_model_folder("llama_tied"))
    documents = make_documents(folder, vocabulary=64)
    heat = documents.temperature if temperature == "temperature" else temperature

    def loss(model: Any) -> Tensor:
        log_probs, entropy = reference_log_probs(model, documents.input_ids, heat)
        terms = [(a + b.square())[mask] for a, b, mask in zip(log_probs, entropy, documents.response_mask, strict=True)]
        return torch.cat(terms).mean()

    expected_loss, expected = reference_gradients(folder, loss)
    for value, _, gradients in run_workers(world, run_training_temperature, folder, sp, temperature):
        assert_number(value, expected_loss)
        assert_gradients(gradients, expected)
