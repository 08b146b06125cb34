"""Writes logs like those of DeepSpeed's sweep, for scripts that read them: a file for each setting and direction.

Compatible with DeepSpeed 0.19: ``nvme/perf_run_sweep.py`` (file names), ``nvme/parse_nvme_stats.py`` (lines that are parsed).
"""

from __future__ import annotations

import math
from pathlib import Path

from deepnvme.tools.tune.measure.job import OPERATIONS, Operation
from deepnvme.tools.tune.search.results import Result, Tuning
from deepnvme.tools.tune.sizes import GIB, size_text


def write(tuning: Tuning, directory: Path) -> None:
    """Write a log for each setting and direction of the recommended search.

    DeepSpeed's names do not contain the backend: of several, the fastest is written. What reads the logs chooses the highest
    rate; so an eliminated setting, whose rate comes from few short transfers, is given no higher one than the recommended one.

    Args:
        tuning: The results.
        directory: Made if it is missing.

    Raises:
        OSError: If a file cannot be written.
    """
    for operation in OPERATIONS:
        search = tuning.chosen
        best = search.best.figures(operation)
        if best is None:
            continue
        logs: dict[str, float] = {}
        for result in search.results:
            figures = result.figures(operation)
            if figures is not None:
                highest = math.inf if result in search.finalists else best.gb_per_second
                name = _name(operation, len(search.folders), result)
                logs[name] = max(logs.get(name, 0.0), min(figures.gb_per_second, highest))
        folder = directory / f"_aio_bench_{operation}_logs"
        folder.mkdir(parents=True, exist_ok=True)
        for name, rate in logs.items():
            (folder / name).write_text(_lines(operation.capitalize(), rate, tuning.io_size))


def _name(operation: Operation, folders: int, result: Result) -> str:
    """Return DeepSpeed's file name for the log of a setting."""
    setting = result.setting
    submission = "single" if setting.single_submit else "block"
    order = "overlap" if setting.overlap_events else "sequential"
    # DeepSpeed's parser knows only K and M.
    block_size = f"{setting.block_size >> 20}M" if setting.block_size % GIB == 0 else size_text(setting.block_size)
    size = f"d{setting.queue_depth}_bs{block_size}_p{setting.intra_op_parallelism}"
    return f"{operation}_{submission}_{order}_ftd{folders}_{size}.txt"


def _lines(what: str, rate: float, nbytes: int) -> str:
    """Return the lines of a log that DeepSpeed's parser reads."""
    seconds, speed = nbytes / (rate * 1e9), rate * 1e9 / GIB
    return "".join(f"{name} {what} Latency = {seconds} sec\n{name} {what} Speed = {speed} GB/sec\n" for name in ("Task", "E2E"))
