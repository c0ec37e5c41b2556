"""A persistent pool of gloo ranks, driven from the pytest process.

The pool grows to the largest world size asked for and is reused by later calls: a call with world size 2 runs on its
first two processes. Each call gets a fresh process group, so no group, mesh or mismatched collective outlives it.
"""

import atexit
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.worker import Failure, Result, Task, serve

START_TIMEOUT = 240.0
"""Seconds that a process gets for imports, its own and those of a function; not part of a call's timeout."""

ERROR_GRACE = 10.0
"""Seconds that the other ranks get to finish once one rank has raised: they usually wait for it in a collective."""


_IMPORTS = ("lightning_rl_engines", "lightning_rl_engines.models.titan.build", "peft", "torch.distributed.checkpoint")


@dataclass(frozen=True)
class RankFailure:
    """What went wrong on one rank.

    Attributes:
        rank: Global rank.
        type_name: Name of the exception's class, ``"Died"`` or ``"StillRunning"``.
        message: ``str(exception)``.
        traceback: Formatted traceback; for a rank that did not raise, where its threads stood, and its output.
        exception: The exception itself where it could be pickled.
    """

    rank: int
    type_name: str
    message: str
    traceback: str
    exception: BaseException | None = None


class WorkerError(Exception):
    """At least one rank raised or died.

    Attributes:
        errors: One entry per failed rank, in rank order.
        world_size: Number of ranks of the call.
    """

    def __init__(self, summary: str, errors: list[RankFailure], world_size: int) -> None:
        self.errors = errors
        self.world_size = world_size
        # Ranks that failed alike are listed together: eight copies of a traceback hide the one that differs.
        alike: dict[tuple[str, str, str], list[int]] = {}
        for e in errors:
            alike.setdefault((e.type_name, e.message, e.traceback), []).append(e.rank)
        parts = [f"--- ranks {ranks}: {name}: {message}\n{text}" for (name, message, text), ranks in alike.items()]
        super().__init__("\n".join([summary, *parts]))

    def all_ranks_raised(self, exception_type: type[BaseException]) -> bool:
        """Whether every rank raised an exception of this type: none was left waiting for another."""
        return len(self.errors) == self.world_size and all(isinstance(e.exception, exception_type) for e in self.errors)


class WorkerTimeout(WorkerError):
    """The ranks did not finish in time; the pool was killed."""


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    stacks: Path
    output: Path


@dataclass
class _Pool:
    folder: Path
    store: dist.TCPStore
    workers: list[_Worker] = field(default_factory=list)

    def kill(self) -> None:
        for worker in self.workers:
            if worker.process.is_alive() and worker.process.pid is not None:
                os.kill(worker.process.pid, signal.SIGKILL)
        for worker in self.workers:
            worker.process.join()
            worker.connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)


_pools: list[_Pool] = []
_calls = itertools.count()


@cache
def _save_tiny_models() -> None:
    """Save the tiny models here: in a process group transformers saves on rank 0 only, whoever holds the lock."""
    from tests.support.models import MODEL_NAMES, tiny_model_folder

    for name in MODEL_NAMES:
        tiny_model_folder(name)


def run_workers(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any
) -> list[Any]:
    """Run a function on every rank of a gloo world and return its results in rank order.

    Args:
        world_size: Number of ranks. The default process group, ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and
            ``MASTER_*`` are set; the torch seed is 0 on every rank.
        function: A function at the top level of an importable module.
        *args: Positional arguments; pickled, tensors by value.
        timeout: Seconds, imports of the function's module apart; when they are over all processes are killed and
            the next call starts new ones.
        **kwargs: Keyword arguments.

    Returns:
        The results, tensors by value.

    Raises:
        WorkerError: If a rank raised or died. Where not all ranks raised, the pool is replaced.
        WorkerTimeout: If the ranks did not finish in time.
    """
    _save_tiny_models()
    task = pickle.dumps((function, args, kwargs))
    pool = _pool_of(world_size)
    try:
        workers = pool.workers[:world_size]
        call = next(_calls)
        for worker in workers:
            worker.connection.send_bytes(pickle.dumps(Task(call, world_size, task)))
        _await_signal(workers)
        replies = _collect(workers, timeout)
        if all(isinstance(reply, Result) for reply in replies.values()) and len(replies) == world_size:
            return [pickle.loads(replies[rank].payload) for rank in range(world_size)]
        error = _error_of(workers, replies, timeout)
    except BaseException:
        shutdown_workers()
        raise
    if not all(isinstance(reply, Failure) for reply in replies.values()) or len(replies) < world_size:
        shutdown_workers()
    causes = [e.exception for e in error.errors if e.exception is not None]
    raise error from (causes[0] if causes else None)


def shutdown_workers() -> None:
    """Kill every process of the pool; harmless when there is none."""
    while _pools:
        _pools.pop().kill()


atexit.register(shutdown_workers)


def _pool_of(world_size: int) -> _Pool:
    if _pools and not all(worker.process.is_alive() for worker in _pools[0].workers):
        shutdown_workers()
    if not _pools:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        _pools.append(_Pool(Path(tempfile.mkdtemp(prefix="lre_workers_")), store))
    pool = _pools[0]
    try:
        fresh = [_start(pool, rank) for rank in range(len(pool.workers), world_size)]
        _await_signal(fresh)
    except BaseException:
        shutdown_workers()
        raise
    return pool


def _await_signal(workers: list[_Worker]) -> None:
    """Wait until each process has started, or has imported the function's module."""
    deadline = time.monotonic() + START_TIMEOUT
    for worker in workers:
        if not worker.connection.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"imports took over {START_TIMEOUT:.0f} s: {_stacks_of(worker)}")
        try:
            worker.connection.recv_bytes()
        except (EOFError, ConnectionResetError) as error:
            raise RuntimeError(f"{worker.process.name} died during imports: {_tail(worker.output)}") from error


def _start(pool: _Pool, rank: int) -> _Worker:
    # Imports take ten seconds, and a lot of memory: one process does them, and the ranks are copies of it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTS))
    ours, theirs = context.Pipe()
    stacks, output = pool.folder / f"stacks_{rank}.txt", pool.folder / f"output_{rank}.txt"
    process = context.Process(
        target=serve, args=(rank, theirs, str(stacks), str(output), pool.store.port), name=f"rank {rank}"
    )
    # Imports read these before any of our code runs.
    with _environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"):
        process.start()
    theirs.close()
    worker = _Worker(process, ours, stacks, output)
    pool.workers.append(worker)
    return worker


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _collect(workers: list[_Worker], timeout: float) -> dict[int, Result | Failure]:
    """Replies by rank: of all of them, or of those that came before the time was over."""
    deadline = time.monotonic() + timeout
    waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
    replies: dict[int, Result | Failure] = {}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(waiting), left):
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                reply = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                workers[rank].process.join()
                code = workers[rank].process.exitcode
                reply = Failure("Died", f"exit code {code}", _tail(workers[rank].output), None)
            replies[rank] = reply
            if isinstance(reply, Failure):
                deadline = min(deadline, time.monotonic() + ERROR_GRACE)
    return replies


def _error_of(workers: list[_Worker], replies: dict[int, Result | Failure], timeout: float) -> WorkerError:
    errors = []
    for rank, worker in enumerate(workers):
        reply = replies.get(rank)
        if reply is None:
            errors.append(RankFailure(rank, "StillRunning", "killed", _stacks_of(worker)))
        elif isinstance(reply, Failure):
            exception = None if reply.exception is None else pickle.loads(reply.exception)
            errors.append(RankFailure(rank, reply.type_name, reply.message, reply.traceback, exception))
    raised = [e for e in errors if e.type_name != "StillRunning"]
    if not raised:
        return WorkerTimeout(f"ranks {[e.rank for e in errors]} ran past {timeout} s", errors, len(workers))
    return WorkerError(f"{len(raised)} of {len(workers)} ranks failed", errors, len(workers))


def _stacks_of(worker: _Worker) -> str:
    if worker.process.pid is not None and worker.process.is_alive():
        os.kill(worker.process.pid, signal.SIGUSR1)
        # A busy machine may take seconds; the dump is whole once it has stopped growing.
        deadline, size = time.monotonic() + 5.0, 0
        while time.monotonic() < deadline and not 0 < size == worker.stacks.stat().st_size:
            size = worker.stacks.stat().st_size if worker.stacks.exists() else 0
            time.sleep(0.3)
    stacks = worker.stacks.read_text() if worker.stacks.exists() else ""
    return f"{stacks}\noutput:\n{_tail(worker.output)}"


def _tail(path: Path, characters: int = 3000) -> str:
    return path.read_text(errors="replace")[-characters:] if path.exists() else ""
