"""Replay a recorded race in the terminal, side by side at the measured speed; without a terminal show its end.

A table of all columns follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from heads.cli.race.recording import Column, pieces_at
from heads.evaluation.report.sections import Table

DRAFTED = "bold green"
FRAMES = 30  # a second
BORDERS = 4  # lines and columns of a panel around its text


def replay(
    console: Console,
    columns: Sequence[Column],
    prompt: str,
    slower: float,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Any] = time.sleep,
) -> None:
    """Show all columns as they were written, `slower` times slower than measured."""
    last = max(column.seconds for column in columns)
    if not console.is_terminal:
        console.print(frame(console, columns, prompt, last, whole=True))
        return
    begun = clock()
    with Live(console=console, refresh_per_second=FRAMES, auto_refresh=False) as live:
        while (seconds := (clock() - begun) / slower) < last:
            live.update(frame(console, columns, prompt, seconds), refresh=True)
            sleep(1 / FRAMES)
        live.update(frame(console, columns, prompt, last), refresh=True)


def summary(columns: Sequence[Column]) -> Table:
    """A row for each column; the first is plain generation."""
    rows = [
        [
            column.name,
            str(column.tokens_at(column.seconds)),
            str(len(column.passes)),
            f"{column.seconds:.2f}",
            f"{column.tokens_per_pass:.2f}",
            f"{column.speed:.1f}",
            f"{column.speed / columns[0].speed:.2f}",
        ]
        for column in columns
    ]
    names = ["column", "tokens", "passes", "seconds", "tokens per pass", "tokens per second", "× plain"]
    return Table(columns=names, rows=rows)


def frame(
    console: Console, columns: Sequence[Column], prompt: str, seconds: float, *, whole: bool = False
) -> RichTable:
    """All columns as they stood after this time.

    Args:
        whole: the whole text, even where the terminal has fewer lines.
    """
    width = max(16, console.width // len(columns) - BORDERS)
    lines = None if whole else max(4, console.height - BORDERS)
    grid = RichTable.grid(expand=True)
    for _ in columns:
        grid.add_column(ratio=1)
    grid.add_row(*(panel(console, column, columns[0], prompt, seconds, width, lines) for column in columns))
    return grid


def panel(
    console: Console, column: Column, plain: Column, prompt: str, seconds: float, width: int, lines: int | None
) -> Panel:
    """One column; its last lines where it has more than `lines`."""
    text = Text()
    text.append(prompt, style="dim")
    for piece, drafted in pieces_at(column, seconds):
        text.append(piece, style=DRAFTED if drafted else None)
    caption = Text(column.caption_at(seconds, plain), style="bold").wrap(console, width)
    room = None if lines is None else max(1, lines - len(caption))
    wrapped = text.wrap(console, width, tab_size=4)
    shown = wrapped if room is None else wrapped[-room:]
    blank = [Text()] * (0 if room is None else room - len(shown))
    style = "green" if seconds >= column.seconds else "none"
    return Panel(Text("\n").join([*shown, *blank, *caption]), title=column.name, border_style=style)
