"""A drive whose reads end when the test says so."""

from __future__ import annotations

import torch

from deepnvme.streaming.extent_memory import PinnedSlot, PinnedSlots


def content(key: str, nbytes: int) -> torch.Tensor:
    """Bytes that tell every extent from every other."""
    return torch.full((nbytes,), sum(key.encode()) % 251 + 1, dtype=torch.uint8)


class FakeReading:
    def __init__(self, drive: FakeDrive, key: str, memory: torch.Tensor, error: OSError | None) -> None:
        self.key = key
        self._drive, self._memory, self.error = drive, memory, error
        self._done = False

    def done(self) -> bool:
        return self._done

    def exception(self, timeout: float | None = None) -> OSError | None:
        """Time passes while somebody waits: everything before it ends, too."""
        if not self._done:
            self._drive.waited_for.append(self.key)
            if timeout is not None:
                self._drive.end(self._drive.under_way[0])
                if not self._done:
                    raise TimeoutError
            else:
                self._drive.end(self)
        return self.error

    def end(self) -> None:
        self._done = True
        if self.error is None:
            self._memory.copy_(content(self.key, self._memory.numel()))
        del self._memory


class FakeDrive:
    """Ends reads in their order."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        """All reads, in their order."""
        self.waited_for: list[str] = []
        self.failing: set[str] = set()
        self.refusing: set[str] = set()
        self.under_way: list[FakeReading] = []

    def read(self, key: str, memory: torch.Tensor) -> FakeReading:
        if key in self.refusing:
            raise OSError(5, f"refused {key}")
        error = OSError(5, f"failed {key}") if key in self.failing else None
        self.begun.append(key)
        self.under_way.append(FakeReading(self, key, memory, error))
        return self.under_way[-1]

    def end(self, last: FakeReading | None = None) -> None:
        """All that are under way, or up to this one."""
        while self.under_way:
            reading = self.under_way.pop(0)
            reading.end()
            if reading is last:
                break


class CountedSlots(PinnedSlots):
    """Remembers the most that was lent, in bytes."""

    most = 0

    def lease(self, nbytes: int, limit: int = 0) -> PinnedSlot | None:
        slot = super().lease(nbytes, limit)
        self.most = max(self.most, self.in_use)
        return slot
