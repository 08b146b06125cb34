"""The common style of charts, and their conversion to SVG that can be embedded in an HTML page with its colours and fonts.

matplotlib is an optional dependency: it is imported when a chart is drawn, not with this module. No pyplot, no display.
"""

from __future__ import annotations

import html
import io
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, RULE, PAPER = "#010101", "#020202", "#030303", "#040404"
"""Placeholders for colours of the page, light or dark: :func:`svg` replaces them by CSS variables, ``--ink`` and so on.

``charts.mplstyle`` has them, too.
"""
_PAGE_COLOURS = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--paper"}

_WIDTH = 5.0
"""Width of a chart in inches of 72 units: narrow enough that text of 9 units stays legible at the width of a phone."""


@dataclass(frozen=True)
class Chart:
    """A drawn chart with its texts."""

    title: str
    """The heading."""
    note: str
    """How to read the chart; shown under the heading."""
    alt: str
    """The text for readers who do not see the chart."""
    axes: Axes
    """The axes that it is drawn on."""


def style() -> AbstractContextManager[None]:
    """Return a context with our matplotlib style, independent of the user's matplotlibrc. Charts are drawn and saved in it."""
    import matplotlib.style

    ours = Path(__file__).with_name("charts.mplstyle")
    return cast("AbstractContextManager[None]", matplotlib.style.context(["default", ours]))


def axes_for(height: float, x_label: str, y_label: str, top: float = 0.28) -> Axes:
    """Return the only axes of a new figure.

    Args:
        height: Height of the figure in inches.
        x_label: Label of the x axis.
        y_label: Label of the y axis; empty for none, which leaves a smaller margin.
        top: Inches above the axes, for a legend.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height))
    # Fixed margins, so that charts below each other are aligned; matplotlib's layout engines would also double the time.
    left = 0.62 if y_label else 0.1
    axes = figure.add_axes((left / _WIDTH, 0.46 / height, 1 - (left + 0.15) / _WIDTH, 1 - (0.46 + top) / height))
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return axes


def svg(chart: Chart, prefix: str) -> str:
    """Return a chart as an ``<svg>`` element for an HTML page.

    Args:
        chart: The chart.
        prefix: Put before all ids in the element, which otherwise might be the same in two charts of a page.
    """
    from matplotlib.figure import Figure

    file = io.StringIO()
    # No metadata: it would contain URLs of vocabularies.
    cast(Figure, chart.axes.figure).savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    _, _, rest = file.getvalue().partition("<svg")  # without the XML declaration, which is not allowed in HTML

    def adapt(tag: re.Match[str]) -> str:
        text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}", tag[0])
        text = re.sub(r"(\d\.\d\d)\d+", r"\1", text)  # more digits are invisible, and would be a third of the page
        for placeholder, name in _PAGE_COLOURS.items():
            text = text.replace(placeholder, f"var({name})")
        return text

    # Only tags are changed: the text between them may be a folder's name. ">" in an attribute is escaped.
    parts = re.sub(r"<[^>]*>", adapt, f"<svg{rest}")
    return re.sub(r">\s+<", ">\n<", parts).replace("<svg", f'<svg role="img" aria-label="{html.escape(chart.alt)}"', 1)
