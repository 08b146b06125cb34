"""What a step of a training did, and what it waited for."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from deepnvme.cache.block_cache import BlockCache
from deepnvme.offload.activations.report import ActivationReport
from deepnvme.states.counted_io import CountedIO
from deepnvme.telemetry.drive_wear import terabytes_per_day
from deepnvme.telemetry.report_figures import ReportFigures

from .ranks import TrainingRanks

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingReport(ReportFigures):
    """Timings and traffic of one step of :class:`OffloadedTraining`. Seconds and bytes; 1 GB is 10^9 bytes.

    ``as_dict()`` has the numbers, for loggers; those of activations begin with ``activations_``.
    """

    step: int
    """Number of the step, from 1."""
    seconds: float
    """From the beginning of the first forward until ``step()`` has ended; with what is done between micro-batches."""
    waiting: float
    """Time that the step waited for blocks to be read, for memory to read them into, and for the last writes; without
    activations."""
    waiting_to_write: float
    """Of :attr:`waiting`, the time for writes: those that free memory to read blocks into, and the last ones. The rest is for
    blocks to be read."""
    reading: float
    """Time with at least one read of a block in flight, whether or not anything waited for it."""
    writing: float
    """Time with at least one write of a block in flight, whether or not anything waited for it."""
    bytes_read: int
    """Bytes read of parameters, gradients and states."""
    bytes_written: int
    """Bytes written of them."""
    activations: ActivationReport | None
    """Of the activations; None if all of them stay in memory."""
    exchanging: float = 0.0
    """Time in exchanges with the other processes of the group, waiting for them among it."""
    period: float = 0.0
    """Time from the end of the step before to the end of this one, whatever was done in it; of the first step, ``seconds``."""

    @property
    def terabytes_per_day(self) -> float:
        """TB (10^12 bytes) that would be written in a day of steps like this one, each of which takes :attr:`period`."""
        activations = 0 if self.activations is None else self.activations.bytes_written
        return terabytes_per_day(self.bytes_written + activations, self.period)

    def line(self) -> str:
        """Return the report as one line of text."""
        text = (
            f"step {self.step}: {self.seconds:.3f} s, waiting {self.waiting:.3f}, {self.waiting_to_write:.3f} of it to write;"
            f" read {self.bytes_read / 1e9:.3f} GB in {self.reading:.3f} s,"
            f" wrote {self.bytes_written / 1e9:.3f} GB in {self.writing:.3f} s; {self.terabytes_per_day:.2f} TB a day"
        )
        if self.exchanging:
            text += f"; exchanging {self.exchanging:.3f} s"
        return text if self.activations is None else f"{text}; activations: {self.activations.line()}"


class StepMeter:
    """Makes the report of each step.

    Args:
        io: Counts transfers of blocks.
        cache: Counts waits for them.
        ranks: Counts exchanges with other processes.
    """

    def __init__(self, io: CountedIO, cache: BlockCache, ranks: TrainingRanks) -> None:
        self._io, self._cache, self._ranks = io, cache, ranks
        self._begun = self._waited = self._waited_to_write = self._exchanged = 0.0
        self._last: TrainingReport | None = None
        self._ended: float | None = None  # when the last step was

    @property
    def last(self) -> TrainingReport:
        """The report of the last step. Raises RuntimeError before the first one."""
        if self._last is None:
            raise RuntimeError("there is nothing to report before the first step")
        return self._last

    def begin(self) -> None:
        """Note that a step begins. Transfers before it, as of an evaluation, do not count."""
        self._io.finish()
        self._begun, self._waited, self._exchanged = time.perf_counter(), self._cache.seconds_waited, self._ranks.seconds
        self._waited_to_write = self._cache.seconds_waited_to_write

    def end(self, step: int, activations: ActivationReport | None) -> None:
        """Make the report of the step that ends."""
        times = self._io.finish()
        now = time.perf_counter()
        seconds = now - self._begun
        period = seconds if self._ended is None else now - self._ended
        self._ended = now
        self._last = TrainingReport(
            step=step,
            seconds=seconds,
            waiting=self._cache.seconds_waited - self._waited,
            waiting_to_write=self._cache.seconds_waited_to_write - self._waited_to_write,
            reading=times.reads.seconds,
            writing=times.writes.seconds,
            bytes_read=times.reads.nbytes,
            bytes_written=times.writes.nbytes,
            activations=activations,
            exchanging=self._ranks.seconds - self._exchanged,
            period=period,
        )
        if _logger.isEnabledFor(logging.DEBUG):
            _logger.debug("%s", self._last.line())
