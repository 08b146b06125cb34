"""Memory that was freed, and that the C library keeps for itself."""

from __future__ import annotations

import ctypes

_libc = ctypes.CDLL(None)


class _MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    )  # fmt: skip


def return_freed_memory(beyond: int) -> None:
    """Give memory that was freed back to the system, if the C library keeps more than ``beyond`` bytes of it.

    What is allocated next needs new pages: 0.2 s for each GB. No effect with a C library other than glibc 2.33 or later.
    """
    if _mallinfo2 is not None and _mallinfo2().fordblks > beyond:
        _libc.malloc_trim(0)


_mallinfo2 = getattr(_libc, "mallinfo2", None)
if _mallinfo2 is not None:
    _mallinfo2.restype = _MallocInfo
