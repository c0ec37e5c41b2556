"""Where a run puts weights for the servers that read them."""

import glob
import os
import shutil
import socket
import uuid
import weakref
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

PREFIX = "lightning-rl-weights-"
_LOCK, _MODEL = "lock", "model"


class HandoverFolder:
    """A new folder below ``root`` that belongs to this process while it lives.

    A process that is killed cannot remove what it wrote, which in shared memory is memory lost to everybody. So each
    holds a lock in its folder, and a new one removes the folders of its machine whose locks nobody holds.

    Args:
        root: Folder that servers see too; made where it is missing.

    Raises:
        OSError: ``root`` cannot be written.
    """

    def __init__(self, root: str) -> None:
        # Servers have a working directory of their own.
        root = os.path.abspath(os.path.expanduser(root))
        os.makedirs(root, exist_ok=True)
        # Locks of network file systems may be known to one machine only, so each looks after its own folders.
        own = f"{PREFIX}{socket.gethostname()}-"
        for folder in Path(root).glob(f"{glob.escape(own)}*"):
            _remove_if_left(folder)
        while True:
            self.folder = Path(root, f"{own}{uuid.uuid4().hex}")
            self.folder.mkdir()
            self._lock = _lock_of(self.folder)
            with suppress(OSError):  # not every file system has locks
                self._lock.acquire()
            if self.folder.exists():
                break
            # Another new process took it for one that was left before it was locked.
            self._lock.release()
        self._removed = weakref.finalize(self, _remove, self.folder, self._lock, os.getpid())

    @property
    def model(self) -> str:
        """Path of the Hugging Face folder; it is there from an update's first weight until the servers have read it."""
        return str(self.folder / _MODEL)

    def clear(self) -> None:
        """Remove the weights."""
        shutil.rmtree(self.model, ignore_errors=True)

    def close(self) -> None:
        """Remove the folder, as the end of the process does too."""
        self._removed()


def _remove(folder: Path, lock: FileLock, owner: int) -> None:
    if os.getpid() == owner:  # and not in a fork of it
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _remove_if_left(folder: Path) -> None:
    if folder.is_symlink():
        return
    lock = _lock_of(folder)
    # Another user's folder cannot be locked either.
    with suppress(Timeout, OSError):
        lock.acquire(blocking=False)
        shutil.rmtree(folder, ignore_errors=True)
    lock.release()


def _lock_of(folder: Path) -> FileLock:
    return FileLock(folder / _LOCK, thread_local=False, fallback_to_soft=False)
