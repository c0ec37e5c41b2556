"""The folder through which weights reach servers."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from lightning_rl_engines.rollout import handover
from lightning_rl_engines.rollout.handover import HandoverFolder

HOLD = """
import sys, time
from pathlib import Path
from lightning_rl_engines.rollout.handover import HandoverFolder
own = HandoverFolder(sys.argv[1])
Path(own.model).mkdir()
Path(own.model, "model.safetensors").touch()
print(own.folder, flush=True)
time.sleep(600)
"""


def test_what_a_killed_process_left_is_removed_and_a_living_one_keeps_its_own(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    others = [
        subprocess.Popen([sys.executable, "-c", HOLD, str(root)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        killed, living = (Path(str(other.stdout and other.stdout.readline()).strip()) for other in others)
        os.kill(others[0].pid, signal.SIGKILL)
        others[0].wait()
        assert (killed / "model" / "model.safetensors").exists()
        mine = HandoverFolder(str(root))
        assert not killed.exists()
        assert (living / "model" / "model.safetensors").exists()
        assert sorted(root.iterdir()) == sorted([living, mine.folder])
        mine.close()
        assert list(root.iterdir()) == [living]
    finally:
        for other in others:
            other.kill()
            other.communicate()


def test_what_is_not_of_this_machine_or_no_folder_is_left_alone(tmp_path: Path) -> None:
    elsewhere, target = tmp_path / "lightning-rl-weights-elsewhere-1", tmp_path / "target"
    elsewhere.mkdir()
    target.mkdir()
    link = tmp_path / f"lightning-rl-weights-{socket.gethostname()}-1"
    link.symlink_to(target)
    own = HandoverFolder(str(tmp_path))
    assert {*tmp_path.iterdir()} == {elsewhere, target, link, own.folder}
    assert list(target.iterdir()) == []


def test_weights_go_when_the_servers_have_read_them_and_the_name_stays(tmp_path: Path) -> None:
    own = HandoverFolder(str(tmp_path))
    Path(own.model).mkdir()
    own.clear()
    assert not Path(own.model).exists()
    assert own.folder.exists()
    del own
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_new_folder_that_another_process_takes_for_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Its lock is taken, and it is removed, before or after this process has opened the file."""
    lock_of, taken = handover._lock_of, []

    def interrupted(folder: Path) -> FileLock:
        lock = lock_of(folder)
        if not taken:
            taken.append(folder)
            if moment == "after":
                lock.acquire()
            shutil.rmtree(folder)
        return lock

    monkeypatch.setattr(handover, "_lock_of", interrupted)
    own = HandoverFolder(str(tmp_path))
    monkeypatch.undo()
    assert taken
    HandoverFolder(str(tmp_path)).close()
    assert list(tmp_path.iterdir()) == [own.folder]
