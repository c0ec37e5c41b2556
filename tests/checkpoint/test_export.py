"""A checkpoint becomes a Hugging Face folder, the same one whichever number of processes writes it."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_rl_engines import export_checkpoint
from tests.checkpoint.cases import run
from tests.strategies.reference import Documents, make_documents
from tests.support import WorkerError, run_workers
from tests.support.models import tiny_model_folder


class Ranks:
    """The workers of the pool."""

    @property
    def global_rank(self) -> int:
        return dist.get_rank()

    def all_gather_objects(self, item: Any) -> list[Any]:
        items: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(items, item)
        return items


class Reads:
    """Counts the tensors that a process reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from lightning_rl_engines.checkpoint import export

        self.count, original = 0, export._Saved.read

        def read(saved: Any, name: str) -> Any:
            self.count += 1
            return original(saved, name)

        monkeypatch.setattr(export._Saved, "read", read)


def export_on_rank(checkpoint: str, output: str, size: int) -> int:
    with pytest.MonkeyPatch.context() as monkeypatch:
        reads = Reads(monkeypatch)
        export_checkpoint(checkpoint, output, max_shard_size=size, ranks=Ranks())
    return reads.count


def train(folder: str, documents: Documents, path: str, strategy: dict[str, Any]) -> None:
    run(folder, documents, steps=2, save=(1, path), **strategy)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module", params=[("qwen3", {}), ("qwen3_moe", {"engine": "torchtitan"})], ids=["dense", "moe"])
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    model, strategy = request.param
    folder = str(tiny_model_folder(model))
    path = str(tmp_path_factory.mktemp("export") / "saved.ckpt")
    run_workers(1, train, folder, make_documents(folder, vocabulary=64), path, strategy)
    return path


@pytest.mark.parametrize("world", [2, 4])
def test_processes_share_the_files_and_the_reading(
    world: int, checkpoint: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    size = 16 * 1024
    with pytest.MonkeyPatch.context() as monkeypatch:
        alone = Reads(monkeypatch)
        export_checkpoint(checkpoint, tmp_path / "alone", max_shard_size=size)
    counts = run_workers(world, export_on_rank, checkpoint, str(tmp_path / "together"), size)
    assert content(tmp_path / "together") == content(tmp_path / "alone")
    files = list((tmp_path / "alone").glob("*.safetensors"))
    assert len(files) > world
    # Each tensor is read once, by the process that writes it; a stack of experts again where another file begins in it.
    stacks = request.node.callspec.params["checkpoint"][0] == "qwen3_moe"
    assert alone.count <= sum(counts) <= alone.count + (len(files) if stacks else 0)
    assert all(0 < count < alone.count for count in counts)


def test_a_model_that_is_not_there_is_refused_by_all_processes(checkpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model='critic'"):
        export_checkpoint(checkpoint, tmp_path / "alone", model="critic")
    with pytest.raises(WorkerError, match="model='critic'"):
        run_workers(2, ask_for_critic, checkpoint, str(tmp_path / "together"))


def ask_for_critic(checkpoint: str, output: str) -> None:
    export_checkpoint(checkpoint, output, model="critic", ranks=Ranks())
