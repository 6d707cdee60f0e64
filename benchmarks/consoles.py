"""A console for results: as wide as tables need where no terminal says how wide it is, as in a file."""

from __future__ import annotations

from rich.console import Console

WIDTH = 132


def wide_console() -> Console:
    """The terminal's own width, or `WIDTH` columns."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)
