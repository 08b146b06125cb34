"""Whether an optimizer can be used."""

from __future__ import annotations

import os


class Standing:
    """By the process that made it, until it is closed; and as long as no step has failed that could not be undone."""

    def __init__(self) -> None:
        self.closed = False
        self.broken: str | None = None
        """What has happened, if it cannot go on."""
        self._process = os.getpid()

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child."""
        if os.getpid() != self._process:
            raise RuntimeError("this optimizer is the parent process's: a forked child cannot use it")

    def check_open(self) -> None:
        """Raise RuntimeError there too, and where it is closed."""
        self.check_process()
        if self.closed:
            raise RuntimeError("this optimizer is closed")

    def check_usable(self) -> None:
        """Raise RuntimeError there too, and where it is broken."""
        self.check_open()
        if self.broken is not None:
            raise RuntimeError(f"this optimizer cannot go on: {self.broken}")
