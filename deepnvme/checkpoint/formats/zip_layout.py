"""Where the records of a zip archive lie, and the headers between them: as torch's writer lays them out, record for record.

Records are stored, not deflated, each from a multiple of an alignment on. The headers of one are padded with an extra field until
its data begins there. Sizes and checksums follow the data ("data descriptor"), and stand again in the directory at the end.
"""

from __future__ import annotations

import struct
from array import array
from typing import NamedTuple

LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
END_64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR_64 = struct.Struct("<4sIQI")
END = struct.Struct("<4sHHHHIIH")

ZIP64 = 1
LARGE = 0xFFFFFFFF
"""From here on a size or an offset has its 8 bytes in an extra field."""


class ZipLayout(NamedTuple):
    """What is in the archive beside its records' data."""

    text: bytes
    """All of it: what stands before the data of each record, in their order, and then what follows the last."""
    headers: array[int]
    """Bytes of the text before the data of each record."""
    paddings: array[int]
    """Bytes of no meaning between these and the data."""


def lay_out(names: list[str], sizes: array[int], crcs: array[int], alignment: int) -> ZipLayout:
    """Place records of so many bytes, with these CRC-32, one after the other; both arrays are of uint64 ("Q")."""
    from deepnvme.ops.op_builder import AsyncIOBuilder

    return ZipLayout(*AsyncIOBuilder().load().zip_layout(names, sizes, crcs, alignment))
