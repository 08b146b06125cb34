"""Report how long a step took, on what, and how fast the drive was."""

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
    """Timings and traffic of one step of an :class:`OffloadedOptimizer`. Seconds and bytes; 1 GB is 10^9 bytes."""

    step: int
    """Number of the step, from 1."""
    seconds: float
    """Time of the whole step, until ``step()`` returns; all times below lie within it.

    It begins with the call of ``step()``, the closure included. With ``step_in_backward`` or ``offload_gradients`` it begins with
    the first gradient of a backward, so it includes the rest of that backward and whatever else is computed until ``step()``."""
    computing: float
    """Time in the optimizer's own kernels, and for copying gradients and weights for them."""
    reading: float
    """Time with at least one read in flight, whether or not anything waited for it."""
    writing: float
    """Time with at least one write in flight, whether or not anything waited for it."""
    waiting: float
    """Time spent waiting for the drive with nothing to compute."""
    bytes_read: int
    """Bytes read of states, and of offloaded gradients."""
    bytes_written: int
    """Bytes written of states, of offloaded gradients, and of copies of parameters to undo the step with.

    ``bytes_read`` and ``bytes_written`` do not include undone steps, checkpoints and ``measure_limits``."""
    read_gb_per_second: float
    """``bytes_read`` over ``reading``. Writes at the same time take their share of the drive."""
    write_gb_per_second: float
    """``bytes_written`` over ``writing``. Reads at the same time take their share of the drive."""
    share_of_limit: float | None
    """The time that the drive would need for these bytes at its limits, first reading and then writing, over ``seconds``.

    None if the limits were not measured: see :meth:`OffloadedOptimizer.measure_limits`."""
    bytes_written_in_all: int
    """Bytes written since the optimizer was created, for any purpose: the wear of the drive."""
    resident_bytes: int
    """Bytes of states kept in memory by ``dram_budget``."""
    sub_groups: int
    """Number of sub-groups stepped in this step."""

    def line(self) -> str:
        """Return the report as one line of text."""
        share = "" if self.share_of_limit is None else f", {self.share_of_limit:.0%} of the drive's limit"
        return (
            f"step {self.step}: {self.seconds:.3f} s, computing {self.computing:.3f}, waiting {self.waiting:.3f};"
            f" read {_text(self.bytes_read)} at {self.read_gb_per_second:.2f} GB/s,"
            f" wrote {_text(self.bytes_written)} at {self.write_gb_per_second:.2f} GB/s{share};"
            f" {_text(self.bytes_written_in_all)} written in all"
        )


class StepReporter:
    """Makes a :class:`StepReport` after each step, and measures the drive's limits.

    Args:
        traffic: Counts the bytes and times.
        verbose: Whether to print each report as a line to stdout.
    """

    def __init__(self, traffic: IOStats, verbose: bool) -> None:
        self._traffic, self._verbose = traffic, verbose
        self._limits: tuple[float, float] | None = None
        self._last: StepReport | None = None

    @property
    def last(self) -> StepReport:
        """The report of the last step. Raises RuntimeError before the first step."""
        if self._last is None:
            raise RuntimeError("there is nothing to report before the first step")
        return self._last

    def measure_limits(self, pool: BufferPool, chunk: int, nbytes: int) -> tuple[float, float]:
        """Measure the drive's speed with three transfers in flight, and keep the result for later reports.

        Blocks. The bytes count for ``bytes_written_in_all`` but not for a step.

        Args:
            pool: Where the memory for the transfers is leased.
            chunk: Bytes of each transfer, at least 1 MiB.
            nbytes: Bytes to read and to write, rounded up to a multiple of three chunks.

        Returns:
            Bytes per second read, and bytes per second written.

        Raises:
            ValueError: If ``nbytes`` is less than 1.
            OSError: From the drive.
        """
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
                    seconds(traffic.put)  # not measured: it allocates the files' blocks
                    writing, reading = zip(*((seconds(traffic.put), seconds(traffic.get)) for _ in range(rounds)), strict=True)
                finally:
                    for name in names:
                        if name in traffic.store:
                            traffic.store.delete(name).result()
        self._limits = rounds * lease.nbytes / sum(reading), rounds * lease.nbytes / sum(writing)
        return self._limits

    def step_made(self, step: int, sub_groups: int, resident_bytes: int) -> None:
        """Report a completed step. All traffic counted since the last step is attributed to it.

        Args:
            step: Number of the step, from 1.
            sub_groups: Number of sub-groups stepped.
            resident_bytes: Bytes of states kept in memory.
        """
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
