"""Critics: values, the clipped value loss and its gradients equal the plain model; a fresh head on a policy."""

import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from lightning_rl_engines import Experience, ModelConfig
from lightning_rl_engines.algorithms import ValueLoss
from tests.strategies.checks import assert_gradients, assert_number, backward
from tests.strategies.layouts import titan
from tests.strategies.reference import gradients_of
from tests.support import run_workers
from tests.support.engine import EngineModule, share, with_engine
from tests.support.models import random_documents, tiny_config, tiny_model_folder

SHAPES = ((3, 5), (9, 1), (2, 26), (4, 0), (12, 3), (1, 7), (5, 2))
JOBS = tuple(itertools.product(("token-mean", "seq-mean-token-mean"), (None, 48, 32)))


@dataclass(frozen=True)
class Critique:
    """Documents with old values and returns."""

    input_ids: list[Tensor]
    response_mask: list[Tensor]
    values: list[Tensor]
    returns: list[Tensor]

    def experience(self, indices: list[int]) -> Experience:
        columns = {name: [getattr(self, name)[index] for index in indices] for name in self.__dataclass_fields__}
        return Experience.from_documents(**columns)


def critic_folder(name: str) -> str:
    """A saved critic: the tiny model with a random head of one label, its vectors off their initial values."""
    folder = Path(os.environ["LRE_TEST_MODELS"]) / f"critic_{name}"
    if not folder.exists():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = tiny_config(name, num_labels=1)
            model = AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model.save_pretrained(folder)
    return str(folder)


def plain_values(model: Any, documents: list[Tensor]) -> list[Tensor]:
    """Index t is the value before token t, one document at a time; the first token holds 0."""
    results = []
    for document in documents:
        scores = model(input_ids=document[None], use_cache=False).logits[0, :-1, 0]
        results.append(torch.cat([scores.new_zeros(1), scores]))
    return results


def plain_model(folder: str) -> Any:
    return AutoModelForTokenClassification.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


def make_critique(folder: str) -> Critique:
    generator = torch.Generator().manual_seed(0)
    ids = random_documents([prompt + response + 1 for prompt, response in SHAPES])
    with torch.no_grad():
        values = plain_values(plain_model(folder), ids)

    def noisy(scale: float) -> list[Tensor]:
        return [item + scale * torch.randn(item.shape, generator=generator) for item in values]

    masks = [torch.tensor([False] * prompt + [True] * response + [False]) for prompt, response in SHAPES]
    return Critique(ids, masks, noisy(0.4), noisy(1.0))


def plain_loss(model: Any, data: Critique, aggregation: str) -> tuple[Tensor, dict[str, float]]:
    """The clipped value loss, token by token."""
    values = plain_values(model, data.input_ids)
    counts = [int(mask.sum()) for mask in data.response_mask]
    sequences = sum(1 for count in counts if count)
    terms, clipped, seen, targets = [], [], [], []
    for index, count in enumerate(counts):
        weight = 1 / sum(counts) if aggregation == "token-mean" else 1 / max(count, 1) / sequences
        for token in data.response_mask[index].nonzero()[:, 0].tolist():
            value, old, target = values[index][token], data.values[index][token], data.returns[index][token]
            error = (value - target) ** 2
            other = (torch.clamp(value, old - 0.2, old + 0.2) - target) ** 2
            terms.append(weight * 0.5 * torch.max(error, other))
            clipped.append(float(other > error))
            seen.append(float(value.detach()))
            targets.append(float(target))
    total, number = torch.stack(terms).sum(), len(terms)
    metrics = {
        "value_loss": float(total.detach()),
        "value_clip_fraction": sum(clipped) / number,
        "value_mean": sum(seen) / number,
        "return_mean": sum(targets) / number,
    }
    return total, metrics


def run_layout(folder: str, data: Critique, layout: dict[str, Any]) -> Any:
    """On a rank: the values of its documents, and loss, metrics and gradients of every job."""

    def body(module: EngineModule) -> Any:
        engine = module.engine
        mine = share(range(len(SHAPES)), engine.data_parallel_rank, engine.data_parallel_size)
        experience = data.experience(mine)
        everywhere = experience.with_columns(response_mask=[[1] * length for length in experience.lengths])
        with engine.eval_mode(module.policy):
            columns = engine.infer_batch(module.policy, everywhere, max_tokens_per_micro_batch=32).columns
        jobs = [
            backward(module, experience, ValueLoss(aggregation=mode), max_tokens_per_micro_batch=budget, balance=True)
            for mode, budget in JOBS
        ]
        masked = experience.with_columns(response_mask=[[0] * length for length in experience.lengths])
        return mine, columns, jobs, backward(module, masked, ValueLoss())

    return with_engine(body, ModelConfig(path=folder, head="value"), **layout)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (1, {}),
    "fsdp-sp2": (2, {"ulysses_sp_size": 2}),
    "fsdp2x2": (4, {"fsdp_size": 2}),
    "fsdp2-sp2": (4, {"ulysses_sp_size": 2}),
    **{name: titan(name) for name in ("hsdp2x2", "tp2", "cp2", "cp2-headtail", "cp2-ptrr", "ep2", "pp2", "cp2-tp2")},
}


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("fsdp", "llama"),
        ("fsdp-sp2", "qwen2"),
        ("fsdp2x2", "llama"),
        ("fsdp2-sp2", "one_kv"),
        ("hsdp2x2", "qwen2"),
        ("tp2", "qwen2"),
        ("cp2", "one_kv"),
        ("cp2-headtail", "one_kv"),
        ("cp2-ptrr", "one_kv"),
        ("ep2", "qwen3_moe"),
        ("pp2", "llama"),
        pytest.param("cp2-tp2", "llama", marks=pytest.mark.exhaustive),
    ],
)
def test_values_loss_and_gradients_equal_the_plain_model(layout: str, name: str) -> None:
    folder, (world, options) = critic_folder(name), LAYOUTS[layout]
    data = make_critique(folder)
    with torch.no_grad():
        expected_values = plain_values(plain_model(folder), data.input_ids)
    expected = {}
    for mode in ("token-mean", "seq-mean-token-mean"):
        model = plain_model(folder)
        total, metrics = plain_loss(model, data, mode)
        total.backward()
        assert 0 < metrics["value_clip_fraction"] < 1
        expected[mode] = float(total.detach()), metrics, gradients_of(model)
    assert {"score.weight", "score.bias"} <= expected["token-mean"][2].keys()
    for mine, columns, jobs, masked in run_workers(world, run_layout, folder, data, options):
        assert columns.keys() == {"values"}
        values = torch.cat([torch.zeros(0), *(expected_values[index] for index in mine)])
        torch.testing.assert_close(columns["values"], values, rtol=1e-5, atol=1e-5)
        for job, (loss, metrics, gradients) in zip(JOBS, jobs, strict=True):
            wanted_loss, wanted_metrics, wanted_gradients = expected[job[0]]
            assert_number(loss, wanted_loss, job)
            for key, value in wanted_metrics.items():
                assert_number(metrics[key], value, (job, key))
            assert_gradients(gradients, wanted_gradients, job)
        masked_loss, _, masked_gradients = masked
        assert masked_loss == 0
        assert all(not gradient.any() for gradient in masked_gradients.values())


def build_critics(policy_folder: str) -> Any:
    """On a rank: full weights of critics that start from a policy, built twice from one seed and once from another."""

    def body(module: EngineModule) -> Any:
        return [dict(module.engine.get_per_tensor_param(getattr(module, name))) for name in ("a", "b", "c")]

    seeds = {"a": 5, "b": 5, "c": 6}
    return with_engine(
        body, {key: ModelConfig(path=policy_folder, head="value", seed=seed) for key, seed in seeds.items()}
    )


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_a_critic_from_a_policy_has_its_backbone_and_a_seeded_head(name: str) -> None:
    folder = str(tiny_model_folder(name))
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    backbone = {key: value for key, value in policy.items() if key.startswith("model.")}
    alone = run_workers(1, build_critics, folder)
    for critics in [*alone, *run_workers(2, build_critics, folder)]:
        for critic in critics:
            assert critic.keys() == backbone.keys() | {"score.weight", "score.bias"}
            assert all(torch.equal(critic[key], value) for key, value in backbone.items())
        first, same, other = (critic["score.weight"] for critic in critics)
        assert first.std() > 0 and math.isfinite(first.std())
        assert torch.equal(first, same) and not torch.equal(first, other)
        assert torch.equal(first, alone[0][0]["score.weight"])
