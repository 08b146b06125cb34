"""What tests do to files, and see of them."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
from collections.abc import Sequence
from pathlib import Path


def flip(path: Path, at: int) -> None:
    """Change one bit of the byte at this offset, on the drive."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())


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


def open_files(directory: Path, pattern: str = "*") -> list[str]:
    """The files below ``directory`` that this process has open, once for each descriptor."""
    found = (Path(os.path.realpath(f"/proc/self/fd/{number}")) for number in os.listdir("/proc/self/fd"))
    return [str(path) for path in found if path.is_relative_to(directory) and path.match(pattern)]


def copied(directories: Sequence[Path], name: str) -> list[Path]:
    """Return copies of directories, beside them, whose names begin with another one."""
    copies = [each.with_name(f"{name} {each.name}") for each in directories]
    for each, copy in zip(directories, copies, strict=True):
        shutil.copytree(each, copy)
    return copies
