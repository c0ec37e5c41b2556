"""Folders of checkpoints: one that bears its name is whole, whenever the process that wrote it died.

A checkpoint ``NAME`` is written as ``.NAME.part``, gets a marker once everything in it is on the disk, and is renamed.
What stood under the name before is called ``.NAME.old`` in between. A process that dies between the two renames leaves
both beside an empty place; :func:`recover_checkpoints` fills it again.
"""

import io
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

METADATA = "meta.pt"
MARKER = "complete"
_PART, _OLD, _REMOVED = ".part", ".old", ".removed"


def is_whole(path: Path) -> bool:
    """Whether a folder was finished; its name does not matter."""
    return (path / MARKER).is_file()


def open_scratch(path: Path) -> Path:
    """Return the new folder that becomes the checkpoint ``path``; for one rank.

    Raises:
        ValueError: A folder with something else stands under this name and would be lost.
    """
    if path.is_dir() and not path.is_symlink() and not _is_ours(path):
        raise ValueError(
            f"filepath={str(path)!r} is a folder that holds no checkpoint and would be replaced; name a new one, such "
            f"as {str(path / 'last.ckpt')!r}."
        )
    recover_checkpoints(path.parent)
    scratch = _sibling(path, _PART)
    discard(scratch)
    scratch.mkdir(parents=True)
    return scratch


def pack(metadata: Mapping[str, Any]) -> bytes:
    """Return plain data as the file that :func:`publish` writes, so that it may change from now on."""
    file = io.BytesIO()
    torch.save(dict(metadata), file)
    return file.getvalue()


def publish(scratch: Path, path: Path, metadata: bytes) -> None:
    """Finish the folder ``scratch`` and put it in the place of ``path``, whatever stands there; for one rank.

    Everything is on the disk before the marker is, and the marker before the name.
    """
    with open(scratch / METADATA, "wb") as file:
        file.write(metadata)
        file.flush()
        os.fsync(file.fileno())
    _sync(scratch)
    (scratch / MARKER).touch()
    _sync(scratch / MARKER)
    _sync(scratch)
    _replace(scratch, path)
    _sync(path.parent)


def recover_checkpoints(folder: Path) -> list[Path]:
    """Give checkpoints their names back whose writer died between two renames; return them.

    Any process may call it at any time, also while another one writes into the folder: nothing is deleted, and only
    a whole checkpoint whose place is empty is renamed. The newer of two wins.
    """
    found = []
    for suffix in (_PART, _OLD):
        for hidden in sorted(folder.glob(f".*{suffix}")):
            path = folder / hidden.name[1 : -len(suffix)]
            if is_whole(hidden) and not os.path.lexists(path):
                with suppress(OSError):  # another process was faster
                    hidden.rename(path)
                    found.append(path)
    return found


def remove_leftovers(folder: Path) -> None:
    """Delete what dead writers left in a folder that no other run writes to."""
    recover_checkpoints(folder)
    for suffix in (_PART, _OLD, _REMOVED):
        for hidden in folder.glob(f".*{suffix}"):
            if hidden.is_dir() and _is_ours(hidden):
                discard(hidden)


def remove_checkpoint(path: Path) -> bool:
    """Delete a checkpoint, all at once as far as its name goes; return False for what is none.

    A link is removed without what it leads to.
    """
    if path.is_symlink():
        path.unlink()
        return True
    if not is_whole(path):
        return False
    removed = _sibling(path, _REMOVED)
    discard(removed)
    path.rename(removed)
    for folder in (removed, _sibling(path, _PART), _sibling(path, _OLD)):
        discard(folder)
    return True


def discard(folder: Path) -> None:
    """Delete a hidden folder; half deleted, it must not pass for a checkpoint."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _replace(scratch: Path, path: Path) -> None:
    old = _sibling(path, _OLD)
    if path.is_symlink() or path.is_file():
        path.unlink()
    while True:
        discard(old)
        with suppress(FileNotFoundError):
            path.rename(old)
        try:
            scratch.rename(path)
        except OSError:
            # A process that looks for checkpoints took the empty place for that of a dead writer, and filled it.
            if is_whole(path) and not scratch.exists():
                break
            if not (scratch.exists() and path.exists()):
                raise
        else:
            break
    discard(old)


def _is_ours(folder: Path) -> bool:
    names = {item.name for item in folder.iterdir()}
    return not names or bool(names & {MARKER, METADATA, ".metadata"}) or any(n.endswith(".distcp") for n in names)


def _sibling(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}{suffix}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
