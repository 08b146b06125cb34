"""What an engine that is to fail returns."""

from __future__ import annotations


class FailedTransfer:
    """One that ended with this error."""

    def __init__(self, error: OSError) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def exception(self, timeout: float | None = None) -> OSError:
        return self._error

    def result(self, timeout: float | None = None) -> int:
        raise self._error
