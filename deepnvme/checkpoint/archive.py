"""The image of a .pt file: the archive that ``torch.save`` makes, with each storage on a page of its own."""

from __future__ import annotations

import hashlib
import sys
import zlib
from types import ModuleType
from typing import Any, TypeVar

import torch

from deepnvme._tensor_memory import memory_of

from .file_image import PAGE, FileImage, Source, bytes_of
from .pickled import pickled
from .sharding import Across, Sharded
from .zip_layout import ZipLayout

_CRC_CHUNK = 16 << 20
_Source = TypeVar("_Source", torch.Tensor, torch.UntypedStorage)


def archive(
    obj: object,
    pickle_module: ModuleType,
    protocol: int,
    checksum: bool,
    alignment: int = PAGE,
    across: Across | None = None,
) -> FileImage:
    """Of any object that pickles. ``checksum``: the CRC-32 of each storage, 0.4 s of one core for each GB; 0 stands there
    otherwise. ``alignment``: bytes of which each storage begins at a multiple. ``across``: what this rank has of the archive of
    an object with DTensors. Raises what pickling raises."""
    stream, storages = pickled(obj, pickle_module, protocol, across)
    image, layout = FileImage(), ZipLayout(alignment)

    def add(name: str, data: bytes | torch.UntypedStorage | Sharded, nbytes: int, crc32: int) -> None:
        record = layout.add(f"archive/{name}", nbytes, crc32)
        image.add_text(record.header)
        image.add_padding(record.padding)
        if isinstance(data, bytes):
            image.add_text(data)
        elif isinstance(data, Sharded):
            image.add_part(_reachable(data.local), data.offsets, data.lengths, nbytes)
        else:
            image.add(_reachable(data))

    def add_text(name: str, text: bytes) -> None:
        add(name, text, len(text), zlib.crc32(text))

    add_text("data.pkl", stream)
    add_text(".format_version", b"1")
    add_text(".storage_alignment", str(alignment).encode())
    add_text("byteorder", sys.byteorder.encode())
    for key, storage in enumerate(storages):
        if checksum and isinstance(storage, Sharded):
            raise ValueError("the checksum of a DTensor cannot be had from its shards: save without checksum")
        add(f"data/{key}", storage, storage.nbytes(), crc32_of(storage) if checksum else 0)
    add_text("version", b"3\n")
    add_text(".data/serialization_id", _identity(stream, storages))
    image.add_text(layout.end())
    return image


def _reachable(source: _Source) -> _Source:
    """Where the engine can read it: itself on the CPU and on CUDA devices, as torch.save has it from any other device a copy."""
    return source if source.device.type in ("cpu", "cuda") else source.cpu()  # type: ignore[no-untyped-call]


def crc32_of(source: Source) -> int:
    """Of the bytes of a contiguous tensor or a storage, wherever they are. Blocks."""
    data = bytes_of(source)
    crc = 0
    for begin in range(0, data.numel(), _CRC_CHUNK):
        part = data[begin : begin + _CRC_CHUNK].cpu()
        crc = zlib.crc32(memory_of(part), crc)
    return crc


def _identity(stream: bytes, storages: list[Any]) -> bytes:
    """40 digits, as torch's: the same for the same structure."""
    digest = hashlib.sha256(stream)
    digest.update(str([storage.nbytes() for storage in storages]).encode())
    return str(int.from_bytes(digest.digest(), "big"))[:40].zfill(40).encode()
