"""When a device is done with memory."""

from __future__ import annotations

import torch


class Computed:
    """Ends when all has that the current stream of a CUDA device has been given so far: what a lease can be released after.

    ``event``: for another stream to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(torch.cuda.current_stream(device))

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def exception(self, timeout: float | None = None) -> None:
        """None: what fails on a device is told by what comes next there."""
