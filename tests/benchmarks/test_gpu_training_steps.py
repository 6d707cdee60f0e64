"""Training steps at large shapes: what memory does not hold is named, and the rest is measured."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import training_steps
from benchmarks.gpu.training_steps import PLAIN, SHAPES, TINY, measure, model_flops
from benchmarks.shared import wide_console
from benchmarks.training.training_speed import heads_products


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


def test_flops_are_those_of_the_parameters_and_the_scores():
    model = TINY.build()
    decoder = sum(p.numel() for p in model.backbone.layers.parameters())
    scores = 2 * TINY.layers * TINY.width * TINY.length  # of each token: queries × keys, then × values, half of them
    assert model_flops(TINY, model) - heads_products(TINY, model) == 2 * TINY.tokens * (decoder + scores)
