"""From a matplotlib figure to an inline `<svg>`: text stays text, and ink and grid follow the page's colours."""

from __future__ import annotations

import hashlib
import io
import re
from html import escape
from typing import TYPE_CHECKING

from heads.evaluation.pictures import DARK
from heads.evaluation.report.sections import Picture
from heads.extras import needs_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRID = "#E5E5E5"
PAGE_COLORS = {DARK: "currentColor", GRID: "var(--grid)", "#000000": "currentColor", "#FFFFFF": "var(--paper)"}
"""Colours that a figure is drawn in, and what stands for them on the page, where they follow light and dark."""


def as_picture(figure: Figure, shows: str) -> Picture:
    """The figure as an inline picture with a caption."""
    with needs_extra("plots", "A report was requested"):
        from matplotlib import rc_context
    drawn = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "headway"}):
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return Picture(svg=name_apart(recolour(label(svg, shows))), shows=shows)


def recolour(svg: str) -> str:
    """
    >>> recolour('<path style="stroke: #e5e5e5"/>')
    '<path style="stroke: var(--grid)"/>'
    """
    for drawn, shown in PAGE_COLORS.items():
        svg = re.sub(re.escape(drawn) + r"(?![0-9a-fA-F])", shown, svg, flags=re.IGNORECASE)
    return svg


def label(svg: str, shows: str) -> str:
    """A name for screen readers; width and height are left to the page, which keeps the shape by the view box."""
    opening, _, rest = svg.partition(">")
    opening = re.sub(r'\s(width|height)="[^"]*"', "", opening)
    return f'{opening} role="img" aria-label="{escape(shows)}">{rest}'


def name_apart(svg: str) -> str:
    """Ids that no other picture of the page has."""
    prefix = hashlib.sha256(svg.encode()).hexdigest()[:8]
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", svg)
