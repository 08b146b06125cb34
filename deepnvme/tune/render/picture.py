"""A chart as a picture in a page: one look, in the page's colours and fonts, and SVG that can stand beside other SVG.

matplotlib is an extra: it is imported where a picture is drawn, never when this module is. No pyplot, no display.
"""

from __future__ import annotations

import html
import io
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, RULE, PAPER = "#010101", "#020202", "#030303", "#040404"
"""Stand for the colours of the page, light or dark: its CSS variables ``--ink``, ``--muted``, ``--rule`` and ``--paper``."""
_PAGE_COLOURS = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--paper"}

_WIDTH = 5.0
"""Inches of 72 units: narrow enough that text of 9 units stays legible when a phone shows the picture at its width."""


@dataclass(frozen=True)
class Chart:
    """A picture with what is said beside it, and ``alt`` instead of it."""

    title: str
    note: str
    alt: str
    axes: Axes


def style() -> AbstractContextManager[None]:
    """To be entered while charts are drawn and saved: ours, whatever the user's matplotlibrc says."""
    import matplotlib.style

    ours: dict[str, object] = {
        "svg.fonttype": "none",  # text stays text: sharp, small, and found by the browser's search
        "svg.hashsalt": "deepnvme",  # the same figures give the same file
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "font.sans-serif": ["DejaVu Sans"],  # only measures: the page has fonts of its own, and a list would be in each text
        "font.size": 9,
        "text.color": INK,
        "text.parse_math": False,  # a folder's name may hold dollars
        "axes.labelcolor": MUTED,
        "axes.edgecolor": RULE,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.color": RULE,
        "grid.linewidth": 0.6,
        "xtick.color": RULE,
        "ytick.color": RULE,
        "xtick.labelcolor": MUTED,
        "ytick.labelcolor": MUTED,
        "legend.frameon": False,
        "legend.labelcolor": MUTED,
        "hatch.color": RULE,
        "hatch.linewidth": 0.8,
    }
    return cast("AbstractContextManager[None]", matplotlib.style.context(["default", ours]))


def axes_for(height: float, x_label: str, y_label: str, top: float = 0.28) -> Axes:
    """The only axes of a new figure, ``height`` in inches, of which ``top`` are left for a legend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height))
    # Margins of a fixed size line up charts that stand below each other, and matplotlib's own layouts take as long as all else.
    left = 0.62 if y_label else 0.1
    axes = figure.add_axes((left / _WIDTH, 0.46 / height, 1 - (left + 0.15) / _WIDTH, 1 - (0.46 + top) / height))
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return axes


def svg(chart: Chart, prefix: str) -> str:
    """An ``<svg>`` element. ``prefix`` goes before the names of its parts, which differ between figures only by chance."""
    from matplotlib.figure import Figure

    file = io.StringIO()
    # No metadata, which would hold addresses of vocabularies.
    cast(Figure, chart.axes.figure).savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    _, _, rest = file.getvalue().partition("<svg")  # without XML's declaration, which HTML does not have

    def adapt(tag: re.Match[str]) -> str:
        text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}", tag[0])
        text = re.sub(r"(\d\.\d\d)\d+", r"\1", text)  # a hundredth of a unit is not seen, and the rest a third of the page
        for placeholder, name in _PAGE_COLOURS.items():
            text = text.replace(placeholder, f"var({name})")
        return text

    # Tags only: the text between them may be a folder's name. ">" within an attribute is escaped.
    parts = re.sub(r"<[^>]*>", adapt, f"<svg{rest}")
    return re.sub(r">\s+<", ">\n<", parts).replace("<svg", f'<svg role="img" aria-label="{html.escape(chart.alt)}"', 1)
