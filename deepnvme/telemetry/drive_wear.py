"""Drive wear: estimates of how much a training writes to a drive, in total and per day."""

from __future__ import annotations

from dataclasses import dataclass

from deepnvme.telemetry.descriptions import decimal_size
from deepnvme.telemetry.report_figures import ReportFigures

_DAY = 24 * 60 * 60
_YEAR = 365 * _DAY


def terabytes_per_day(nbytes: int, seconds: float) -> float:
    """Return the TB (10^12 bytes) written per day at a rate of ``nbytes`` bytes in ``seconds`` seconds; 0 if ``seconds`` is 0."""
    return nbytes / seconds * _DAY / 1e12 if seconds > 0 else 0.0


@dataclass(frozen=True)
class WriteEstimate(ReportFigures):
    """Estimate of how much a training or a checkpoint manager will write to the drive, in bytes. 1 TB is 10^12 bytes.

    ``print`` shows it as a line of text.
    """

    bytes_per_step: int
    """Bytes that each step writes, or each save of a :class:`deepnvme.CheckpointManager`."""
    most_bytes_per_step: int
    """Upper bound of ``bytes_per_step``: includes data that is written only if it does not fit into memory."""
    bytes_once: int
    """Bytes written once, in addition to those of the steps."""

    def terabytes_per_day(self, seconds_per_step: float) -> float:
        """Return the TB written per day at one step every ``seconds_per_step`` seconds.

        Raises ValueError if ``seconds_per_step`` is not positive.
        """
        _check_positive(seconds_per_step, "seconds_per_step")
        return terabytes_per_day(self.bytes_per_step, seconds_per_step)

    def years(self, seconds_per_step: float, rated_terabytes: float) -> float:
        """Return the years of training after which the bytes written reach the drive's rating.

        Args:
            seconds_per_step: Seconds from one step to the next.
            rated_terabytes: The drive's rating of terabytes written ("TBW"), from its data sheet.

        Returns:
            Years of 365 days; infinity if nothing is written.

        Raises:
            ValueError: If an argument is not positive.
        """
        _check_positive(seconds_per_step, "seconds_per_step")
        _check_positive(rated_terabytes, "rated_terabytes")
        if not self.bytes_per_step:
            return float("inf")
        return (rated_terabytes * 1e12 - self.bytes_once) / self.bytes_per_step * seconds_per_step / _YEAR

    def __str__(self) -> str:
        most = f", at most {decimal_size(self.most_bytes_per_step)}" if self.most_bytes_per_step > self.bytes_per_step else ""
        once = f", and {decimal_size(self.bytes_once)} once" if self.bytes_once else ""
        each, per_day = decimal_size(self.bytes_per_step), self.terabytes_per_day(1)
        return f"writes {each} per step or save{most}{once}; {per_day:.2f} TB a day at one per second"


def _check_positive(value: float, name: str) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")
