"""On SIGTERM, SIGUSR1 (sent by schedulers) or Ctrl-C a run finishes its step, saves and exits with code 75.

75 is EX_TEMPFAIL of sysexits.h, "try again later", on which a scheduler can requeue. All processes stop after the same
step, since the reduction that sums label counts also sums received signals. Launchers hide their processes' exit codes,
so the run also writes a file `requeue` into its folder.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.util
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXIT_CODE = 75
INTERRUPTED, TERMINATED = 130, 143
"""Codes of a run that was trained to its end and not measured: to start it again would help nobody."""
MARKER = "requeue"
SIGNALS = [signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])]
SAME_SIGNAL = 5.0  # seconds: a scheduler signals every process, and a launcher hands its own on to them
SAME_KEY = 0.5  # seconds: a launcher hands Ctrl-C on; a person who presses it twice means it


class Interruption:
    """Whether the run received a signal to stop.

    Attributes:
        received: name of the signal that this process received, for messages.
        agreed: all processes stop after the current step.
        training: whether there is something to save; before that, a signal ends the run immediately.
        trained: the folder of the trained heads, once all steps are done and they are saved: what remains is to measure
            them, and a signal ends the run immediately.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.agreed = False
        self.training = False
        self.trained: Path | None = None
        self._at = 0.0
        self._same = SAME_SIGNAL
        self._process = os.getpid()

    def receive(self, number: int, frame: Any) -> None:
        """Record the first signal. A second one some seconds later, or a second Ctrl-C, ends the process immediately.

        `torchrun` turns a second Ctrl-C into SIGTERM, so only the kind of the first signal counts.

        Raises:
            SystemExit: nothing was trained yet, or all is trained and saved.
        """
        if os.getpid() != self._process:
            return  # a process that was forked from this one, such as a worker that reads data
        if self.received is None:
            by_key = number == signal.SIGINT
            self.received, self._at = "Ctrl-C" if by_key else signal.Signals(number).name, time.monotonic()
            self._same = SAME_KEY if by_key else SAME_SIGNAL
            # not a logger: the signal may have come while it was writing
            if not self.training:
                os.write(2, f"{self.received}: ended before training began; nothing had to be saved.\n".encode())
                raise SystemExit(EXIT_CODE)
            self.leave_when_trained()
            second = "a second Ctrl-C" if by_key else "a second signal"
            message = f"{self.received}: the run ends after this step is saved; {second} ends it immediately.\n"
            os.write(2, message.encode())
        elif time.monotonic() - self._at > self._same:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def leave_when_trained(self) -> None:
        """
        Raises:
            SystemExit: a signal was received, and all is trained and saved.
        """
        if self.received is not None and self.trained is not None:
            os.write(2, f"{self.received}: all is trained and saved in {self.trained}, but not measured.\n".encode())
            raise SystemExit(INTERRUPTED if self.received == "Ctrl-C" else TERMINATED)


@contextlib.contextmanager
def listening() -> Iterator[Interruption]:
    """Within the context, signals are recorded. Only a main thread can receive them; in another one nothing happens."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.signal(number, interruption.receive) for number in SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def shield_workers(loader: Any) -> None:
    """A DataLoader's workers ignore these signals from now on: the main process still needs them."""
    loader.worker_init_fn = ShieldedWorker(loader.worker_init_fn)
    kill_workers_at_exit()


@functools.cache  # once a process
def kill_workers_at_exit() -> None:
    """Kill workers that ignore SIGTERM at exit, where multiprocessing would send it and wait for them without end.

    A DataLoader stops its workers before that, except one that had just started when the run failed.
    """
    multiprocessing.util.Finalize(None, kill_daemons, exitpriority=0)


def kill_daemons() -> None:
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


class ShieldedWorker:
    """A DataLoader's worker_init_fn after which the worker ignores these signals."""

    def __init__(self, init: Any) -> None:
        self.init = init

    def __call__(self, worker: int) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if self.init is not None:
            self.init(worker)


def set_marker(run_folder: Path, text: str) -> None:
    """Mark the run as to be started again; if the folder cannot be written, the exit code alone shows it."""
    with contextlib.suppress(OSError):
        (run_folder / MARKER).write_text(text + "\n", encoding="utf-8")


def clear_marker(run_folder: Path) -> None:
    (run_folder / MARKER).unlink(missing_ok=True)
