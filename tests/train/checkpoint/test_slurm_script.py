"""launch/slurm.sh with stand-ins for slurm's commands: which launch file, what it hands on, when it requeues."""

import os
import signal
import subprocess
import time

import pytest
from repository import ROOT

SCONTROL = """#!/usr/bin/env bash
echo "$@" >> scontrol.log
[ "$1" != show ] || echo first-machine
"""
SRUN = """#!/usr/bin/env bash
shift
exec "$@"
"""
ACCELERATE = """#!/usr/bin/env bash
trap '[ -z "$MARKS" ] || { mkdir -p runs/a; touch runs/a/requeue; }; exit 1' TERM
echo "$@" > accelerate.log
for i in $(seq 600); do sleep 0.05; done
"""


@pytest.fixture
def start(tmp_path):
    """Starts the script in a folder with a config and the stand-ins; returns once the launcher runs."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("accelerate", ACCELERATE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "X.yaml").write_text("output_dir: runs/a\n")

    def started(**environment):
        slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NODEID": "0"}
        place = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **slurm, "MARKS": "", **environment}
        command = ["bash", str(ROOT / "launch/slurm.sh"), "X.yaml", "--rates.heads", "3e-4"]
        process = subprocess.Popen(command, cwd=tmp_path, env=place, start_new_session=True)
        deadline = time.monotonic() + 60
        while not (log := tmp_path / "accelerate.log").is_file() or not log.read_text():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return process, log.read_text()

    return started


@pytest.mark.parametrize("launch", [None, "launch/zero3.yaml"])
def test_a_run_that_marks_its_folder_is_requeued(start, tmp_path, launch):
    process, launched = start(MARKS="yes", **({} if launch is None else {"LAUNCH": launch}))
    assert f"--config_file {launch or 'launch/fsdp2_multi_node.yaml'} --num_machines 2 --num_processes 16" in launched
    assert launched.endswith("train.py --config X.yaml --rates.heads 3e-4\n")
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    assert "requeue 7" in (tmp_path / "scontrol.log").read_text().splitlines()


def test_a_run_that_does_not_is_not_requeued(start, tmp_path):
    process, launched = start(SLURM_RESTART_COUNT="1")
    assert "--config X.yaml --resume true --rates.heads 3e-4" in launched
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) == 1
    assert "requeue 7" not in (tmp_path / "scontrol.log").read_text()
