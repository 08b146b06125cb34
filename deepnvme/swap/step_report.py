"""Where the time of a step went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepReport:
    """One step of an :class:`OffloadedOptimizer`. Seconds, bytes, and GB/s of 10^9 bytes."""

    step: int
    """Counted from 1."""
    seconds: float
    """From the call of ``step()`` to its return, with the closure's time; of ``step_in_backward`` only what was left for
    ``step()``."""
    computing: float
    """In the optimizer's own kernels, and copying gradients and weights for them."""
    reading: float
    """With a read under way, whether or not anything waited for it."""
    writing: float
    waiting: float
    """For the drive, with nothing to compute."""
    bytes_read: int
    bytes_written: int
    read_gb_per_second: float
    """While a read was under way; the writes beside it have their share of the drive."""
    write_gb_per_second: float
    share_of_limit: float | None
    """The time that the drive alone would need for these bytes (each way at its limit, one after the other), over
    ``seconds``. None if the limits were not measured: :meth:`OffloadedOptimizer.measure_limits`."""
    bytes_written_in_all: int
    """Since the optimizer was made: the wear."""
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


def _text(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
