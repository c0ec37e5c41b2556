"""A folder written by several ranks: the same bytes as by one, each rank its own files, and no half of one."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_rl_engines.export import (
    ExportContext,
    HFFolderSink,
    drain,
    plan_from_hf_model,
    stream_full_parameters,
)
from tests.export.support import Alone, World, assert_same, make_model, saved_tensors, shard
from tests.support import WorkerError, run_workers

LIMIT = 7000
SAVE = safetensors.torch.save_file


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*")}


def export(path: str, writers: Any, name: str = "llama", **options: Any) -> int:
    """Export a sharded model, and return how many files this rank wrote."""
    model = make_model(name)
    plan, config = plan_from_hf_model(model), model.config
    stream = stream_full_parameters(shard(model), plan)
    sink = HFFolderSink(path=path, max_shard_size=LIMIT, writers=writers)
    with patch("safetensors.torch.save_file", wraps=SAVE) as save:
        assert drain(stream, sink, World(), plan=plan, context=ExportContext(config=config)) == path
    return save.call_count


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_ranks_write_the_folder_that_one_would(name: str, world_size: int, tmp_path: Path) -> None:
    alone = run_workers(world_size, export, str(tmp_path / "alone"), "rank0", name)
    together = run_workers(world_size, export, str(tmp_path / "together"), "all", name)
    count = len(list((tmp_path / "alone").glob("*.safetensors")))
    assert alone == [count] + [0] * (world_size - 1)
    # In turn, so the shares differ by one file.
    assert together == [count // world_size + (rank < count % world_size) for rank in range(world_size)]
    assert files_of(tmp_path / "together") == files_of(tmp_path / "alone")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["alone", "together"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "together", attn_implementation="eager")
    assert_same(dict(loaded.state_dict()), dict(make_model(name).state_dict()))


def export_where_only_rank_zero_sees(path: str) -> int:
    class Elsewhere(HFFolderSink):
        def join(self, invitation: tuple[str, str], context: ExportContext) -> bool:
            folder, token = invitation
            return super().join((folder + "-of-another-machine", token), context)

    with patch(f"{__name__}.HFFolderSink", Elsewhere):
        return export(path, "all")


def test_ranks_that_do_not_see_the_folder_leave_it_to_those_that_do(tmp_path: Path) -> None:
    first, second = run_workers(2, export_where_only_rank_zero_sees, str(tmp_path / "out"))
    assert first == len(list((tmp_path / "out").glob("*.safetensors")))
    assert second == 0
    assert_same(saved_tensors(tmp_path / "out"), dict(make_model("llama").state_dict()))


def peak_bytes(path: str, world: bool) -> tuple[int, int]:
    """Most bytes of the stream that are alive while it is walked, and the largest tensor."""
    alive: list[weakref.ref[np.ndarray]] = []  # memory outlives the tensor that is yielded, in views of it
    peak = largest = 0

    def stream() -> Iterator[tuple[str, Tensor]]:
        nonlocal peak, largest
        for name, tensor in make_model("llama").state_dict().items():
            memory = tensor.numpy().copy()
            alive.append(weakref.ref(memory))
            largest = max(largest, memory.nbytes)
            copy = torch.from_numpy(memory)
            del memory
            yield name, copy
            del copy
            peak = max(peak, sum(item.nbytes for ref in alive if (item := ref()) is not None))

    drain(stream(), HFFolderSink(path=path, max_shard_size=20_000), World() if world else Alone())
    return peak, largest


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_rank_holds_one_file_at_most(world_size: int, tmp_path: Path) -> None:
    # On the host `cpu` is no copy, so what is alive is what the sink holds.
    for peak, largest in run_workers(world_size, peak_bytes, str(tmp_path / "out"), True):
        assert largest < 20_000
        assert 10_000 < peak <= 20_000
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 4


def export_with_a_full_disk(path: str, failing: int, number: int) -> None:
    calls = 0

    def save(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if World().global_rank == failing and calls == number:
            raise OSError(28, "No space left on device", path)
        SAVE(*args, **kwargs)

    model = make_model("llama")
    plan = plan_from_hf_model(model)
    stream = stream_full_parameters(shard(model), plan)
    sink = HFFolderSink(path=path, max_shard_size=LIMIT)
    with patch("safetensors.torch.save_file", save):
        drain(stream, sink, World(), plan=plan)


@pytest.mark.parametrize(("failing", "number"), [(0, 1), (1, 1), (1, 3)])
def test_one_rank_that_fails_stops_all_and_leaves_the_last_export(failing: int, number: int, tmp_path: Path) -> None:
    run_workers(2, export, str(tmp_path / "out"), "all")
    before = files_of(tmp_path / "out")
    with pytest.raises(WorkerError, match="No space left") as caught:
        run_workers(2, export_with_a_full_disk, str(tmp_path / "out"), failing, number)
    assert caught.value.all_ranks_raised(OSError)
    assert files_of(tmp_path / "out") == before
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_a_place_that_cannot_be_written_stops_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WorkerError, match="file") as caught:
        run_workers(2, export, str(tmp_path / "file" / "out"), "all")
    assert caught.value.all_ranks_raised(OSError)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def stream_that_breaks(path: str) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        for index in range(6):
            yield f"tensor.{index}", torch.zeros(LIMIT // 8)
        raise RuntimeError("gather lost")

    drain(broken(), HFFolderSink(path=path, max_shard_size=LIMIT), World())


def test_a_stream_that_breaks_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="gather lost") as caught:
        run_workers(2, stream_that_breaks, str(tmp_path / "out"))
    assert caught.value.all_ranks_raised(RuntimeError)
    assert not (tmp_path / "out").exists()


def test_writers_are_checked() -> None:
    with pytest.raises(ValueError, match=r"writers='some' is unknown; use one of \['all', 'rank0'\]"):
        HFFolderSink(path="out", writers="some")  # type: ignore[arg-type]
