"""Where the time of a step went."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .io_stats import IOStats

if TYPE_CHECKING:
    import torch

    from deepnvme.memory.pool import BufferPool
    from deepnvme.store.futures import StoreFuture


@dataclass(frozen=True)
class StepReport:
    """One step of an :class:`OffloadedOptimizer`. Seconds, bytes, and GB/s of 10^9 bytes."""

    step: int
    """Counted from 1."""
    seconds: float
    """From the first that was done for this step to the return of ``step()``. The first is the call of ``step()``, the closure
    included; with ``step_in_backward`` and ``offload_gradients`` the first gradient that a backward gave, so that this contains
    what else was computed from there on: all that is told below lies within."""
    computing: float
    """In the optimizer's own kernels, and copying gradients and weights for them."""
    reading: float
    """With a read under way, whether or not anything waited for it."""
    writing: float
    waiting: float
    """For the drive, with nothing to compute."""
    bytes_read: int
    """Of states, and of gradients that were offloaded."""
    bytes_written: int
    """Of these, and of copies of parameters to undo the step with. What was moved for a step that was undone, for a checkpoint or
    to measure limits is not in here."""
    read_gb_per_second: float
    """While a read was under way; the writes beside it have their share of the drive."""
    write_gb_per_second: float
    share_of_limit: float | None
    """The time that the drive alone would need for these bytes (each way at its limit, one after the other), over
    ``seconds``. None if the limits were not measured: :meth:`OffloadedOptimizer.measure_limits`."""
    bytes_written_in_all: int
    """Since the optimizer was made, for whatever purpose: the wear."""
    resident_bytes: int
    """States kept in memory, of ``dram_budget``."""
    sub_groups: int
    """Stepped in this step."""

    def line(self) -> str:
        """For people."""
        share = "" if self.share_of_limit is None else f", {self.share_of_limit:.0%} of the drive's limit"
        return (
            f"step {self.step}: {self.seconds:.3f} s, computing {self.computing:.3f}, waiting {self.waiting:.3f};"
            f" read {_text(self.bytes_read)} at {self.read_gb_per_second:.2f} GB/s,"
            f" wrote {_text(self.bytes_written)} at {self.write_gb_per_second:.2f} GB/s{share};"
            f" {_text(self.bytes_written_in_all)} written in all"
        )


class StepReporter:
    """``traffic``: what is reported on."""

    def __init__(self, traffic: IOStats, verbose: bool) -> None:
        self._traffic, self._verbose = traffic, verbose
        self._limits: tuple[float, float] | None = None
        self._last: StepReport | None = None

    @property
    def last(self) -> StepReport:
        """Raises RuntimeError before the first step."""
        if self._last is None:
            raise RuntimeError("there is nothing to report before the first step")
        return self._last

    def measure_limits(self, pool: BufferPool, chunk: int, nbytes: int) -> tuple[float, float]:
        """Bytes/s read and written, by moving ``nbytes`` bytes and more each way, three chunks at a time."""
        if nbytes < 1:
            raise ValueError(f"nbytes must be positive, got {nbytes}")
        names = [f"limits.{number}" for number in range(3)]
        traffic = self._traffic
        with pool.lease(max(chunk, 1 << 20) * len(names)) as lease:
            parts = lease.buffer.chunk(len(names))
            rounds = -(-nbytes // lease.nbytes)

            def seconds(move: Callable[[str, torch.Tensor], StoreFuture[Any]]) -> float:
                begun = time.perf_counter()
                for future in [move(name, part) for name, part in zip(names, parts, strict=True)]:
                    future.result()
                return time.perf_counter() - begun

            with traffic.aside():
                try:
                    seconds(traffic.put)  # allocates
                    writing, reading = zip(*((seconds(traffic.put), seconds(traffic.get)) for _ in range(rounds)), strict=True)
                finally:
                    for name in names:
                        if name in traffic.store:
                            traffic.store.delete(name).result()
        self._limits = rounds * lease.nbytes / sum(reading), rounds * lease.nbytes / sum(writing)
        return self._limits

    def step_made(self, step: int, sub_groups: int, resident_bytes: int) -> None:
        """What has moved since the last step was for this one."""
        times = self._traffic.finish()
        seconds = time.perf_counter() - times.begun if times.begun is not None else 0.0
        limit = None
        if self._limits is not None:
            limit = (times.bytes_read / self._limits[0] + times.bytes_written / self._limits[1]) / seconds
        self._last = StepReport(
            step=step,
            seconds=seconds,
            computing=times.computing,
            reading=times.reading,
            writing=times.writing,
            waiting=times.waiting,
            bytes_read=times.bytes_read,
            bytes_written=times.bytes_written,
            read_gb_per_second=times.bytes_read / times.reading / 1e9 if times.reading else 0.0,
            write_gb_per_second=times.bytes_written / times.writing / 1e9 if times.writing else 0.0,
            share_of_limit=limit,
            bytes_written_in_all=self._traffic.written_in_all,
            resident_bytes=resident_bytes,
            sub_groups=sub_groups,
        )
        if self._verbose:
            print(self._last.line(), flush=True)


def _text(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
