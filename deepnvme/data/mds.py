"""Shards of MosaicML streaming (MDS), uncompressed.

``index.json`` lists shards and their columns. A shard begins with the number of its samples, and the offsets of the samples and
of the end of the last one (uint32 each). A sample has the lengths of its columns of variable length (uint32 each), and then all
columns.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import AliasPath, BaseModel, Field, NonNegativeInt

from deepnvme.files.manifest import read_manifest
from deepnvme.files.regular_files import open_regular
from deepnvme.files.replacing import with_filename

from .layouts import CorruptSamples, OffsetsLayout
from .sample_files import SampleColumn

INDEX_NAME = "index.json"
_DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32"}
_DTYPES |= {64: "uint64", 65: "int64", 66: "float64"}
_KINDS = {"bytes": "bytes", "jpeg": "bytes", "png": "bytes", "str": "str", "json": "str", "int": "int64"}
_KINDS |= {name: name for name in _DTYPES.values()}


class _Shard(BaseModel):
    format: Literal["mds"]
    compression: str | None
    column_names: tuple[str, ...]
    column_encodings: tuple[str, ...]
    basename: str = Field(validation_alias=AliasPath("raw_data", "basename"))
    samples: NonNegativeInt


class _Index(BaseModel):
    shards: tuple[_Shard, ...]


class MDSLayout(OffsetsLayout):
    """Samples in the shards of a directory.

    Raises CorruptSamples and other errors of the system; ValueError for what is not read in place.
    """

    def __init__(self, directory: Path) -> None:
        shards = read_manifest(directory / INDEX_NAME, 1 << 30, _Index.model_validate_json, CorruptSamples).shards
        columns = {(shard.column_names, shard.column_encodings) for shard in shards}
        if len(columns) != 1 or any(shard.compression for shard in shards):
            raise ValueError(f"'{directory}': its shards are compressed, their columns differ, or there are none")
        names, encodings = columns.pop()
        if len(set(names)) != len(encodings):
            raise CorruptSamples(directory / INDEX_NAME, f"the columns {names} have the encodings {encodings}")
        self._columns = list(map(_column, names, encodings))
        self._head = 4 * sum(not column.fixed for column in self._columns)
        paths = [directory / shard.basename for shard in shards]
        super().__init__(paths, lambda number, path: [_offsets(path, shards[number].samples, self._head)])

    def sample(self, number: int, *data: memoryview) -> dict[str, Any]:
        """Return a sample by column. Arrays are views."""
        (record,), at, sample = data, self._head, {}
        lengths = iter(record[:at].cast("I"))
        for column in self._columns:
            begin, at = at, at + (column.row_bytes if column.fixed else next(lengths))
            sample[column.name] = column.decode(record[begin:at])
        if at != len(record):
            raise ValueError(f"its columns have {at} bytes")
        return sample


def _offsets(path: Path, samples: int, least: int) -> torch.Tensor:
    """Return the offsets of a shard's samples, which have at least ``least`` bytes, and of its end. Raises CorruptSamples."""
    with with_filename(path), open_regular(path) as file:
        size, head = os.fstat(file.fileno()).st_size, 4 * samples + 8
        if head <= size:
            found = torch.frombuffer(bytearray(file.read(head)), dtype=torch.int32).long() & 0xFFFFFFFF
            ends = found[1:]
            if found[0] == samples and ends[0] >= head and ends[-1] == size and bool((ends.diff() >= least).all()):
                return ends[None]
    raise CorruptSamples(path, f"it does not have offsets of {samples} samples in {size} bytes")


class _Array(SampleColumn):
    """An array whose shape, and dtype if the column has none, precede the elements."""

    def decode(self, data: memoryview) -> Any:
        """Return the array, a view."""
        dtype, at = (_DTYPES[data[0]], 1) if self.kind == "bytes" else (self.kind, 0)
        size = 1 << (data[at] & 3)
        begin, end = at + 1, at + 1 + (data[at] >> 2) * size
        shape = (int.from_bytes(data[place : place + size], "little") for place in range(begin, end, size))
        return SampleColumn(self.name, dtype, tuple(shape)).decode(data[end:])


def _column(name: str, encoding: str) -> SampleColumn:
    if encoding in _KINDS:
        return SampleColumn(name, _KINDS[encoding])
    found = re.fullmatch(r"ndarray(?::(\w+)(?::(\d+(?:,\d+)*))?)?", encoding)
    if found is None or found[1] not in (None, *_DTYPES.values()):
        raise ValueError(f"column '{name}' has the encoding '{encoding}', which is not read in place")
    dtype, shape = found.groups("")
    return SampleColumn(name, dtype, tuple(map(int, shape.split(",")))) if shape else _Array(name, dtype or "bytes", (-1,))
