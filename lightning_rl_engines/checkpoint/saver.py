"""Writes checkpoints, at once or while training goes on."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from filelock import BaseFileLock, FileLock, Timeout
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from lightning_rl_engines.checkpoint.folders import open_scratch, pack, publish, remove_checkpoint, remove_leftovers
from lightning_rl_engines.checkpoint.training import Gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LOCK = ".lock"
"""Empty file that the writing run holds, in each folder of checkpoints."""


class CheckpointSaver:
    """Saves with all ranks; an error of one rank is raised on all of them.

    In the background, the state is copied to the host first, so training may go on while a thread writes the copy,
    talking to the other ranks' threads in a gloo group of its own. One save is under way at most.

    Args:
        gather: Exchanges objects between the ranks.
        is_writer: Whether this rank renames and deletes folders; one rank does.
        timeout: How long threads wait for each other.
    """

    def __init__(self, gather: Gather, *, is_writer: bool, timeout: timedelta) -> None:
        self._gather = gather
        self._is_writer = is_writer
        self._timeout = timeout
        self._executor: ThreadPoolExecutor | None = None
        self._group: ProcessGroup | None = None
        self._stager: DefaultStager | None = None
        self._under_way: list[Future[BaseException | None]] = []
        self._claims: dict[Path, BaseFileLock | None] = {}

    def claim(self, folder: Path) -> None:
        """Keep other runs from writing into a folder until :meth:`close`, and remove what dead ones left there.

        For the rank that is the writer; others have nothing to do. The system gives the claim up if the process dies.

        Raises:
            RuntimeError: Another run writes there.
        """
        if not self._is_writer or folder in self._claims:
            return
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._claims[folder] = _lock(folder)
        except Timeout as error:
            raise RuntimeError(
                f"another run writes checkpoints into {str(folder)!r}; give this one a folder of its own, with "
                "UpdateCheckpoint(dirpath=...) or Trainer(default_root_dir=...)."
            ) from error
        except OSError:
            self._claims[folder] = None  # not every file system has locks
        remove_leftovers(folder)

    def save(self, state: dict[str, Any], metadata: Mapping[str, Any], path: Path, *, background: bool) -> None:
        """Write a checkpoint; collective over the world.

        Args:
            state: Sharded and replicated tensors. They and the metadata may change as soon as this returns.
            metadata: Plain data, the first rank's is written.
            path: The folder; a checkpoint there is replaced once this one is whole.
            background: Return once the state is copied; :meth:`wait` or the next call raises what fails later.

        Raises:
            RuntimeError: On all ranks, what failed on any of them, in an earlier save too.
        """
        self.wait()
        scratch = path.with_name(f".{path.name}.part")
        packed = b""

        def prepare() -> None:
            nonlocal packed
            if self._is_writer:
                self._open(path)
                packed = pack(metadata)

        self._raise_together(self._attempt(prepare))
        if not background:
            self._raise_together(self._attempt(lambda: self._write(state, packed, scratch, path, None)))
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
            self._group = cast("ProcessGroup", dist.new_group(backend="gloo", timeout=self._timeout))
            # Plain host memory: what else there is needs an accelerator.
            self._stager = DefaultStager(StagingOptions(False, False, False, False))
        assert self._stager is not None
        copy: Any = self._stager.stage(state)
        self._submit(lambda: self._write(copy, packed, scratch, path, self._group))

    def remove(self, path: Path) -> bool:
        """Delete a checkpoint, after the save that is under way, and not if that fails.

        Returns:
            False if there is nothing that could be deleted; always True on ranks that do not delete.
        """
        if not self._is_writer:
            return True
        if not self._under_way:
            return remove_checkpoint(path)
        before = self._under_way[-1]

        def remove() -> None:
            if before.result() is None:
                remove_checkpoint(path)

        self._submit(remove)
        return True

    def wait(self) -> None:
        """Wait until everything is written; collective over the world.

        Raises:
            RuntimeError: On all ranks, what failed on any of them.
        """
        # Whether a save is under way is the same on all ranks; removals are not.
        if self._executor is not None:
            self._raise_together(self.join())

    def join(self) -> BaseException | None:
        """Wait for this rank's own thread and return what failed; no collective, for ranks that are about to end."""
        errors = [error for error in [future.result() for future in self._under_way] if error is not None]
        self._under_way = []
        return errors[0] if errors else None

    def close(self) -> BaseException | None:
        """Wait as :meth:`join` does, end the thread and give claims up; a later save makes both anew."""
        error = self.join()
        for lock in self._claims.values():
            if lock is not None:
                _unlock(lock)
        self._claims = {}
        if self._executor is not None:
            self._executor.shutdown()
        if self._stager is not None:
            self._stager.close()
        self._executor, self._stager, self._group = None, None, None
        return error

    def _open(self, path: Path) -> None:
        self.claim(path.parent)
        open_scratch(path)

    def _write(
        self,
        state: dict[str, Any],
        metadata: bytes,
        scratch: Path,
        path: Path,
        group: "ProcessGroup | None",
    ) -> None:
        dcp.save(state, checkpoint_id=scratch, process_group=group)
        if self._is_writer:  # by now, the files of all ranks are on the disk
            publish(scratch, path, metadata)

    def _submit(self, action: Callable[[], None]) -> None:
        assert self._executor is not None
        self._under_way.append(self._executor.submit(self._attempt, action))

    def _attempt(self, action: Callable[[], None]) -> BaseException | None:
        try:
            action()
        except (Exception, CheckpointException) as error:  # torch derives the latter from BaseException
            return error
        return None

    def _raise_together(self, error: BaseException | None) -> None:
        texts = self._gather(None if error is None else f"{type(error).__name__}: {error}")
        failed = [(rank, text) for rank, text in enumerate(texts) if text is not None]
        if failed:
            rank, text = failed[0]
            raise RuntimeError(f"A checkpoint could not be written; rank {rank} says: {text}") from error


def _lock(folder: Path) -> BaseFileLock:
    # One object per folder, which counts: Trainers of one process may overlap. A soft lock would outlive the process.
    lock = FileLock(folder / LOCK, is_singleton=True, thread_local=False, fallback_to_soft=False)
    while True:
        lock.acquire(blocking=False)
        if Path(lock.lock_file).exists():
            return lock
        lock.release()  # of a file that its last owner has just removed


def _unlock(lock: BaseFileLock) -> None:
    if lock.lock_counter == 1:
        Path(lock.lock_file).unlink(missing_ok=True)
    lock.release()
