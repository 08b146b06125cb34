"""Memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from deepnvme.memory.host import trim_heap


def own_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_trim_heap_returns_freed_memory_beyond_what_may_be_kept() -> None:
    trim_heap(0)
    pieces = [bytearray(b"\1" * 100_000) for _ in range(600)]  # below the size for which the C library asks the system each time
    last = bytearray(100_000)
    before = own_bytes()
    pieces.clear()
    trim_heap(1 << 40)
    trim_heap(1 << 20)
    assert own_bytes() < before - 40_000_000
    assert len(last) == 100_000
