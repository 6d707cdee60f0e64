"""The sums of a log that a checkpoint falls into: to the last digit those of a run that never stopped."""

import json

import pytest
import torch

from train.checkpoint.progress import PROGRESS, read_progress
from train.loop.metrics import RunningLosses


class Together:
    """The processes of a run, one after the other: what each reduces is summed in their order."""

    def __init__(self, runs):
        self.runs = runs

    def reduce(self, tensor, reduction):
        return torch.stack([run.taken_before[0] for run in self.runs]).sum(dim=0)


def step(run, loss):
    run.add(torch.tensor([loss]), torch.tensor([7.0]))
    run.keep_step()


def mean(runs):
    for run in runs:
        run.taken_before = run.taken
    return runs[0].take_means(Together(runs))


LOSSES = torch.rand(2, 6, generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("processes", [1, 2])
def test_sums_continue_in_each_process_as_if_it_had_not_stopped(processes):
    whole, first, resumed = ([RunningLosses() for _ in range(processes)] for _ in range(3))
    for i in range(6):
        for process in range(processes):
            step(whole[process], LOSSES[process][i])
            step((first if i < 3 else resumed)[process], LOSSES[process][i])
        if i == 2:
            states = json.loads(json.dumps([run.state() for run in first]))
            for process, run in enumerate(resumed):
                run.restore(states, process, processes)
    assert mean(resumed) == mean(whole)


def test_the_first_of_another_number_of_processes_takes_all():
    runs = [RunningLosses() for _ in range(3)]
    for process, run in enumerate(runs):
        run.restore([[[1.0], [8.0]], [[2.0], [8.0]]], process, 3)
    assert [run.taken[0].tolist() for run in runs] == [[3.0], [0.0], [0.0]]
    assert mean(runs) == [3 / 8]


@pytest.mark.parametrize(("losses", "wanted"), [(None, []), ([[3.0], [8.0]], [[[3.0], [8.0]]])])
def test_progress_of_older_checkpoints_is_read(tmp_path, losses, wanted):
    fields = {"all_losses": 0.0, "skipped": 0, "skipped_since_log": 0, "steps_since_log": 1, "metrics_bytes": 0}
    fields |= {"measured_accuracy": None, "evaluation_put_off": False, "data_pass": 0, "blocks_in_pass": 0}
    (tmp_path / PROGRESS).write_text(json.dumps(fields | {"losses": losses, "logged_loss": 1.5}))
    found = read_progress(tmp_path)
    assert (found.losses, found.logged_loss) == (wanted, [1.5])
