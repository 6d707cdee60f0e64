"""What a run prints: a bar in terminals alone, lines that fit, and no bar left where an error is said."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from train.loop import console
from train.loop.console import RunLines, header, line


def evaluated(num_heads):
    names = {f"eval_head{k}_{name}": 0.5 for k in range(1, num_heads + 1) for name in ("loss", "top1", "agreement")}
    return {"eval_backbone_loss": 3.0, "eval_backbone_top1": 0.4, "eval_tokens_per_pass": 1.5, **names}


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("num_heads", [0, 1, 4, 8, 32])
def test_lines_are_aligned_and_fit(num_heads, width):
    logged = {"loss": 123.456, "learning_rate": 1e-4}
    lines = [header(num_heads, 20_000, width)]
    lines += [line(logs, 12_000, 90_000.0, num_heads, 20_000, width) for logs in (logged, evaluated(num_heads))]
    assert len(set(map(len, lines))) == 1
    assert len(lines[0]) <= width
    assert lines[1].split()[1] == "123.5"


def run_on(file, monkeypatch, *, terminal):
    monkeypatch.setattr(console, "CONSOLE", Console(file=file, width=60, force_terminal=terminal, highlight=False))
    lines = RunLines(2)
    args = SimpleNamespace(disable_tqdm=False)
    state = SimpleNamespace(global_step=0, max_steps=4, is_world_process_zero=True)
    lines.on_train_begin(args, state, None)
    for state.global_step in (1, 2):
        lines.on_step_end(args, state, None)
        lines.on_log(args, state, None, logs={"loss": 2.5, "learning_rate": 1e-3})
    lines.on_log(args, state, None, logs=evaluated(2))
    return lines


def test_in_a_file_there_are_lines_and_no_bar(monkeypatch):
    file = io.StringIO()
    lines = run_on(file, monkeypatch, terminal=False)
    state = SimpleNamespace(global_step=4, is_world_process_zero=True)
    lines.on_log(None, state, None, logs={"backbone_ppl_after": 2.0})
    first, *rest = file.getvalue().splitlines()
    assert first.split()[:2] == ["step", "loss"]
    assert [text.split()[0] for text in rest] == ["1", "2", "2"]
    assert rest[-1].split()[1:7] == ["1.000", "50", "50", "50", "50", "1.50"]
    assert "\x1b" not in file.getvalue()


def test_in_a_terminal_there_is_a_bar_until_the_end(monkeypatch):
    file = io.StringIO()
    lines = run_on(file, monkeypatch, terminal=True)
    lines.stop()
    lines.stop()  # an error and the end of training may both ask for it
    assert "2/4" in file.getvalue()
    assert "\x1b[?25h" in file.getvalue(), "the cursor is shown again"


def test_other_processes_print_nothing(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(console, "CONSOLE", Console(file=file, width=60))
    other = SimpleNamespace(global_step=1, max_steps=2, is_world_process_zero=False)
    RunLines(1).on_log(None, other, None, logs={"loss": 1.0})
    assert not file.getvalue()
