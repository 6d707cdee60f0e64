"""A recorded race as an animated SVG for a README: no script, light and dark, and without animation its end.

Each run of characters that one pass wrote is hidden until its pass ended (SMIL `set`), and all begins anew after a
pause. Viewers that do not animate show the finished columns.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from heads.cli.race.recording import Column

FONT, CHARACTER, LINE = 12, 7.2, 16  # pixels
PADDING, HEADER = 14, 52
HOLD = 3.0  # seconds that the end stands
WIDTH = 46  # characters of a line
SAMPLES = 20  # figures of a speed line
STYLE = """
svg{--paper:#fff;--ink:#1f2328;--dim:#59636e;--line:#d1d9e0;--drafted:#1a7f37}
@media(prefers-color-scheme:dark){svg{--paper:#0d1117;--ink:#e6edf3;--dim:#9198a1;--line:#3d444d;--drafted:#3fb950;\
--band:#12261e}}
text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:var(--ink);white-space:pre}
.s{font-size:11px}.d{fill:var(--drafted);font-weight:600}.p,.s,.c{fill:var(--dim)}.n{font-weight:700;font-size:14px}
.b{fill:var(--paper);stroke:var(--line)}
"""


@dataclass(frozen=True, kw_only=True)
class TextRun:
    """Neighbouring characters of one line that appear together; `seconds` is None for the prompt."""

    line: int
    start: int
    text: str
    drafted: bool
    seconds: float | None


def draw_race(columns: Sequence[Column], prompt: str, note: str, *, slower: float) -> str:
    """The SVG.

    Args:
        note: the line at its foot: machine, fairness.
        slower: how many times slower than measured it plays.
    """
    laid_out = [list(lay_out(column, prompt, WIDTH)) for column in columns]
    lines = max(run.line for runs in laid_out for run in runs) + 1
    box = WIDTH * CHARACTER + 2 * PADDING
    notes = wrap(note, int((box * len(columns)) / CHARACTER) - 4)
    body_height = HEADER + lines * LINE + PADDING
    total_width, total_height = box * len(columns), body_height + len(notes) * LINE + PADDING
    total = max(column.seconds for column in columns) * slower + HOLD
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_width:.0f} {total_height:.0f}" '
        f'width="{total_width:.0f}" height="{total_height:.0f}" role="img" aria-label="{escape(describe(columns))}">',
        f"<style>{STYLE}</style>",
        f'<rect width="100%" height="100%" fill="var(--paper)"><animate id="t" attributeName="opacity" from="1" to="1" '
        f'begin="0s;t.end" dur="{total:.2f}s"/></rect>',
    ]
    for number, (column, runs) in enumerate(zip(columns, laid_out, strict=True)):
        left = number * box
        frame = f'x="{left + 4:.1f}" y="4" width="{box - 8:.1f}" height="{body_height - 8}" rx="6"'
        parts.append(f'<rect class="b" {frame}/>')
        parts.append(f'<text class="n" x="{left + PADDING:.1f}" y="24">{escape(column.name)}</text>')
        parts += speed_line(column, columns[0], left + PADDING, slower)
        parts += [draw_run(run, left + PADDING, slower) for run in runs if run.text.strip()]
    parts += [
        f'<text class="c" x="{PADDING}" y="{body_height + LINE * (i + 1) - 4}">{escape(line)}</text>'
        for i, line in enumerate(notes)
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def lay_out(column: Column, prompt: str, width: int) -> Iterator[TextRun]:
    """The prompt and the text, broken into lines of `width` characters.

    >>> from heads.cli.race.recording import ShownPass
    >>> passes = (ShownPass(seconds=1.0, tokens=2, pieces=(("b", False), ("c", True))),)
    >>> column = Column(name="a", passes=passes, tokens=[])
    >>> [(run.line, run.start, run.text) for run in lay_out(column, "de", 3)]
    [(0, 0, 'de'), (0, 2, 'b'), (1, 0, 'c')]
    """
    pieces: list[tuple[str, bool, float | None]] = [(prompt, False, None)]
    pieces += [(piece, drafted, one.seconds) for one in column.passes for piece, drafted in one.pieces]
    line = place = 0
    for piece, drafted, seconds in pieces:
        for number, part in enumerate(piece.expandtabs(4).split("\n")):
            if number:
                line, place = line + 1, 0
            while part:
                if place == width:
                    line, place = line + 1, 0
                taken, part = part[: width - place], part[width - place :]
                yield TextRun(line=line, start=place, text=taken, drafted=drafted, seconds=seconds)
                place += len(taken)


def draw_run(run: TextRun, left: float, slower: float) -> str:
    """One text element, at its own place, so that no font's spacing moves what follows."""
    text = run.text.rstrip()
    lead = len(text) - len(text.lstrip())
    x, y = left + (run.start + lead) * CHARACTER, HEADER + (run.line + 1) * LINE
    kind = "p" if run.seconds is None else "d" if run.drafted else ""
    style = f' class="{kind}"' if kind else ""
    text = text.lstrip()
    hidden = "" if run.seconds is None else hidden_for(run.seconds * slower)
    return f'<text{style} x="{x:.1f}" y="{y}" textLength="{len(text) * CHARACTER:.1f}">{escape(text)}{hidden}</text>'


def speed_line(column: Column, plain: Column, left: float, slower: float) -> list[str]:
    """The tokens a second so far, and at the end the whole caption."""
    step = column.seconds / SAMPLES
    place = f'class="s" x="{left:.1f}" y="42"'
    drawn = []
    for number in range(1, SAMPLES):
        begin, end = (f"{at * step * slower:.2f}s" for at in (number, 1))
        shown = f'<set attributeName="visibility" to="visible" begin="t.begin+{begin}" dur="{end}"/>'
        drawn.append(f'<text {place} visibility="hidden">{column.caption_at(number * step)}{shown}</text>')
    caption = escape(column.caption_at(column.seconds, plain))
    return [*drawn, f"<text {place}>{caption}{hidden_for(column.seconds * slower)}</text>"]


def hidden_for(seconds: float) -> str:
    """Hides the element around it for the first seconds of each round."""
    return f'<set attributeName="visibility" to="hidden" begin="t.begin" dur="{seconds:.2f}s"/>'


def describe(columns: Sequence[Column]) -> str:
    """The race in words, for readers of the picture's label."""
    return "; ".join(f"{column.name}: {column.caption_at(column.seconds, columns[0])}" for column in columns)


def wrap(text: str, width: int) -> list[str]:
    """
    >>> wrap("one two three", 8)
    ['one two', 'three']
    """
    return textwrap.wrap(text, width)
