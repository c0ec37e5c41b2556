"""The loop that each process of the pool runs."""

import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Task:
    """One call: its number, the world size, and ``(function, args, kwargs)`` pickled."""

    call: int
    world_size: int
    payload: bytes


@dataclass(frozen=True)
class Result:
    """What the function returned, pickled."""

    payload: bytes


@dataclass(frozen=True)
class Failure:
    """An exception, with itself pickled where that is possible."""

    type_name: str
    message: str
    traceback: str
    exception: bytes | None


def serve(rank: int, connection: Connection, stacks: str, output: str, port: int) -> None:
    """Run tasks until the connection closes."""
    # An interrupt at the terminal reaches the whole process group; the pytest process alone decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _redirect_output(output)
    with open(stacks, "w") as stack_file:
        threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
        torch.set_num_threads(1)
        if sys.platform == "linux":
            # gloo otherwise resolves the host name, which containers do not always know.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        connection.send_bytes(b"ready")
        while True:
            try:
                task = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            # Anew for each call: a Trainer in an earlier one has put back the handlers that Python knows of.
            faulthandler.unregister(signal.SIGUSR1)
            faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
            # The same for its place among the ranks: a call may have played another launch.
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0", GROUP_RANK="0")
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            outcome = _load(task)
            # The clock of the call starts here: imports of the function's module are slow on a busy machine.
            connection.send_bytes(b"loaded")
            reply = outcome if isinstance(outcome, Failure) else _run(rank, task, store, *outcome)
            connection.send_bytes(pickle.dumps(reply))


def _load(task: Task) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | Failure:
    try:
        function, args, kwargs = pickle.loads(task.payload)
    except BaseException as error:
        return _failure(error)
    return function, args, kwargs


def _run(
    rank: int,
    task: Task,
    store: dist.TCPStore,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Result | Failure:
    try:
        _new_world(rank, task, store)
        return Result(pickle.dumps(function(*args, **kwargs)))
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> Failure:
    return Failure(type(error).__name__, str(error), "".join(traceback.format_exception(error)), _pickled(error))


def _new_world(rank: int, task: Task, store: dist.TCPStore) -> None:
    # The groups of the last call go only now, when every rank has finished it: a rank that closes its sockets early
    # would break the last collective of a slower one.
    if dist.is_initialized():
        dist.destroy_process_group()
    _forget_the_last_call()
    os.environ.update(WORLD_SIZE=str(task.world_size), LOCAL_WORLD_SIZE=str(task.world_size))
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(str(task.call), store),
        rank=rank,
        world_size=task.world_size,
        timeout=timedelta(minutes=20),
    )
    torch.manual_seed(0)


def _forget_the_last_call() -> None:
    """Let go of what torch's caches and cycles keep of the last call: each of its groups has three busy threads."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor._collective_utils import MeshTopoInfo
        from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        MeshTopoInfo.build_from_mesh.cache_clear()
        _gen_transform_infos.cache_clear()
        clear_redistribute_planner_cache()
        _clear_sharding_prop_cache()
    gc.collect()
    if len(gc.get_objects()) > 50_000:
        # Those are modules, which need not be looked at again: the next collections take a tenth of the time.
        gc.freeze()


def _pickled(error: BaseException) -> bytes | None:
    # Exceptions with constructors of their own may pickle and then fail to load.
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:
        return None
    return payload


def _redirect_output(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
