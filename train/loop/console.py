"""The console output of a run: a progress bar in a terminal, and one aligned line for each log and each evaluation.

     step   loss   eval  top-1 %      agreement %  t/pass   left
       10  12.31                                           01:40
       20  10.08                                           01:21
       25  9.870  10.42  38 22 14 11  41 25 17 13    1.61  01:12

`loss` is the mean training loss since the last line; only an evaluation after training has none. `eval` is the sum of
the heads' losses on held-out data, plus the backbone's own where it is trained. `top-1` and `agreement` (with the
backbone's prediction) have a number for each head. `t/pass` is tokens per backbone pass. From 80 columns on the
learning rate is shown too. A line takes at most the terminal's width (or 60 columns, if that is less), so only the
first of many heads are shown. metrics.jsonl has more. There is no bar where the output is a pipe or a file.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import datasets
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from transformers import TrainerCallback

from train.engine.notices import is_for_users, leave_out_deprecations

CONSOLE = Console(highlight=False)
ERRORS = Console(highlight=False, stderr=True)
NARROWEST = 60
WIDE = 80  # columns; from this width on the learning rate is shown too


class ConsoleHandler(logging.Handler):
    """Writes log messages above the bar, which `print` would break; outside a terminal, warnings go to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            style = "yellow" if record.levelno >= logging.WARNING else ""
            console = CONSOLE if CONSOLE.is_terminal or not style else ERRORS
            console.print(Text(self.format(record), style=style), soft_wrap=not CONSOLE.is_terminal)
        except Exception:  # as in every handler, a message that cannot be written does not end the run
            self.handleError(record)


def set_up_logging() -> None:
    """Send log messages to the console, unless the program has set up logging of its own.

    Progress bars of libraries (tokenising, reading and writing weights) are switched off outside a terminal, where each
    of their updates would be a line.
    """
    if not logging.getLogger().handlers:
        handler = ConsoleHandler()
        handler.addFilter(is_for_users)
        logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    leave_out_deprecations()
    transformers.logging.set_verbosity_warning()
    if not CONSOLE.is_terminal:
        transformers.logging.disable_progress_bar()
        datasets.disable_progress_bars()


def end_lines(trainer: Any) -> None:
    """End what a run prints, however it ends: an error's sentence then has a line of its own, below the last loss."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, RunLines):
            callback.stop()
            callback.show_waiting(trainer.state)


class RunLines(TrainerCallback):
    """Prints the lines and the bar instead of the Trainer's dictionaries.

    The Trainer logs a step's training loss and its evaluation one after the other; here the loss waits for the latter.

    Args:
        num_heads: heads of the run; 0 where the backbone is trained alone.
    """

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads
        self.waiting: dict[str, Any] = {}  # a training log that is printed with the evaluation of its step
        self.bar: Progress | None = None
        self.started, self.first_step = time.monotonic(), 0
        self.header_is_due = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started, self.first_step = time.monotonic(), state.global_step
        if state.is_world_process_zero and CONSOLE.is_terminal and not args.disable_tqdm:
            columns = TextColumn("training"), BarColumn(bar_width=None), MofNCompleteColumn(), TimeRemainingColumn()
            self.bar = Progress(*columns, console=CONSOLE, transient=True)
            self.task = self.bar.add_task("training", total=state.max_steps, completed=state.global_step)
            self.bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop()

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if "train_runtime" in logs:
            taken, loss = clock(logs["train_runtime"]), short(logs["train_loss"])
            self.say(f"{state.global_step} steps in {taken}, mean loss {loss}")
        elif "eval_backbone_loss" in logs:
            logs, self.waiting = self.waiting | logs, {}
            self.show(logs, state)
        elif "loss" in logs or "skipped_steps" in logs:
            if control.should_evaluate:
                self.waiting = logs
            else:
                self.show(logs, state)

    def show_waiting(self, state: Any) -> None:
        """Print the last training log if a failure has prevented the evaluation that it waits for."""
        logs, self.waiting = self.waiting, {}
        if logs:
            self.show(logs, state)

    def show(self, logs: Mapping[str, Any], state: Any) -> None:
        width = max(NARROWEST, CONSOLE.width)
        if self.header_is_due:
            self.say(header(self.num_heads, state.max_steps, width))
            self.header_is_due = False
        left = self.time_left(state.global_step, state.max_steps)
        self.say(line(logs, state.global_step, left, self.num_heads, state.max_steps, width))

    def say(self, text: str) -> None:
        CONSOLE.print(Text(text), soft_wrap=True)

    def time_left(self, step: int, steps: int) -> float | None:
        """Estimated seconds, from the steps that this process has taken; None before its first."""
        taken = step - self.first_step
        return (time.monotonic() - self.started) / taken * (steps - step) if taken else None


def line(logs: Mapping[str, Any], step: int, left: float | None, num_heads: int, steps: int, width: int) -> str:
    """The line of a training log, of an evaluation, or of both joined.

    >>> head1 = {"loss": 3.5, "eval_head1_loss": 3.25, "eval_head1_top1": 0.384, "eval_head1_agreement": 0.5}
    >>> print(header(1, 100, 60)); print(line(head1 | {"eval_tokens_per_pass": 1.6}, 25, 72.0, 1, 100, 60))
     step   loss   eval  top-1 %  agreement %  t/pass   left
       25  3.500  3.250  38       50             1.60  01:12
    """
    shown = heads_shown(num_heads, steps, width)
    per_head = [f"eval_head{k}" for k in range(1, num_heads + 1)] or ["eval_backbone"]
    losses = [logs[f"{name}_loss"] for name in per_head if f"{name}_loss" in logs]
    if num_heads and "eval_backbone_tokens" in logs:  # counted where the backbone is trained
        losses.append(logs["eval_backbone_loss"])
    values = {
        "step": str(step),
        "loss": short(logs.get("loss")),
        "rate": f"{logs['learning_rate']:.1e}" if "learning_rate" in logs else "",
        "eval": short(sum(losses)) if losses else "",
        "top1": percents([logs.get(f"{name}_top1") for name in per_head], shown),
        "agreement": percents([logs.get(f"{name}_agreement") for name in per_head], shown),
        "passes": f"{logs['eval_tokens_per_pass']:.2f}" if "eval_tokens_per_pass" in logs else "",
        "left": clock(left),
    }
    return layout(values, num_heads, steps, width)


def header(num_heads: int, steps: int, width: int) -> str:
    names = {"step": "step", "loss": "loss", "rate": "rate", "eval": "eval", "top1": "top-1 %"}
    names |= {"agreement": "agreement %", "passes": "t/pass", "left": "left"}
    return layout(names, num_heads, steps, width)


def layout(values: Mapping[str, str], num_heads: int, steps: int, width: int) -> str:
    per_head = 3 * heads_shown(num_heads, steps, width) + (1 if is_cut(num_heads, steps, width) else -1)
    cells = [f"{values['step']:>{max(5, len(str(steps)))}}", f"{values['loss']:>5}"]
    cells += [f"{values['rate']:>7}"] if width >= WIDE else []
    cells += [f"{values['eval']:>5}", f"{values['top1']:<{max(7, per_head)}}"]
    if num_heads:
        cells += [f"{values['agreement']:<{max(11, per_head)}}", f"{values['passes']:>6}"]
    return "  ".join([*cells, f"{values['left']:>5}"])


def heads_shown(num_heads: int, steps: int, width: int) -> int:
    """The number of heads whose figures fit into a line.

    >>> [heads_shown(heads, 1000, 60) for heads in (1, 4, 8)], heads_shown(8, 1000, 100)
    ([1, 4, 3], 8)
    """
    besides = max(5, len(str(steps))) + sum((7, 7, 8, 7)) + 2 * 2 + (9 if width >= WIDE else 0)
    fitting = max(1, (width - besides + 2) // 6)
    return num_heads if num_heads <= fitting else max(1, fitting - 1)


def is_cut(num_heads: int, steps: int, width: int) -> bool:
    return heads_shown(num_heads, steps, width) < num_heads


def percents(shares: list[float | None], shown: int) -> str:
    """
    >>> percents([0.384, 0.2], 2), percents([0.384, 0.2, 0.1], 2), percents([None], 1)
    ('38 20', '38 20 …', '')
    """
    known = [f"{100 * share:2.0f}" for share in shares if share is not None]
    return " ".join([*itertools.islice(known, max(1, shown)), *["…"] * (len(known) > max(1, shown))])


def short(value: float | None) -> str:
    """A number in about five characters.

    >>> [short(value) for value in (34.387, 1.5, 1234.5, 0.01234, None)]
    ['34.39', '1.500', '1234', '0.012', '']
    """
    if value is None or not math.isfinite(value):
        return "" if value is None else "nan"
    decimals = 3 - sum(abs(value) >= power for power in (10, 100, 1000))
    return f"{value:.{decimals}f}"


def clock(seconds: float | None) -> str:
    """
    >>> [clock(value) for value in (72.0, 3720.0, 190_000.0, None)]
    ['01:12', '1h02m', '2d04h', '']
    """
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes:02}:{rest:02}"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours < 24 else f"{hours // 24}d{hours % 24:02}h"
