"""A future for work queued on a CUDA stream, after which a lease can be released."""

from __future__ import annotations

import torch


class Computed:
    """Done when a CUDA device's current stream has finished all work that was queued on it before this was made.

    A lease can be released after it: see :meth:`deepnvme.memory.lease.Lease.release`.

    Attributes:
        event: The CUDA event, for which another stream can wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(torch.cuda.current_stream(device))

    def done(self) -> bool:
        """Return whether the work is finished. Never blocks."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def exception(self, timeout: float | None = None) -> None:
        """Return None. Errors on a device are raised by later calls that use the device."""
