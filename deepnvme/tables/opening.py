"""Finds the rows in a file that can be used as a table in place: ``.npy``, a checkpoint, or raw rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from deepnvme.checkpoint.weight_locations import Location, weights_in
from deepnvme.files.regular_files import open_regular
from deepnvme.files.replacing import with_filename
from deepnvme.model.weight_differences import WeightInfo
from deepnvme.telemetry.descriptions import shorten

from .layout import Shard, TableLayout, columns_of
from .manifest import CorruptTable


def find_layout(
    path: Path, name: str | None, dtype: torch.dtype | None, shape: int | Sequence[int] | None, offset: int
) -> TableLayout:  # fmt: skip
    """Return the layout of the rows in a file.

    The suffix of the file's name tells its kind: ``.npy``, a checkpoint (``.safetensors``, ``.pt``, ``.pth``), else raw rows.

    Args:
        path: The file.
        name: Name of a tensor in a checkpoint.
        dtype: Dtype of the values in a raw file.
        shape: Shape of one row in a raw file.
        offset: Bytes from the start of a raw file to its first row.

    Raises:
        FileNotFoundError: If the file is missing.
        CorruptTable: If the file's header is incomplete.
        ValueError: If the rows are not contiguous in the file; no tensor has that name, or there are several and no name is
            given; or an argument is not for such a file.
    """
    checkpoint = path.suffix in (".safetensors", ".pt", ".pth")
    if name is not None and not checkpoint:
        raise ValueError(f"'{path}' has no tensors with names, got name={name!r}")
    if not checkpoint and path.suffix != ".npy":
        path.stat()  # raises FileNotFoundError
        if dtype is None or shape is None:
            raise ValueError(f"'{path}' is read as a raw file: give dtype, and the shape of one row")
        return _raw(path, dtype, (shape,) if isinstance(shape, int) else tuple(shape), offset)
    if dtype is not None or shape is not None or offset:
        raise ValueError(f"'{path}' says itself what its rows are: give dtype, shape and offset for raw files only")
    return _tensor(path, name) if checkpoint else _numpy(path)


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
    return TableLayout((Shard(path, base=offset),), rows, columns)


def _numpy(path: Path) -> TableLayout:
    try:
        import numpy
    except ImportError as error:
        raise RuntimeError("numpy is needed to open .npy files: pip install numpy") from error
    open_regular(path).close()  # a FIFO would be waited for
    with with_filename(path):
        try:
            array = numpy.lib.format.open_memmap(path, mode="r")
        except OSError:
            raise
        except Exception as error:  # numpy parses the header as Python text, which fails in many ways
            raise CorruptTable(path, str(error)) from error
    shape = array.shape
    if not shape:
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
    return TableLayout((Shard(path, base=array.offset),), shape[0], columns_of(dtype, shape[1:]))


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
    return TableLayout((Shard(Path(weight.path), base=weight.offset),), shape[0], columns_of(weight.info.dtype, shape[1:]))


def ranges_layout(info: WeightInfo, ranges: Iterable[tuple[str, int, int]]) -> TableLayout | None:
    """Return the layout of a tensor whose rows lie in ranges of files; None if a range ends within a row.

    Args:
        info: Dtype and shape of the tensor.
        ranges: Path, offset and bytes of each range, in the order of the rows.
    """
    columns = columns_of(info.dtype, info.shape[1:])
    shards: list[Shard] = []
    end: tuple[Path, int] | None = None
    row = 0
    for path, offset, nbytes in ranges:
        if nbytes % columns[0].nbytes:
            return None
        if end != (Path(path), offset):  # else it continues the range before
            shards.append(Shard(Path(path), row, offset))
        row += nbytes // columns[0].nbytes
        end = Path(path), offset + nbytes
    return TableLayout(tuple(shards), row, columns)
