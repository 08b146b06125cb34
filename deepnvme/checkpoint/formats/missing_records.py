"""Find what a truncated archive lacks: the first storage that is not complete, according to the pickle."""

from __future__ import annotations

import os
import pickle
from typing import BinaryIO

from .pickle_scan import PickleScan, why_wasteful
from .zip_directory import BadDirectory, data_of
from .zip_layout import LOCAL_HEADER

_LONGEST_PICKLE = 64 << 20
"""Most bytes of the pickle that are read: that of half a million tensors. Without the directory its length is unknown."""
_NEAR = 64 << 10
"""Bytes within which the next header begins: only a data descriptor is before it."""
_OTHER_RECORDS = 16
"""More records than torch writes besides the storages."""


def what_is_missing(path: str | os.PathLike[str]) -> str | None:
    """Return which storage of a truncated archive is cut off, as a message, or None if that cannot be told.

    None if the file does not begin like those of torch.save. Blocks.

    Raises:
        OSError: If the file cannot be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            begin = data_of(file.read(LOCAL_HEADER.size), 0)
            file.seek(begin)
            stream = file.read(min(_LONGEST_PICKLE, size))
            why = why_wasteful(stream)
            if why is not None:
                return f"it is cut off before the first storage, at byte {size}: its pickle {why}"
            del stream
            file.seek(begin)
            referred = PickleScan(file)
            referred.load()
        except OSError:
            raise
        except (EOFError, BadDirectory, pickle.UnpicklingError):
            return f"it is cut off before the first storage, at byte {size}"
        except Exception:  # not a pickle of torch.save, or no pickle at all: these can raise anything
            return None
        missing, at = referred.nbytes, file.tell()
        header: int | None = at
        for _ in range(len(missing) + _OTHER_RECORDS):
            header = _find(file, at) if missing else None
            if header is None:
                break
            file.seek(header)
            head = file.read(LOCAL_HEADER.size)
            at = data_of(head, header) if len(head) == LOCAL_HEADER.size else size
            name = file.read(max(0, at - header - LOCAL_HEADER.size))
            key = name.split(b"/data/")[-1].split(b"FB")[0].decode(errors="replace")
            if at + missing.get(key, 0) > size:
                break
            at += missing.pop(key, 0)
        for key, expected in missing.items():
            found = max(0, size - at) if header is not None else 0
            return f"storage {key} is cut off: expected {expected} bytes, found {found}; the file ends at byte {size}"
    return None


def _find(file: BinaryIO, begin: int) -> int | None:
    """Return the offset of the next record's header after ``begin``, or None."""
    file.seek(begin)
    found = file.read(_NEAR).find(b"PK\3\4")
    return None if found < 0 else begin + found
