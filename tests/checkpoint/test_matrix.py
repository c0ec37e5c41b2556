"""Every layout resumes from every other: weights, Adam's moments and the schedule are those of a run in one piece."""

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_rl_engines import FSDPUlyssesStrategy, ModelConfig
from tests.checkpoint.cases import Everything
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import assert_near, assert_same
from tests.support import run_workers
from tests.support.lightning_env import make_trainer
from tests.support.lora import lora
from tests.support.models import tiny_model_folder
from tests.support.pairwise import pairwise

GRID: dict[str, tuple[Any, ...]] = {
    "saved world": (1, 2, 4),
    "saved sp": (1, 2),
    "world": (1, 2, 4),
    "sp": (1, 2),
    "adapter": (False, True),
}
MODELS = {False: "qwen2", True: "llama_tied"}
Case = dict[str, Any]
State = dict[str, Tensor]


def _legal(case: Case) -> bool:
    return case.get("saved world", 4) % case.get("saved sp", 1) == 0 and case.get("world", 4) % case.get("sp", 1) == 0


def product() -> list[Case]:
    cases = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    return [case for case in cases if _legal(case)]


class Watched(Everything):
    """Remembers this rank's pieces of all trained tensors and of Adam's state, before the first step and at the end."""

    def configure_optimizers(self) -> Any:
        # With a larger epsilon, the step is smooth where a gradient is all rounding.
        trained = [item for item in self.policy.parameters() if item.requires_grad]
        optimizer = torch.optim.AdamW(trained, 1e-2, eps=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]

    def on_train_start(self) -> None:
        super().on_train_start()
        self.first = self.pieces()

    def on_train_end(self) -> None:
        self.last = self.pieces()

    def pieces(self) -> tuple[State, dict[str, Any]]:
        optimizer: Any = self.optimizers()
        pieces: State = {}
        counts = set()
        for name, parameter in self.policy.named_parameters():
            if parameter.requires_grad:
                # FSDP1 keeps a stretch of each flattened tensor per rank, in their order.
                pieces[name] = parameter.detach().flatten().clone()
                state = optimizer.state.get(parameter, {})
                counts |= {int(state["step"])} if "step" in state else set()
                for key in ("exp_avg", "exp_avg_sq"):
                    if key in state:
                        pieces[f"{name} {key}"] = state[key].flatten().clone()
        schedule: Any = self.lr_schedulers()
        rates = [group["lr"] for group in optimizer.optimizer.param_groups]
        return pieces, {"rates": rates, "schedule": schedule.state_dict(), "steps": counts}


def train(
    config: ModelConfig,
    documents: Documents,
    steps: int,
    *,
    save: str | None = None,
    resume: str | None = None,
    sp: int,
) -> tuple[Any, Any, Any]:
    module = Watched(config, documents)
    trainer = make_trainer(FSDPUlyssesStrategy(ulysses_sp_size=sp), max_steps=steps)
    trainer.fit(module, DataLoader(range(64)), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    seen = [{name: step[name] for name in ("step", "loss", "norm", "rate")} for step in module.steps]
    return module.first, module.last, seen


def whole(pieces: list[tuple[State, dict[str, Any]]]) -> tuple[State, dict[str, Any]]:
    """Put the ranks' pieces together; the schedule and the counts of steps are equal on all."""
    names = {name for state, _ in pieces for name in state}
    for _, plan in pieces:
        assert (plan["rates"], plan["schedule"]) == (pieces[0][1]["rates"], pieces[0][1]["schedule"])
    counts = set.union(*(plan["steps"] for _, plan in pieces))
    return (
        {name: torch.cat([state[name] for state, _ in pieces if name in state]) for name in sorted(names)},
        {**pieces[0][1], "steps": counts},
    )


Checkpoint = Callable[[int, int, bool], tuple[str, State, dict[str, Any]]]


@pytest.fixture(scope="module")
def inputs() -> Callable[[bool], tuple[ModelConfig, Documents]]:
    @cache
    def make(adapter: bool) -> tuple[ModelConfig, Documents]:
        folder = str(tiny_model_folder(MODELS[adapter]))
        options = lora(r=2, target_modules=["q_proj", "v_proj", "up_proj"], modules_to_save=["norm"])
        return ModelConfig(path=folder, lora=options if adapter else None), make_documents(folder, vocabulary=64)

    return make


@pytest.fixture(scope="module")
def in_one_piece(inputs: Any) -> Callable[[bool], tuple[Any, Any, Any]]:
    @cache
    def make(adapter: bool) -> tuple[Any, Any, Any]:
        ((_, last, seen),) = run_workers(1, train, *inputs(adapter), 4, sp=1)
        return *whole([last]), seen

    return make


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, inputs: Any) -> Checkpoint:
    """Path of a checkpoint after two updates on a layout, and the state of that run."""

    @cache
    def make(world: int, sp: int, adapter: bool) -> tuple[str, State, dict[str, Any]]:
        path: Path = tmp_path_factory.mktemp("saved") / "run.ckpt"
        ranks = run_workers(world, train, *inputs(adapter), 2, save=str(path), sp=sp)
        return str(path), *whole([last for _, last, _ in ranks])

    return make


def check(case: Case, inputs: Any, in_one_piece: Any, checkpoint: Checkpoint) -> None:
    path, saved, plan = checkpoint(case["saved world"], case["saved sp"], case["adapter"])
    assert plan["steps"] == {2} and any(name.endswith("exp_avg_sq") for name in saved)
    ranks = run_workers(case["world"], train, *inputs(case["adapter"]), 4, resume=path, sp=case["sp"])
    found, found_plan = whole([first for first, _, _ in ranks])
    assert_same(found, saved)
    assert found_plan == plan

    expected, expected_plan, expected_steps = in_one_piece(case["adapter"])
    found, found_plan = whole([last for _, last, _ in ranks])
    assert_near(found, expected, 2e-5)
    assert found_plan == expected_plan and found_plan["steps"] == {4}
    for _, _, steps in ranks:
        for step, reference in zip(steps, expected_steps[2:], strict=True):
            assert (step["step"], step["rate"]) == (reference["step"], reference["rate"])
            assert (step["loss"], step["norm"]) == pytest.approx((reference["loss"], reference["norm"]), rel=1e-5)


def _id(case: Case) -> str:
    kind = "lora" if case["adapter"] else "full"
    return f"{case['saved world']}x{case['saved sp']}-{case['world']}x{case['sp']}-{kind}"


@pytest.mark.parametrize("case", pairwise(GRID, _legal), ids=_id)
def test_a_run_resumes_on_every_pair_of_worlds(
    case: Case, inputs: Any, in_one_piece: Any, checkpoint: Checkpoint
) -> None:
    check(case, inputs, in_one_piece, checkpoint)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", product(), ids=_id)
def test_a_run_resumes_on_every_layout(case: Case, inputs: Any, in_one_piece: Any, checkpoint: Checkpoint) -> None:
    check(case, inputs, in_one_piece, checkpoint)
