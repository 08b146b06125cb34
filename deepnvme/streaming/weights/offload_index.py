"""Reads the weights that accelerate's offload index lists: in safetensors files, or in one raw file each."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from deepnvme.checkpoint.formats.contents import CorruptCheckpoint
from deepnvme.checkpoint.formats.safetensors_header import read_header
from deepnvme.engine import Engine
from deepnvme.memory.host import empty_aligned
from deepnvme.memory.tensor_bytes import dtype_named

from .manifest import WeightInfo
from .sources import Location, Pending, Weights


class OffloadIndex(Weights):
    """The weights of an accelerate offload index, as a :class:`Source` for :meth:`WeightStore.build`. Not thread-safe.

    Args:
        index: Entries by the weight's name in the model. An entry has either ``safetensors_file``, the ``weight_name`` in that
            file and optionally the ``dtype`` that the weight is to have; or the ``dtype`` and ``shape`` of the raw bytes in
            ``<folder>/<name>.dat``. Accelerate writes such entries, and transformers passes them to it.
        folder: Directory of the raw files; None if there are none.
        wanted: Names of the weights to use, all in the index. Other entries are ignored.
        engine: Reads the files.
        in_memory: Further weights, which are in memory.

    Raises:
        CorruptCheckpoint: If a file lacks a weight that the index says is in it, or is too short.
        FileNotFoundError: If a file is missing.
        ValueError: If an entry is of a raw file, and ``folder`` is None.
    """

    def __init__(
        self,
        index: Mapping[str, Mapping[str, Any]],
        folder: str | os.PathLike[str] | None,
        wanted: Iterable[str],
        engine: Engine,
        in_memory: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        headers = functools.lru_cache(maxsize=None)(_locations_in)
        weights: dict[str, torch.Tensor | Location] = {**(in_memory or {})}
        self._infos = {name: WeightInfo(each.dtype, tuple(each.shape)) for name, each in (in_memory or {}).items()}
        for name in wanted:
            entry = index[name]
            file = entry.get("safetensors_file")
            if file is None:
                location = _raw(name, entry, folder)
            else:
                inside = headers(os.fspath(file))
                key = entry.get("weight_name", name)
                if key not in inside:
                    raise CorruptCheckpoint(file, f"it is said to hold {key!r}, which is not there")
                location = inside[key]
            weights[name] = location
            dtype = dtype_named(entry["dtype"]) if "dtype" in entry else location.info.dtype
            self._infos[name] = WeightInfo(dtype, location.info.shape)
        super().__init__(weights, engine)

    def info(self, name: str) -> WeightInfo:
        """Return the dtype that the weight is to have, and its shape."""
        return self._infos[name]

    def read_into(self, name: str, out: torch.Tensor) -> Pending:
        """Start reading a weight; see :meth:`Source.read_into`. A conversion to its dtype is done by ``Pending.result``."""
        stored, wanted = super().info(name), self._infos[name]
        if stored == wanted:
            return super().read_into(name, out)
        raw = empty_aligned(stored.nbytes)
        reading = super().read_into(name, raw)

        def convert() -> None:
            out.view(wanted.dtype).copy_(raw.view(stored.dtype))

        return _Then(reading, convert)


class _Then:
    """A read, and a function to be called when it has succeeded."""

    def __init__(self, reading: Pending, conclude: Callable[[], None]) -> None:
        self._reading = reading
        self._conclude = conclude

    def result(self) -> None:
        """Wait for the read, and call the function. Must be called only once."""
        self._reading.result()
        self._conclude()


def _locations_in(file: str) -> dict[str, Location]:
    """Return where the tensors of a safetensors file lie, by name."""
    return {
        each.name: Location(file, each.offset, WeightInfo(each.dtype, each.shape)) for each in read_header(file).tensors
    }


def _raw(name: str, entry: Mapping[str, Any], folder: str | os.PathLike[str] | None) -> Location:
    """Return where the weight of an entry without a safetensors file lies, after checking the file's size."""
    if folder is None:
        raise ValueError(f"the index says that {name!r} lies in a folder, and none is given")
    info = WeightInfo(dtype_named(entry["dtype"]), tuple(entry["shape"]))
    path = os.path.join(folder, f"{name}.dat")
    size = os.stat(path).st_size
    if size < info.nbytes:
        raise CorruptCheckpoint(path, f"expected {info.nbytes} bytes of {name!r}, found {size}")
    return Location(path, 0, info)
