"""Kill a run at random moments, resume it, compare with one that never stopped: `python -m benchmarks.training.resume`.

The real command trains heads on the demo backbone. It is killed with SIGKILL a random time after its start or in the
middle of a save, and resumed, until it has ended. Final weights must be equal bit by bit, and so must all lines of
metrics.jsonl except times.
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
from pathlib import Path
from typing import Any

import torch
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


def start(folder: Path, steps: int, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "train.py", *FLAGS, "--output_dir", str(folder), "--trainer.max_steps", str(steps)]
    pipe: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, *flags], cwd=ROOT, start_new_session=True, **pipe)


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


def kill(process: subprocess.Popen[str], folder: Path, seconds: float, *, in_save: bool) -> bool:
    """Kill the run after some seconds, or in the first save after that; returns False if it ended before."""
    at = time.perf_counter() + seconds
    while time.perf_counter() < at or (in_save and saving(folder) is None):
        if process.poll() is not None:
            finish(process)
            return False
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return True


def describe_kill(folder: Path) -> tuple[str, str]:
    """Where the run was killed, and the checkpoint to resume from."""
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
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    title = f"{options.steps} steps, checkpoints every 3"
    table = figures_table(title, "kill", "after seconds", "where", "resumed from", left=4)
    console, generator = wide_console(), random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder) / "whole", Path(folder) / "parts"
        duration = finish(start(whole, options.steps))
        kills, same = 0, []
        while kills < options.kills:
            seconds = generator.uniform(0.2, 0.9) * duration
            process = start(parts, options.steps, *(("--resume", "true") if parts.exists() else ()))
            if not kill(process, parts, seconds, in_save=kills % 2 == 1):  # it ended before: compare, and start again
                same.append(equal(whole, parts))
                shutil.rmtree(parts)
                continue
            kills += 1
            table.add_row(str(kills), f"{seconds:.1f}", *describe_kill(parts))
        finish(start(parts, options.steps, "--resume", "true"))
        same.append(equal(whole, parts))
        weights, logs = (all(column) for column in zip(*same, strict=True))
    console.print(table)
    console.print(
        f"uninterrupted: {duration:.1f} s; {kills} kills in {len(same)} runs; final weights equal: "
        f"{weights}; metrics.jsonl equal: {logs}"
    )
    sys.exit(0 if weights and logs else 1)


if __name__ == "__main__":
    run_benchmark(main)
