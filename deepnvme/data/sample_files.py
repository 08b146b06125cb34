"""The format of SampleWriter: a manifest, and for each part an index and one data file for each directory.

1. The manifest lists parts. Of each it says how many samples are committed, and how many bytes of the data files they take.
   The index and the data files of a part may be longer: a later commit, or a writer that died.
2. A part's index has 16 bytes for each sample, in the order of writing: offset (uint64), length and CRC-32 (uint32 each). With n
   data files, sample i of the part is in file i % n.
3. Manifests of the same directory only ever grow: by samples of the last part, and by parts. A merged dataset lists parts of
   other directories, by paths relative to its own directory.
4. A record has, one after the other: the lengths in bytes (uint32) of all columns of variable length but the last; the columns of
   fixed length; the columns of variable length. Each column begins at a multiple of its element's size, after zeros.
"""

from __future__ import annotations

import math
import os
import struct
import sys
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import torch
from pydantic import NonNegativeInt, TypeAdapter

from deepnvme.files.manifest import checked_fields, read_manifest, with_checksum
from deepnvme.files.replacing import replace_durably
from deepnvme.memory.tensor_bytes import check_storable, dtype_named, flat_bytes, memory_of, stack_ranges

from .layouts import CorruptSamples, Empty, Layout, Places, Records, containing, distinct

ColumnKind: TypeAlias = "str | torch.dtype | tuple[torch.dtype, tuple[int, ...]]"
"""What a column holds: "bytes", "str", a dtype for one number, or a dtype and a shape, whose first size may be -1: any."""

_WORD = (1 << 32) - 1
_MOST_BYTES = 4 * 10**9
"""Most bytes of a sample's values: an index has 32 bits for the record, which also has lengths and padding."""
_PLAIN: dict[str, Any] = {"bytes": (bytes, bytearray, memoryview), "str": str}


@dataclass(frozen=True)
class SampleColumn:
    """One column of a sample."""

    name: str
    kind: str
    """"bytes", "str", or the name of a dtype."""
    shape: tuple[int, ...] = ()
    """Shape of a tensor; -1 as its first size for any number of rows."""

    def __post_init__(self) -> None:
        _ = self.dtype  # raises ValueError if torch has no such dtype
        if any(size < -(not number) for number, size in enumerate(self.shape)) or {-1, 0} <= {*self.shape}:
            raise ValueError(f"sizes of '{self.name}' must not be negative, except for a first one of -1, got {self.shape}")

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements; uint8 for bytes and text."""
        return torch.uint8 if self.kind in _PLAIN else dtype_named(self.kind)

    @cached_property
    def fixed(self) -> bool:
        """Whether all samples have the same number of bytes in this column."""
        return self.kind not in _PLAIN and -1 not in self.shape

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of the column if its length is fixed, otherwise of one row of it."""
        return math.prod(size for size in self.shape if size != -1) * self.dtype.itemsize

    def encode(self, value: Any) -> memoryview:
        """Return the bytes of a value. Raises TypeError or ValueError if the column cannot hold it."""
        if self.kind in _PLAIN:
            if not isinstance(value, _PLAIN[self.kind]):
                raise TypeError(f"'{self.name}' must be {self.kind}, got {type(value).__name__}")
            return memoryview(value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value).cast("B")
        number = next((kind for kind in (bool, int, float, complex) if isinstance(value, kind)), None)
        fits = number is not None and torch.can_cast(torch.tensor(number()).dtype, self.dtype)
        try:
            given = torch.as_tensor(value, dtype=self.dtype if fits else None)
        except (RuntimeError, TypeError, ValueError) as error:  # RuntimeError for a number that is too large
            raise ValueError(f"'{self.name}': {error}") from error
        check_storable(self.name, given)
        rows = int(-1 in self.shape)
        if given.dtype != self.dtype or given.shape[rows:] != self.shape[rows:] or given.dim() != len(self.shape):
            found = f"{tuple(given.shape)} in {given.dtype}"
            raise ValueError(f"'{self.name}' must have the shape {self.shape} in {self.dtype}, got {found}")
        return memory_of(flat_bytes(given.cpu().resolve_conj().resolve_neg().contiguous()))

    def decode(self, data: memoryview) -> Any:
        """Return the value whose bytes these are. A tensor is a view of them if their address is aligned."""
        if self.kind == "bytes":
            return bytes(data)
        if self.kind == "str":
            return str(data, "utf-8", "surrogatepass")
        found = torch.frombuffer(data, dtype=self.dtype) if data else torch.empty(0, dtype=self.dtype)
        if found.data_ptr() % self.dtype.itemsize:  # in files of other projects
            found = torch.frombuffer(bytearray(data), dtype=self.dtype)
        return found.view(self.shape)


class RecordFormat:
    """Packs samples with these columns into records, and unpacks them. Raises ValueError if there is no column."""

    def __init__(self, columns: tuple[SampleColumn, ...]) -> None:
        if not columns:
            raise ValueError("a sample needs at least one column")
        self._names = [column.name for column in columns]
        self._columns = sorted(columns, key=lambda column: not column.fixed)
        variable = sum(not column.fixed for column in columns)
        self._lengths = end = 4 * max(variable - 1, 0)
        self._begins = []  # where the columns of fixed length begin
        for column in self._columns[: len(columns) - variable]:
            self._begins.append(end + -end % column.dtype.itemsize)
            end = self._begins[-1] + column.row_bytes
        self.nbytes = None if variable else end
        """Bytes of each record if all columns are fixed."""

    def pack(self, sample: Mapping[str, Any]) -> bytearray:
        """Return a sample as a record. Raises TypeError or ValueError, naming the column, if it cannot hold a value."""
        if sample.keys() != set(self._names):
            raise TypeError(f"a sample has the columns {', '.join(self._names)}, got {', '.join(map(str, sample)) or 'none'}")
        values = [column.encode(sample[column.name]) for column in self._columns]
        if (nbytes := sum(value.nbytes for value in values)) > _MOST_BYTES:
            raise ValueError(f"a sample may have {_MOST_BYTES} bytes, got {nbytes}")
        lengths = [value.nbytes for column, value in zip(self._columns, values, strict=True) if not column.fixed]
        record = bytearray(array("I", lengths[:-1]))
        for column, value in zip(self._columns, values, strict=True):
            record += bytes(-len(record) % column.dtype.itemsize)
            record += value
        return record

    def unpack(self, record: memoryview) -> dict[str, Any]:
        """Return the sample in a record. Tensors are views of the record. Raises ValueError if the record is damaged."""
        at, whole = self._lengths, record.nbytes
        if whole < at:
            raise ValueError(f"its record has {whole} bytes, and its columns' lengths {at}")
        lengths = iter(record[:at].cast("I"))
        sample = dict.fromkeys(self._names)
        for column in self._columns:
            begin = at + -at % column.dtype.itemsize
            at = begin + column.row_bytes if column.fixed else begin + next(lengths, whole - begin)
            if not begin <= at <= whole or (at - begin) % max(column.row_bytes, 1):
                raise ValueError(f"the length of its column '{column.name}' is wrong")
            sample[column.name] = column.decode(record[begin:at])
        return sample

    def stacked(self, memory: torch.Tensor, starts: torch.Tensor, empty: Empty | None) -> dict[str, torch.Tensor]:
        """Return the samples in records by column, if all columns are fixed. See :func:`stack_ranges`."""
        columns = dict.fromkeys(self._names, memory)  # in the user's order
        for column, begin in zip(self._columns, self._begins, strict=True):
            columns[column.name] = stack_ranges(memory, starts + begin, column.dtype, column.shape, empty)
        return columns


def columns_from(kinds: Mapping[str, ColumnKind]) -> tuple[SampleColumn, ...]:
    """Return the columns that a user has described.

    Raises:
        TypeError: If a name is not a str, or a kind is neither "bytes", "str", a dtype, nor a dtype and a shape.
        ValueError: If a shape has a size below 0, other than a first one of -1; or 0, and -1 too.
    """
    columns = []
    for name, kind in kinds.items():
        dtype, shape = kind if isinstance(kind, tuple) and len(kind) == 2 else (kind, ())
        if not isinstance(name, str) or not (kind in _PLAIN or isinstance(dtype, torch.dtype)):
            raise TypeError(f'a column is "bytes", "str", a dtype, or (dtype, shape), by name: got {kind!r} for {name!r}')
        columns.append(SampleColumn(name, str(dtype).removeprefix("torch."), tuple(shape)))
    return tuple(columns)


MANIFEST_NAME = "deepnvme-samples.json"
_KIND = ("deepnvme samples", 1)
_MOST_MANIFEST_BYTES = 64 << 20
ENTRY = struct.Struct("<QII")
"""A sample in an index: offset, length and CRC-32 of its record."""


@dataclass(frozen=True)
class Part:
    """Samples that one writer has written."""

    index: str
    """Path of the index, relative to the dataset's directory."""
    files: tuple[str, ...]
    """Paths of the data files, one for each directory."""
    samples: NonNegativeInt
    """Committed samples."""
    nbytes: tuple[NonNegativeInt, ...]
    """Committed bytes of each data file."""


@dataclass(frozen=True)
class Manifest:
    """Columns and committed parts of a dataset."""

    columns: tuple[SampleColumn, ...]
    parts: tuple[Part, ...]

    @property
    def samples(self) -> int:
        """Number of committed samples of all parts."""
        return sum(part.samples for part in self.parts)

    def save(self, directory: Path) -> None:
        """Replace the manifest of a directory, atomically and durably. Raises OSError."""
        replace_durably(directory / MANIFEST_NAME, with_checksum(_KIND, asdict(self)))


_MANIFEST = TypeAdapter(Manifest)


def load_manifest(directory: Path) -> Manifest:
    """Return the manifest of a directory.

    Raises:
        FileNotFoundError: If there is none.
        CorruptSamples: If it is damaged, or another version of the package wrote it.
    """
    return read_manifest(
        directory / MANIFEST_NAME, _MOST_MANIFEST_BYTES, lambda data: _MANIFEST.validate_python(checked_fields(_KIND, data)),
        CorruptSamples,
    )  # fmt: skip


def path_in(directory: Path, name: str) -> Path:
    """Return the path of a part's file. ".." is the parent by name, also if the directory is a symbolic link."""
    return Path(os.path.normpath(directory / name))


class WrittenLayout(Layout):
    """Samples that :class:`SampleWriter` wrote. Entries of indexes are read when they are needed.

    Raises:
        CorruptSamples: If an index or a data file is missing bytes that are committed.
        OSError: If a file cannot be opened.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._parts = manifest.parts
        self._records = RecordFormat(manifest.columns)
        self.sample_bytes = self._records.nbytes
        self._indexes = [path_in(directory, part.index) for part in self._parts]
        self.files = [path_in(directory, name) for part in self._parts for name in part.files]
        committed = [nbytes for part in self._parts for nbytes in part.nbytes]
        indexed = [part.samples * ENTRY.size for part in self._parts]
        for path, nbytes in zip([*self.files, *self._indexes], [*committed, *indexed], strict=True):
            if (size := path.stat().st_size) < nbytes:
                raise CorruptSamples(path, f"it has {size} bytes, and its commit {nbytes}")
        self._committed = torch.tensor(committed, dtype=torch.int64)
        self._ends = torch.tensor(list(accumulate(part.samples for part in self._parts)), dtype=torch.int64)
        self._first_files = list(accumulate((len(part.files) for part in self._parts), initial=0))

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._parts else 0

    def places(self, numbers: torch.Tensor, records: Records) -> Places:
        """Return where samples are. Blocks for pages of the indexes."""
        parts = containing(numbers, self._ends)
        entries, files = torch.empty((len(numbers), 2), dtype=torch.int64), torch.empty_like(numbers)
        for part in distinct(parts):
            members = (parts == part).nonzero().flatten()
            inner = numbers[members] - (int(self._ends[part]) - self._parts[part].samples)
            entries[members] = records(self._indexes[part], inner, 2)
            files[members] = self._first_files[part] + inner % len(self._parts[part].files)
        offsets, rest = entries.unbind(1)
        nbytes = rest & _WORD
        wrong = (offsets < 0) | (offsets > self._committed[files] - nbytes) | (nbytes < (self.sample_bytes or 0))
        for at in wrong.nonzero().flatten().tolist():
            where = f"the entry of sample {int(numbers[at])} is wrong: offset {int(offsets[at])}, {int(nbytes[at])} bytes"
            raise CorruptSamples(self._indexes[int(parts[at])], where)
        return Places(files, offsets, nbytes, rest >> 32 & _WORD)

    def sample(self, number: int, *data: memoryview) -> dict[str, Any]:
        """Return a sample by column. Tensors are views."""
        return self._records.unpack(*data)

    def stacked(self, memory: torch.Tensor, starts: torch.Tensor, empty: Empty | None) -> dict[str, torch.Tensor]:
        """Return one tensor for each column, see :func:`stack_ranges`."""
        return self._records.stacked(memory, starts, empty)


assert sys.byteorder == "little", "records are little-endian"
