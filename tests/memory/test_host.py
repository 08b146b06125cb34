"""Memory that was freed goes back to the system; memory that is about to be read into has pages that come fast."""

from __future__ import annotations

import ctypes
import mmap
import time
from pathlib import Path

import pytest

from deepnvme.memory import host
from deepnvme.memory.host import huge_pages, populate_huge_pages, trim_heap


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


def resident(address: int, nbytes: int) -> bool:
    """Return whether all pages of a range are populated."""
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(address // mmap.PAGESIZE * 8)
        entries = pagemap.read(-(-nbytes // mmap.PAGESIZE) * 8)
    return all(entries[at + 7] & 0x80 for at in range(0, len(entries), 8))


def has_huge_pages_disabled(address: int) -> bool:
    """Return whether the mapping at an address was told to have no huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            begin, end = (int(number, 16) for number in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return "nh" in rest.split()
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_huge_pages_that_come_slowly_are_given_up_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    populate = host.prefault
    seconds = 0.0

    def slower(address: int, nbytes: int) -> None:
        until = time.thread_time() + seconds
        populate(address, nbytes)
        while time.thread_time() < until:
            pass

    def populated(nbytes: int) -> bool:
        memory = huge_pages(nbytes)
        done = populate_huge_pages(memory.data_ptr(), nbytes)
        assert resident(memory.data_ptr(), nbytes) == done
        assert has_huge_pages_disabled(memory.data_ptr()) == (not done)
        return done

    now = time.monotonic()
    monkeypatch.setattr(host, "prefault", slower)
    monkeypatch.setattr(host, "_slow_until", 0.0)
    monkeypatch.setattr(host, "_FAST_HUGE_PAGES", 100e6)  # slower than any machine that runs this, faster than 8 MiB in 0.2 s
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert [populated(8 << 20), populated(8 << 20)] == [True, True]
    seconds = 0.2
    assert populated(1 << 20)  # too short to have huge pages, and to show that they are slow
    assert [populated(8 << 20), populated(8 << 20)] == [True, False]
    now += 1.1
    assert populated(8 << 20)
