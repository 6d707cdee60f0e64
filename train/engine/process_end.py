"""The end of a process that trained with others: nothing of a finished run may make its launcher call it failed.

destroy_process_group() leaves gloo's threads running while anything still refers to a group, and DeepSpeed does until
the interpreter ends. Such a thread that frees a tensor while the interpreter is taken down asks for its lock and is
ended inside C++ instead: `terminate called without an active exception`, SIGABRT, and the launcher reports a failure
of a run that is saved. So a process that had a process group leaves without the interpreter's teardown.
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
    """End this process with an exit code, once all processes are here and everything is done; alone, return.

    What the interpreter does for others at its end is done here: threads are waited for, atexit handlers run (loggers
    of other libraries upload in them), and output is flushed.
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
