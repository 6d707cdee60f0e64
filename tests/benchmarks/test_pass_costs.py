"""Costs of passes: every place is measured, costs are plain steps, and a shape that cannot run says why."""

from __future__ import annotations

import pytest
import torch

from benchmarks.speed import pass_costs
from benchmarks.speed.pass_costs import filled_state, main, make_pass, measure, why_not
from heads.backbone.model import Backbone


@pytest.fixture
def tiny(monkeypatch):
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    monkeypatch.setitem(pass_costs.SHAPES, "demo", {**shape, "num_attention_heads": 2})
    return Backbone(pass_costs.make_model("demo", torch.device("cpu")), check_projection=False)


def test_a_context_read_in_blocks_is_the_context_read_at_once(tiny):
    torch.manual_seed(0)
    tokens = torch.randint(tiny.vocab_size, (1, 1100))
    whole, _ = tiny.prefill(tokens, torch.ones_like(tokens).bool())
    torch.manual_seed(0)
    state = filled_state(tiny, 1100)
    assert state.valid_BS.shape == (1, 1100)
    assert int(state.next_position_B) == 1100
    for mine, theirs in zip(state.cache.layers, whole.cache.layers, strict=True):
        torch.testing.assert_close(mine.keys[..., :1100, :], theirs.keys[..., :1100, :], atol=1e-5, rtol=1e-5)


def test_passes_leave_nothing_behind(tiny):
    state = filled_state(tiny, 20)
    run = make_pass(tiny, state, 8)
    torch.testing.assert_close(run(), run())
    assert state.cache.get_seq_length() == 20


def test_a_batch_has_a_context_and_a_tree_in_each_row(tiny):
    state = filled_state(tiny, 20, 3)
    assert make_pass(tiny, state, 8)().shape == (3, 8, tiny.vocab_size)
    assert {cost.batch for cost in measure("demo", tiny, [8], [4], 1, batch=3)} == {3}


def test_every_place_is_measured_in_plain_steps(tiny):
    costs = measure("demo", tiny, [8, 20], [4, 16], 2)
    assert [(c.context, c.nodes) for c in costs] == [(c, n) for c in (8, 20) for n in (1, 4, 16)]
    assert all(c.steps == 1.0 for c in costs if c.nodes == 1)
    step = {c.context: c.milliseconds for c in costs if c.nodes == 1}
    assert all(c.steps == pytest.approx(c.milliseconds / step[c.context]) for c in costs)


@pytest.mark.parametrize(
    ("free", "reason"), [(80, ""), (20, ""), (12, "needs a GPU with about 20 GiB and 12 GiB are free")]
)
def test_a_7b_needs_room_on_the_gpu(free, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 2**30, 80 * 2**30))
    found = why_not("7b", torch.device("cuda"))
    assert found == reason or (reason and reason in found)
    assert why_not("demo", torch.device("cuda")) == ""


def test_the_command_skips_a_7b_without_a_gpu(tiny, capsys, tmp_path):
    assert "none is here" in why_not("7b", torch.device("cpu"))
    shapes = ["demo"] if torch.cuda.is_available() else ["demo", "7b"]
    main(["--shapes", *shapes, "--contexts", "8", "--nodes", "4", "--repeats", "1", "--json", str(tmp_path / "costs")])
    said = capsys.readouterr().out
    assert "context 8" in said
    assert ("7b: skipped" in said) == (not torch.cuda.is_available())
    assert (tmp_path / "costs").is_file()


def test_contexts_that_time_or_memory_leave_out_are_named(tiny, monkeypatch, capsys):
    def full(name, form, contexts, *more, **others):
        if contexts == [16]:
            raise torch.OutOfMemoryError
        return measure(name, form, contexts, *more, **others)

    monkeypatch.setattr(pass_costs, "measure", full)
    asked = ["--shapes", "demo", "--contexts", "8", "16", "--nodes", "4", "--repeats", "1"]
    main(asked)
    printed = capsys.readouterr().out
    assert "demo, eager, batch 1, context 16 is left out: the GPU's memory does not hold it" in printed
    assert "context 8 " in printed
    main([*asked, "--minutes", "0.0"])
    assert (
        "demo, eager, batch 1, context 8 is left out: its share of the run, 0 minutes, is over"
        in capsys.readouterr().out
    )
