"""Writes logs like those of DeepSpeed's sweep, for scripts that read them: a file for each setting and direction.

Compatible with DeepSpeed 0.19: ``nvme/perf_run_sweep.py`` (file names), ``nvme/parse_nvme_stats.py`` (lines that are parsed).
"""

from __future__ import annotations

from pathlib import Path

from deepnvme.tune.measure.job import OPERATIONS, Operation
from deepnvme.tune.search.results import Result, Tuning
from deepnvme.tune.sizes import GIB, size_text


def write(tuning: Tuning, directory: Path) -> None:
    """Write a log for each setting and direction of the recommended search.

    DeepSpeed's names do not contain the backend: of several, the fastest is written.

    Args:
        tuning: The results.
        directory: Made if it is missing.

    Raises:
        OSError: If a file cannot be written.
    """
    for operation in OPERATIONS:
        logs: dict[str, float] = {}
        for result in tuning.chosen.results:
            figures = result.figures(operation)
            if figures is not None:
                name = _name(operation, result, len(tuning.chosen.folders))
                logs[name] = max(logs.get(name, 0.0), figures.gb_per_second)
        if not logs:
            continue
        folder = directory / f"_aio_bench_{operation}_logs"
        folder.mkdir(parents=True, exist_ok=True)
        for name, rate in logs.items():
            (folder / name).write_text(_lines(operation.capitalize(), rate, tuning.io_size))


def _name(operation: Operation, result: Result, folders: int) -> str:
    """Return DeepSpeed's file name for the log of a setting."""
    setting = result.setting
    submission = "single" if setting.single_submit else "block"
    order = "overlap" if setting.overlap_events else "sequential"
    size = f"d{setting.queue_depth}_bs{_block_size(setting.block_size)}_p{setting.intra_op_parallelism}"
    return f"{operation}_{submission}_{order}_ftd{folders}_{size}.txt"


def _block_size(size: int) -> str:
    # DeepSpeed's parser knows only K and M.
    return f"{size >> 20}M" if size % GIB == 0 else size_text(size)


def _lines(what: str, rate: float, nbytes: int) -> str:
    """Return the lines of a log that DeepSpeed's parser reads."""
    seconds, speed = nbytes / (rate * 1e9), rate * 1e9 / GIB
    return "".join(f"{name} {what} Latency = {seconds} sec\n{name} {what} Speed = {speed} GB/sec\n" for name in ("Task", "E2E"))
