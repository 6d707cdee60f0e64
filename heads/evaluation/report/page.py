"""A report as one self-contained HTML file: no script, no font and no picture from elsewhere.

It follows the reader's light or dark setting, is readable at 360 px (wide tables scroll inside themselves) and prints
in black on white.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from heads.evaluation.report.sections import Picture, Section, Table

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
th { vertical-align: bottom; font-weight: 600; } tbody tr:nth-child(even) { background: var(--stripe); }
@media (min-width: 60rem) { td { white-space: nowrap; } }
th:first-child, td:first-child { text-align: left; padding-left: .3rem; font-weight: 400; }
.note, figcaption { color: var(--dim); font-size: .875rem; max-width: 46rem; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
figure { margin: .6rem 0; } svg { width: 100%; height: auto; display: block; max-height: 40rem; }
@media (max-width: 30rem) { body { padding: .6rem; } dl { grid-template-columns: 1fr; } dd { margin: 0 0 .3rem; } }
@media print {
  :root { color-scheme: light; --paper: #ffffff; --ink: #000000; --dim: #333333; --grid: #bbbbbb; --stripe: #ffffff; }
  body { max-width: none; padding: 0; font-size: 10pt; } nav { display: none; }
  .scroll { overflow: visible; } table { font-size: 8pt; width: 100%; } th, td { padding-right: .3rem; }
  h2, caption { break-after: avoid; } figure, tr { break-inside: avoid; }
  .pictures { grid-template-columns: 1fr 1fr; }
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
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    inner = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{inner}</div>{note}'


def render_picture(picture: Picture) -> str:
    return f"<figure>{picture.svg}<figcaption>{escape(picture.shows)}</figcaption></figure>"
