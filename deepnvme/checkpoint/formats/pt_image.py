"""Make the image of a .pt file: the archive that ``torch.save`` writes, with each storage aligned to a page.

Its records are stored, not deflated. The data of each begin at a multiple of the alignment, for which its header is padded with
an extra field. Sizes and checksums follow the data ("data descriptor") and are repeated in the directory at the end.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import zlib
from array import array
from types import ModuleType
from typing import Any, NamedTuple

import torch

from deepnvme.checkpoint.formats.sharding import Across, Sharded
from deepnvme.memory.alignment import PAGE
from deepnvme.memory.tensor_bytes import checksums, flat_bytes
from deepnvme.ops import load_async_io

from .file_image import FileImage, Source
from .pt_pickle import pickled


def pt_image(
    obj: object,
    pickle_module: ModuleType,
    protocol: int,
    checksum: bool,
    across: Across | None = None,
    alignment: int = PAGE,
) -> FileImage:
    """Return the image of the archive of an object.

    Args:
        obj: Any object that pickles.
        pickle_module: Provides the pickler.
        protocol: Pickle protocol.
        checksum: Compute the CRC-32 of each storage, 0.4 s of one core per GB. Otherwise the file has 0 in its place.
        across: If several ranks save one object with DTensors together: pickles it alike on every rank. The image then has this
            rank's part.
        alignment: Each storage begins at a multiple of this many bytes.

    Raises:
        ValueError: If ``checksum`` is given for an object with DTensors saved across ranks.
        Exception: Whatever pickling raises.
    """
    stream, storages = pickled(obj, pickle_module, protocol, across)
    if checksum and any(isinstance(storage, Sharded) for storage in storages):
        raise ValueError("the checksum of a DTensor cannot be had from its shards: save without checksum")
    sizes = array("Q", [storage.nbytes() for storage in storages])
    before = {
        "data.pkl": stream,
        ".format_version": b"1",
        ".storage_alignment": str(alignment).encode(),
        "byteorder": sys.byteorder.encode(),
    }
    after = {"version": b"3\n", ".data/serialization_id": _identity(stream, sizes)}
    names = [f"archive/{name}" for name in before]
    names += [f"archive/data/{key}" for key in range(len(storages))]
    names += [f"archive/{name}" for name in after]
    nbytes = array("Q", [*map(len, before.values()), *sizes, *map(len, after.values())])
    crcs = array("Q", map(zlib.crc32, before.values()))
    crcs.extend(map(crc32_of, storages) if checksum else bytes(len(storages)))
    crcs.extend(map(zlib.crc32, after.values()))
    return _image(lay_out(names, nbytes, crcs, alignment), [*before.values(), *storages, *after.values()])


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


def _image(layout: ZipLayout, contents: list[bytes | torch.UntypedStorage | Sharded]) -> FileImage:
    """Return the image of an archive with these records."""
    image, at = FileImage(), 0
    first = 0
    for kind, run in itertools.groupby(contents, type):
        data: list[Any] = list(run)
        headers, paddings = (column[first : first + len(data)] for column in (layout.headers, layout.paddings))
        if kind is bytes or kind is Sharded:
            for header, padding, content in zip(headers, paddings, data, strict=True):
                image.add_text(layout.text[at : at + header])
                image.add_padding(padding)
                if kind is bytes:
                    image.add_text(content)
                else:
                    image.add_part(content.local, content.offsets, content.lengths, content.nbytes())
                at += header
        else:
            text = layout.text[at : at + sum(headers)]
            image.add_each(data, text, headers, paddings)
            at += len(text)
        first += len(data)
    image.add_text(layout.text[at:])
    return image


def crc32_of(source: Source) -> int:
    """Return the CRC-32 of the bytes of a contiguous tensor or a storage, on any device. Blocks."""
    data = flat_bytes(source)
    return checksums(data, [data.numel()])[0]


def _identity(stream: bytes, sizes: array[int]) -> bytes:
    """Return 40 digits, as torch writes them. They are the same for objects of the same structure."""
    digest = hashlib.sha256(stream)
    digest.update(sizes)
    return str(int.from_bytes(digest.digest(), "big"))[:40].zfill(40).encode()
