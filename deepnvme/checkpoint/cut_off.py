"""What an archive lacks whose end is missing: the first storage that is not whole, by what the pickle says of it."""

from __future__ import annotations

import mmap
import os
import pickle

from .pickle_scan import PickleScan
from .zip_directory import BadDirectory, data_of
from .zip_layout import LOCAL_HEADER


def what_is_missing(path: str | os.PathLike[str]) -> str | None:
    """None where the file does not begin as torch.save's do."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        size = len(data)
        try:
            file.seek(data_of(data[: LOCAL_HEADER.size], 0))
            referred = PickleScan(file)
            referred.load()
        except (EOFError, BadDirectory, pickle.UnpicklingError):
            return f"it is cut off before the first storage, at byte {size}"
        except Exception:  # whatever another's pickle, or no pickle, raises
            return None
        missing, at = referred.nbytes, file.tell()
        while missing and (header := data.find(b"PK\3\4", at)) >= 0:
            head = data[header : header + LOCAL_HEADER.size]
            at = data_of(head, header) if len(head) == LOCAL_HEADER.size else size
            key = data[header + LOCAL_HEADER.size : at].split(b"/data/")[-1].split(b"FB")[0].decode(errors="replace")
            if at + missing.get(key, 0) > size:
                break
            at += missing.pop(key, 0)
        for key, expected in missing.items():
            found = max(0, size - at) if header >= 0 else 0
            return f"storage {key} is cut off: expected {expected} bytes, found {found}; the file ends at byte {size}"
    return None
