"""One rank is killed at a random moment: everything ends, and the next run goes on from the last checkpoint."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from safetensors import safe_open

from lightning_rl_engines.checkpoint import read_metadata
from tests.support.models import tiny_model_folder
from tests.support.shell import RANK_VARIABLES, REPOSITORY

# Imports in two processes on a machine that may be busy.
START_SECONDS = 240.0
# The other rank notices by its broken connection; else Lightning looks after its children every five seconds.
END_SECONDS = 30.0
PHASES = ("SAVING", "TRAINING", "EXPORTING")


class Run:
    """A run of two ranks, read line by line."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.ranks: dict[int, int] = {}
        self.started = -1
        self.saved = 0
        self.updates: dict[int, tuple[str, ...]] = {}
        self.output: list[str] = []

    def lines(self) -> Iterator[list[str]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            words = line.split()
            if words[:1] == ["RANK"]:
                self.ranks[int(words[1])] = int(words[2])
            elif words[:1] == ["START"]:
                self.started = int(words[1])
            elif words[:1] == ["SAVED"]:
                self.saved = int(words[1])
            elif words[:1] == ["UPDATE"]:
                self.updates[int(words[1])] = tuple(words[2:])
            yield words

    def read_until(self, phase: str, after: int) -> bool:
        """Read until a phase begins for the ``after``-th time; False if the run ends first."""
        for words in self.lines():
            if self.started >= 0 and words[:1] == [phase]:
                after -= 1
                if after <= 0:
                    return True
        return False


@contextmanager
def start(folder: Path, updates: int, *, mode: str, engine: str, trained: str) -> Iterator[Run]:
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [
            sys.executable,
            str(REPOSITORY / "tests/checkpoint/kill_run.py"),
            *(str(folder), mode, str(updates), engine, trained),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    watchdog = threading.Timer(START_SECONDS, os.killpg, (process.pid, signal.SIGKILL))
    watchdog.start()
    try:
        yield Run(process)
    finally:
        watchdog.cancel()
        for left in members(process.pid):
            left.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def members(session: int) -> list[psutil.Process]:
    """Processes of a session that are not dead."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def require_end(run: Run) -> None:
    """All processes end by themselves, and soon."""
    deadline = time.monotonic() + END_SECONDS
    while members(run.process.pid):
        assert time.monotonic() < deadline, f"{members(run.process.pid)} in:\n{''.join(run.output)}"
        time.sleep(0.1)
    for _ in run.lines():  # what was still in the pipe
        pass


def require_nothing_half_written(folder: Path) -> None:
    for path in (folder / "checkpoints").glob("[!.]*"):
        assert path.name == "last.ckpt"
        assert read_metadata(path)["global_step"] > 0
    export = folder / "export"
    if export.exists():
        assert {item.name for item in export.iterdir()} >= {"config.json", "model.safetensors"}
        with safe_open(export / "model.safetensors", "pt") as file:
            assert all(file.get_tensor(name).isfinite().all() for name in file.keys())  # noqa: SIM118


def kill_and_resume(
    folder: Path, *, kills: int, seed: int, mode: str, engine: str, trained: str, phases: tuple[str, ...] = PHASES
) -> None:
    chosen = random.Random(seed)
    saved, seen, updates = 0, {}, 12 * (kills + 1)
    for number in range(kills + 1):
        last = number == kills
        with start(folder, saved + 2 if last else updates, mode=mode, engine=engine, trained=trained) as run:
            if last:
                assert run.read_until("END", 1), "".join(run.output)
                run.process.wait(END_SECONDS)
            else:
                phase, rank = phases[number % len(phases)], chosen.randrange(2)
                assert run.read_until(phase, chosen.randint(2, 5)), "".join(run.output)
                time.sleep(chosen.uniform(0.0, 0.06))
                os.kill(run.ranks[rank], signal.SIGKILL)
            require_end(run)
            output = "".join(run.output)
            if last:
                assert run.process.returncode == 0, output
            else:
                assert run.process.returncode != 0, output
        # Synchronously, what was said to be saved is; in the background, all but the last that was begun.
        assert run.started >= saved - (1 if mode == "async" else 0), output
        assert (run.started > 0) == (number > 0), output
        for update, numbers in run.updates.items():
            assert seen.setdefault(update, numbers) == numbers, f"update {update} differs in:\n{output}"
        require_nothing_half_written(folder)
        saved = max(run.saved, run.started)
    assert sorted(seen) == list(range(1, max(seen) + 1))


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    tiny_model_folder("llama")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("engine", "trained", "phase"), [("fsdp_ulysses", "full", "SAVING"), ("torchtitan", "lora", "TRAINING")]
)
def test_a_run_survives_the_death_of_a_rank(tmp_path: Path, engine: str, trained: str, phase: str) -> None:
    kill_and_resume(tmp_path, kills=1, seed=1, mode="sync", engine=engine, trained=trained, phases=(phase,))


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ["fsdp_ulysses", "torchtitan"])
@pytest.mark.parametrize(("mode", "trained", "seed"), [("sync", "full", 2), ("async", "full", 3), ("sync", "lora", 4)])
def test_a_run_survives_ten_deaths(tmp_path: Path, engine: str, mode: str, trained: str, seed: int) -> None:
    kill_and_resume(tmp_path, kills=10, seed=seed, mode=mode, engine=engine, trained=trained)


CHILD = """
import os, time
from lightning_rl_engines.strategies.launcher import follow_launcher
follow_launcher()
print("CHILD", os.getpid(), os.environ.get("LIGHTNING_RL_LAUNCHER_PID"), flush=True)
time.sleep(1000)
"""

PARENT = """
import os, subprocess, sys
environment = {**os.environ, "LIGHTNING_RL_LAUNCHER_PID": str(os.getpid())}
subprocess.run([sys.executable, "-c", sys.argv[1]], env=environment)
"""


def test_a_rank_that_waits_for_nothing_ends_with_its_launcher() -> None:
    command = [sys.executable, "-c", PARENT, CHILD]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        _, pid, variable = parent.stdout.readline().split()
        assert variable == "None"  # what the rank starts in turn is no rank
        child = psutil.Process(int(pid))
        time.sleep(1.5)
        assert child.is_running()
        parent.kill()
        child.wait(10.0)
