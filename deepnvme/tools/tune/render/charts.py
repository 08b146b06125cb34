"""Draws the charts of a search's results, with the style of ``charts.mplstyle``.

matplotlib is imported when a chart is drawn, not with this module. No pyplot, no display.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepnvme.tools.tune.measure.job import OPERATIONS, Operation
from deepnvme.tools.tune.search.estimates import CONFIDENCE
from deepnvme.tools.tune.search.results import Figures, Result, Search, Striping
from deepnvme.tools.tune.sizes import size_text

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
    """Return all charts of a search that compare anything; none for a single setting.

    Speeds, latencies and CPU times are shown of the finalists only, which were measured in turn with transfers of one length. Of
    the others, which were measured for less time, it is only shown how much longer they took than the recommended setting in the
    same round.
    """
    by_direction = itertools.product((latency_chart, cpu_chart), search.best.operations)
    charts = [heat_map(search), *(draw(search, operation) for draw, operation in by_direction)]
    charts.append(_groups(search, "Workers compared", "workers", lambda result: result.setting.intra_op_parallelism))
    charts.append(_groups(search, "Backends compared", "backend", lambda result: result.backend))
    return [chart for chart in charts if chart is not None]


def striping_charts(striping: Striping) -> list[Chart]:
    """Return a chart of the folders alone and together for each direction that was measured."""
    return [_striping_chart(striping, operation) for operation in OPERATIONS if operation in striping.together]


def heat_map(search: Search) -> Chart | None:
    """Draw how much longer settings take than the recommended one, over block size and queue depth.

    Returns None if both are the same for all settings.
    """
    from matplotlib.patches import Rectangle

    blocks = sorted({result.setting.block_size for result in search.results})
    depths = sorted({result.setting.queue_depth for result in search.results})
    if len(blocks) * len(depths) < 2:
        return None
    cells = search.leaders(lambda result: (result.setting.block_size, result.setting.queue_depth))

    x_label, y_label = "queue depth (blocks for each worker)", "block size (bytes)"
    axes = _axes(height=0.5 + 0.33 * len(blocks), x_label=x_label, y_label=y_label, top=0.03)
    said: list[str] = []
    for (row, block), (column, depth) in itertools.product(enumerate(blocks), enumerate(depths)):
        result, gap = cells.get((block, depth)), 0.03
        area = Rectangle((column - 0.5 + gap, row - 0.5 + gap), 1 - 2 * gap, 1 - 2 * gap, linewidth=0)
        if result is None:
            area.set(facecolor="none", hatch="////")
        else:
            text, slower = _longer(search, result), result.difference.slower if result.difference else 0.0
            final, best = result in search.finalists, result == search.best
            # Transparent for what takes for ever rather than for the slowest: otherwise noise would look like a peak.
            shade = min(1 / (1 + slower), 1.0) ** 1.5
            area.set(facecolor=COLOURS["read"] if final else MUTED, alpha=shade if final else 0.35 * shade)
            colour, weight = ("white" if final and shade > 0.85 else INK), ("bold" if best else "normal")
            axes.text(column, row, text, ha="center", va="center", color=colour, weight=weight)
            said.append(f"{size_text(block)} at depth {depth}: {text}{'' if final else ', eliminated'}")
            if best:
                axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=INK, linewidth=2, zorder=3))
        axes.add_patch(area)
    axes.set_xlim(-0.55, len(depths) - 0.45)
    axes.set_ylim(-0.55, len(blocks) - 0.45)
    axes.set_xticks(range(len(depths)), [str(depth) for depth in depths])
    axes.set_yticks(range(len(blocks)), [size_text(block) for block in blocks])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    unmeasured = len(blocks) * len(depths) - len(cells)
    what = f"Time to {' and '.join(search.best.operations)} a byte"
    return Chart(
        title=f"{what}, compared with the recommended setting",
        note="Per cent more, for the workers and backend that did best. Framed: recommended. Blue: in the final. Grey: "
        "eliminated, compared in the round where it left; \N{LESS-THAN OR EQUAL TO}18: not told from noise, at most 18 % more."
        + (" Hatched: not measured." if unmeasured else ""),
        alt=f"Heat map over block size and queue depth. {what}, in per cent more than with the recommended setting: "
        f"{'; '.join(said)}. {unmeasured} cells were not measured.",
        axes=axes,
    )


def _longer(search: Search, result: Result) -> str:
    """Return by how many per cent more time a result takes than the recommended one: "+35".

    Finalists have a figure in any case, because their table has the intervals beside it. An eliminated setting has one if it is
    more than noise; otherwise the most that it may be, "\N{LESS-THAN OR EQUAL TO}18", or "?" if that says nothing.
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


def latency_chart(search: Search, operation: Operation) -> Chart | None:
    """Draw GB/s over the 99th percentile of a block's latency, of the finalists. Returns None if fewer than two have one."""
    points = [
        _Point(result, figures, figures.latency_p99 * 1e3, figures.latency_p50 * 1e3)
        for result, figures in _measured(search, operation)
    ]
    return _trade_off(search, operation, points, "latency", "latency of a block, 99th percentile (ms)")


def cpu_chart(search: Search, operation: Operation) -> Chart | None:
    """Draw GB/s over CPU time, of the finalists. Returns None if fewer than two took any that was measurable."""
    measured = _measured(search, operation)
    points = [_Point(result, figures, figures.cpu_seconds_per_gb) for result, figures in measured]
    return _trade_off(search, operation, points, "CPU time", "CPU time (s/GB)")


@dataclass(frozen=True)
class _Point:
    """A setting in a chart of speed over a cost."""

    result: Result
    figures: Figures
    cost: float
    median_cost: float | None = None
    """For a bar from there to the point; None for no bar."""

    @property
    def speed(self) -> float:
        """10^9 bytes per second."""
        return self.figures.gb_per_second


def _trade_off(search: Search, operation: Operation, points: Sequence[_Point], cost: str, x_label: str) -> Chart | None:
    """Draw GB/s, with its interval, over a cost, with the settings that no other beats in both joined by a line."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    # The axis is logarithmic: a cost of 0, below the clock's resolution, cannot be drawn.
    points = [point for point in points if point.cost > 0]
    if len(points) < 2:
        return None
    axes = _axes(height=3.3, x_label=x_label, y_label=f"{operation} speed (GB/s)")
    axes.grid(True)
    backends = sorted({point.result.backend for point in points})
    for backend, (colour, marker) in zip(backends, itertools.cycle(_BACKEND_STYLES), strict=False):
        mine = _coordinates(point for point in points if point.result.backend == backend)
        axes.plot(*mine, marker, markersize=4, color=colour, alpha=0.8, markeredgewidth=0, label=backend)
    intervals = [(point.cost, point.figures.interval) for point in points if point.figures.interval is not None]
    ends = [end for _, interval in intervals for end in interval]
    if intervals:
        axes.vlines([cost for cost, _ in intervals], ends[::2], ends[1::2], color=MUTED, linewidth=0.8, alpha=0.6)
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
    slowest, top = (limit([point.speed for point in points] + ends) for limit in (min, max))
    axes.set_ylim(slowest - 0.05 * top, top * 1.08 or 1)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, handletextpad=0.1, columnspacing=1.2, borderaxespad=0.2)
    _label_some(axes, frontier)
    cheapest, fastest = frontier[0], frontier[-1]
    return Chart(
        title=f"{operation.capitalize()} speed against {cost}",
        note="The finalists, which were measured in turn. Up and to the left is better. The line joins the settings that none is "
        f"measured to beat in both{'; bars to the left reach back to the median' if bars else ''}"
        f"{f'; upright ones: {100 * CONFIDENCE:.0f} % interval of the speed' if intervals else ''}. Labels: block "
        "size/depth/workers.",
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


def _groups(search: Search, title: str, x_label: str, group_of: Callable[[Result], Any]) -> Chart | None:
    """Draw how much longer the best setting of each group takes than the recommended one. Returns None if there is one group."""
    leaders = search.leaders(group_of)
    if len(leaders) < 2:
        return None
    names = sorted(leaders)
    axes = _axes(height=2.6, x_label=x_label, y_label="time, % more than recommended")
    axes.grid(True, axis="y")
    axes.axhline(0, color=INK, linewidth=0.8)
    said: list[str] = []
    for place, name in enumerate(names):
        result = leaders[name]
        found, final = result.difference, result in search.finalists
        slower, ends = (found.percent, found.interval) if found is not None else (0.0, None)
        colour = COLOURS["read"] if final else MUTED
        if ends is not None:
            axes.vlines(place, 100 * ends[0], 100 * ends[1], color=colour, linewidth=2)
        if final or (found is not None and found.clearly_slower):  # otherwise there is only noise to show
            axes.plot([place], [slower], "o", markersize=7, color=colour)
        text = "recommended" if found is None else _longer(search, result) + ("" if final else f", left in round {result.rounds}")
        _annotate(axes, text, (place, 100 * ends[1] if ends else slower), (0, 6), ha="center", fontsize=8)
        said.append(f"{x_label} {name}: {text} ({_short(result)})")
    axes.set_xticks(range(len(names)), [str(name) for name in names])
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.25)
    return Chart(
        title=title,
        note=f"The best setting of each, measured in turn with the recommended one; bars: {100 * CONFIDENCE:.0f} % interval. "
        "Grey: eliminated before the final, and without a point if the difference is not told from noise.",
        alt=f"Chart of the time in per cent more than with the recommended setting. {'; '.join(said)}.",
        axes=axes,
    )


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
    """Return the finalists that have values of a direction, with these values."""
    return [(result, figures) for result in search.finalists if (figures := result.figures(operation))]


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
