"""Pickle an object like ``torch.save``: the stream, and the storages that it refers to."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import math
import os
from collections import OrderedDict
from collections.abc import Iterator
from types import FunctionType, ModuleType, NoneType
from typing import Any, NamedTuple

import torch
from torch._utils import _rebuild_tensor_v2
from torch.serialization import location_tag
from torch.storage import TypedStorage, UntypedStorage

from deepnvme.checkpoint.formats.sharding import Across, Sharded
from deepnvme.ops import load_async_io


class Pickled(NamedTuple):
    """An object pickled as torch.save does, its storages beside it."""

    stream: bytes
    """The pickle."""
    storages: list[Any]
    """The storages whose keys in the stream are "0", "1" and so on: UntypedStorage, and Sharded if saved across ranks."""


class _Reference:
    """Given to the pickler in place of a storage, to be written as its persistent id."""

    __slots__ = ("persistent_id",)

    def __init__(self, persistent_id: tuple[Any, ...]) -> None:
        self.persistent_id = persistent_id


class _Hooks:
    """Stands in the stream for the empty OrderedDict that each plain tensor has; takes less time and memory."""

    __slots__ = ()


def pickled(obj: object, pickle_module: ModuleType, protocol: int, across: Across | None = None) -> Pickled:
    """Pickle an object, byte for byte as ``torch.save`` does.

    Args:
        obj: Any object that pickles.
        pickle_module: Provides the pickler.
        protocol: Pickle protocol.
        across: If several ranks save the object together: pickles it alike on every rank, with whole tensors for DTensors.

    Raises:
        RuntimeError: If one storage is used with two dtypes, which torch.load cannot read.
        TypeError: If ``across`` is given and a DTensor's dtype cannot be saved by shards.
        Exception: Whatever pickling raises.
    """
    storages: list[UntypedStorage | Sharded] = []
    keys: dict[object, str] = {}
    dtypes: dict[int, torch.dtype] = {}
    """By address of the storage: torch.load cannot give one storage two dtypes, and torch.save refuses to write that."""
    locations: dict[torch.device, str] = {}
    location_of = location_tag if across is None else across.location

    def reference(known: UntypedStorage | Sharded, dtype: torch.dtype, numel: int) -> tuple[str, Any, str, str, int]:
        """Return the persistent id of a storage that is used with this dtype and number of elements."""
        storage = known if isinstance(known, UntypedStorage) else known.local.untyped_storage()
        device = storage.device
        location = locations.get(device)
        if location is None:
            location = location_of(storage)
            if device.type == "cpu":  # of others torch makes a new string each time, which the pickle then has each time
                locations[device] = location
        address = 0 if location == "meta" else storage.data_ptr()
        if address and storage is known and dtypes.setdefault(address, dtype) != dtype:
            raise RuntimeError(
                f"one storage is seen as {dtypes[address]} and as {dtype}, which a .pt file cannot hold: clone one of the tensors"
            )
        identity: object = storage._cdata if storage is known else known
        key = keys.get(identity)
        if key is None:
            key = keys[identity] = str(len(storages))
            storages.append(known if isinstance(known, Sharded) else _whole_elements(known, numel * dtype.itemsize))
        return "storage", _storage_class(dtype), key, location, numel

    def whole(tensor: torch.Tensor, shard: Sharded) -> Any:
        """Return what the pickle says of a DTensor: how to rebuild it as a whole, contiguous tensor."""
        if tensor.dtype not in _ITEMSIZES:
            raise TypeError(f"a DTensor of {tensor.dtype} cannot be saved by shards: save its full_tensor()")
        strides = [math.prod(max(size, 1) for size in tensor.shape[dim + 1 :]) for dim in range(tensor.dim())]
        storage = _Reference(reference(shard, tensor.dtype, tensor.numel()))
        return _rebuild_tensor_v2, (storage, 0, tuple(tensor.shape), tuple(strides), tensor.requires_grad, hooks())

    def persistent_id(obj: object) -> Any:
        """Return the persistent id of a storage, or None for any other object."""
        if type(obj) is _Reference:
            return obj.persistent_id
        if isinstance(obj, TypedStorage):
            return reference(obj._untyped_storage, obj.dtype, obj._size())  # type: ignore[no-untyped-call]
        if isinstance(obj, UntypedStorage):
            key = reference(obj, torch.uint8, obj.nbytes())
            return key[0], torch.UntypedStorage, *key[2:]
        return None

    asked_first = getattr(pickle_module.Pickler, "reducer_override", None)
    """The pickler's own hook. cloudpickle has one, for functions and classes that it pickles by value."""
    hooks = _Hooks if asked_first is None else OrderedDict

    class Pickler(pickle_module.Pickler):  # type: ignore[name-defined, misc]
        def reducer_override(self, obj: Any) -> Any:
            """Return what ``__reduce_ex__`` gives for a plain tensor or its empty OrderedDict, in a fifth of the time."""
            if asked_first is not None and (given := asked_first(self, obj)) is not NotImplemented:
                return given
            kind = type(obj)
            if kind is _Hooks or (kind is OrderedDict and not obj and not vars(obj)):
                return OrderedDict, ()
            itemsize = _ITEMSIZES.get(obj.dtype) if kind is torch.Tensor else None
            if itemsize is None or not is_plain(obj):
                shard = across.shard_of(obj) if across is not None and isinstance(obj, torch.Tensor) else None
                return NotImplemented if shard is None else whole(obj, shard)
            storage = obj.untyped_storage()
            referred = _Reference(reference(storage, obj.dtype, storage.nbytes() // itemsize))
            shape = tuple(obj.shape)
            return _rebuild_tensor_v2, (referred, obj.storage_offset(), shape, obj.stride(), obj.requires_grad, hooks())

    Pickler.persistent_id = load_async_io().checkpoint.none_for(_NO_STORAGES, persistent_id)
    buffer = io.BytesIO()
    try:
        with _without_collections():
            Pickler(buffer, protocol=protocol).dump(obj)
        return Pickled(buffer.getvalue(), storages.copy())
    finally:
        storages.clear()  # the class Pickler is in a reference cycle, which would keep them alive until it is collected


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Disable the garbage collector in the block.

    Pickling makes objects that live until its end. The collector examines them again and again, which takes half of the time of
    pickling 10,000 tensors.
    """
    global _paused
    enabled = gc.isenabled()
    if enabled:
        _paused = True
        gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
            _paused = False


_paused = False
"""Whether a thread has disabled the collector, for the whole process, and is going to enable it again."""


def _resume() -> None:
    """Enable the collector in a forked child, which may not have the thread that would do so."""
    global _paused
    if _paused:
        _paused = False
        gc.enable()


os.register_at_fork(after_in_child=_resume)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is fully described by its storage, sizes and strides, and torch.save pickles it by these."""
    return (
        tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.is_cuda)
        and not tensor.is_quantized
        and not tensor.__dict__
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_nested
        and not tensor._backward_hooks
    )


def _whole_elements(storage: UntypedStorage, nbytes: int) -> UntypedStorage:
    """Return the storage without a rest smaller than one element.

    torch.save writes that rest too, and torch.load then refuses the file.
    """
    return storage if storage.nbytes() == nbytes else storage[:nbytes]


@functools.cache
def _storage_class(dtype: torch.dtype) -> Any:
    """Return torch's storage class for this dtype."""
    typed = TypedStorage(wrap_storage=UntypedStorage(0), dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
    return getattr(torch, typed._pickle_storage_type())  # type: ignore[no-untyped-call]


_NO_STORAGES = frozenset(
    (str, int, float, bool, NoneType, tuple, list, dict, OrderedDict, torch.Tensor, FunctionType, type, _Hooks)
)
"""Types of most objects that are pickled and are not storages."""
_ITEMSIZES = {
    dtype: dtype.itemsize
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex128, torch.complex64,
    )
}  # fmt: skip
"""Dtypes that have a storage class of their own name. Others are pickled in newer ways, by torch itself."""
