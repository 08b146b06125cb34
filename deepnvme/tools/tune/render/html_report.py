"""Formats the results of ds_nvme_tune as one self-contained HTML document: no network, no script, no other files.

The page itself is the template ``report.html``, beside this file. Charts have the colours and fonts of the page.
"""

from __future__ import annotations

import html
import io
import json
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import cast

from deepnvme.tools.tune.measure.unsuitable import Unsuitable, first_line
from deepnvme.tools.tune.search.results import TABLE, Tuning
from deepnvme.tools.tune.sizes import size_text
from deepnvme.version import __version__

from . import charts
from .charts import INK, MUTED, PAPER, RULE, Chart, three_digits

_PAGE_COLOURS = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--paper"}


def require_matplotlib() -> None:
    """Raise Unsuitable if matplotlib or jinja2 cannot be imported. Called before measuring: afterwards it would be too late."""
    try:
        import jinja2  # noqa: F401
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        needs = f"a report needs matplotlib and jinja2, one of which cannot be imported ({first_line(error)})"
        raise Unsuitable(f"{needs}: pip install 'deepnvme[plot]'") from error


def render_html(tuning: Tuning) -> str:
    """Return the whole HTML document. Needs matplotlib and jinja2.

    It can be encoded as UTF-8 whatever the names of the folders are. The same ``tuning`` gives the same text.
    """
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"size": size_text, "three_digits": three_digits}
    template = environment.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    with style():
        document = template.render(
            tuning=tuning,
            block=json.dumps(tuning.chosen.best.setting.to_deepspeed(), indent=2),
            search_charts=charts.search_charts,
            striping_charts=charts.striping_charts,
            svg=svg,
            most_shown=TABLE,
            version=__version__,
        )
    # Bytes of a file name that are not UTF-8 are shown as escapes.
    return document.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") + "\n"


def style() -> AbstractContextManager[None]:
    """Return a context with our matplotlib style, independent of the user's matplotlibrc. Charts are drawn and saved in it."""
    import matplotlib.style

    ours = Path(__file__).with_name("charts.mplstyle")
    return cast("AbstractContextManager[None]", matplotlib.style.context(["default", ours]))


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
