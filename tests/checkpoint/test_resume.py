"""A resumed run sees what the run would have seen: losses, norms, rates, random numbers, the module's own state."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.cases import Everything, run, run_and_resume
from tests.strategies.reference import Documents, make_documents
from tests.support import run_workers
from tests.support.models import tiny_model_folder


@pytest.fixture(scope="module")
def documents() -> Documents:
    return make_documents(tiny_model_folder("llama"), vocabulary=64)


@pytest.fixture(scope="module")
def folder() -> str:
    return str(tiny_model_folder("llama"))


@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        (1, {}),
        (2, {}),
        (2, {"ulysses_sp_size": 2, "async_checkpoint": True}),
        (2, {"fsdp_size": 1, "async_checkpoint": True}),
        (4, {"fsdp_size": 2, "async_checkpoint": True, "offload_param": True, "offload_optimizer": True}),
    ],
)
def test_the_rest_of_a_run_is_equal_to_the_last_bit(
    tmp_path: Path, folder: str, documents: Documents, world: int, strategy: dict[str, Any]
) -> None:
    ranks = run_workers(world, run_and_resume, folder, documents, str(tmp_path / "run.ckpt"), **strategy)
    for whole, resumed in ranks:
        assert [step["step"] for step in resumed] == [4, 5, 6]
        assert resumed == whole
    drawn = {str(whole[0]["drawn"]) for whole, _ in ranks}
    assert len(drawn) == world // strategy.get("ulysses_sp_size", 1)


def test_a_new_data_rank_draws_numbers_of_its_own_and_the_same_in_each_resume(
    tmp_path: Path, folder: str, documents: Documents
) -> None:
    path = str(tmp_path / "run.ckpt")
    (whole,) = run_workers(1, run, folder, documents, steps=4, save=(2, path))
    first, second = (
        [[step["drawn"] for step in steps] for steps in run_workers(2, run, folder, documents, steps=4, resume=path)]
        for _ in range(2)
    )
    assert first == second
    assert first[0] == [step["drawn"] for step in whole[2:]]
    for new, old in zip(first[1][0], first[0][0], strict=True):
        assert new != old  # of torch, Python and numpy alike


class Frozen(Everything):
    """The first layer is frozen; the optimizer holds it all the same, and so has no state for it."""

    def configure_model(self) -> None:
        if not hasattr(self, "policy"):
            super().configure_model()
            self.policy.layers[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.policy.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        self.steps[-1]["with state"] = sorted(names[id(parameter)] for parameter in optimizer.optimizer.state)


class LeftOut(Frozen):
    """The first layer is frozen, and the optimizer does not hold it."""

    def configure_optimizers(self) -> Any:
        return Everything.configure_optimizers(self)


@pytest.mark.parametrize("kind", [Frozen, LeftOut])
@pytest.mark.parametrize("world", [1, 2])
def test_parameters_without_optimizer_state(
    tmp_path: Path, folder: str, documents: Documents, kind: type[Everything], world: int
) -> None:
    for whole, resumed in run_workers(world, run_and_resume, folder, documents, str(tmp_path / "run.ckpt"), kind=kind):
        assert resumed == whole
        names = whole[0]["with state"]
        assert any(".layers.1." in name for name in names)
        assert not any(".layers.0." in name for name in names)


class Late(Everything):
    """The optimizer takes its first step after the checkpoint, or has no state at all."""

    momentum_free = False
    saves = True

    def configure_optimizers(self) -> Any:
        if self.momentum_free:
            optimizer: torch.optim.Optimizer = torch.optim.SGD(self.policy.parameters(), 1e-2)
        else:
            optimizer = torch.optim.AdamW(self.policy.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def on_train_start(self) -> None:
        super().on_train_start()
        optimizer: Any = self.optimizers()
        if self.trainer.global_step == 0:
            optimizer.param_groups[0]["lr"] = 0.02
            if self.saves:
                self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/early.ckpt")


class Stateless(Late):
    momentum_free = True


class Unsaved(Late):
    saves = False


def run_early(folder: str, documents: Documents, root: str, kind: type[Late]) -> tuple[Any, Any]:
    trainer = {"default_root_dir": root}
    whole = run(folder, documents, steps=3, kind=kind, trainer=trainer)
    if not kind.saves:
        return whole, whole
    return whole, run(folder, documents, steps=3, kind=kind, trainer=trainer, resume=f"{root}/early.ckpt")


@pytest.mark.parametrize("kind", [Late, Stateless])
def test_saving_before_the_first_step_changes_nothing(
    tmp_path: Path, folder: str, documents: Documents, kind: type[Late]
) -> None:
    for whole, resumed in run_workers(2, run_early, folder, documents, str(tmp_path), kind):
        assert whole[0]["rate"] == 0.02
        assert [s["loss"] for s in resumed] == [s["loss"] for s in whole]
        assert [s["rate"] for s in resumed] == [s["rate"] for s in whole]
    optimizer = torch.load(tmp_path / "early.ckpt" / "meta.pt", weights_only=True)["optimizers"][0]["groups"][0]
    assert optimizer["lr"] == 0.02
    if kind is Late:
        unsaved, _ = run_workers(2, run_early, folder, documents, str(tmp_path), Unsaved)[0]
        assert [s["loss"] for s in unsaved] == [s["loss"] for s in whole]
