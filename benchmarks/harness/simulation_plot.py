"""Draws what share of simulated drives the engine reaches. matplotlib is imported when something is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.simulation import Point
from harness.tables import size_text

_COLOURS = ("#0d9488", "#2f6fed", "#8b5cf6", "#c8501e")


def draw(points: Sequence[Point], path: Path) -> None:
    """Draw a panel for each number of cores: solid lines are the engine, dashed ones the same cores without it.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    cores = sorted({point.cores for point in points})
    figure = Figure(figsize=(4.2 * len(cores) + 1.2, 3.4), layout="constrained")
    panels = figure.subplots(1, len(cores), sharey=True, squeeze=False)[0]
    sizes = sorted({point.block_size for point in points})
    drives = sorted({point.drives for point in points})
    for axes, number in zip(panels, cores, strict=True):
        for count, colour in zip(drives, _COLOURS, strict=False):
            line = sorted((p for p in points if (p.cores, p.drives) == (number, count)), key=lambda p: p.block_size)
            places = [sizes.index(point.block_size) for point in line]
            axes.plot(places, [point.of_hardware(point.engine).median for point in line], color=colour, marker="o", markersize=3)
            axes.plot(places, [point.possible_of_hardware().median for point in line], color=colour, linestyle="--", linewidth=1)
        axes.set_xticks(range(len(sizes)), [size_text(size) for size in sizes], fontsize=8)
        axes.set_title(f"{number} core" + "s" * (number > 1), fontsize=10)
        axes.set_xlabel("block size")
        axes.set_ylim(0, 1.05)
        axes.grid(color="#dddddd", linewidth=0.5)
    panels[0].set_ylabel("share of the drives' limit")
    handles = [
        Line2D([], [], color=colour, marker="o", markersize=3, label=f"{count} drive" + "s" * (count > 1))
        for count, colour in zip(drives, _COLOURS, strict=False)
    ]
    handles.append(Line2D([], [], color="#555555", linestyle="--", linewidth=1, label="without the engine"))
    figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path, dpi=100)
