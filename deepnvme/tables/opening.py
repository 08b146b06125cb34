"""Finds the rows in a file that can be used as a table in place: ``.npy``, a checkpoint, or raw rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from deepnvme.checkpoint.weight_locations import Location, weights_in
from deepnvme.files.regular_files import open_regular
from deepnvme.telemetry.descriptions import shorten

from .layout import TableLayout, columns_of
from .manifest import CorruptTable


def find_layout(
    path: Path, name: str | None, dtype: torch.dtype | None, shape: int | Sequence[int] | None, offset: int
) -> TableLayout:  # fmt: skip
    """Return the layout of the rows in a file.

    The name of the file says what it is: ``.npy``, a checkpoint (``.safetensors``, ``.pt``, ``.pth``, ``.bin``), or raw rows. A
    checkpoint with ``dtype`` and ``shape``, and without ``name``, is read as raw rows.

    Args:
        path: The file.
        name: Name of a tensor in a checkpoint.
        dtype: Dtype of the values in a raw file. For other files, the expected dtype; None for any.
        shape: Shape of one row in a raw file. For other files, the expected shape; None for any.
        offset: Bytes from the start of a raw file to its first row.

    Raises:
        FileNotFoundError: If the file is missing.
        CorruptTable: If the file's header is incomplete.
        ValueError: If the rows are not contiguous in the file; no tensor has that name, or there are several and no name is
            given; or an argument contradicts the file.
    """
    row_shape = (shape,) if isinstance(shape, int) else None if shape is None else tuple(shape)
    checkpoint = path.suffix in (".safetensors", ".pt", ".pth", ".bin")
    if name is not None and not checkpoint:
        raise ValueError(f"'{path}' has no tensors with names, got name={name!r}")
    raw_checkpoint = checkpoint and name is None and dtype is not None and row_shape is not None
    if (path.suffix != ".npy" and not checkpoint) or raw_checkpoint:
        path.stat()  # raises FileNotFoundError
        if dtype is None or row_shape is None:
            raise ValueError(f"'{path}' is read as a raw file: give dtype, and the shape of one row")
        return _raw(path, dtype, row_shape, offset)
    if offset:
        raise ValueError(f"'{path}' says itself where its rows are: give offset for raw files only")
    layout = _tensor(path, name) if checkpoint else _numpy(path)
    found = layout.values.dtype, layout.values.shape
    wanted = dtype or found[0], found[1] if row_shape is None else row_shape
    if found != wanted:
        raise ValueError(f"'{path}' has rows of the shape {found[1]} in {found[0]}, and {wanted[1]} in {wanted[0]} is wanted")
    return layout


def _raw(path: Path, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> TableLayout:
    columns = columns_of(dtype, shape)
    if offset < 0:
        raise ValueError(f"offset must not be negative, got {offset}")
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
    """Return the layout of a checkpoint tensor's rows. Raises ValueError if they are not contiguous in the file."""
    if not isinstance(weight, Location):
        raise ValueError(f"{name!r} in '{path}' lies in memory only: write the file by torch.save as a zip archive")
    if weight.elements is not None:
        raise ValueError(f"the rows of {name!r} in '{path}' do not lie one after the other: save a contiguous copy")
    shape = weight.info.shape
    if not shape:
        raise ValueError(f"{name!r} in '{path}' has one value, and no rows")
    return TableLayout((Path(weight.path),), shape[0], columns_of(weight.info.dtype, shape[1:]), weight.offset)
