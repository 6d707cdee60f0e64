"""What a report shows: sections of sentences, tables and pictures, the same for the terminal and for report.html."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table as RichTable
from rich.text import Text


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of texts under named columns; the first column names the row, the others are figures.

    Attributes:
        note: a sentence below it: what the figures are of, and which differences count.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"A table of the columns {', '.join(self.columns)} has a row of another length.")

    def as_rich(self) -> RichTable:
        """The same table for a terminal."""
        table = RichTable(title=Text(self.caption), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for i, column in enumerate(self.columns):
            table.add_column(Text(column), justify="right" if i else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An inline picture.

    Attributes:
        svg: one `<svg>` element (heads/evaluation/report/svg.py).
        shows: what it shows, in a sentence: its caption, and its text for readers who cannot see it.
    """

    svg: str
    shows: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """One question about the heads, and its answer."""

    title: str
    text: str = ""
    tables: Sequence[Table] = field(default_factory=tuple)
    pictures: Sequence[Picture] = field(default_factory=tuple)
