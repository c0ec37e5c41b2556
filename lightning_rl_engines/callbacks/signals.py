"""Signals seen by a thread, so that they count even while the main thread waits in a collective."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence


class SignalWatch:
    """Calls back on the first signal, and again when it is repeated.

    A Python signal handler runs between two bytecodes of the main thread: never, if that thread waits in C code for a
    rank that is gone. The C-level handler of Python however writes to the wake-up file descriptor at once, and a thread
    that reads it can act.

    A signal within ``grace_seconds`` of the first is the same request: `torchrun`, `uv run` and shells pass on a
    Ctrl-C that the terminal sent to the whole process group already.

    Args:
        signals: What to watch.
        on_first: Called once, in the watching thread.
        on_repeat: Called for each later signal, in the watching thread.
        grace_seconds: How long repetitions of the first signal are ignored.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals],
        *,
        on_first: Callable[[], None],
        on_repeat: Callable[[], None],
        grace_seconds: float = 1.0,
    ) -> None:
        self.signals = tuple(signals)
        self.on_first = on_first
        self.on_repeat = on_repeat
        self.grace_seconds = grace_seconds
        self._read = -1
        self._write = -1
        self._wakeup_before = -1
        self._handlers_before: dict[signal.Signals, object] = {}
        self._thread: threading.Thread | None = None

    @property
    def installed(self) -> bool:
        """Whether signals are being watched."""
        return self._thread is not None

    def install(self) -> bool:
        """Take over the signals; return False, and do nothing, outside the main thread."""
        if self.installed or threading.current_thread() is not threading.main_thread():
            return self.installed
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._handlers_before = {number: signal.signal(number, _ignore) for number in self.signals}
        self._thread = threading.Thread(target=self._watch, args=(self._read,), name="signal-watch", daemon=True)
        self._thread.start()
        return True

    def remove(self) -> None:
        """Give the signals back to their former handlers; does nothing when nothing is installed."""
        if self._thread is None:
            return
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._write)
        self._thread.join(timeout=5.0)
        self._thread = None

    def _watch(self, read: int) -> None:
        first: float | None = None
        while data := os.read(read, 64):
            for number in data:
                if number not in self.signals:
                    continue
                if first is None:
                    first = time.monotonic()
                    self.on_first()
                elif time.monotonic() - first >= self.grace_seconds:
                    self.on_repeat()
        os.close(read)


def _ignore(number: int, frame: object) -> None:
    """A handler must exist for Python to write to the wake-up descriptor; the thread does the work."""
