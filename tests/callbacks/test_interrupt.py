"""Ctrl-C: a checkpoint and a clean end on every rank, whichever process the signal reaches."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_rl_engines.callbacks.interrupt import GracefulInterrupt, RunInterrupted
from lightning_rl_engines.callbacks.signals import SignalWatch
from tests.support.shell import RANK_VARIABLES

# Imports torch and Lightning in two processes on a machine that may be busy.
START_SECONDS = 120.0

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    # Lightning's own use of torch.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]

SCRIPT = """
    import os, sys, time, torch
    from datetime import timedelta
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy
    from lightning_rl_engines.callbacks.interrupt import GracefulInterrupt

    def say(*words):
        os.write(1, (" ".join(map(str, words)) + chr(10)).encode())  # One write: two processes share the pipe.

    class Module(LightningModule):
        def __init__(self, stuck):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.stuck = stuck
        def training_step(self, batch, batch_idx):
            if self.trainer.is_global_zero:
                say("STEP", self.trainer.global_step)
            if self.stuck and batch_idx == 3:
                if self.trainer.global_rank == 1:
                    say("PID", os.getpid())
                    time.sleep(1000)
                torch.distributed.barrier()
            time.sleep(0.05)
            return self.layer(batch).sum()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    folder, resume, stuck = sys.argv[1], sys.argv[2] == "resume", sys.argv[2] == "stuck"
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=60)),
        max_steps=100000 if not resume else int(sys.argv[3]), default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(dirpath=folder + "/checkpoints", save_last=True), GracefulInterrupt(grace_seconds=0.2)
        ],
    )
    data = torch.utils.data.DataLoader(torch.ones(10000, 1), batch_size=1)
    trainer.fit(Module(stuck), data, ckpt_path="last" if resume else None)
    say("END", trainer.global_step)
"""


@contextmanager
def start(folder: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """The script on two ranks; all its processes are gone at the end, however the test ends."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    for name in RANK_VARIABLES:
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script), str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            kill(process)


def kill(process: "subprocess.Popen[str]") -> None:
    """Kill what is left of the processes that a script started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def read_until(process: "subprocess.Popen[str]", word: str) -> str:
    """Read output until a line starts with the word; a thread kills a silent process."""
    assert process.stdout is not None
    timer = threading.Timer(START_SECONDS, kill, (process,))
    timer.start()
    seen = []
    try:
        for line in process.stdout:
            seen.append(line)
            if line.startswith(word):
                return line
    finally:
        timer.cancel()
    raise AssertionError(f"no line starts with {word!r} in:\n{''.join(seen)}")


def finish(process: "subprocess.Popen[str]", seconds: float = 60.0) -> str:
    output, _ = process.communicate(timeout=seconds)
    return output


def stop_two_ranks(tmp_path: Path, send) -> int:
    """Run, send a signal after some steps, and return the step of the checkpoint."""
    with start(tmp_path, "first") as process:
        read_until(process, "STEP 5")
        send(process.pid)
        output = finish(process)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert saved >= 6
    return saved


def test_a_signal_to_one_process_stops_both_ranks(tmp_path):
    stop_two_ranks(tmp_path, lambda pid: os.kill(pid, signal.SIGTERM))


@pytest.mark.exhaustive
def test_ctrl_c_in_a_terminal_stops_both_ranks_and_the_run_resumes(tmp_path):
    saved = stop_two_ranks(tmp_path, lambda pid: os.killpg(pid, signal.SIGINT))
    with start(tmp_path, "resume", str(saved + 2)) as process:
        assert read_until(process, "STEP").split()[1] == str(saved)
        assert f"END {saved + 2}" in finish(process)
    assert process.returncode == 0


def test_a_second_signal_kills_processes_that_wait_in_a_collective(tmp_path):
    with start(tmp_path, "stuck") as process:
        child = int(read_until(process, "PID").split()[1])
        os.kill(process.pid, signal.SIGINT)
        read_until(process, "Stopping after this update")
        time.sleep(0.5)  # The grace time runs from the moment at which the first signal was seen.
        assert process.poll() is None, "the first signal must not kill"
        os.kill(process.pid, signal.SIGINT)
        output = finish(process, 10.0)
        assert process.returncode == 130, output
        assert gone(child), "the launched process is still alive"


def gone(pid: int) -> bool:
    """Whether a process is nobody's any more; waits for the kernel to remove it."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class StopAt(Callback):
    def __init__(self, interrupt: GracefulInterrupt, hook: str, step: int) -> None:
        self.interrupt, self.hook, self.step = interrupt, hook, step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.hook == "train" and batch_idx == self.step:
            self.interrupt.request()

    def on_validation_start(self, trainer, pl_module):
        if self.hook == "validation" and trainer.global_step >= self.step:
            self.interrupt.request()


def fit(tmp_path: Path, hook: str, step: int, **options) -> tuple[Trainer, RunInterrupted]:
    interrupt = GracefulInterrupt()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[StopAt(interrupt, hook, step), interrupt],
        **options,
    )
    data = DataLoader(torch.ones(6, 1), num_workers=0)
    with pytest.raises(RunInterrupted) as caught:
        trainer.fit(Module(), data, data)
    return trainer, caught.value


def test_stops_after_the_batch_in_which_it_was_asked(tmp_path):
    trainer, interruption = fit(tmp_path, "train", 2)
    assert interruption.code == 130
    assert trainer.interrupted
    assert torch.load(interruption.checkpoint, weights_only=True)["global_step"] == 3
    assert trainer.global_step == 3


def test_stops_after_a_validation(tmp_path):
    trainer, interruption = fit(tmp_path, "validation", 6)
    assert torch.load(interruption.checkpoint, weights_only=True)["global_step"] == 6
    assert trainer.global_step == 6


def test_no_validation_is_started_after_the_request(tmp_path):
    trainer, interruption = fit(tmp_path, "train", 5)
    assert torch.load(interruption.checkpoint, weights_only=True)["global_step"] == 6
    assert trainer.fit_loop.epoch_loop.val_loop.batch_progress.current.ready == 0


def test_nothing_is_saved_in_the_sanity_check(tmp_path):
    _, interruption = fit(tmp_path, "validation", 0)
    assert interruption.checkpoint is None
    assert not list(tmp_path.rglob("*.ckpt"))


def test_handlers_are_given_back_after_an_interruption(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    fit(tmp_path, "train", 0)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not [thread for thread in threading.enumerate() if thread.name == "signal-watch"]


def test_repetitions_within_the_grace_time_are_one_request():
    calls = []
    first, repeated = threading.Event(), threading.Event()
    watch = SignalWatch(
        (signal.SIGINT,),
        on_first=lambda: (calls.append("first"), first.set()),
        on_repeat=lambda: (calls.append("repeat"), repeated.set()),
        grace_seconds=0.3,
    )
    assert watch.install()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        assert first.wait(5.0)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.4)
        assert calls == ["first"]
        os.kill(os.getpid(), signal.SIGINT)
        assert repeated.wait(5.0)
        assert calls == ["first", "repeat"]
    finally:
        watch.remove()


def test_outside_the_main_thread_signals_are_left_alone():
    results = []
    watch = SignalWatch((signal.SIGINT,), on_first=lambda: None, on_repeat=lambda: None)
    thread = threading.Thread(target=lambda: results.append(watch.install()))
    thread.start()
    thread.join()
    assert results == [False]


def test_negative_grace_is_refused():
    with pytest.raises(ValueError, match="grace_seconds=-1"):
        GracefulInterrupt(grace_seconds=-1)
