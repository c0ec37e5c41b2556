import os
import time
from typing import ClassVar

import psutil
import pytest
import torch
import torch.distributed as dist
from lightning import LightningModule
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader

from tests.support import WorkerError, WorkerTimeout, run_workers, shutdown_workers
from tests.support.lightning_env import make_trainer
from tests.support.models import MODEL_NAMES, random_documents, reference_log_probs, tiny_model, tiny_model_folder


def identity(value: object) -> tuple[int, int, object]:
    return os.getpid(), dist.get_rank(), value


def total(value: Tensor) -> Tensor:
    value = value + dist.get_rank()
    dist.all_reduce(value)
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(dist.get_rank())
    assert os.environ["WORLD_SIZE"] == str(dist.get_world_size())
    return value


def hang_on_last_rank() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(1000)
    dist.barrier()


def fail(ranks: tuple[int, ...]) -> None:
    if dist.get_rank() in ranks:
        raise ValueError(f"bad number {dist.get_rank()}")


def die() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def mesh_product(shape: tuple[int, ...]) -> Tensor:
    mesh = init_device_mesh("cpu", shape)
    weight = distribute_tensor(torch.eye(8), mesh, [Shard(0)] * len(shape))
    return (weight @ weight).full_tensor()


def trainers_in_turn(strategies: list[str]) -> list[Tensor]:
    results = []
    for name in strategies:
        module = Regression()
        trainer = make_trainer(DDPStrategy() if name == "ddp" else CPUFullySharded(), max_steps=2)
        trainer.fit(module, DataLoader(torch.arange(8.0).reshape(8, 1), batch_size=2))
        assert trainer.world_size == dist.get_world_size()
        assert trainer.global_rank == dist.get_rank()
        with FullyShardedDataParallel.summon_full_params(trainer.strategy.model or module):
            results.append(module.layer.weight.detach().clone().reshape(1, 1))
    return results


class CPUFullySharded(FSDPStrategy):
    # Lightning refuses the names on this list without CUDA.
    _registered_strategies: ClassVar[list[str]] = []

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return (self.layer(batch) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.001)


def test_processes_are_reused_and_results_come_in_rank_order() -> None:
    first = run_workers(2, identity, {"a": torch.arange(3)})
    second = run_workers(2, identity, 1)
    assert [pid for pid, *_ in first] == [pid for pid, *_ in second]
    assert [rank for _, rank, _ in first] == [0, 1]
    assert os.getpid() not in [pid for pid, *_ in first]
    torch.testing.assert_close(first[1][2], {"a": torch.arange(3)})


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_world_sizes_share_the_pool(world_size: int) -> None:
    expected = torch.tensor(float(world_size * 1 + sum(range(world_size))))
    for result in run_workers(world_size, total, torch.tensor(1.0)):
        torch.testing.assert_close(result, expected)


def test_a_hang_is_killed_and_named_and_the_next_call_works() -> None:
    before = [pid for pid, *_ in run_workers(2, identity, 0)]
    started = time.monotonic()
    with pytest.raises(WorkerTimeout, match="hang_on_last_rank") as caught:
        run_workers(2, hang_on_last_rank, timeout=2.0)
    assert time.monotonic() - started < 20
    assert [e.rank for e in caught.value.errors] == [0, 1]
    assert not any(psutil.pid_exists(pid) for pid in before)
    after = [pid for pid, *_ in run_workers(2, identity, 0)]
    assert not set(before) & set(after)


def test_an_error_on_all_ranks_keeps_the_pool() -> None:
    before = [pid for pid, *_ in run_workers(2, identity, 0)]
    with pytest.raises(WorkerError, match="bad number 1") as caught:
        run_workers(2, fail, (0, 1))
    assert caught.value.all_ranks_raised(ValueError)
    assert not caught.value.all_ranks_raised(TypeError)
    assert [str(e.exception) for e in caught.value.errors] == ["bad number 0", "bad number 1"]
    assert "raise ValueError" in caught.value.errors[0].traceback
    assert [pid for pid, *_ in run_workers(2, identity, 0)] == before


def test_an_error_on_one_rank_is_raised_and_is_not_all_ranks() -> None:
    with pytest.raises(WorkerError, match="1 of 2 ranks failed") as caught:
        run_workers(2, fail, (1,))
    assert not caught.value.all_ranks_raised(ValueError)
    assert [e.rank for e in caught.value.errors] == [1]
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_dead_rank_is_reported() -> None:
    with pytest.raises(WorkerError, match="exit code 3"):
        run_workers(2, die)
    assert len(run_workers(2, identity, 0)) == 2


def test_meshes_of_different_calls_do_not_mix() -> None:
    for shape in ((2, 2), (4,), (2, 2)):
        for result in run_workers(4, mesh_product, shape):
            torch.testing.assert_close(result, torch.eye(8))


def test_shutdown_leaves_no_process() -> None:
    pids = [pid for pid, *_ in run_workers(2, identity, 0)]
    shutdown_workers()
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("world_size", [1, 2])
def test_several_trainers_run_in_the_same_processes(world_size: int) -> None:
    # The step on the mean over ranks of each batch: with 8 rows the two worlds see other batches, so each has its own.
    for rank_results in run_workers(world_size, trainers_in_turn, ["ddp", "fsdp", "ddp"]):
        assert rank_results[0] < 1
        for result in rank_results[1:]:
            torch.testing.assert_close(result, rank_results[0])


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_tiny_models_are_reproducible_and_saved(name: str) -> None:
    model = tiny_model(name)
    other = type(model).from_pretrained(tiny_model_folder(name), attn_implementation="eager")
    for (key, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=key)
    documents = random_documents([5, 9], vocabulary=model.config.vocab_size)
    log_probs, entropies = reference_log_probs(model, documents, temperature=[1.0, 0.7])
    assert [len(x) for x in log_probs] == [5, 9]
    assert all(x[0] == 0 for x in log_probs + entropies)
    # A near-uniform model would hide mistakes.
    assert entropies[0][1:].mean() < 0.95 * torch.tensor(float(model.config.vocab_size)).log()
