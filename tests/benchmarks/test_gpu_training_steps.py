"""Training steps at large shapes: what memory or minutes do not hold is named, and the rest is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import training_steps
from benchmarks.gpu.training_steps import PLAIN, SHAPES, TINY, Step, measure, model_flops, peak_memory
from benchmarks.shared import wide_console
from benchmarks.training.training_speed import heads_products
from train.objective.model import TrainedModel


def test_a_step_that_memory_does_not_hold_is_left_out(monkeypatch, capsys):
    model = TINY.build()

    def too_large() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(
        training_steps, "build", lambda *given: {PLAIN: (model, too_large), "ours": (model, lambda: None)}
    )
    (row,) = measure(wide_console(), "7b", TINY, 1, "cpu")
    assert (row.shape, row.step, row.mfu) == ("7b", "ours", None)
    assert "7b, a plain loop is left out: the GPU's memory does not hold it" in capsys.readouterr().out
    training_steps.show(wide_console(), TINY, [row])
    assert "ours" in capsys.readouterr().out


def test_a_shape_that_memory_does_not_hold_is_left_out(monkeypatch, capsys):
    def too_large(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(training_steps, "build", too_large)
    assert measure(wide_console(), "7b", TINY, 1, "cpu") == []
    assert "7b is left out: the GPU's memory does not hold its weights twice" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "billions"), [("1b", 1.3), ("7b", 6.7)])
def test_the_shapes_have_the_parameters_that_their_names_say(name, billions):
    workload = SHAPES[name]
    model = workload.build("meta", torch.bfloat16)
    assert sum(p.numel() for p in model.model.parameters()) / 1e9 == pytest.approx(billions, rel=0.05)


def test_flops_are_those_of_the_parameters_and_of_half_of_all_pairs():
    """One layer of width 64 over 64 tokens: 49,152 parameters, and a token sees 32 others on average, twice 64 wide."""
    workload = replace(TINY, layers=1)
    model = workload.build()
    assert model_flops(workload, model) - heads_products(workload, model) == 2 * 128 * (49_152 + 4_096)


def test_attention_is_a_run_s_without_a_dense_mask_unless_layers_are_compiled(monkeypatch, capsys):
    """Blocks are one document each: 2 × 64 tokens."""
    masks, usual = {}, TrainedModel.attention

    def attention(model, document_ids_BT):
        found = usual(model, document_ids_BT)
        masks.setdefault(model, []).append(found[2])
        return found

    monkeypatch.setattr(TrainedModel, "attention", attention)
    compiled = []
    monkeypatch.setattr(training_steps, "compile_layers", compiled.append)
    rows = measure(wide_console(), "tiny", TINY, 1, "cpu")
    assert [row.step for row in rows] == [PLAIN, "ours", "ours, decoder layers compiled"]
    dense = masks.pop(compiled[0])
    assert {mask.shape for mask in dense} == {(2, 1, 64, 64)}
    (ours,) = masks.values()
    assert len(ours) == len(dense) == 4  # two of the peak's, a warm-up and a round
    assert all(mask.numel() == 0 and mask.documents == [[64], [64]] for mask in ours)
    assert "tiny, ours: attention each document by itself, without a mask" in capsys.readouterr().out


class Memory:
    """A GPU's memory, of which a step of a model with 64 bytes keeps 500 for moments and frees 1,000 again."""

    def __init__(self, monkeypatch, before):
        self.now, self.peak, self.moments = before, before, 0
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: setattr(self, "peak", self.now))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def step(self):
        self.peak = max(self.peak, self.now + 1000)
        if not self.moments:
            self.moments = 500
            self.now += self.moments


def test_peak_memory_is_of_the_step_s_own_model_optimizer_and_activations(monkeypatch):
    memory = Memory(monkeypatch, before=64 + 7_000_000)
    memory.peak = 9_000_000  # of an earlier step
    own = torch.nn.Linear(4, 4, bias=False)
    assert peak_memory(own, memory.step, "cuda") == 64 + 500 + 1000


def test_a_shape_that_the_minutes_do_not_hold_is_named(capsys):
    training_steps.main(["--tiny", "--minutes", "0"])
    assert "tiny is left out: its share of the run, 0 minutes, is over" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA RTX 4090", None),
    ],
)
def test_a_gpu_s_peak_is_its_own(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert training_steps.peak_flops("cuda") == peak


def test_an_unknown_peak_is_named(capsys):
    row = Step(shape="1b", step=PLAIN, seconds=1, tokens=1, flops=1, mfu=None, bytes=2**30)
    training_steps.show(wide_console(), TINY, [row])
    assert "utilisation needs the GPU's peak, which is known of H200 NVL, H200" in " ".join(
        capsys.readouterr().out.split()
    )
