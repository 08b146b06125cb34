"""Formats results with the templates beside this file: as text for a terminal, or as one self-contained HTML page.

The templates use Jinja, which torch installs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from deepnvme.telemetry.descriptions import printable, size_for_people
from deepnvme.version import __version__

from .command_line import size_text
from .job import Measurement, Operation
from .results import Figures, Result, Search, Tuning


def measurement_text(measurement: Measurement) -> str:
    """Return the text that ds_io prints."""
    return _rendered("ds_io.txt", found=measurement)


def tuning_text(tuning: Tuning, verbose: bool = False) -> str:
    """Return the text that ds_nvme_tune prints.

    Args:
        tuning: The results.
        verbose: Whether to list eliminated settings as well.
    """
    block = json.dumps(tuning.chosen.best.setting.to_deepspeed(), indent=3)
    return _rendered("ds_nvme_tune.txt", tuning=tuning, verbose=verbose, block=block)


def tuning_page(tuning: Tuning) -> str:
    """Return a self-contained HTML page about the results.

    The page can be encoded as UTF-8, even if folder names cannot. The same results always give the same text.
    """
    block = json.dumps(tuning.chosen.best.setting.to_deepspeed(), indent=2)
    shown: dict[str, Any] = {"longer": longer, "cells": cells, "dots": dots, "version": __version__}
    page = _rendered("ds_nvme_tune.html", tuning=tuning, block=block, **shown)
    # Bytes of a file name that are not UTF-8 are shown as escapes.
    return page.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") + "\n"


def _rendered(template: str, **values: Any) -> str:
    """Return the text of a template filled in with values, which are escaped in an HTML template."""
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    environment = jinja2.Environment(autoescape=template.endswith(".html"), **options)
    environment.filters |= {"size": size_text} | {each.__name__: each for each in (size_for_people, three_digits, printable)}
    return environment.from_string(Path(__file__).with_name(template).read_text(encoding="utf-8")).render(values).strip("\n")


def three_digits(value: float) -> str:
    """Return a positive number with three significant digits, without an exponent: "0.0123", "6.90", "1234"; "0" for others."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def longer(search: Search, result: Result) -> str:
    """Return how many per cent longer a result takes than the recommended one, as text such as "+35".

    A finalist always has a figure, because the finalists' table shows its interval as well. An eliminated setting has a figure
    only if the difference is more than noise. Otherwise the text is an upper bound ("at most", as a sign), or "?" if that
    exceeds 100 %.
    """
    found = result.difference
    if found is None:
        return "0"
    if result in search.finalists:
        return f"{found.percent:+.1f}"
    if found.clearly_slower:
        return f"{found.percent:+.0f}"
    most = math.inf if found.interval is None else 100 * found.interval[1]
    return f"\N{LESS-THAN OR EQUAL TO}{most:.0f}" if most <= 100 else "?"


def cells(search: Search) -> dict[tuple[int, int], Result]:
    """Return the best result for each pair of block size and queue depth, over all numbers of workers and all backends.

    The best result is the recommended one if the pair has it, else the fastest among the results that stayed in the search
    longest.
    """
    found: dict[tuple[int, int], Result] = {}
    for result in (search.best, *search.results):
        found.setdefault((result.setting.block_size, result.setting.queue_depth), result)
    return found


def dots(search: Search, operation: Operation, cost: str) -> list[tuple[float, float, Result, Figures]]:
    """Return the finalists' positions in a chart of speed over a cost.

    Only finalists are shown, because they were measured in turn with transfers of one length.

    Args:
        search: The search.
        operation: The direction.
        cost: Name of a field of :class:`Figures`.

    Returns:
        For each finalist its x and y, from 0 to 1, its result and its figures. Empty if there are fewer than two finalists.
    """
    shown = [(result, result.measured[operation]) for result in search.finalists]
    xs, ys = _places([getattr(each, cost) for _, each in shown]), _places([each.gb_per_second for _, each in shown])
    return [(x, y, *each) for x, y, each in zip(xs, ys, shown, strict=True)] if len(shown) > 1 else []


def _places(values: Sequence[float]) -> list[float]:
    """Scale values linearly to positions from 0.1 to 0.9 in a chart."""
    low, high = min(values), max(values)
    return [0.1 + 0.8 * (value - low) / (high - low) if high > low else 0.5 for value in values]
