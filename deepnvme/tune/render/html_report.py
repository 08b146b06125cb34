"""Formats the results of ds_nvme_tune as one self-contained HTML document: no network, no script, no other files.

The page itself is the template ``report.html``, beside this file.
"""

from __future__ import annotations

import json
from pathlib import Path

from deepnvme.tune.measure.folder import Unsuitable
from deepnvme.tune.search.results import TABLE, Tuning
from deepnvme.tune.sizes import size_text
from deepnvme.version import __version__

from . import charts, picture
from .charts import three_digits


def require_matplotlib() -> None:
    """Raise Unsuitable if matplotlib or jinja2 cannot be imported. Called before measuring: afterwards it would be too late."""
    try:
        import jinja2  # noqa: F401
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        why = (str(error).splitlines() or ["no reason given"])[0]
        said = f"a report needs matplotlib and jinja2, one of which cannot be imported ({why}): pip install 'deepnvme[plot]'"
        raise Unsuitable(said) from error


def render_html(tuning: Tuning) -> str:
    """Return the whole HTML document. Needs matplotlib and jinja2.

    It can be encoded as UTF-8 whatever the names of the folders are. The same ``tuning`` gives the same text.
    """
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"size": size_text, "three_digits": three_digits}
    template = environment.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    with picture.style():
        document = template.render(
            tuning=tuning,
            block=json.dumps(tuning.chosen.best.setting.to_deepspeed(), indent=2),
            search_charts=charts.search_charts,
            striping_charts=charts.striping_charts,
            svg=picture.svg,
            most_shown=TABLE,
            version=__version__,
        )
    # Bytes of a file name that are not UTF-8 are shown as escapes.
    return document.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") + "\n"
