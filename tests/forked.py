"""Training commands as processes that are forked from one that has imported everything, so that a start costs little.

An interpreter that imports torch, transformers and datasets takes 8 seconds of a core. The server of `multiprocessing`
imports them once; each request runs a script in a fork of it, with its own arguments, environment, session and output,
as the command would. Only the interpreter's very beginning and end are left out: tests that mean the user's own command
start that.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import runpy
import signal
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

from accelerate.commands.launch import launch_command, launch_command_parser
from repository import ROOT

from benchmarks.training.engines import free_port

IMPORTED = [
    "deepspeed",
    "peft",
    "transformers.integrations.deepspeed",
    "transformers.models.llama.modeling_llama",
    "train.run",
]


@functools.cache
def server():
    """The context whose processes are forked from one that has imported `IMPORTED`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    place = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with patch.dict(os.environ, place):
        multiprocessing.forkserver.ensure_running()
    return context


class Forked:
    """What tests use of `subprocess.Popen`, stdout and stderr in one file."""

    def __init__(self, script, arguments, environment):
        descriptor, self.output = tempfile.mkstemp(prefix="headway-forked-")
        os.close(descriptor)
        call = (str(script), [*map(str, arguments)], dict(environment), self.output)
        self.process = server().Process(target=run_script, args=call)
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        return self.process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def communicate(self, timeout=None):
        """Wait for its end; what it said, and None for the second stream."""
        self.process.join(timeout)
        assert self.returncode is not None, f"it did not end in {timeout} seconds"
        return Path(self.output).read_text(errors="replace"), None


def run_script(script, arguments, environment, output):
    """In the fork: become the command `python script arguments`, begun in the repository's root."""
    os.setsid()
    stream = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.environ.clear()
    os.environ.update(environment)
    if "HF_DATASETS_CACHE" in environment:
        sys.modules["datasets"].config.HF_DATASETS_CACHE = environment["HF_DATASETS_CACHE"]  # read when it was imported
    multiprocessing.set_start_method(None, force=True)  # its own processes start as any do
    sys.modules["train.run"].use_all_cores = lambda: None  # tests run side by side
    os.chdir(ROOT)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def launch_forked(config, engine, split, *arguments):
    """As `benchmarks.training.engines.launch`: the environment is accelerate's own, the processes are forks.

    Raises:
        RuntimeError: the run failed.
    """
    common = {**os.environ, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(config.parent / "cache")}
    ranks = [common] if engine == "single" else environments(common, engine, split.processes)
    processes = [Forked("train.py", ["--config", config, *arguments], rank) for rank in ranks]
    wait_for_all(processes)
    output = "".join(process.communicate()[0] for process in processes)
    if any(process.returncode for process in processes):
        codes = [process.returncode for process in processes]
        raise RuntimeError(f"{engine} ended with {codes}:\n{output[-8000:]}")
    return output


def environments(common, engine, processes):
    """What `accelerate launch` and torchrun put into the environment of each process."""
    port, found = free_port(), {}
    asked = ["--config_file", f"{ROOT}/launch/{engine}.yaml", "--num_processes", str(processes)]
    asked += ["--main_process_port", port, "train.py"]
    with patch.dict(os.environ, common), patch("torch.distributed.run.run", lambda _: found.update(os.environ)):
        launch_command(launch_command_parser().parse_args(asked))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes)}
    return [{**found, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def wait_for_all(processes):
    """To the end of the last; where one fails, the others would wait for it and are killed, as a launcher does."""
    running = {process.process.sentinel: process for process in processes}
    while running:
        for sentinel in multiprocessing.connection.wait(list(running)):
            if running.pop(sentinel).returncode:
                for other in running.values():
                    os.killpg(other.pid, signal.SIGKILL)
