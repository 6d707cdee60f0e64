"""A report as one self-contained HTML file: no script, no font and no picture from elsewhere.

It follows the reader's light or dark setting, is readable at 360 px (wide tables scroll inside themselves, and keep the
columns that name a row in view) and prints in black on white.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from heads.evaluation.report.sections import Picture, Section, Table

FIGURE = re.compile(r"[-+−–±<>≈]?\s?\d|[–∞]$")
LONG_NAME, LONG_TEXT = 24, 60
"""Words of more characters are broken into lines on paper, and texts everywhere."""
MOST_ON_PAPER = 9
"""Columns whose cells stay on one line on paper; more would not fit on a page."""
STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #222; --dim: #5a5a5a; --grid: #ddd; --stripe: #f5f6f7; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15181b; --ink: #e6e6e6; --dim: #a5abb1; --grid: #3a4046; --stripe: #1d2125; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; }
p { max-width: 46rem; margin: .4rem 0; }
nav ul { list-style: none; padding: 0; margin: .5rem 0; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; }
nav a { color: inherit; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .1rem 1rem; margin: 0; color: var(--dim);
  font-size: .875rem; }
dt { font-weight: 600; } dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: .8rem 0 .2rem; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; }
th, td { padding: .25rem .7rem .25rem 0; text-align: right; border-bottom: 1px solid var(--grid); }
th { vertical-align: bottom; font-weight: 600; } th:first-child, td:first-child { padding-left: .3rem; }
tbody tr { background: var(--paper); } tbody tr:nth-child(even) { background: var(--stripe); }
.words, .long { text-align: left; padding-left: .4rem; } .keep { white-space: nowrap; }
td.long { white-space: pre-wrap; min-width: 13rem; max-width: 40rem; } tr:has(.long) > td { vertical-align: top; }
@media (min-width: 60rem) { td:not(.long) { white-space: nowrap; } }
@media (max-width: 40rem) {
  .name1, .name2 { position: sticky; min-width: 4.5rem; max-width: 5.5rem; overflow-wrap: anywhere; }
  .name1:has(+ .name2), .name2 { min-width: 5.5rem; } .name1 { left: 0; } .name2 { left: 5.5rem; }
  th.name1, th.name2 { background: var(--paper); } td.name1, td.name2 { background: inherit; }
}
.note, figcaption { color: var(--dim); font-size: .875rem; max-width: 46rem; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
figure { margin: .6rem 0; max-width: 34rem; }
svg { width: 100%; height: auto; display: block; max-height: 40rem; fill: currentColor; }
@media (max-width: 30rem) { body { padding: .6rem; } dl { grid-template-columns: 1fr; } dd { margin: 0 0 .3rem; } }
@media print {
  :root { color-scheme: light; --paper: #ffffff; --ink: #000000; --dim: #333333; --grid: #bbbbbb; --stripe: #ffffff; }
  body { max-width: none; padding: 0; font-size: 10pt; } nav { display: none; }
  .scroll { overflow: visible; } table { font-size: 7.5pt; max-width: 100%; } th, td { padding-right: .3rem; }
  table:not(.many) td { white-space: nowrap; } table td.wrap { white-space: normal; }
  table td.long { white-space: pre-wrap; min-width: 0; }
  h2, caption, section > p { break-after: avoid; } figure, tr, p { break-inside: avoid; }
  .pictures { grid-template-columns: 1fr 1fr; break-inside: avoid; }
}
"""


def render_page(title: str, facts: Mapping[str, str], sections: Sequence[Section]) -> str:
    """The whole file.

    Args:
        facts: what identifies the run: heads, machine, command.

    >>> "<h2" in render_page("medusa: speed", {"heads": "medusa"}, [Section(title="Speed", text="It is fast.")])
    True
    """
    links = "".join(f'<li><a href="#s{i}">{escape(section.title)}</a></li>' for i, section in enumerate(sections))
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    body = "\n".join(render_section(section, f"s{i}") for i, section in enumerate(sections))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><header><h1>{escape(title)}</h1><dl>{listed}</dl></header>\n"
        f"<nav><ul>{links}</ul></nav>\n<main>{body}</main></body></html>\n"
    )


def render_section(section: Section, name: str) -> str:
    text = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in section.text.split("\n\n") if paragraph)
    tables = "".join(map(render_table, section.tables))
    pictures = "".join(map(render_picture, section.pictures))
    pictures = f'<div class="pictures">{pictures}</div>' if pictures else ""
    return f'<section id="{name}"><h2>{escape(section.title)}</h2>{text}{tables}{pictures}</section>'


def render_table(table: Table) -> str:
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    classes = [f' class="{name}"' if name else "" for name in column_classes(table)]
    heads = zip(classes, table.columns, strict=True)
    head = "".join(f'<th scope="col"{of_column}>{escape(column)}</th>' for of_column, column in heads)
    rows = "".join(f"<tr>{render_row(row, classes)}</tr>" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    many = ' class="many"' if len(table.columns) > MOST_ON_PAPER else ""
    inner = f"<table{many}>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{inner}</div>{note}'


def render_row(row: Sequence[str], classes: Sequence[str]) -> str:
    """A row's cells; no line ends within an interval."""
    cells = (re.sub(r"\([^() ]+\)", r'<span class="keep">\g<0></span>', escape(cell)) for cell in row)
    return "".join(f"<td{of_column}>{cell}</td>" for of_column, cell in zip(classes, cells, strict=True))


def column_classes(table: Table) -> list[str]:
    """Figures stand to the right, words to the left; at most two columns of words at the beginning name a row.

    >>> column_classes(Table(columns=["a", "b", "c", "d"], rows=[["x", "y", "1.5 (1.2–1.7)", "faster"]]))
    ['words name1', 'words name2', '', 'words']
    """
    kinds = []
    for i in range(len(table.columns)):
        cells = [row[i] for row in table.rows if row[i]]
        longest = max(map(len, cells), default=0)
        if longest > LONG_TEXT:
            kinds.append("long")
        elif i and all(FIGURE.match(cell) for cell in cells):
            kinds.append("")
        else:
            kinds.append("words wrap" if longest > LONG_NAME else "words")
    for i in range(min(2, len(kinds))):
        if not kinds[i].startswith("words"):
            break
        kinds[i] += f" name{i + 1}"
    return kinds


def render_picture(picture: Picture) -> str:
    return f"<figure>{picture.svg}<figcaption>{escape(picture.shows)}</figcaption></figure>"
