"""What a run prints: a bar in terminals alone, lines that fit, and no bar left where an error is said."""

import io
import textwrap
from types import SimpleNamespace

import pytest
from rich.console import Console
from transformers import TrainerControl

from train.loop import console
from train.loop.console import RunLines, end_lines, header, line


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
    lines, args = RunLines(2), SimpleNamespace(disable_tqdm=False)
    state = SimpleNamespace(global_step=0, max_steps=4, is_world_process_zero=True)
    lines.on_train_begin(args, state, None)
    for state.global_step in (1, 2):
        lines.on_step_end(args, state, None)
        log(lines, state, {"loss": 2.5, "learning_rate": 1e-3}, evaluates=state.global_step == 2)
    log(lines, state, evaluated(2))
    return lines


def log(lines, state, logs, *, evaluates=False):
    """As the Trainer does: `evaluates` where it will evaluate after this log."""
    lines.on_log(None, state, TrainerControl(should_evaluate=evaluates), logs=logs)


def test_in_a_file_there_are_lines_and_no_bar(monkeypatch):
    file = io.StringIO()
    lines = run_on(file, monkeypatch, terminal=False)
    state = SimpleNamespace(global_step=4, is_world_process_zero=True)
    log(lines, state, {"backbone_ppl_after": 2.0})
    first, *rest = file.getvalue().splitlines()
    assert first.split()[:2] == ["step", "loss"]
    assert [text.split()[0] for text in rest] == ["1", "2"], "an evaluation shares the line of its step"
    assert rest[-1].split()[1:8] == ["2.500", "1.000", "50", "50", "50", "50", "1.50"]
    assert "\x1b" not in file.getvalue()


def test_the_documented_lines_are_printed(monkeypatch):
    """Logged every 10 steps, evaluated every 25, on a terminal of 60 columns."""
    file, clock = io.StringIO(), iter([0.0, 11.11, 20.25, 24.0])
    monkeypatch.setattr(console, "CONSOLE", Console(file=file, width=60))
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    lines, state = RunLines(4), SimpleNamespace(global_step=10, max_steps=100, is_world_process_zero=True)
    accuracy = zip((0.38, 0.22, 0.14, 0.11), (0.41, 0.25, 0.17, 0.13), strict=True)
    found = {"eval_backbone_loss": 1.5, "eval_tokens_per_pass": 1.61}
    for k, (top1, agreement) in enumerate(accuracy, start=1):
        found |= {f"eval_head{k}_loss": 2.605, f"eval_head{k}_top1": top1, f"eval_head{k}_agreement": agreement}
    log(lines, state, {"loss": 12.31})
    state.global_step = 20
    log(lines, state, {"loss": 10.08})
    state.global_step = 25
    log(lines, state, {"loss": 9.87}, evaluates=True)
    log(lines, state, found)
    assert textwrap.indent(file.getvalue(), "    ") in console.__doc__


def test_the_last_loss_does_not_wait_for_an_evaluation_after_training(monkeypatch):
    """Saving and evaluating take long, and an interrupted run puts its evaluation off."""
    file = io.StringIO()
    monkeypatch.setattr(console, "CONSOLE", Console(file=file, width=60))
    lines, state = RunLines(1), SimpleNamespace(global_step=4, max_steps=4, is_world_process_zero=True)
    log(lines, state, {"loss": 2.5})
    assert file.getvalue().splitlines()[-1].split()[:2] == ["4", "2.500"]
    log(lines, state, {"train_runtime": 3.0, "train_loss": 2.75})
    log(lines, state, evaluated(1))
    _, _, summary, row = file.getvalue().splitlines()
    assert summary == "4 steps in 00:03, mean loss 2.750"
    assert row.split()[:2] == ["4", "0.500"]


def test_a_loss_whose_evaluation_fails_is_printed_once_when_the_run_ends(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(console, "CONSOLE", Console(file=file, width=60))
    state = SimpleNamespace(global_step=2, max_steps=4, is_world_process_zero=True)
    lines = RunLines(1)
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[lines]), state=state)
    log(lines, state, {"loss": 2.5}, evaluates=True)
    assert not file.getvalue()
    end_lines(trainer)
    end_lines(trainer)
    assert [text.split()[:2] for text in file.getvalue().splitlines()] == [["step", "loss"], ["2", "2.500"]]


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
    log(RunLines(1), other, {"loss": 1.0})
    assert not file.getvalue()
