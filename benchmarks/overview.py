#!/usr/bin/env python3
"""One picture of how fast this package is against what is used today, from what the other benchmarks have written.

    python benchmarks/overview.py checkpoint.json streaming.json --svg overview.svg
    python benchmarks/overview.py docs/images/overview.json --svg docs/images/overview.svg

Each argument is a file that a benchmark has written with --json, or a list of such documents. Several runs of one benchmark give
a range: the lowest and the highest median. What was not measured is left out.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """A comparison to be shown."""

    what: str
    instead_of: str
    benchmark: str
    target: str
    """Matches the names of the targets that are meant, from their beginning to their end."""


ROWS = (
    Row("save a state to stable storage", "torch.save and fsync", "checkpoint", r"save, times as fast: deepnvme / torch"),
    Row("the same", "safetensors", "checkpoint", r"save, times as fast: deepnvme / safetensors"),
    Row("load it, not cached", "torch.load", "checkpoint", r"load, times as fast: deepnvme / torch"),
    Row("load a safetensors file", "safetensors", "checkpoint", r"load, times as fast: deepnvme safetensors / safetensors"),
    Row(
        "forward pass, weights on the drive", "accelerate's disk_offload", "streaming",
        r"forward pass of .*, times as fast: deepnvme / accelerate's disk_offload",
    ),
    Row(
        "optimizer step, in as much memory", "DeepSpeed ZeRO-3", "optimizer_swap",
        r"step, times as fast: memory of \d+ buffers / DeepSpeed's, pipelined",
    ),
    Row("DeepSpeed's optimizer step, our op", "DeepSpeed's op", "deepspeed_training", r".*, our op / .*: a step, times as fast"),
    Row(
        "training step, everything on the drive", "DeepSpeed ZeRO-3", "training",
        r"DeepSpeed, .*: times as fast as ZeRO-3 with its own op",
    ),
    Row("4000 tensors of 64 KiB", "DeepSpeed's aio_handle", "raw_io", r"4000 x 64 KiB (read|write), pinned: handle / DeepSpeed"),
    Row("one tensor of 1 GiB", "DeepSpeed's aio_handle", "raw_io", r"1 GiB (read|overwrite|fresh), pinned: handle / DeepSpeed"),
)  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """What was measured of a row: times as fast."""

    row: Row
    lowest: float
    highest: float

    @property
    def text(self) -> str:
        """The range, or one figure if its ends read alike."""
        low, high = f"{self.lowest:.1f}", f"{self.highest:.1f}"
        return f"{low}\N{MULTIPLICATION SIGN}" if low == high else f"{low} - {high}\N{MULTIPLICATION SIGN}"


def documents(paths: Iterable[Path]) -> list[Mapping[str, Any]]:
    """Return the documents in these files. Raises OSError and ValueError."""
    found: list[Mapping[str, Any]] = []
    for path in paths:
        content = json.loads(path.read_text())
        found += content if isinstance(content, list) else [content]
    return found


def bars(given: Sequence[Mapping[str, Any]], rows: Iterable[Row] = ROWS) -> list[Bar]:
    """Return what the documents have of each row, in order; nothing of a row that none of them has."""
    found = []
    for row in rows:
        medians = [
            target["figure"]["median"]
            for document in given
            if document["benchmark"] == row.benchmark
            for target in document["targets"]
            if target["figure"] is not None and re.fullmatch(row.target, target["what"])
        ]
        if medians:
            found.append(Bar(row, min(medians), max(medians)))
    return found


_WIDTH, _LEFT, _RIGHT, _TOP, _STEP, _BAR = 900, 490, 100, 66, 30, 16
"""Pixels: of the picture, left and right of the bars, above the first, from one to the next, and of one."""


def svg(shown: Sequence[Bar], machine: str) -> str:
    """Return the picture. It has a background of its own, so that it can be read on a light page and on a dark one.

    Args:
        shown: The bars, from the top.
        machine: Where it was measured, said below them.
    """
    most = max((bar.highest for bar in shown), default=1.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    bottom = _TOP + _STEP * len(shown)
    one = _LEFT + scale
    alternative = "; ".join(f"{bar.row.what}: {bar.text} {bar.row.instead_of}" for bar in shown)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 44}" role="img"'
        ' font-family="system-ui, sans-serif">',
        f"  <title>Times as fast as what is used today. {escape(alternative)}</title>",
        "  <style>",
        "    .title { font-size: 16px; font-weight: 600; fill: #1c2430 }",
        "    .what { font-size: 14px; fill: #1c2430; text-anchor: end }",
        "    .than { fill: #5b6472 }",
        "    .figure { font-size: 14px; font-weight: 600; fill: #1c2430 }",
        "    .note { font-size: 12px; fill: #5b6472 }",
        "  </style>",
        f'  <rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{bottom + 43}" rx="8" fill="#ffffff" stroke="#d0d7de"/>',
        '  <text class="title" x="16" y="30">Times as fast as what is used today</text>',
    ]
    for number, bar in enumerate(shown):
        top = _TOP + _STEP * number
        low, high = scale * bar.lowest, scale * bar.highest
        baseline = top + _BAR - 3
        lines += [
            f'  <text class="what" x="{_LEFT - 10}" y="{baseline}">{escape(bar.row.what)} '
            f'<tspan class="than">vs. {escape(bar.row.instead_of)}</tspan></text>',
            f'  <rect x="{_LEFT}" y="{top}" width="{high:.1f}" height="{_BAR}" rx="2" fill="#a9bffa"/>',
            f'  <rect x="{_LEFT}" y="{top}" width="{low:.1f}" height="{_BAR}" rx="2" fill="#2f6fed"/>',
            f'  <text class="figure" x="{_LEFT + high + 8:.1f}" y="{baseline}">{bar.text}</text>',
        ]
    lines += [
        f'  <line x1="{one:.1f}" y1="{_TOP - 8}" x2="{one:.1f}" y2="{bottom - 6}" stroke="#1c2430" stroke-dasharray="3 3"/>',
        f'  <text class="note" x="{one + 4:.1f}" y="{_TOP - 12}">1\N{MULTIPLICATION SIGN}</text>',
        f'  <text class="note" x="16" y="{bottom + 22}">Light: the range of the runs. {escape(machine)}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def table(shown: Iterable[Bar]) -> str:
    """Return the bars as a table in Markdown."""
    rows = [f"| {bar.row.what} | {bar.row.instead_of} | {bar.text.removesuffix(chr(0xD7))} |" for bar in shown]
    return "\n".join(["| | instead of | times as fast |", "|---|---|---|", *rows]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and draw the picture if asked to. Returns 1 if nothing was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("json", nargs="+", type=Path, help="what benchmarks have written with --json")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the picture")
    parser.add_argument("--machine", help="what is said of the machine; by default the first document's own words")
    given = parser.parse_args(arguments)
    found = documents(given.json)
    shown = bars(found)
    if not shown:
        print("overview.py: none of the comparisons that are shown is in these files", file=sys.stderr)
        return 1
    print(table(shown), end="")
    if given.svg is not None:
        machine = given.machine or next((each["in_words"] for each in found if "in_words" in each), "")
        given.svg.write_text(svg(shown, machine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
