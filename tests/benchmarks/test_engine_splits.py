"""How the comparison of engines divides a step among the processes of this machine, and what it allows each case."""

from __future__ import annotations

import pytest
import torch

from benchmarks.shared import wide_console
from benchmarks.training.engines import FOUR, ONE, SPLITS, TWO, EngineRow, jobs_of, show, splits_of

CASES = ["grounded, frozen", "dynamo, bf16"]


@pytest.mark.parametrize(("gpus", "split"), [(1, ONE), (2, TWO), (3, TWO), (4, FOUR), (8, FOUR)])
def test_one_process_runs_on_each_gpu(monkeypatch, gpus, split):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert splits_of(None, gpu=True) == [split]


def test_without_a_gpu_that_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert splits_of(None, gpu=False) == [TWO, FOUR]
    assert splits_of([1], gpu=False) == [SPLITS[1]]
    with pytest.raises(ValueError, match="--gpu was given and PyTorch finds no GPU here"):
        splits_of(None, gpu=True)


def test_one_process_shards_nothing():
    found = jobs_of(CASES, ["ddp", "fsdp2"], [ONE], gpu=True)
    assert found == [(case, "ddp", ONE) for case in CASES]
    assert ("dynamo, bf16", "fsdp2", TWO) in jobs_of(CASES, ["ddp", "fsdp2"], [TWO], gpu=True)


def test_cases_that_an_engine_cannot_train_are_dropped():
    assert jobs_of(CASES, ["zero2"], [TWO], gpu=False) == [("grounded, frozen", "zero2", TWO)]


def test_each_row_names_what_its_case_allows(capsys):
    measured = {"engine": "ddp", "split": str(TWO), "losses": 1e-4, "norms": 1e-3, "weights": 1e-2, "seconds": 1.0}
    show([EngineRow(case=case, **measured) for case in CASES], wide_console())
    exact, bf16 = [line for line in capsys.readouterr().out.splitlines() if "ddp" in line]
    assert "1e-05 (0.0001)" in exact
    assert "NO" in exact
    assert "0.02 (0.2)" in bf16
    assert "yes" in bf16
