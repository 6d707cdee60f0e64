"""Kill a run at random moments, resume it, compare with one that never stopped: `python -m benchmarks.training.resume`.

The real command trains heads on the demo backbone, in one process and in two under DDP. It is killed with SIGKILL a
random time after its start or in the middle of a save, and resumed, until it ends by itself; with two processes one is
killed, and the launcher ends the other. Final weights must be equal bit by bit, and so must all lines of metrics.jsonl
except times.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file

from benchmarks.shared import ROOT, figures_table, parser_of, run_benchmark, wide_console
from train.checkpoint.whole import LIST, checkpoints, newest_whole, step_of

TIMES = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
FLAGS = (
    *("--config", "configs/demo/grounded.yaml", "--save_every_steps", "3", "--trainer.logging_steps", "2"),
    *("--trainer.per_device_train_batch_size", "2", "--trainer.eval_on_start", "false"),
    *("--evaluation.every_steps", "10", "--evaluation.num_prompts", "1", "--evaluation.new_tokens", "8"),
    *("--data.max_eval_blocks", "4"),
)


LAUNCHER = ("-m", "accelerate.commands.launch", "--config_file", "launch/ddp.yaml", "--num_processes")


@dataclass(frozen=True, kw_only=True)
class Command:
    """train.py in one process, or in several ranks."""

    processes: int
    steps: int

    def start(self, folder: Path) -> subprocess.Popen[str]:
        """Start the run, or resume it if its folder is there, which a kill may come before."""
        flags = ("--resume", "true") if folder.exists() else ()
        launcher = () if self.processes == 1 else (*LAUNCHER, str(self.processes))
        command = [sys.executable, *launcher, "train.py", *FLAGS, "--output_dir", str(folder), *flags]
        pipe: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        steps = ("--trainer.max_steps", str(self.steps))
        return subprocess.Popen([*command, *steps], cwd=ROOT, start_new_session=True, **pipe)

    def kill(self, process: subprocess.Popen[str], generator: random.Random) -> None:
        """Kill the process; of several ranks kill one, after which the launcher ends."""
        if self.processes > 1:
            listed = subprocess.run(
                ["pgrep", "-P", str(process.pid), "-f", "train.py"], capture_output=True, check=False
            )
            if ranks := listed.stdout.split():  # else they are not there yet
                os.kill(int(generator.choice(ranks)), signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def finish(process: subprocess.Popen[str]) -> float:
    """Wait for the run's end; returns the seconds.

    Raises:
        SystemExit: the run failed.
    """
    started = time.perf_counter()
    output = process.communicate()[1]
    if process.returncode:
        sys.exit(f"train.py failed with exit code {process.returncode}:\n{output[-2000:]}")
    return time.perf_counter() - started


def saving(folder: Path) -> Path | None:
    """A checkpoint that is being written."""
    return next((path for path in checkpoints(folder) if not (path / LIST).exists()), None)


def is_time(process: subprocess.Popen[str], folder: Path, seconds: float, *, in_save: bool) -> bool:
    """Wait for some seconds, or for the first save after that; returns False if the run ended before."""
    at = time.perf_counter() + seconds
    while time.perf_counter() < at or (in_save and saving(folder) is None):
        if process.poll() is not None:
            finish(process)
            return False
        time.sleep(0.001)
    return True


def describe_kill(folder: Path) -> tuple[str, str]:
    """A sentence on where the run was killed, and on the checkpoint that it will resume from."""
    path = folder / "metrics.jsonl"
    logged = [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.is_file() else []
    cut, (whole, _) = saving(folder), newest_whole(folder)
    phase = (
        f"while saving step {step_of(cut)}" if cut else "between saves" if checkpoints(folder) else "before any save"
    )
    last = f", last logged step {logged[-1]}" if logged else ""
    return phase + last, f"step {step_of(whole)}" if whole else "the beginning"


def equal(one: Path, other: Path) -> tuple[bool, bool]:
    """Whether all final weights are equal bit by bit, and whether all lines are equal."""
    first, second = (load_file(run / "last/heads.safetensors") for run in (one, other))
    same = first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    return same, lines(one) == lines(other)


def lines(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    untimed = [{name: value for name, value in line.items() if name not in TIMES} for line in found]
    return [{name: value for name, value in line.items() if name != "heads_overhead"} for line in untimed]


def main() -> None:
    parser = parser_of("benchmarks.training.resume", __doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="compared one after another")
    parser.add_argument("--kills", type=int, default=4, help="kills of each")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of a run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    console, right = wide_console(), True
    for processes in options.processes:
        command = Command(processes=processes, steps=options.steps)
        right &= kill_and_resume(console, command, options.kills, random.Random(options.seed))
    sys.exit(0 if right else 1)


def kill_and_resume(console: Console, command: Command, wanted: int, generator: random.Random) -> bool:
    """Whether all weights and lines are those of the run that was never stopped; prints each kill."""
    title = f"{command.processes} process(es), {command.steps} steps, checkpoints every 3"
    table = figures_table(title, "kill", "after seconds", "where", "resumed from", left=4)
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder) / "whole", Path(folder) / "parts"
        duration = finish(command.start(whole))
        kills, same = 0, []
        while kills < wanted:
            seconds = generator.uniform(0.2, 0.9) * duration
            process = command.start(parts)
            if not is_time(process, parts, seconds, in_save=kills % 2 == 1):  # compare, and start again
                same.append(equal(whole, parts))
                shutil.rmtree(parts)
                continue
            command.kill(process, generator)
            kills += 1
            table.add_row(str(kills), f"{seconds:.1f}", *describe_kill(parts))
        finish(command.start(parts))
        same.append(equal(whole, parts))
    weights, logs = (all(column) for column in zip(*same, strict=True))
    console.print(table)
    console.print(
        f"uninterrupted: {duration:.1f} s; {kills} kills in {len(same)} runs; final weights equal: {weights}; "
        f"metrics.jsonl equal: {logs}"
    )
    return weights and logs


if __name__ == "__main__":
    run_benchmark(main)
