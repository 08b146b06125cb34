"""Files that are tables already: where their rows are."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path

import torch

from deepnvme.checkpoint.weight_locations import Location, weights_in
from deepnvme.files.regular_files import open_regular
from deepnvme.telemetry.descriptions import shorten

from .layout import TableLayout, columns_of
from .manifest import CorruptTable


class CheckpointFormat(enum.Enum):
    """What a file is, by its name: a numpy array, a checkpoint of torch or safetensors, or rows and nothing else."""

    NPY = "numpy"
    WEIGHTS = "weights"
    RAW = "raw"

    @classmethod
    def of(cls, path: Path) -> CheckpointFormat:
        """Return the format of a file."""
        if path.suffix == ".npy":
            return cls.NPY
        return cls.WEIGHTS if path.suffix in (".safetensors", ".pt", ".pth", ".bin") else cls.RAW


def find_layout(
    kind: CheckpointFormat,
    path: Path,
    name: str | None,
    dtype: torch.dtype | None,
    shape: int | Sequence[int] | None,
    offset: int,
    rows: int | None = None,
) -> TableLayout:
    """Return where the rows of a file are.

    Args:
        kind: What it is. A checkpoint with ``dtype`` and ``shape``, and without ``name``, is read as raw whatever its name.
        path: The file.
        name: Of a tensor in a checkpoint.
        dtype: Of the values in a raw file. Of another file, what they are expected to have; None for any.
        shape: Of one row, likewise.
        offset: Bytes from the start of a raw file to its first row.
        rows: How many rows of a raw file the table has; None for all up to its end.

    Raises:
        FileNotFoundError: If it is missing.
        CorruptTable: If it has no whole header.
        ValueError: If its rows do not lie one after the other; there is no tensor of that name, or several and no name is given;
            or an argument contradicts the file.
    """
    row_shape = (shape,) if isinstance(shape, int) else None if shape is None else tuple(shape)
    if kind is CheckpointFormat.WEIGHTS and name is None and dtype is not None and shape is not None:
        kind = CheckpointFormat.RAW
    if name is not None and kind is not CheckpointFormat.WEIGHTS:
        raise ValueError(f"'{path}' has no tensors with names, got name={name!r}")
    if kind is CheckpointFormat.RAW:
        path.stat()  # raises FileNotFoundError
        if dtype is None or row_shape is None:
            raise ValueError(f"'{path}' is read as a raw file: give dtype, and the shape of one row")
        return _raw(path, dtype, row_shape, offset, rows)
    if offset or rows is not None:
        raise ValueError(f"'{path}' says itself where its rows are and how many: give offset and rows for raw files only")
    layout = _numpy(path) if kind is CheckpointFormat.NPY else _tensor(path, name)
    found = layout.values.dtype, layout.values.shape
    wanted = dtype or found[0], found[1] if row_shape is None else row_shape
    if found != wanted:
        raise ValueError(f"'{path}' has rows of the shape {found[1]} in {found[0]}, and {wanted[1]} in {wanted[0]} is wanted")
    return layout


def _raw(path: Path, dtype: torch.dtype, shape: tuple[int, ...], offset: int, wanted: int | None) -> TableLayout:
    columns = columns_of(dtype, shape)
    if offset < 0:
        raise ValueError(f"offset must not be negative, got {offset}")
    if wanted is not None:
        if wanted < 0:
            raise ValueError(f"rows must not be negative, got {wanted}")
        return TableLayout((path,), wanted, columns, offset)
    size = path.stat().st_size - offset
    rows, rest = divmod(size, columns[0].nbytes)
    if size < 0 or rest:
        raise ValueError(
            f"'{path}' has {size} bytes from offset {offset} on, which is no whole number of rows of {columns[0].nbytes} bytes"
        )
    return TableLayout((path,), rows, columns, offset)


def _numpy(path: Path) -> TableLayout:
    try:
        import numpy
    except ImportError as error:
        raise RuntimeError("numpy is needed to open .npy files: pip install numpy") from error
    with open_regular(path) as file:
        try:
            version = numpy.lib.format.read_magic(file)
            # Version 3 is for structures whose fields have names beyond latin-1: no tensor can have these.
            read_header = {1: numpy.lib.format.read_array_header_1_0, 2: numpy.lib.format.read_array_header_2_0}[version[0]]
            shape, fortran_order, numpy_dtype = read_header(file)
        except KeyError:
            raise ValueError(f"'{path}' is of version {version[0]} of the format, and 1 and 2 can be read") from None
        except ValueError as error:
            raise CorruptTable(path, str(error)) from error
        begin = file.tell()
    if any(size < 0 for size in shape):
        raise CorruptTable(path, f"its header says that its shape is {shape}")
    if not shape:
        raise ValueError(f"'{path}' has one value, and no rows")
    if fortran_order and sum(each > 1 for each in shape) > 1:
        raise ValueError(
            f"'{path}' is in Fortran order, in which the values of a row are not next to one another: save it again by"
            " numpy.save(path, numpy.ascontiguousarray(array))"
        )
    if numpy_dtype.byteorder == ">":
        raise ValueError(f"'{path}' has big-endian values ({numpy_dtype}): save it again in the machine's order")
    try:
        dtype = torch.from_numpy(numpy.empty(0, numpy_dtype)).dtype
    except TypeError as error:
        raise ValueError(f"'{path}' has values of {numpy_dtype}, which no tensor can have") from error
    return TableLayout((path,), shape[0], columns_of(dtype, shape[1:]), begin)


def _tensor(path: Path, name: str | None) -> TableLayout:
    weights = weights_in(path)
    if name is None:
        if len(weights) != 1:
            raise ValueError(f"'{path}' has {len(weights)} tensors: give the name of one, such as {shorten(weights)}")
        (name,) = weights
    if name not in weights:
        raise ValueError(f"'{path}' has no tensor {name!r}, but {shorten(weights)}")
    return tensor_layout(path, name, weights[name])


def tensor_layout(path: Path, name: str, weight: Location | torch.Tensor) -> TableLayout:
    """Return where the rows of a tensor in a checkpoint are. Raises ValueError if they do not lie one after the other."""
    if not isinstance(weight, Location):
        raise ValueError(f"{name!r} in '{path}' lies in memory only: write the file by torch.save as a zip archive")
    if weight.elements is not None or weight.conj or weight.neg:
        raise ValueError(f"the rows of {name!r} in '{path}' do not lie one after the other: save a contiguous copy")
    shape = weight.info.shape
    if not shape:
        raise ValueError(f"{name!r} in '{path}' has one value, and no rows")
    return TableLayout((Path(weight.path),), shape[0], columns_of(weight.info.dtype, shape[1:]), weight.offset)
