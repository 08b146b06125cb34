"""Counters of a weight stream: passes, bytes read, and the time spent waiting for weights."""

from __future__ import annotations

from dataclasses import dataclass

from deepnvme.telemetry.report_figures import ReportFigures


@dataclass(frozen=True)
class StreamReport(ReportFigures):
    """Counters of a :class:`Streaming` since it was made or last reset; made by :meth:`Streaming.report`.

    ``str()`` returns the report as text, in which a GB is 10^9 bytes, and ``as_dict()`` its numbers. Units are seconds and
    bytes.
    """

    passes: int
    """Calls of the model."""
    seconds: float
    """Seconds spent in the model, and in blocks that were called without it."""
    bytes_read: int
    """Bytes read from the drive, including extents that were read ahead and then not used."""
    stalled: float
    """Seconds that blocks waited for their weights."""
    resident_bytes: int
    """Bytes of weights of blocks that stay in memory once they have been read."""
    peak_bytes: int
    """Most bytes of weights of blocks that were in memory at a time, those that stay and those read ahead included."""

    @property
    def bytes_per_second(self) -> float:
        """Bytes read per second spent in the model; 0 if it was not called."""
        return self.bytes_read / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"{self.passes} pass{'' if self.passes == 1 else 'es'} in {self.seconds:.3f} s, {self.stalled:.3f} s of them waiting"
            f" for weights; read {self.bytes_read / 1e9:.3f} GB at {self.bytes_per_second / 1e9:.2f} GB/s;"
            f" {self.resident_bytes / 1e9:.3f} GB stay in memory, and at most {self.peak_bytes / 1e9:.3f} GB were there"
        )
