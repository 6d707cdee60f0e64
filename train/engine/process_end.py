"""End a process that trained with others without the interpreter's teardown, which can make a saved run look failed.

destroy_process_group() leaves gloo's threads running while anything refers to a group, and DeepSpeed refers to one
until the interpreter ends. If such a thread frees a tensor during the teardown, it asks for the interpreter's lock and
is aborted inside C++ (`terminate called without an active exception`, SIGABRT), and the launcher reports a failure.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

import torch


def has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def end_together(code: int = 0) -> None:
    """Wait for all processes, then end this one with an exit code; a process without a process group just returns.

    What the interpreter would do at its end is done here: threads are joined, atexit handlers run (in which loggers of
    other libraries upload), and output is flushed.
    """
    if not has_process_group():
        return
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    exit_without_teardown(code)


def exit_without_teardown(code: int) -> NoReturn:
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    for thread in others:
        if not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
