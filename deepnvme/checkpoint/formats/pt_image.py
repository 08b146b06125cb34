"""Make the image of a .pt file: the archive that ``torch.save`` writes, with each storage aligned to a page.

Invariants:

1. All records are stored, not deflated, in one folder: the pickle, short records, the storages in the order of the
   pickle, the version and the serialization id.
2. The data of each record begin at a multiple of the alignment. An extra field pads the record's header to that length.
3. The size and checksum of a record follow its data ("data descriptor"), and are repeated in the directory at the end.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import sys
import zlib
from array import array
from typing import Any

import torch

from deepnvme.checkpoint.formats.sharding import JointPickling, Sharded
from deepnvme.memory.alignment import PAGE
from deepnvme.memory.tensor_bytes import checksums, flat_bytes
from deepnvme.ops import load_async_io

from .file_image import FileImage, Source
from .pt_pickle import pickled


def pt_image(
    obj: object,
    protocol: int,
    checksum: bool | None,
    across: JointPickling | None = None,
    alignment: int = PAGE,
) -> FileImage:
    """Pickle an object, and return the image of its .pt archive.

    Args:
        obj: Any object that pickles.
        protocol: Pickle protocol.
        checksum: Whether the archive has the CRC-32 of each storage, or 0 instead. True: of all storages. False: of none.
            None: of storages on the CPU, unless ranks save together. :func:`add_checksums` computes the checksums of storages
            on the CPU while the image is written, at little cost. With True, the others are computed here, which blocks. With
            None, after ``torch.serialization.set_crc32_options(False)``, all records have 0, as in torch.save's files.
        across: State by which several ranks that save one object with DTensors write the same pickle. The image then has this
            rank's part of the DTensors. None if this process saves alone.
        alignment: Each storage begins at a multiple of this many bytes.

    Raises:
        ValueError: If ``checksum`` is True for an object with DTensors saved across ranks.
        Exception: Whatever pickling raises.
    """
    stream, storages = pickled(obj, protocol, across)
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
    omitted = checksum is None and not torch.serialization.get_crc32_options()
    checksum = False if omitted else checksum
    crc32_of_text = (lambda text: 0) if omitted else zlib.crc32
    crcs = array("Q", map(crc32_of_text, before.values()))
    beside = [checksum is not False and across is None and storage.device.type == "cpu" for storage in storages]
    crcs.extend(crc32_of(each) if checksum and not later else 0 for each, later in zip(storages, beside, strict=True))
    crcs.extend(map(crc32_of_text, after.values()))
    native = load_async_io().checkpoint
    text, headers, paddings, places = native.zip_layout(names, nbytes, crcs, alignment)
    image = _image(text, headers, paddings, [*before.values(), *storages, *after.values()])
    if any(beside):
        image.checksums = native.Checksums(places, nbytes, bytes([*bytes(len(before)), *beside, *bytes(len(after))]))
    return image


def _image(
    text: bytes, headers: array[int], paddings: array[int], contents: list[bytes | torch.UntypedStorage | Sharded]
) -> FileImage:
    """Return the image of an archive with the records ``contents``. The other arguments are results of ``zip_layout``."""
    image, unused, first = FileImage(), io.BytesIO(text), 0
    for kind, run in itertools.groupby(contents, type):
        data: list[Any] = list(run)
        records = slice(first, first + len(data))
        first += len(data)
        if kind is not bytes and kind is not Sharded:
            image.add_each(data, unused.read(sum(headers[records])), headers[records], paddings[records])
            continue
        for header, padding, content in zip(headers[records], paddings[records], data, strict=True):
            image.add_text(unused.read(header))
            image.add_padding(padding)
            if kind is bytes:
                image.add_text(content)
            else:
                image.add_part(content.local, content.runs, content.whole)
                content.runs = []  # the image has them now, and there can be millions
    image.add_text(unused.read())
    return image


def crc32_of(source: Source) -> int:
    """Return the CRC-32 of the bytes of a contiguous tensor or a storage, on any device. Blocks."""
    data = flat_bytes(source)
    return checksums(data, [data.numel()])[0]


def _identity(stream: bytes, sizes: array[int]) -> bytes:
    """Return the archive's serialization id: 40 digits, as in torch's archives.

    It is a hash of the pickle and the sizes of the storages, so it is the same for objects of the same structure.
    """
    digest = hashlib.sha256(stream)
    digest.update(sizes)
    return str(int.from_bytes(digest.digest(), "big"))[:40].zfill(40).encode()
