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
"""Exit codes of a run that was trained to its end and saved but not evaluated, so that no scheduler requeues it."""
MARKER = "requeue"
SIGNALS = [signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])]
SAME_SIGNAL = 5.0  # seconds: schedulers signal every process, and launchers pass their own signal on to them
SAME_KEY = 0.5  # seconds: launchers pass Ctrl-C on, and a person who presses it twice should be heard
"""Signals that arrive within this time of the first one count as the same."""


class Interruption:
    """Whether the run received a signal to stop.

    Attributes:
        received: name of the signal that this process received, for messages.
        agreed: all processes stop after the current step.
        training: training has begun, so there is something to save; before that, a signal ends the run immediately.
        starts_again_in: the run's folder, if `--resume true` would do there what this run was to do; a signal before
            training then leaves the marker in it.
        trained: the folder of the trained heads once they are saved. Only their evaluation remains then, and a signal
            ends the run immediately.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.agreed = False
        self.training = False
        self.starts_again_in: Path | None = None
        self.trained: Path | None = None
        self._at = 0.0
        self._same = SAME_SIGNAL
        self._process = os.getpid()

    def receive(self, number: int, frame: Any) -> None:
        """Record the first signal. A second one some seconds later, or a second Ctrl-C, ends the process immediately.

        `torchrun` turns a second Ctrl-C into SIGTERM, so only the kind of the first signal counts.

        Raises:
            SystemExit: training has not begun, or all is trained and saved.
        """
        if os.getpid() != self._process:
            return  # a process that was forked from this one, such as a worker that reads data
        if self.received is None:
            by_key = number == signal.SIGINT
            self.received, self._at = "Ctrl-C" if by_key else signal.Signals(number).name, time.monotonic()
            self._same = SAME_KEY if by_key else SAME_SIGNAL
            # os.write and no logger, since the signal may have come while a logger was writing.
            if not self.training:
                os.write(2, f"{self.received}: ended before training began; nothing had to be saved.\n".encode())
                if self.starts_again_in is not None:
                    set_marker(self.starts_again_in, "before the first step")
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
    """Within the context, signals are recorded; only in a main thread, since Python delivers signals to no other."""
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
    """Make a DataLoader's workers ignore these signals, since the main process needs the workers for its last step."""
    loader.worker_init_fn = ShieldedWorker(loader.worker_init_fn)
    kill_workers_at_exit()


@functools.cache  # once a process
def kill_workers_at_exit() -> None:
    """At exit, kill the workers, since multiprocessing would send SIGTERM, which they ignore, and wait without end.

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
        run_folder.mkdir(parents=True, exist_ok=True)
        (run_folder / MARKER).write_text(text + "\n", encoding="utf-8")


def clear_marker(run_folder: Path) -> None:
    (run_folder / MARKER).unlink(missing_ok=True)
