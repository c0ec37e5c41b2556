"""DPO, reward models and regression: losses and gradients equal the plain model, whichever rank holds a pair's half."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rl_engines import Experience, ModelConfig
from lightning_rl_engines.algorithms import DPOLoss, RewardModelLoss, RewardRegressionLoss
from tests.strategies.checks import assert_gradients, assert_number, backward
from tests.strategies.layouts import titan
from tests.strategies.reference import gradients_of, reference_gradients
from tests.strategies.test_value import critic_folder, plain_model, plain_values
from tests.support import run_workers
from tests.support.engine import EngineModule, share, with_engine
from tests.support.models import random_documents, reference_log_probs, tiny_model, tiny_model_folder

SHAPES = ((3, 5), (9, 1), (2, 17), (4, 2), (6, 3), (1, 7), (5, 2), (2, 9))
# Pairs lie across the data ranks, which hold the first two and the other six documents.
GROUPS = (11, 4, 11, 2, 4, 9, 2, 9)
PREFERRED = (False, True, True, True, False, False, False, True)
PAIRS = ((2, 0), (1, 4), (3, 6), (7, 5))
BUDGETS = (None, 36)


@dataclass(frozen=True)
class Comparisons:
    """Documents with everything that the losses on pairs and documents read."""

    input_ids: list[Tensor]
    response_mask: list[Tensor]
    ref_log_probs: list[Tensor]
    targets: list[float]
    group_ids: tuple[int, ...] = GROUPS
    preferred: tuple[bool, ...] = PREFERRED

    def experience(self, indices: list[int]) -> Experience:
        columns = {name: [getattr(self, name)[index] for index in indices] for name in self.__dataclass_fields__}
        return Experience.from_documents(**columns)


def make_comparisons() -> Comparisons:
    generator = torch.Generator().manual_seed(0)
    ids = random_documents([prompt + response + 1 for prompt, response in SHAPES])
    # The documents end after the response, so that the last response token is not the last of its document.
    masks = [torch.tensor([False] * prompt + [True] * response + [False]) for prompt, response in SHAPES]
    with torch.no_grad():
        log_probs, _ = reference_log_probs(tiny_model("llama"), ids)
    references = [item + 0.2 * torch.randn(item.shape, generator=generator) for item in log_probs]
    return Comparisons(ids, masks, references, torch.randn(len(SHAPES), generator=generator).tolist())


def dpo(data: Comparisons, term: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
    def loss(model: Any) -> Tensor:
        log_probs, _ = reference_log_probs(model, data.input_ids)
        ratios = [
            (policy - reference)[mask].sum()
            for policy, reference, mask in zip(log_probs, data.ref_log_probs, data.response_mask, strict=True)
        ]
        return torch.stack([term(ratios[chosen] - ratios[rejected]) for chosen, rejected in PAIRS]).mean()

    return loss


def scores(model: Any, data: Comparisons) -> list[Tensor]:
    values = plain_values(model, data.input_ids)
    return [value[mask][-1] for value, mask in zip(values, data.response_mask, strict=True)]


def bradley_terry(model: Any, data: Comparisons) -> Tensor:
    found = scores(model, data)
    return torch.stack([(1 + (found[rejected] - found[chosen]).exp()).log() for chosen, rejected in PAIRS]).mean()


def regression(model: Any, data: Comparisons) -> Tensor:
    return (torch.stack(scores(model, data)) - torch.tensor(data.targets)).square().mean()


def run_layout(config: ModelConfig, data: Comparisons, layout: dict[str, Any], losses: list[Any]) -> Any:
    """On a rank: loss, metrics and gradients of each loss and budget; pairs coming from two ranks."""

    def body(module: EngineModule) -> Any:
        engine = module.engine
        experience = data.experience(share(range(len(SHAPES)), engine.data_parallel_rank, engine.data_parallel_size))
        return [
            backward(module, experience, loss, max_tokens_per_micro_batch=budget, balance=True)
            for loss in losses
            for budget in BUDGETS
        ]

    return with_engine(body, config, **layout)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (1, {}),
    "fsdp2": (2, {}),
    "fsdp-sp2": (2, {"ulysses_sp_size": 2}),
    "fsdp1x2": (2, {"fsdp_size": 1}),
    "fsdp2x2": (4, {"fsdp_size": 2}),
    **{name: titan(name) for name in ("replicate2", "tp2", "cp2", "cp2-headtail", "cp2-ptrr", "pp2", "pp2-dp2")},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dpo_and_ipo_equal_the_plain_model(layout: str) -> None:
    folder, data, (world, options) = tiny_model_folder("llama"), make_comparisons(), LAYOUTS[layout]
    losses = [DPOLoss(beta=0.5, label_smoothing=0.1), DPOLoss(beta=0.5, kind="ipo")]
    terms = [
        lambda h: -0.9 * torch.sigmoid(0.5 * h).log() - 0.1 * torch.sigmoid(-0.5 * h).log(),
        lambda h: (h - 1.0) ** 2,
    ]
    expected = [reference_gradients(folder, dpo(data, term)) for term in terms for _ in BUDGETS]
    for jobs in run_workers(world, run_layout, ModelConfig(path=str(folder)), data, options, losses):
        for (loss, metrics, gradients), (wanted_loss, wanted_gradients) in zip(jobs, expected, strict=True):
            assert_number(loss, wanted_loss)
            assert_number(metrics["preference_loss"], wanted_loss)
            assert_gradients(gradients, wanted_gradients)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reward_models_equal_the_plain_model(layout: str) -> None:
    folder, data, (world, options) = critic_folder("llama"), make_comparisons(), LAYOUTS[layout]
    expected = []
    for plain in (bradley_terry, regression):
        model = plain_model(folder)
        total = plain(model, data)
        total.backward()
        expected += [(float(total.detach()), gradients_of(model))] * len(BUDGETS)
    config = ModelConfig(path=folder, head="value")
    for jobs in run_workers(world, run_layout, config, data, options, [RewardModelLoss(), RewardRegressionLoss()]):
        for job, (wanted_loss, wanted_gradients) in zip(jobs, expected, strict=True):
            loss, _, gradients = job
            assert_number(loss, wanted_loss)
            # The offset of the head cancels in a pair: its gradient is rounding.
            for name, value in wanted_gradients.items():
                if float(value.norm()) < 1e-6:
                    assert float(gradients.pop(name).norm()) < 1e-6, name
            wanted = {name: value for name, value in wanted_gradients.items() if name in gradients}
            assert_gradients(gradients, wanted)


def run_refusals(config: ModelConfig, data: Comparisons) -> list[str]:
    """On a rank: what was said about pairs that do not work."""

    def body(module: EngineModule) -> list[str]:
        engine = module.engine
        rank = engine.data_parallel_rank
        experience = data.experience(share(range(len(SHAPES)), rank, engine.data_parallel_size))
        broken = experience.with_document_columns(preferred=torch.ones(len(experience), dtype=torch.bool))
        cases: list[tuple[Experience, dict[str, Any]]] = [
            (experience, {"balance": False}),
            (experience, {"balance": True, "max_tokens_per_micro_batch": 21}),
            (broken if rank == 1 else experience, {"balance": True}),
            (experience.drop("preferred") if rank == 1 else experience, {"balance": True}),
        ]
        said = []
        for documents, options in cases:
            with pytest.raises(ValueError) as error:
                backward(module, documents, DPOLoss(), **options)
            said.append(str(error.value))
        loss, _, _ = backward(module, experience, DPOLoss(), balance=True)
        assert math.isfinite(loss)
        return said

    return with_engine(body, config)


def test_pairs_that_do_not_work_are_refused_by_all_ranks_together() -> None:
    first, second = run_workers(2, run_refusals, ModelConfig(path=str(tiny_model_folder("llama"))), make_comparisons())
    assert first == second
    for text, words in zip(
        first,
        (
            ["unit 11", "data ranks 0 and 1", "group_ids", "balance=True"],
            ["unit 11", "29 tokens", "max_tokens_per_micro_batch=21"],
            ["group_ids=4 has 2 documents, 2 of them preferred"],
            ["rank 1", "'preferred'"],
        ),
        strict=True,
    ):
        for word in words:
            assert word in text
