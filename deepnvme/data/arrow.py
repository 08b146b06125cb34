"""Arrow files of Hugging Face datasets: streams of batches of rows, uncompressed.

A batch has its columns one after the other. Opening maps a file, reads the metadata of all batches, the columns of numbers and
the offsets of the other columns, and keeps them in memory. A sample then is as many ranges of the file as it has other columns.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from deepnvme.files.manifest import read_manifest
from deepnvme.files.regular_files import open_regular
from deepnvme.files.replacing import with_filename

from .layouts import CorruptSamples, OffsetsLayout
from .sample_files import SampleColumn

try:
    import pyarrow.ipc
except ImportError as error:
    raise ImportError(f"{error}: Arrow files need pyarrow (pip install pyarrow)") from error

_KINDS = {"string": "str", "large_string": "str", "binary": "bytes", "large_binary": "bytes", "halffloat": "float16"}
_KINDS |= {f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_KINDS |= {"float": "float32", "double": "float64"}


class ArrowLayout(OffsetsLayout):
    """Rows of Arrow files, and of directories of ``save_to_disk``.

    Raises CorruptSamples and other errors of the system; ValueError for what is not read in place.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._columns: list[SampleColumn] = []
        numbers: dict[str, list[torch.Tensor]] = {}
        super().__init__([file for path in paths for file in _files(path)], lambda _, path: self._blocks(path, numbers))
        self._numbers = {name: torch.cat(parts) for name, parts in numbers.items()}

    def sample(self, number: int, *data: memoryview) -> dict[str, Any]:
        """Return a row by column. Arrays are views."""
        sample, values = {}, iter(data)
        for column in self._columns:
            held = self._numbers.get(column.name)
            sample[column.name] = column.decode(next(values)) if held is None else held[number].clone()
        return sample

    def _blocks(self, path: Path, numbers: dict[str, list[torch.Tensor]]) -> Iterator[torch.Tensor]:
        """Yield the offsets of each batch of a file, and append its numbers to those of each column."""
        for batch, file in _batches(path):
            columns, offsets = [_column(field) for field in batch.schema], []
            self._columns = self._columns or columns
            if len({column.name for column in columns}) != len(columns):
                raise ValueError(f"'{path}' has two columns with one name")
            if columns != self._columns or all(map(_is_number, columns)):
                raise ValueError(f"'{path}' has other columns than the file before it, or only numbers, which fit into memory")
            for column, rows in zip(columns, batch.columns, strict=True):
                values = rows.field("bytes") if pyarrow.types.is_struct(rows.type) else rows
                if rows.null_count or values.null_count or getattr(values, "values", values).null_count:
                    raise ValueError(f"column '{column.name}' of '{path}' has nulls")
                first, data = values.buffers()[1], values.buffers()[-1]
                place = data.address - file.address if data.size else 0
                if _is_number(column):
                    numbers.setdefault(column.name, []).append(_tensor(data, column.dtype, len(rows)))
                elif 0 <= place < file.size:
                    dtype = torch.int64 if str(values.type).startswith("large") else torch.int32
                    ends = torch.arange(len(rows) + 1) if column.fixed else _tensor(first, dtype, len(rows) + 1).long()
                    if bool((ends.diff() < 0).any()):
                        raise CorruptSamples(path, f"the offsets of column '{column.name}' descend")
                    offsets.append(place + ends * column.row_bytes)
                else:
                    raise ValueError(f"column '{column.name}' of '{path}' is compressed")
            yield torch.stack(offsets)


def _batches(path: Path) -> Iterator[tuple[Any, Any]]:
    """Yield each batch of a file, and the file as a buffer, which is mapped. Raises CorruptSamples if it is damaged."""
    with with_filename(path), open_regular(path) as file:
        try:
            mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
            mapped.madvise(mmap.MADV_RANDOM)  # only what is used is read
            if mapped[-8:] != b"\xff\xff\xff\xff\0\0\0\0":
                raise ValueError("it is no stream of batches, or its end is missing")
            for batch in filter(len, pyarrow.ipc.open_stream(pyarrow.py_buffer(mapped))):
                batch.validate()
                yield batch, pyarrow.py_buffer(mapped)
        except (ValueError, OSError) as error:
            if getattr(error, "errno", None):  # not pyarrow's
                raise
            raise CorruptSamples(path, str(error)) from error


def _tensor(buffer: Any, dtype: torch.dtype, count: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(buffer), dtype=dtype, count=count)


def _is_number(column: SampleColumn) -> bool:
    return column.fixed and not column.shape


def _column(field: Any) -> SampleColumn:
    """Return what a field holds: one value, an array of numbers, or the bytes of an image or a sound beside its path."""
    types, kind = pyarrow.types, field.type
    shape: tuple[int, ...] = ()
    if types.is_struct(kind) and {each.name for each in kind} == {"bytes", "path"}:
        kind = kind.field("bytes").type
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind, shape = kind.value_type, (getattr(kind, "list_size", -1),)
    found = _KINDS.get(str(kind))
    if found is None or (shape and found in ("str", "bytes")):
        raise ValueError(f"column '{field.name}' is {field.type}, which is not read in place")
    return SampleColumn(field.name, found, shape)


def _files(path: Path) -> list[Path]:
    """Return the files of a directory, as its state lists them; or the path, if it is a file."""

    def listed(state: bytes) -> list[Path]:
        """Return the paths that the bytes of ``state.json`` name."""
        return [path / file["filename"] for file in json.loads(state)["_data_files"]]

    return [path] if path.suffix == ".arrow" else read_manifest(path / "state.json", 1 << 30, listed, CorruptSamples)
