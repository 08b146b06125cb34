"""Draws the charts of a search's results, with the style of ``charts.mplstyle``.

matplotlib is imported when a chart is drawn, not with this module. No pyplot, no display.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepnvme.tune.measure.job import OPERATIONS, Operation
from deepnvme.tune.search.results import Figures, Result, Search, Striping
from deepnvme.tune.sizes import size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, RULE, PAPER = "#010101", "#020202", "#030303", "#040404"
"""Placeholders for colours of the page, light or dark: ``html_report`` replaces them by CSS variables, ``--ink`` and so on.

``charts.mplstyle`` has them, too.
"""
COLOURS: dict[Operation, str] = {"read": "#2f6fed", "write": "#c8501e"}
"""Colour of each direction. White text, a white page and a black page all have a contrast of about 4 with them."""
_BACKEND_STYLES = (("#0d9488", "o"), ("#8b5cf6", "s"), ("#d97706", "^"), ("#db2777", "D"))
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


def three_digits(value: float) -> str:
    """Return a positive number with three significant digits, without an exponent: "0.0123", "6.90", "1234"; "0" for others."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def search_charts(search: Search) -> list[Chart]:
    """Return all charts of a search that compare anything; none for a single setting."""
    by_direction = itertools.product((heat_map, latency_chart, cpu_chart), search.best.operations)
    charts = [draw(search, operation) for draw, operation in by_direction]
    charts.append(_bars(search, "Scaling over workers", "workers", lambda result: result.setting.intra_op_parallelism))
    charts.append(_bars(search, "Backends compared", "backend", lambda result: result.backend))
    return [chart for chart in charts if chart is not None]


def striping_charts(striping: Striping) -> list[Chart]:
    """Return a chart of the folders alone and together for each direction that was measured."""
    return [_striping_chart(striping, operation) for operation in OPERATIONS if operation in striping.together]


def heat_map(search: Search, operation: Operation) -> Chart | None:
    """Draw GB/s over block size and queue depth. Returns None if both are the same for all settings."""
    from matplotlib.patches import Rectangle

    blocks = sorted({result.setting.block_size for result in search.results})
    depths = sorted({result.setting.queue_depth for result in search.results})
    if len(blocks) * len(depths) < 2:
        return None
    cells = search.fastest(operation, lambda result: (result.setting.block_size, result.setting.queue_depth))
    (fastest_block, fastest_depth), fastest = max(cells.items(), key=lambda item: item[1])
    chosen = (search.best.setting.block_size, search.best.setting.queue_depth)

    x_label, y_label = "queue depth (blocks for each worker)", "block size (bytes)"
    axes = _axes(height=0.5 + 0.33 * len(blocks), x_label=x_label, y_label=y_label, top=0.03)
    for (row, block), (column, depth) in itertools.product(enumerate(blocks), enumerate(depths)):
        speed, gap = cells.get((block, depth)), 0.03
        area = Rectangle((column - 0.5 + gap, row - 0.5 + gap), 1 - 2 * gap, 1 - 2 * gap, linewidth=0)
        if speed is None:
            area.set(facecolor="none", hatch="////")
        else:
            # Shades of one colour, transparent at 0 GB/s rather than at the slowest: otherwise noise would look like a peak.
            shade = (speed / fastest) ** 1.5 if fastest else 1.0
            area.set(facecolor=COLOURS[operation], alpha=shade)
            colour, weight = ("white" if shade > 0.85 else INK), ("bold" if (block, depth) == chosen else "normal")
            axes.text(column, row, three_digits(speed), ha="center", va="center", color=colour, weight=weight)
        axes.add_patch(area)
        if (block, depth) == chosen:
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=INK, linewidth=2, zorder=3))
    axes.set_xlim(-0.55, len(depths) - 0.45)
    axes.set_ylim(-0.55, len(blocks) - 0.45)
    axes.set_xticks(range(len(depths)), [str(depth) for depth in depths])
    axes.set_yticks(range(len(blocks)), [size_text(block) for block in blocks])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    unmeasured = len(blocks) * len(depths) - len(cells)
    return Chart(
        title=f"{operation.capitalize()} speed, GB/s",
        note="Each cell: the best over workers and backends. Framed: the recommended setting."
        + (" Hatched: not measured." if unmeasured else ""),
        alt=f"Heat map of {operation} GB/s over block size and queue depth, from {three_digits(min(cells.values()))} to "
        f"{three_digits(fastest)} GB/s, the fastest cell being {size_text(fastest_block)} blocks at queue depth {fastest_depth}; "
        f"{unmeasured} cells were not measured.",
        axes=axes,
    )


def latency_chart(search: Search, operation: Operation) -> Chart | None:
    """Draw GB/s over the 99th percentile of a block's latency. Returns None if fewer than two settings have one."""
    points = [
        _Point(result, figures.gb_per_second, figures.latency_p99 * 1e3, figures.latency_p50 * 1e3)
        for result, figures in _measured(search, operation)
    ]
    return _trade_off(search, operation, points, "latency", "latency of a block, 99th percentile (ms)")


def cpu_chart(search: Search, operation: Operation) -> Chart | None:
    """Draw GB/s over CPU time. Returns None if fewer than two settings took any that was measurable."""
    measured = _measured(search, operation)
    points = [_Point(result, figures.gb_per_second, figures.cpu_seconds_per_gb) for result, figures in measured]
    return _trade_off(search, operation, points, "CPU time", "CPU time (s/GB)")


@dataclass(frozen=True)
class _Point:
    """A setting in a chart of speed over a cost."""

    result: Result
    speed: float
    cost: float
    median_cost: float | None = None
    """For a bar from there to the point; None for no bar."""


def _trade_off(search: Search, operation: Operation, points: Sequence[_Point], cost: str, x_label: str) -> Chart | None:
    """Draw GB/s over a cost, with the settings that no other beats in both joined by a line."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    # The axis is logarithmic: a cost of 0, below the clock's resolution, cannot be drawn.
    points = [point for point in points if point.cost > 0]
    if len(points) < 2:
        return None
    axes = _axes(height=3.3, x_label=x_label, y_label=f"{operation} speed (GB/s)")
    axes.grid(True)
    backends = sorted({result.backend for result in search.results})
    for backend, (colour, marker) in zip(backends, itertools.cycle(_BACKEND_STYLES), strict=False):
        mine = _coordinates(point for point in points if point.result.backend == backend)
        axes.plot(*mine, marker, markersize=4, color=colour, alpha=0.55, markeredgewidth=0, label=backend)
    frontier = _frontier(points)
    costs, speeds = _coordinates(frontier)
    axes.plot(costs, speeds, color=MUTED, linewidth=1.1, zorder=2.5)
    bars = [point.median_cost for point in frontier if point.median_cost is not None]
    if bars:
        axes.hlines(speeds, bars, costs, color=MUTED, linewidth=0.8)
    best = _coordinates(point for point in points if point.result == search.best)
    (ring,) = axes.plot(*best, "o", markersize=9, markerfacecolor="none", markeredgewidth=1.6, label="recommended")
    ring.set_markeredgecolor(INK)
    axes.set_xscale("log")
    # At least a factor of 4; ticks are at most 2.5 apart, so there is always one.
    axes.set_xlim(min(point.median_cost or point.cost for point in points) / 2.5, max(point.cost for point in points) * 1.6)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    slowest, top = (limit(point.speed for point in points) for limit in (min, max))
    axes.set_ylim(slowest - 0.05 * top, top * 1.08 or 1)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, handletextpad=0.1, columnspacing=1.2, borderaxespad=0.2)
    _label_some(axes, frontier)
    cheapest, fastest = frontier[0], frontier[-1]
    return Chart(
        title=f"{operation.capitalize()} speed against {cost}",
        note="Up and to the left is better. The line joins the settings that none beats in both"
        f"{'; bars reach back to the median' if bars else ''}. Labels: block size/depth/workers.",
        alt=f"Scatter of {operation} GB/s over {x_label} for {len(points)} settings. Cheapest on the frontier: "
        f"{_short(cheapest.result)} with {three_digits(cheapest.speed)} GB/s at {three_digits(cheapest.cost)}; fastest: "
        f"{_short(fastest.result)} with {three_digits(fastest.speed)} GB/s at {three_digits(fastest.cost)}.",
        axes=axes,
    )


def _coordinates(points: Iterable[_Point]) -> tuple[list[float], list[float]]:
    """Return the x and the y coordinates of points."""
    listed = list(points)
    return [point.cost for point in listed], [point.speed for point in listed]


def _frontier(points: Sequence[_Point]) -> list[_Point]:
    """Return the points that are faster than all that cost less, cheapest first."""
    frontier: list[_Point] = []
    for point in sorted(points, key=lambda each: (each.cost, -each.speed)):
        if not frontier or point.speed > frontier[-1].speed:
            frontier.append(point)
    return frontier


def _label_some(axes: Axes, frontier: Sequence[_Point]) -> None:
    """Label points of the frontier, both ends first, where labels do not overlap."""
    to_shares = axes.transData - axes.transAxes
    taken: list[tuple[float, float]] = []
    for point in [frontier[-1], *frontier[:-1]]:
        x, y = to_shares.transform((point.cost, point.speed))
        if all(abs(x - other_x) > 0.2 or abs(y - other_y) > 0.07 for other_x, other_y in taken):
            taken.append((x, y))
            box = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.75, "pad": 0.5}
            _annotate(axes, _short(point.result), (point.cost, point.speed), (-4, 4), ha="right", fontsize=8, bbox=box)


def _annotate(axes: Axes, text: str, point: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
    """Put a text beside a point, at an offset in units of the font's size."""
    axes.annotate(text, point, xytext=offset, textcoords="offset points", **style)


def _bars(search: Search, title: str, x_label: str, group_of: Callable[[Result], Any]) -> Chart | None:
    """Draw GB/s of the best setting in each group. Returns None if there is only one group."""
    groups = sorted({group_of(result) for result in search.results})
    if len(groups) < 2:
        return None
    both = search.best.operations
    axes = _axes(height=2.8, x_label=x_label, y_label="speed (GB/s)")
    axes.grid(True, axis="y")
    width = 0.7 / len(both)
    said: list[str] = []
    for nth, operation in enumerate(both):
        speeds = dict.fromkeys(groups, 0.0) | search.fastest(operation, group_of)
        places = [place + (nth - (len(both) - 1) / 2) * width for place in range(len(groups))]
        bars = axes.bar(places, list(speeds.values()), width * 0.94, color=COLOURS[operation], label=operation)
        axes.bar_label(bars, labels=[three_digits(speed) for speed in speeds.values()], padding=2)
        said += [f"{operation} with {group}: {three_digits(speed)} GB/s" for group, speed in speeds.items()]
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.12)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, handlelength=0.8, handleheight=0.8, borderaxespad=0.2)
    alt = f"Bar chart, {x_label}: {'; '.join(said)}."
    return Chart(title=title, note="GB/s of the best setting of each.", alt=alt, axes=axes)


def _striping_chart(striping: Striping, operation: Operation) -> Chart:
    """Draw the speeds of folders alone and of all together."""
    together = striping.together[operation]
    speeds = [(folder, rates[operation]) for folder, rates in striping.alone]
    total = sum(speed for _, speed in speeds)
    # Names are escaped to ASCII: no font has every character, and matplotlib warns of each that is missing.
    rows = [(_middle_out(folder.encode("unicode_escape").decode(), 60), speed) for folder, speed in speeds]
    rows.append(("all together", together))
    axes = _axes(height=0.5 + 0.5 * len(rows), x_label=f"{operation} speed (GB/s)", y_label="", top=0.03)
    for row, (name, speed) in enumerate(rows):
        last = row == len(rows) - 1
        axes.barh(row, speed, 0.4, color=COLOURS[operation], alpha=1.0 if last else 0.55)
        _annotate(axes, name, (0, row - 0.25), (0, 1), weight="bold" if last else "normal")
        end = max(speed, total) if last else speed  # beside the line that marks the sum
        _annotate(axes, three_digits(speed), (end, row), (4, 0), va="center")
    axes.plot([total, total], [len(rows) - 1.25, len(rows) - 0.75], color=INK, linewidth=2)
    axes.set_yticks([])
    axes.set_ylim(len(rows) - 0.6, -0.7)
    axes.set_xlim(0, max(total, together) * 1.12 or 1)
    axes.grid(True, axis="x")
    axes.spines["left"].set_visible(False)
    share = f"{together / total:.0%} of the sum" if total else "the sum is 0"
    return Chart(
        title=f"{operation.capitalize()}: alone and together",
        note=f"Together {three_digits(together)} GB/s: {share} of the folders alone, which the upright line marks.",
        alt=f"Bar chart of {operation} GB/s: {'; '.join(f'{name} {three_digits(speed)}' for name, speed in rows)}.",
        axes=axes,
    )


def _middle_out(text: str, length: int) -> str:
    """Shorten a text to ``length`` characters by leaving out its middle."""
    return text if len(text) <= length else f"{text[: length // 2 - 1]}…{text[-length // 2 :]}"


def _measured(search: Search, operation: Operation) -> list[tuple[Result, Figures]]:
    """Return the results that have values of a direction, with these values."""
    return [(result, figures) for result in search.results if (figures := result.figures(operation))]


def _short(result: Result) -> str:
    """Return block size/depth/workers of a result."""
    setting = result.setting
    return f"{size_text(setting.block_size)}/{setting.queue_depth}/{setting.intra_op_parallelism}"


def _axes(height: float, x_label: str, y_label: str, top: float = 0.28) -> Axes:
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
