"""Pickle an object like ``torch.save``, and unpickle it like ``torch.load``: the stream, and the storages that it refers to."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import FunctionType, NoneType
from typing import Any, NamedTuple

import torch
from torch import _weights_only_unpickler
from torch._utils import _rebuild_tensor_v2, _validate_loaded_sparse_tensors
from torch.serialization import StorageType, _serialization_tls, location_tag
from torch.storage import TypedStorage, UntypedStorage

from deepnvme.checkpoint.formats.sharding import JointPickling, Sharded
from deepnvme.memory.tensor_bytes import contiguous_strides
from deepnvme.ops import load_async_io


class Pickled(NamedTuple):
    """An object as ``torch.save`` pickles it: the pickle, and the storages that it refers to."""

    stream: bytes
    """The bytes of the pickle."""
    storages: list[Any]
    """The storages in the order of their keys in the pickle, "0", "1" and so on.

    Each is an UntypedStorage, or a Sharded for a DTensor saved across ranks.
    """


class _Reference:
    """Stand-in for a storage, which the pickler writes as the storage's persistent id."""

    __slots__ = ("persistent_id",)

    def __init__(self, persistent_id: tuple[Any, ...]) -> None:
        self.persistent_id = persistent_id


class _Hooks:
    """Stand-in for the empty OrderedDict of hooks in the pickle of each plain tensor. Takes less time and memory than a dict."""

    __slots__ = ()


class _References:
    """The storages that a pickle refers to, in the order of their keys, and their persistent ids.

    Args:
        across: As for :func:`pickled`.
    """

    def __init__(self, across: JointPickling | None) -> None:
        self.storages: list[UntypedStorage | Sharded] = []
        self._keys: dict[object, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        """Dtype of each storage, by the storage's address: torch.load cannot read one storage with two dtypes."""
        self._locations: dict[torch.device, str] = {}
        self._location_of = location_tag if across is None else across.location

    def reference(self, known: UntypedStorage | Sharded, dtype: torch.dtype, numel: int) -> tuple[str, Any, str, str, int]:
        """Return the persistent id of a storage that is used with this dtype and number of elements."""
        storage = known if isinstance(known, UntypedStorage) else known.local.untyped_storage()
        device = storage.device
        location = self._locations.get(device)
        if location is None:
            location = self._location_of(storage)
            if device.type == "cpu":  # of others torch makes a new string each time, which the pickle then has each time
                self._locations[device] = location
        address = 0 if location == "meta" else storage.data_ptr()
        if address and storage is known and self._dtypes.setdefault(address, dtype) != dtype:
            raise RuntimeError(
                f"one storage is seen as {self._dtypes[address]} and as {dtype}, which a .pt file cannot hold: clone one of the"
                " tensors"
            )
        identity: object = storage._cdata if storage is known else known
        key = self._keys.get(identity)
        if key is None:
            key = self._keys[identity] = str(len(self.storages))
            self.storages.append(known if isinstance(known, Sharded) else _whole_elements(known, numel * dtype.itemsize))
        return "storage", _storage_class(dtype), key, location, numel

    def whole_tensor(self, tensor: torch.Tensor, shard: Sharded, hooks: object) -> Any:
        """Return the function and arguments by which the pickle rebuilds a DTensor as a whole, contiguous tensor."""
        if tensor.dtype not in _ITEMSIZES:
            raise TypeError(f"a DTensor of {tensor.dtype} cannot be saved by shards: save its full_tensor()")
        storage = _Reference(self.reference(shard, tensor.dtype, tensor.numel()))
        strides = contiguous_strides(tensor.shape)
        return _rebuild_tensor_v2, (storage, 0, tuple(tensor.shape), strides, tensor.requires_grad, hooks)


def pickled(obj: object, protocol: int, across: JointPickling | None = None) -> Pickled:
    """Pickle an object, byte for byte as ``torch.save`` does.

    Args:
        obj: Any object that pickles.
        protocol: Pickle protocol.
        across: State by which several ranks that save the object together write the same pickle, in which each DTensor is a
            whole tensor. None if this process saves alone.

    Raises:
        RuntimeError: If one storage is used with two dtypes, which torch.load cannot read.
        TypeError: If ``across`` is given and a DTensor's dtype cannot be saved by shards.
        Exception: Whatever pickling raises.
    """
    references = _References(across)
    reference = references.reference

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

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            """Return what ``__reduce_ex__`` gives for a plain tensor or its empty OrderedDict, in a fifth of the time."""
            kind = type(obj)
            if kind is _Hooks or (kind is OrderedDict and not obj and not vars(obj)):
                return OrderedDict, ()
            itemsize = _ITEMSIZES.get(obj.dtype) if kind is torch.Tensor else None
            if itemsize is None or not is_plain(obj):
                shard = across.shard_of(obj) if across is not None and isinstance(obj, torch.Tensor) else None
                return NotImplemented if shard is None else references.whole_tensor(obj, shard, _Hooks())
            storage = obj.untyped_storage()
            referred = _Reference(reference(storage, obj.dtype, storage.nbytes() // itemsize))
            shape = tuple(obj.shape)
            return _rebuild_tensor_v2, (referred, obj.storage_offset(), shape, obj.stride(), obj.requires_grad, _Hooks())

    Pickler.persistent_id = load_async_io().checkpoint.none_for(_NON_STORAGE_TYPES, persistent_id)  # type: ignore[method-assign]
    buffer = io.BytesIO()
    try:
        with _without_collections():
            Pickler(buffer, protocol=protocol).dump(obj)
        return Pickled(buffer.getvalue(), references.storages.copy())
    finally:
        references.storages.clear()  # the class Pickler is in a reference cycle, which would keep them alive


Place = Callable[[str, int, str], UntypedStorage]
"""Returns the memory for a storage, given its key in the pickle, its size in bytes, and the location that it was saved from."""


def unpickled(stream: bytes, place: Place, weights_only: bool, map_location: Any = None, **options: Any) -> Any:
    """Return the object of a pickle of ``torch.save``, as ``torch.load`` does, but with storages that ``place`` provides.

    Args:
        stream: The pickle.
        place: Provides the storages. ``map_location`` is not applied to them.
        weights_only: Whether to unpickle with torch's restricted unpickler.
        map_location: As for ``torch.load``, for tensors that are made without a storage in the pickle.
        **options: Further arguments of the unpickler.

    Raises:
        Exception: Whatever unpickling or ``place`` raises.
    """
    storages: dict[str, TypedStorage] = {}

    def persistent_load(saved: Any) -> TypedStorage:
        """Return the storage with this persistent id."""
        _, kind, key, location, numel = saved
        if key in storages:
            return storages[key]
        dtype = torch.uint8 if kind is UntypedStorage else kind.dtype
        memory = place(key, numel * dtype.itemsize, location.decode("ascii") if isinstance(location, bytes) else location)
        storage = TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
        if memory.data_ptr():  # torch makes storages without memory anew for each tensor
            storages[key] = storage
        return storage

    class Unpickler((_weights_only_unpickler if weights_only else pickle).Unpickler):  # type: ignore[misc]
        def find_class(self, module: str, name: str) -> Any:
            """Return a stand-in with the dtype for a storage class; else the object under its present name in torch."""
            if "Storage" in name:
                with contextlib.suppress(KeyError):
                    return StorageType(name)  # type: ignore[no-untyped-call]
            return super().find_class("torch._tensor" if module == "torch.tensor" else module, name)

    unpickler = Unpickler(io.BytesIO(stream), **{"encoding": "utf-8", **options})
    unpickler.persistent_load = persistent_load
    outer = _serialization_tls.map_location
    _serialization_tls.map_location = map_location
    try:
        loaded = unpickler.load()
    finally:
        _serialization_tls.map_location = outer
    _validate_loaded_sparse_tensors()  # type: ignore[no-untyped-call]
    return loaded


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Disable the garbage collector during the ``with`` block.

    Pickling makes objects that live until it ends. The collector would examine them again and again, which takes half of
    the time of pickling 10,000 tensors.
    """
    if not gc.isenabled():
        yield
        return
    with contextlib.ExitStack() as ending:
        ending.callback(_collect_again)
        _paused.append(None)
        gc.disable()
        yield


_paused: list[None] = []  # not empty while the garbage collector is disabled for pickling


def _collect_again() -> None:
    """Enable the garbage collector if pickling has disabled it, also in a child that was forked meanwhile."""
    if _paused:
        _paused.clear()
        gc.enable()


os.register_at_fork(after_in_child=_collect_again)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether storage, sizes and strides describe the tensor completely, so that torch.save pickles only these."""
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
    """Return the storage without trailing bytes that are less than one element.

    torch.save writes such bytes too, and torch.load then refuses the file.
    """
    return storage if storage.nbytes() == nbytes else storage[:nbytes]


@functools.cache
def _storage_class(dtype: torch.dtype) -> Any:
    """Return torch's storage class for this dtype."""
    typed = TypedStorage(wrap_storage=UntypedStorage(0), dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
    return getattr(torch, typed._pickle_storage_type())  # type: ignore[no-untyped-call]


_NON_STORAGE_TYPES = frozenset(
    (str, int, float, bool, NoneType, tuple, list, dict, OrderedDict, torch.Tensor, FunctionType, type, _Hooks)
)
"""Types of most pickled objects that are not storages: their persistent id is None without a call of Python code."""
_ITEMSIZES = {
    dtype: dtype.itemsize
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex128, torch.complex64,
    )
}  # fmt: skip
"""Dtypes that have a storage class of their own name. Others are pickled in newer ways, by torch itself."""
