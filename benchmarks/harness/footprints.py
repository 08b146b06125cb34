"""Memory that a request takes beyond its tensor: from a process that has done nothing else, for a range aligned in no way."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from deepnvme.tools.tune.figures import Spread
from deepnvme.tools.tune.folder import drop_pages, settle
from deepnvme.tools.tune.job import OPERATIONS
from harness import drive
from harness.figures import Verdict
from harness.interleave import CONTENTS
from harness.libraries import LibraryProcess
from harness.workloads import ContenderFailed

_MIB = 1 << 20
# Face, its options, MiB allowed: queue_depth x block_size, and 64 MiB by default. The quarter more is for what resident memory
# shows beside the staging: the worker's stack and ring, and page counts that the kernel batches; 0.06 MiB were measured.
Case = tuple[str, Literal["engine", "handle"], dict[str, int], float]
CASES: tuple[Case, ...] = (
    ("engine, defaults", "engine", {}, 64),
    ("handle, defaults", "handle", {}, 64),
    ("engine, queue depth 8 x 1 MiB", "engine", {"queue_depth": 8, "block_size": _MIB}, 8.25),
)


def measure(directory: Path, nbytes: int, backend: str, cases: Sequence[Case] = CASES) -> list[Verdict]:
    """One transfer of just under ``nbytes`` for each case and direction; figures in MiB."""
    path = directory / "existing"
    verdicts: list[Verdict] = []
    for what, face, options, bound in cases:
        for operation in OPERATIONS:
            drive.lay_out(path, nbytes, CONTENTS)
            drop_pages([path])
            settle(directory)
            figure, note = None, "the kernel does not let peak memory be reset (/proc/self/clear_refs)"
            try:
                with LibraryProcess(sys.executable, "deepnvme", directory, backend) as fresh:
                    growth = fresh.call(
                        "footprint",
                        face=face,
                        operation=operation,
                        path=str(path),
                        offset=1,
                        nbytes=nbytes - 3,
                        options=options,
                    )["peak_growth"]
            except ContenderFailed as error:
                note = str(error)
            else:
                if growth is not None:
                    figure = Spread.of([growth / _MIB])
            what_moved = f"memory beyond the tensor, unaligned {operation}: {what}"
            verdicts.append(Verdict(what_moved, figure, "at most", bound, "MiB", note))
    return verdicts
