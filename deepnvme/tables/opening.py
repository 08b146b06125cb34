"""Files that are tables already: where their rows are."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path

import torch

from deepnvme._shortened_lists import listed
from deepnvme.checkpoint.weight_locations import Location, weights_in

from .layout import TableLayout, columns_of


class CheckpointFormat(enum.Enum):
    """What a file is, by its name."""

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
) -> TableLayout:
    """Return where the rows of a file are.

    Args:
        kind: What it is. With ``dtype`` and ``shape`` it is read as raw whatever its name.
        path: The file.
        name: Of a tensor in it.
        dtype: Of the values in a raw file.
        shape: Of one row in a raw file.
        offset: Bytes from the start of a raw file to its first row.

    Raises:
        FileNotFoundError: If it is missing.
        ValueError: If its rows do not lie one after the other, there is no tensor of that name, or several and no name is given.
    """
    if dtype is not None and shape is not None:
        return _raw(path, dtype, (shape,) if isinstance(shape, int) else tuple(shape), offset)
    if kind is CheckpointFormat.NPY:
        return _numpy(path)
    if kind is CheckpointFormat.WEIGHTS:
        return _tensor(path, name)
    path.stat()  # raises FileNotFoundError
    raise ValueError(f"'{path}' is read as a raw file: give dtype, and the shape of one row")


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
    array = numpy.lib.format.open_memmap(path, mode="r")
    if array.ndim == 0:
        raise ValueError(f"'{path}' has one value, and no rows")
    if not array.flags.c_contiguous:
        raise ValueError(
            f"'{path}' is in Fortran order, in which the values of a row are not next to one another: save it again by"
            " numpy.save(path, numpy.ascontiguousarray(array))"
        )
    if array.dtype.byteorder == ">":
        raise ValueError(f"'{path}' has big-endian values ({array.dtype}): save it again in the machine's order")
    try:
        dtype = torch.from_numpy(numpy.empty(0, array.dtype)).dtype
    except TypeError as error:
        raise ValueError(f"'{path}' has values of {array.dtype}, which no tensor can have") from error
    return TableLayout((path,), array.shape[0], columns_of(dtype, array.shape[1:]), int(array.offset))


def _tensor(path: Path, name: str | None) -> TableLayout:
    weights = weights_in(path)
    if name is None:
        if len(weights) != 1:
            raise ValueError(f"'{path}' has {len(weights)} tensors: give the name of one, such as {listed(weights)}")
        (name,) = weights
    if name not in weights:
        raise ValueError(f"'{path}' has no tensor {name!r}, but {listed(weights)}")
    weight = weights[name]
    if not isinstance(weight, Location):
        raise ValueError(f"{name!r} in '{path}' lies in memory only: write the file by torch.save as a zip archive")
    if weight.elements is not None or weight.conj or weight.neg:
        raise ValueError(f"the rows of {name!r} in '{path}' do not lie one after the other: save a contiguous copy")
    shape = weight.info.shape
    if not shape:
        raise ValueError(f"{name!r} in '{path}' has one value, and no rows")
    return TableLayout((Path(weight.path),), shape[0], columns_of(weight.info.dtype, shape[1:]), weight.offset)
