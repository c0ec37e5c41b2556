"""Commands as a user types them, in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

RANK_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK")
"""What an earlier run in this process may have left behind; a new run would take itself for one of its ranks."""


def run_python(*arguments: str, timeout: float = 240.0) -> str:
    """Run the interpreter of the tests in the repository's root and return what it writes.

    Args:
        *arguments: What follows `python`.
        timeout: Seconds.

    Raises:
        AssertionError: Another exit code than 0; the message holds the whole output.
    """
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command: Sequence[str] = (sys.executable, *arguments)
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
