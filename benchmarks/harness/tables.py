"""Tables for a terminal or a log: plain text, never wrapped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deepnvme.tools.tune.figures import Spread
from harness.comparison import Comparison, Counts
from harness.figures import Verdict
from harness.interleave import Result


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> str:
    """The first ``left`` columns and the last are aligned left, the figures between them right."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        aligned = [
            cell.ljust(width) if column < left or column == len(widths) - 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(aligned).rstrip())
    rule = "-" * max(len(line) for line in lines)
    return "\n".join([title, rule, lines[0], rule, *lines[1:], ""])


def spread_text(spread: Spread, digits: int = 2) -> str:
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} - {spread.high:.{digits}f})"


def verdict_table(verdicts: Iterable[Verdict]) -> str:
    """The table of targets: each with its median, and whether it is met."""
    rows = []
    for verdict in verdicts:
        target = f"{verdict.sense} {verdict.bound:g} {verdict.unit}".rstrip()
        if verdict.figure is None:
            rows.append([verdict.what, "-", target, f"not measured: {verdict.note}"])
        else:
            rows.append([verdict.what, spread_text(verdict.figure), target, "met" if verdict.met else "MISSED"])
    return table("Targets", ["", "median (quartiles)", "target", ""], rows, left=1)


def rate_table(result: Result) -> str:
    """The table of a workload: rates and CPU time of each contender."""
    workload = result.workload
    rows = []
    for series in result.series:
        if series.failure:
            rows.append([series.name, series.memory, "-", "-", "-", f"failed: {series.failure}"])
            continue
        growth = [sample.peak_growth for sample in series.samples if sample.peak_growth is not None]
        rows.append(
            [
                series.name,
                series.memory,
                spread_text(Spread.of([sample.gb_per_second for sample in series.samples])),
                f"{Spread.of([sample.cpu_seconds_per_gb for sample in series.samples]).median:.3f}",
                f"{max(growth) / (1 << 20):.1f}" if growth else "-",
                "",
            ]
        )
    header = ["contender", "memory", "GB/s, median (quartiles)", "CPU s/GB", "peak MiB beyond tensors", ""]
    state = "new" if workload.state == "absent" else workload.state
    files = "file" if workload.files == 1 else "files"
    tensors = workload.files * workload.tensors
    return table(f"{workload.operation} {tensors} x {size_text(workload.nbytes)}, {state} {files}", header, rows, left=2)


def comparison_table(title: str, comparison: Comparison[str, Counts]) -> str:
    """The table of a comparison: seconds of each contender."""
    rows = [
        [
            name,
            spread_text(Spread.of([sample["seconds"] for sample in samples]), 3) if samples else "-",
            comparison.absent.get(name, ""),
        ]
        for name, samples in comparison.samples.items()
    ]
    return table(title, ["contender", "s, median (quartiles)", ""], rows, left=1)


def size_text(nbytes: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} bytes"
