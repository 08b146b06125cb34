"""The safetensors format as ``torch.distributed.checkpoint`` writes and reads it."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.planner import WriteItem

from .file_image import FileImage
from .tensor_archive import Elements

_LENGTH = struct.Struct("<Q")
_LONGEST_HEADER = 100_000_000
"""Bytes: what the format allows."""
_DTYPES = {
    name: dtype
    for name, attribute in (
        ("F64", "float64"),
        ("F32", "float32"),
        ("F16", "float16"),
        ("BF16", "bfloat16"),
        ("I64", "int64"),
        ("I32", "int32"),
        ("I16", "int16"),
        ("I8", "int8"),
        ("U64", "uint64"),
        ("U32", "uint32"),
        ("U16", "uint16"),
        ("U8", "uint8"),
        ("BOOL", "bool"),
        ("F8_E4M3", "float8_e4m3fn"),
        ("F8_E4M3FNUZ", "float8_e4m3fnuz"),
        ("F8_E5M2", "float8_e5m2"),
        ("F8_E5M2FNUZ", "float8_e5m2fnuz"),
        ("C64", "complex64"),
    )
    if (dtype := getattr(torch, attribute, None)) is not None
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def add_safetensors(image: FileImage, tensors: Sequence[tuple[WriteItem, torch.Tensor]]) -> None:
    """Append a file of this format with what torch needs to put shards together. Raises ValueError for what it cannot hold."""
    shards: dict[str, Any] = {}
    header: dict[str, Any] = {
        "__metadata__": {"DCP_SHARDING_INFO": "", "DCP_VERSION": "1.0", "format": "pt"},
    }
    sources = []
    begin = 0
    for item, tensor in sorted(tensors, key=lambda each: (-each[1].dtype.itemsize, each[0].index.fqn)):
        name = item.index.fqn
        if name in header:
            raise ValueError(f"two shards of {name!r} on one rank: a safetensors file holds one tensor of a name")
        if tensor.dtype not in _NAMES or tensor.layout is not torch.strided:
            raise ValueError(f"{name!r} is a {tensor.layout} tensor of {tensor.dtype}, which safetensors cannot hold")
        source = tensor.detach().contiguous()
        end = begin + source.nbytes
        header[name] = {"dtype": _NAMES[source.dtype], "shape": list(source.shape), "data_offsets": [begin, end]}
        shards[name] = {"saved_offsets": list(item.tensor_data.chunk.offsets) if item.tensor_data else []}
        sources.append(source)
        begin = end
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(shards)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    image.add_text(_LENGTH.pack(len(text)) + text)
    for source in sources:
        image.add(source.view(-1))


def elements_of_safetensors(file: BinaryIO, begin: int) -> dict[str, Elements]:
    """Where the tensors lie of such a file, which begins at ``begin`` of another. Raises ValueError for anything else."""
    file.seek(begin)
    (length,) = _LENGTH.unpack(file.read(_LENGTH.size).ljust(_LENGTH.size, b"\0"))
    if not 2 <= length <= _LONGEST_HEADER:
        raise ValueError(f"a header of {length} bytes")
    header = json.loads(file.read(length))
    data = begin + _LENGTH.size + length
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (first, end) = _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"])), entry["data_offsets"]
        except (LookupError, TypeError) as error:
            raise ValueError(f"the entry {entry!r} of {name!r}") from error
        elements = Elements(data + first, dtype, shape, _contiguous(shape))
        if end - first != elements.nbytes:
            raise ValueError(f"{name!r} with {end - first} bytes, where {list(shape)} of {dtype} are {elements.nbytes}")
        found[name] = elements
    return found


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()
