"""TFRecord files, uncompressed.

A record is its length (uint64), the masked CRC-32C of the length (uint32), the data, and their masked CRC-32C (uint32). Lengths
are verified when a file is scanned. The data are not: nothing here computes CRC-32C fast.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import IO


def record_places(file: IO[bytes]) -> Iterator[tuple[int, int]]:
    """Yield offset and bytes of each record's data. Raises ValueError if the file is damaged, compressed, or no TFRecord file."""
    begin, size = 0, os.fstat(file.fileno()).st_size
    while header := file.read(12):
        length, checksum = struct.unpack("<QI", header.ljust(12, b"\0"))
        if checksum != _masked_crc32c(header[:8]):
            raise ValueError(f"no record begins at offset {begin}: the file is damaged, compressed, or no TFRecord file")
        if begin + length + 16 > size:
            raise ValueError(f"the record at offset {begin} has {length} bytes, and the file ends before them")
        yield begin + 12, length
        begin = file.seek(begin + length + 16)


def _masked_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
