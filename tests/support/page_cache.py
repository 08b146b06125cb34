"""What the page cache holds of a file."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path


def cached(path: Path) -> bool:
    """Whether the page cache holds any of the file. Looks only: a read that must not wait would start reading ahead."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        first = ctypes.c_char.from_buffer(mapping)
        pages = ctypes.create_string_buffer(-(-len(mapping) // mmap.PAGESIZE))
        refused = libc.mincore(ctypes.byref(first), ctypes.c_size_t(len(mapping)), pages)
        del first  # or the mapping cannot be closed
        if refused:
            raise OSError(ctypes.get_errno(), "mincore")
    return any(page & 1 for page in pages.raw)
