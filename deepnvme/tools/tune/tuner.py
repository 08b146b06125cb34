"""Runs the searches of ds_nvme_tune: for each folder alone, and for all folders together."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.mounts import MEMORY_FILESYSTEMS
from deepnvme.ops import load_async_io

from .bench import TrialBench
from .folder import NotMeasurable, check_memory, check_space, folder_facts
from .halving import SearchProgress, least_written, search
from .job import OPERATIONS, Operation
from .results import Search, Tuning
from .settings import default_space

WRITES = 28 << 30
"""Most bytes that a search writes by default.

A fast drive could take twice as many in the usual time, but the answer would hardly be better (on simulated drives:
tests/tools/tune/test_halving.py).
"""


@dataclass(frozen=True)
class Order:
    """Order for :func:`tune`: what to measure, and for how long."""

    folders: tuple[Path, ...]
    """The folders, on one or several drives."""
    io_size: int
    """Bytes of the file in each folder, an int; no transfer is larger."""
    read: bool = True
    """Whether to measure reads."""
    write: bool = True
    """Whether to measure writes."""
    settings: tuple[AioConfig, ...] | None = None
    """The settings to choose from; None for the default ones."""
    gpu: bool = False
    """Whether tensors are in GPU memory; they go through a pinned buffer, unless ``gds``."""
    gds: bool = False
    """Whether GPU tensors are moved by GPUDirect Storage."""
    seconds: float = 50.0
    """Approximate seconds of each search; less if the limit on bytes written is reached before."""
    max_writes: int | None = None
    """Most bytes that the run may write to all folders together, an int. None for the files and 28 GiB for each search."""

    @property
    def operations(self) -> list[Operation]:
        """The directions to measure, reads before writes."""
        return [operation for operation in OPERATIONS if (self.read if operation == "read" else self.write)]

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Folder indices for each search: each folder alone, then all folders together if there are several."""
        together = tuple(range(len(self.folders)))
        return [(index,) for index in together] + ([together] if len(together) > 1 else [])

    @property
    def write_limit(self) -> int:
        """Most bytes that the run writes to all folders together, including the files to read from."""
        files = self.io_size * len(self.folders)
        if not self.write:
            return files
        if self.max_writes is not None:
            return self.max_writes
        each = least_written(len(self.settings or ()), self.io_size) * len(self.folders)
        return files + len(self.groups) * max(WRITES, each)

    def least_written(self, settings: int) -> int:
        """Return the fewest bytes that the run writes with ``settings`` settings to choose from, including the files."""
        searches = len(self.groups) if self.write else 0
        return (self.io_size + searches * least_written(settings, self.io_size)) * len(self.folders)

    def writes_of_each_search(self, settings: int) -> int | None:
        """Return the bytes that each search may write; None if only reads are measured.

        Args:
            settings: Number of settings to choose from.

        Raises:
            NotMeasurable: If ``max_writes`` is too little for this number of settings.
        """
        if not self.write:
            return None
        needed = self.least_written(settings)
        if self.write_limit < needed:
            raise NotMeasurable(
                f"--max-writes: {settings} settings need at least {needed} bytes, got {self.write_limit}; allow more, give fewer "
                "settings (--sweep_config) or a smaller --io_size, or measure only reads (--no_write)"
            )
        return (self.write_limit - self.io_size * len(self.folders)) // len(self.groups)


def tune(order: Order, progress: SearchProgress = lambda share, step: None) -> Tuning:
    """Find the best settings for folders. Blocks, for about ``order.seconds`` for each search.

    There is one search for each folder and, if there are several, one for all together. At most ``order.write_limit`` bytes are
    written. No file is left behind, also after an interrupt (KeyboardInterrupt).

    Args:
        order: What to measure.
        progress: Called with the share that is done and a description of the current step.

    Returns:
        The results of all searches. ``chosen.best.setting`` is the recommended setting.

    Raises:
        NotMeasurable: Before anything is transferred, if the order cannot be carried out on this machine.
        OSError: If a transfer fails.
    """
    # Before the op is compiled to learn which backends work here: one backend has the fewest settings.
    order.writes_of_each_search(len(order.settings or default_space(order.io_size, ["auto"], use_gds=order.gds)))
    facts = [folder_facts(folder) for folder in order.folders]
    check_space((folder, order.io_size) for folder in order.folders)
    tensors = 0 if order.gds else order.io_size * len(order.folders)
    check_memory(tensors + order.io_size * sum(each.filesystem in MEMORY_FILESYSTEMS for each in facts))
    progress(0.0, "starting (compiles on first use)")
    offered, backend = _offered(order, progress)
    writes = order.writes_of_each_search(len(offered))
    begin = time.monotonic()
    searches: list[Search] = []
    with TrialBench(order.folders, order.io_size, order.gpu, order.gds, functools.partial(progress, 0.0)) as bench:
        settings, refused = bench.usable(offered)
        for number, group in enumerate(order.groups):
            move = functools.partial(bench.move, group)
            where = " + ".join(facts[index].path for index in group)

            def show(share: float, step: str, number: int = number, where: str = where) -> None:
                progress((number + share) / len(order.groups), f"{where}: {step}")

            limit = None if writes is None else writes // len(group)
            found = search(settings, order.operations, move, order.io_size, order.seconds, limit, show, auto=backend)
            searches.append(dataclasses.replace(found, folders=tuple(facts[index] for index in group)))
    limit = order.write_limit if order.write else None
    return Tuning(order.io_size, time.monotonic() - begin, bench.bytes_written, tuple(searches), refused, limit)


def _offered(order: Order, progress: SearchProgress) -> tuple[Sequence[AioConfig], str]:
    """Return the settings to choose from, and the backend that "auto" selects. Leaves out backends if ``max_writes`` is low."""
    from . import transfers  # here, because it takes seconds to import torch

    if order.gds:
        transfers.make_handle(AioConfig(use_gds=True))  # raises the reason if GPUDirect Storage does not work
        return order.settings or default_space(order.io_size, ["auto"], use_gds=True), "gds"
    working = [name for name, obstacle in load_async_io().backends().items() if obstacle is None]
    auto = working[0]
    while not order.settings and order.least_written(len(default_space(order.io_size, working))) > order.write_limit:
        progress(0.0, f"leaving out {working.pop()}: --max-writes is too low to try it as well")
    return order.settings or default_space(order.io_size, working), auto
