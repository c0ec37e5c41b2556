"""A process may die before any change of the file system: the last whole checkpoint is found, and nothing else is."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_rl_engines.checkpoint import read_metadata, recover_checkpoints
from lightning_rl_engines.checkpoint.folders import (
    discard,
    is_whole,
    open_scratch,
    pack,
    publish,
    remove_checkpoint,
    remove_leftovers,
)

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "open")


class Died(BaseException):
    """Nothing in the code under test may catch it."""


_left: list[int | None] = [None]


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _left[0] is not None and event in CHANGES:
        _left[0] -= 1
        if _left[0] < 0:
            raise Died


sys.addaudithook(_hook)  # a hook cannot be removed; without a count it does nothing


@contextmanager
def death_before_change(number: int) -> Iterator[list[bool]]:
    """Whatever would change the file system for the ``number``-th time raises, and so does everything after it."""
    died = [False]
    _left[0] = number
    try:
        yield died
    except Died:
        died[0] = True
    finally:
        _left[0] = None


def write(path: Path, step: int) -> None:
    scratch = open_scratch(path)
    (scratch / "__0_0.distcp").write_bytes(b"x" * step)
    (scratch / ".metadata").write_bytes(b"y")
    publish(scratch, path, pack({"global_step": step}))


def step_of(path: Path) -> int:
    step: int = read_metadata(path)["global_step"]
    assert (path / "__0_0.distcp").read_bytes() == b"x" * step
    return step


@pytest.mark.parametrize("former", ["none", "folder", "link", "file"])
def test_whenever_a_save_dies_the_old_or_the_new_checkpoint_is_there(tmp_path: Path, former: str) -> None:
    seen = set()
    for number in range(1000):
        folder = tmp_path / str(number)
        path = folder / "last.ckpt"
        if former in ("folder", "link"):
            write(folder / "last.ckpt" if former == "folder" else folder / "step=1.ckpt", 1)
        if former == "link":
            path.symlink_to("step=1.ckpt")
        if former == "file":
            folder.mkdir()
            path.write_text("a checkpoint of another strategy")
        with death_before_change(number) as died:
            write(path, 2)
        recover_checkpoints(folder)
        for item in folder.glob("*"):
            assert item.name[0] == "." or item.is_file() or is_whole(item), (item, number)
        found = step_of(path) if path.is_dir() else 0
        seen.add(found)
        assert found in {"folder": (1, 2), "link": (1, 2), "none": (0, 2), "file": (0, 2)}[former]
        # The next run goes on, and leaves nothing behind.
        write(path, 3)
        remove_leftovers(folder)
        assert step_of(path) == 3
        assert {item.name for item in folder.iterdir()} <= {"last.ckpt", "step=1.ckpt"}
        if not died[0]:
            break
    assert number > 10
    assert seen == ({1, 2} if former in ("folder", "link") else {0, 2})


def test_whenever_a_removal_dies_no_part_of_a_checkpoint_comes_back(tmp_path: Path) -> None:
    for number in range(100):
        folder = tmp_path / str(number)
        path = folder / "step=1.ckpt"
        write(path, 1)
        with death_before_change(number) as died:
            remove_checkpoint(path)
        recover_checkpoints(folder)
        assert not path.exists() or step_of(path) == 1
        remove_leftovers(folder)
        assert [item.name for item in folder.iterdir()] == ([path.name] if path.exists() else [])
        if not died[0]:
            break
    assert number > 3
    assert not path.exists()


def test_a_half_deleted_folder_does_not_take_the_place_of_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for number in range(100):
        write(path, 1)
        path.rename(tmp_path / ".last.ckpt.old")
        with death_before_change(number) as died:
            discard(tmp_path / ".last.ckpt.old")
        recover_checkpoints(tmp_path)
        assert not path.exists() or step_of(path) == 1
        if not died[0]:
            break
        remove_checkpoint(path)
    assert number > 2


def test_readers_that_look_for_checkpoints_do_not_disturb_a_writer(tmp_path: Path) -> None:
    path, stop, errors = tmp_path / "last.ckpt", threading.Event(), []
    write(path, 1)

    def look() -> None:
        while not stop.is_set():
            try:
                recover_checkpoints(tmp_path)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for step in range(2, 150):
            write(path, step)
            assert step_of(path) == step
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []


def test_only_checkpoints_are_replaced_and_removed(tmp_path: Path) -> None:
    mine = tmp_path / "runs"
    mine.mkdir()
    (mine / "notes.txt").write_text("of the user")
    with pytest.raises(ValueError, match=r"runs' is a folder that holds no checkpoint.*such as .*last\.ckpt"):
        open_scratch(mine)
    assert not remove_checkpoint(mine)
    assert not remove_checkpoint(tmp_path / "nothing")
    (tmp_path / ".mine.old").mkdir()
    (tmp_path / ".mine.old" / "notes.txt").write_text("of the user")
    remove_leftovers(tmp_path)
    assert {item.name for item in tmp_path.rglob("notes.txt")} == {"notes.txt"}
    assert len(list(tmp_path.rglob("notes.txt"))) == 2
    write(tmp_path / "step=1.ckpt", 1)
    (tmp_path / "last.ckpt").symlink_to("step=1.ckpt")
    assert remove_checkpoint(tmp_path / "last.ckpt")
    assert step_of(tmp_path / "step=1.ckpt") == 1
    assert remove_checkpoint(tmp_path / "step=1.ckpt")
    assert sorted(item.name for item in tmp_path.iterdir()) == [".mine.old", "runs"]
