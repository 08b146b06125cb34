"""Lay out the records of a zip archive and the headers between them, exactly as torch's writer does.

Records are stored, not deflated. The data of each begin at a multiple of the alignment, for which its header is padded with an
extra field. Sizes and checksums follow the data ("data descriptor") and are repeated in the directory at the end.
"""

from __future__ import annotations

import struct
from array import array
from typing import NamedTuple

from deepnvme.ops import load_async_io

LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
END_64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR_64 = struct.Struct("<4sIQI")
END = struct.Struct("<4sHHHHIIH")

ZIP64 = 1
LARGE = 0xFFFFFFFF
"""From this value on, a size or an offset is stored as 8 bytes in an extra field."""


class ZipLayout(NamedTuple):
    """All bytes of an archive besides the data of its records."""

    text: bytes
    """The bytes before the data of each record, in order, and then those after the last record."""
    headers: array[int]
    """Bytes of the text before the data of each record."""
    paddings: array[int]
    """Meaningless bytes between these and the data of each record."""


def lay_out(names: list[str], sizes: array[int], crcs: array[int], alignment: int) -> ZipLayout:
    """Place records one after the other and return the bytes between them.

    Args:
        names: Name of each record.
        sizes: Bytes of each record, an array of uint64 ("Q").
        crcs: CRC-32 of each record, an array of uint64 ("Q").
        alignment: The data of each record begin at a multiple of this many bytes.
    """
    return ZipLayout(*load_async_io().checkpoint.zip_layout(names, sizes, crcs, alignment))
