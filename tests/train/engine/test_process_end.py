"""A process of a group ends by itself: output, threads and atexit handlers complete, no teardown behind them."""

import subprocess
import sys

import pytest
import torch

from train.engine.process_end import end_together

PROGRAM = """
import atexit, sys, threading, time
import torch
from train.engine.process_end import end_together

class Late:
    def __del__(self):
        sys.stderr.write("the interpreter was taken down")

late = Late()
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
held = torch.distributed.group.WORLD  # as DeepSpeed holds it: its threads outlive destroy_process_group()
atexit.register(print, "the atexit handler ran")
threading.Thread(target=lambda: (time.sleep(0.2), print("the thread ended"))).start()
print("trained", end=" ")
end_together(75)
print("unreachable")
"""


@pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this PyTorch was built without gloo, the backend of processes on CPUs",
)
def test_a_process_of_a_group_ends_with_its_code_and_without_teardown(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "store")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 75, done.stderr
    assert done.stdout == "trained the thread ended\nthe atexit handler ran\n"
    assert "taken down" not in done.stderr


def test_a_single_process_goes_back_to_its_caller():
    assert end_together(75) is None
