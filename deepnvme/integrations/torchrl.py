"""A storage for torchrl's replay buffers whose transitions are on the drive, and survive crashes.

    storage = NVMeStorage(1_000_000, "/mnt/nvme/replay")
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=256)
    buffer.writer.load_state_dict({"_cursor": storage.next_cursor})  # goes on where the last run has committed

The file of records has more places than the buffer has slots. A map in memory says which place has the record of each slot;
``docs/formats.md`` has the format.

1. A record is written to a free place, whether its slot is new or overwritten. The map changes when the write has ended. So a
   write that fails or is interrupted changes nothing; the places that it took are not used again until the storage is reopened.
2. A commit flushes the records, then replaces the file of the map. The places of records that were overwritten are free from
   then on, and not before. So the records of the last commit are whole at any time.
3. Records written since the last commit are at most as many as there are spare places: a write of more commits first. Only one
   of more records than there are spare places is itself committed in parts.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from deepnvme._interrupts import defer_interrupts
from deepnvme.drives.profiles import engine_for
from deepnvme.files.directory_lock import DirectoryLock, DirectoryOwner
from deepnvme.files.manifest import checked_fields, read_manifest, with_checksum
from deepnvme.files.preallocation import preallocate
from deepnvme.files.replacing import replace_durably, with_filename
from deepnvme.memory.alignment import padded
from deepnvme.memory.budget import MemoryBudget, budget_bytes
from deepnvme.memory.pool import BufferPool
from deepnvme.memory.system_memory import available_memory
from deepnvme.memory.tensor_bytes import check_storable, crc32, dtype_named, memory_of
from deepnvme.telemetry.descriptions import size_for_people, state_text
from deepnvme.transfer.gather import CHUNK, ChunkRing, Transfers
from deepnvme.transfer.scatter import read_ahead

from ._serving import require_version

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig

TESTED = ("0.14.1",)
"""Versions of torchrl that the tests ran with."""

try:
    import torchrl
    from tensordict import NonTensorStack, TensorDict, TensorDictBase
except ImportError as error:
    what = f"needs torchrl {TESTED[-1]} (pip install torchrl=={TESTED[-1]})"
    raise ImportError(f"deepnvme.integrations.torchrl {what}: {error}") from error
require_version("torchrl", torchrl.__version__, TESTED)

from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase  # noqa: E402
from torchrl.data.replay_buffers.storages import TensorStorage  # noqa: E402
from torchrl.data.replay_buffers.storages.tensor import _flip_list  # noqa: E402
from torchrl.data.replay_buffers.utils import _is_int  # noqa: E402

__all__ = ["NVMeStorage"]

RECORDS, STATE = "deepnvme-replay.records", "deepnvme-replay.state"
"""Names of the files."""
_KIND = ("deepnvme replay", 1)
_SECTOR = 512
_MOST_PLACES = (1 << 31) - 1
_CHUNKS = 4
"""Chunks of pinned memory that transfers use at a time."""

Key = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Leaf:
    """One tensor of a record."""

    key: Key
    """Keys from the TensorDict to the tensor; empty if the data is a tensor."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the record."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, records: torch.Tensor) -> torch.Tensor:
        """Return the view of this tensor in records, given as bytes of shape (count, bytes of a record)."""
        part = records[:, self.offset : self.offset + self.nbytes]
        return part.view(self.dtype).view(len(records), *self.shape)


class _Column(torch.Tensor):
    """One tensor of some records of a storage. It has a shape and a dtype, but its values are on the drive.

    Slices of records and ``transpose`` return other columns. Another index of records reads these, and assigning to an index,
    or ``copy_``, writes them. All other operations read the column into an ordinary tensor.
    """

    _storage: NVMeStorage
    _leaf: _Leaf
    _slots: torch.Tensor
    """Numbers of the slots of the records, of any shape. The column's shape is this one, followed by the tensor's."""

    @staticmethod
    def __new__(cls, storage: NVMeStorage, leaf: _Leaf, slots: torch.Tensor) -> _Column:
        make: Any = torch.Tensor._make_wrapper_subclass
        made: _Column = make(cls, (*slots.shape, *leaf.shape), dtype=leaf.dtype, device="cpu")
        made._storage, made._leaf, made._slots = storage, leaf, slots
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"_Column(shape={tuple(self.shape)}, dtype={self.dtype})"

    def _read(self) -> torch.Tensor:
        return self._storage._read(self._leaf, self._slots)

    def _slots_at(self, index: Any) -> torch.Tensor | None:
        """Return the slots of the records that an index refers to; None if it goes into the records."""
        parts = index if isinstance(index, tuple) else (index,)
        inside = sum(part.ndim if isinstance(part, torch.Tensor) and part.dtype == torch.bool else 1 for part in parts)
        if inside > self._slots.ndim or any(part is Ellipsis or part is None for part in parts):
            return None
        return self._slots[index]

    def _get(self, index: Any) -> torch.Tensor:
        slots = self._slots_at(index)
        if slots is None:
            return self._read()[index]
        column = _Column(self._storage, self._leaf, slots)
        return column if _is_sliced(index) else column._read()

    def _set(self, index: Any, value: Any) -> None:
        slots = self._slots_at(index)
        if slots is None:
            whole = self._read()
            whole[index] = value
            slots, value = self._slots, whole
        value = torch.as_tensor(value, dtype=self._leaf.dtype).expand(*slots.shape, *self._leaf.shape)
        self._storage._store(slots.flatten(), {self._leaf: value.reshape(slots.numel(), *self._leaf.shape)})
        self._storage._bump_mutation_revision()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        if args and isinstance(args[0], cls):
            column = args[0]
            if name in _PROPERTIES:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            if name == "__getitem__":
                return column._get(args[1])
            if name == "transpose" and len(args) == 3 and all(0 <= each < column._slots.ndim for each in args[1:]):
                return cls(column._storage, column._leaf, column._slots.transpose(*args[1:]))
            if name in ("__setitem__", "copy_"):
                column._set(*(args[1:] if name == "__setitem__" else (slice(None), args[1])))
                return column
        elif name == "_foreach_copy_" and any(isinstance(each, cls) for each in args[0]):
            for target, source in zip(*args[:2], strict=True):
                target.copy_(source)
            return None
        if _IN_PLACE.fullmatch(name) and any(
            isinstance(each, cls) for each in tree_leaves((args[:1], (kwargs or {}).get("out")))
        ):
            raise NotImplementedError(f"{name} cannot change records on the drive: assign to an index, or use copy_()")
        return func(*tree_map_only(cls, cls._read, args), **tree_map_only(cls, cls._read, kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*tree_map_only(cls, cls._read, args), **tree_map_only(cls, cls._read, kwargs or {}))


_PROPERTIES = frozenset([
    "__hash__", "__len__", "device", "dim", "dtype", "element_size", "grad_fn", "is_complex", "is_contiguous", "is_cuda",
    "is_floating_point", "is_leaf", "is_meta", "is_nested", "is_pinned", "is_quantized", "is_shared", "is_sparse", "itemsize",
    "layout", "names", "nbytes", "ndim", "nelement", "numel", "requires_grad", "shape", "size", "stride",
])  # fmt: skip
"""What a column is asked without reading it."""
_IN_PLACE = re.compile(r".*[^_]_|__set__|__i(?!nvert|nt|ndex).*__")


def _is_sliced(index: Any) -> bool:
    return all(isinstance(part, slice) for part in (index if isinstance(index, tuple) else (index,)))


@dataclass(frozen=True)
class _RecordFormat:
    """Where the tensors of a record are, and the TensorDict that they are put into."""

    leaves: Mapping[Key, _Leaf]
    template: TensorDictBase | None
    """One record on the meta device; None if the data is a tensor."""
    nbytes: int
    """Bytes from one record to the next: whole sectors."""

    @staticmethod
    def of(tensors: Mapping[Key, torch.Tensor], template: TensorDictBase | None, sector: int) -> _RecordFormat:
        """Return the format of a record with these tensors. Those with the largest elements come first, so all are aligned."""
        offset, leaves = 0, {}
        for key, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
            leaves[key] = _Leaf(key, tensor.dtype, tuple(tensor.shape), offset)
            offset += leaves[key].nbytes
        return _RecordFormat({key: leaves[key] for key in tensors}, template, padded(max(offset, 1), max(sector, _SECTOR)))

    def filled(self, shape: Sequence[int], tensor_of: Callable[[_Leaf], torch.Tensor]) -> Any:
        """Return records of this shape, with a tensor for each leaf."""
        if self.template is None:
            return tensor_of(self.leaves[()])

        def of_key(key: str | Key, _: torch.Tensor) -> torch.Tensor:
            return tensor_of(self.leaves[(key,) if isinstance(key, str) else key])

        records = self.template.expand(*shape, *self.template.shape)
        return records.named_apply(of_key, nested_keys=True, device=torch.device("cpu"), filter_empty=False)

    def as_fields(self) -> dict[str, Any]:
        """Return the format for the file of the state."""
        template = TensorDict() if self.template is None else self.template
        nested = {(): template} | {key: each for key, each in _items(template).items() if isinstance(each, TensorDictBase)}
        return {
            "leaves": [[*each] for each in ((leaf.key, str(leaf.dtype)[6:], leaf.shape) for leaf in self.leaves.values())],
            "nested": None if self.template is None else [[key, tuple(each.batch_size)] for key, each in nested.items()],
            "record_bytes": self.nbytes,
        }

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> _RecordFormat:
        """Return the format that :meth:`as_fields` has made. Raises KeyError, TypeError or ValueError if it is damaged."""
        tensors = {
            tuple(key): torch.empty(shape, dtype=dtype_named(dtype), device="meta") for key, dtype, shape in fields["leaves"]
        }
        template = None
        for key, sizes in fields["nested"] or ():
            nested = TensorDict(batch_size=sizes)
            template = nested if template is None else template.set(tuple(key), nested)
        for key, tensor in tensors.items():
            template = template if template is None else template.set(key, tensor)
        return _RecordFormat.of(tensors, template, fields["record_bytes"])


def _items(data: TensorDictBase) -> dict[Key, Any]:
    """Return the nested values of a TensorDict, those that are TensorDicts included."""
    found = data.items(include_nested=True, is_leaf=_is_leaf)
    return {(key,) if isinstance(key, str) else key: value for key, value in found}


def _is_leaf(kind: type) -> bool:
    return issubclass(kind, NonTensorStack) or not issubclass(kind, TensorDictBase)


def _tensors_in(data: Any) -> dict[Key, torch.Tensor]:
    """Return the tensors of a TensorDict, or a tensor. Raises TypeError for data that has no fixed size."""
    if isinstance(data, TensorDictBase):
        try:
            found = {key: each for key, each in _items(data).items() if _is_leaf(type(each))}
        except RuntimeError as error:  # of a lazy stack
            raise TypeError(f"all transitions must have the same shapes: pad them ({error})") from error
    elif isinstance(data, torch.Tensor):
        found = {(): data}
    else:
        raise TypeError(f"NVMeStorage stores TensorDicts and tensors, got {type(data).__name__}: give its to_tensordict()")
    for key, each in found.items():
        name = ".".join(key) or "data"
        check_storable(name, each)
        if each.is_nested:
            raise TypeError(f"'{name}' is a nested tensor, whose parts have no fixed size: pad it")
    return found


class _Checkpointer(StorageCheckpointerBase):  # type: ignore[misc]  # whatever torchrl is
    """Dumps a storage into another directory as an NVMeStorage; into its own, by a commit."""

    def dumps(self, storage: NVMeStorage, path: str | os.PathLike[str]) -> None:
        if not storage.initialized:
            raise RuntimeError("Cannot save a non-initialized storage.")
        if Path(path).absolute() == storage.path:
            storage.commit()
        else:
            with NVMeStorage(storage.max_size, path, ndim=storage.ndim) as copy:
                self._copy(storage, copy)

    def loads(self, storage: NVMeStorage, path: str | os.PathLike[str]) -> None:
        if Path(path).absolute() != storage.path:
            with NVMeStorage(storage.max_size, path, ndim=storage.ndim) as dumped:
                self._copy(dumped, storage)

    def _copy(self, source: NVMeStorage, target: NVMeStorage) -> None:
        """Copy all records, in parts."""
        if self._save_hooks or self._load_hooks:
            raise NotImplementedError("NVMeStorage is dumped as it is: it calls no hooks")
        rows = source._len_along_dim0 or 0
        target._empty()
        for begin in range(0, rows, 64):
            part = torch.arange(begin, min(begin + 64, rows))
            target.set(part, source.get(part))
        target._len = len(source)
        target._set_last_cursor(source._last_cursor_index)


class NVMeStorage(TensorStorage):  # type: ignore[misc]
    """A storage of fixed-size transitions on the drive, for ``ReplayBuffer``, ``TensorDictReplayBuffer`` and their samplers.

    Each transition is one record of whole sectors, read and written by direct I/O. It is a TensorDict or a tensor on the CPU;
    tensors from devices are copied. All transitions have the same keys, dtypes and shapes; values are cast as by ``copy_``.

    After a crash, or a power cut, the storage has the records of the last commit. A commit is made by :meth:`commit`, by
    :meth:`close`, by ``dumps`` into the storage's directory, with ``commit_every``, and before more than 1/16 of
    ``max_size`` transitions would be lost. Only an ``extend`` of more transitions than that is committed in parts.

    A sample is read into tensors of its own. A slice, such as ``storage[:]``, reads and writes the drive when its tensors are
    used: ``set_at_`` and ``update_`` of the buffer write records. A tensor of all records is kept in memory once it was read, if
    the budget allows; so samplers of slices read their keys once.

    Thread-safe. A forked child cannot use it, and it cannot be pickled.

    Args:
        max_size: Transitions that the buffer has room for; in several dimensions rounded up to whole rows, as torchrl does.
        path: Directory of the storage, created if it is missing, and locked. What a storage of the same size has committed
            there is opened. Its space is reserved when the first transition is written.
        memory_budget: Most bytes of pinned memory (at most 16 MiB, if records have at most 4 MiB) and of tensors kept in memory.
            The map takes 4 bytes for each transition in addition.
        ndim: Dimensions of the buffer, as for torchrl's ``LazyMemmapStorage``.
        commit_every: Commit after so many calls of :meth:`set`, that is of ``extend`` and ``add``.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Raises:
        ValueError: If a size is out of range, or the directory has a storage of another size.
        StoreLocked: If another storage has the directory.
        OSError: If a file cannot be read, or is damaged (EBADMSG).
    """

    _default_checkpointer = _Checkpointer

    def __init__(
        self,
        max_size: int,
        path: str | os.PathLike[str],
        *,
        memory_budget: MemoryBudget = "64MiB",
        ndim: int = 1,
        commit_every: int | None = None,
        aio_config: AioConfig | None = None,
    ) -> None:
        budget = budget_bytes(memory_budget, "memory_budget")
        for name, value, least in (
            ("max_size", max_size, 1), ("ndim", ndim, 1), ("commit_every", commit_every, 1), ("memory_budget", budget, CHUNK)
        ):  # fmt: skip
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        super().__init__(None, max_size, ndim=ndim)
        self.path = Path(path).absolute()
        """The storage's directory."""
        self._budget, self._commit_every, self._sets = budget, commit_every, 0
        self._process, self._lock = os.getpid(), threading.RLock()
        self._closed = self._flush_failed = False
        self._kept: dict[_Leaf, torch.Tensor] = {}  # columns, of all slots
        with contextlib.ExitStack() as stack:
            stack.callback(DirectoryLock(self.path, DirectoryOwner("NVMeStorage")).release)
            self._engine = stack.enter_context(engine_for([self.path], aio_config))
            self._resources = stack
            if (self.path / STATE).exists():
                fields, places = read_manifest(self.path / STATE, 4 * _MOST_PLACES, _parse_state, self._corrupt)
                self._reopen(fields, places)
            self._resources = stack.pop_all()

    # The files.

    def _corrupt(self, path: Path, reason: str) -> OSError:
        return OSError(errno.EBADMSG, f"it is damaged, or no state of a replay buffer: {reason}", os.fspath(path))

    def _reopen(self, fields: Mapping[str, Any], places: torch.Tensor) -> None:
        """Take over what was committed last."""
        try:
            shape, record = torch.Size(fields["shape"]), _RecordFormat.from_fields(fields)
            if shape.numel() != len(places) or int(places.max()) >= fields["places"]:
                raise ValueError("its map does not fit")
            length, cursor = int(fields["length"]), int(fields["cursor"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._corrupt(self.path / STATE, str(error)) from error
        rows = -(-self.max_size // shape[1:].numel())
        if (len(shape), shape[0]) != (self.ndim, rows):
            raise ValueError(f"'{self.path}' has a storage of shape {tuple(shape)}: open it with its max_size and ndim")
        self._open_records("r+")
        if self._file.size() < fields["places"] * record.nbytes:
            raise self._corrupt(self.path / RECORDS, "the file was cut off")
        self._start(shape, record, places, fields["places"])
        self._len = length
        self._set_last_cursor(cursor)

    def _init(self, transition: Any) -> None:
        """Make the file for transitions like this one."""
        tensors = _tensors_in(transition)
        inner = self.ndim - 1
        sizes = transition.shape[:inner]
        if len(sizes) < inner or 0 in sizes:
            raise ValueError(f"a storage of {self.ndim} dimensions stores rows of {inner}, got shape {tuple(transition.shape)}")
        template = None
        if isinstance(transition, TensorDictBase):
            template = transition[(0,) * inner].contiguous() if inner else transition.contiguous()
            template = template.apply(lambda each: torch.empty_like(each, device="meta"), filter_empty=False, device=None)
        self._open_records("w+")
        one = {key: each[(0,) * inner] for key, each in tensors.items()}
        record = _RecordFormat.of(one, template, self._file.sector_size)
        shape = torch.Size([-(-self.max_size // sizes.numel()), *sizes])
        spare = max(shape.numel() // 16, min(shape.numel(), CHUNK // record.nbytes), 1)
        places = shape.numel() + spare
        if places > _MOST_PLACES:
            raise ValueError(f"max_size must be at most {_MOST_PLACES * 16 // 17}, got {shape.numel()}")
        with with_filename(self.path / RECORDS), open(self.path / RECORDS, "r+b") as file:
            remedy = "give a smaller max_size, or use another drive"
            preallocate(file.fileno(), 0, places * record.nbytes, str(self.path / RECORDS), remedy)
        self._start(shape, record, torch.full((shape.numel(),), -1, dtype=torch.int32), places)

    def _open_records(self, mode: Any) -> None:
        self._file = self._engine.open(self.path / RECORDS, mode, whole_sectors=True)
        self._resources.callback(self._file.close)

    def _start(self, shape: torch.Size, record: _RecordFormat, places: torch.Tensor, count: int) -> None:
        """Set what is derived from the shape, the format of records and the map."""
        self._shape, self._record, self._places, self._count = shape, record, places, count
        self._slots = torch.arange(len(places), dtype=torch.int32).view(shape)  # indexed as the buffer is
        self._spare, self._uncommitted = count - len(places), 0
        self._free = torch.ones(count, dtype=torch.bool).index_fill_(0, places[places >= 0].long(), False).nonzero()[:, 0].int()
        self._released: list[torch.Tensor] = []  # places of the last commit, overwritten since
        self._chunk = max(CHUNK, padded(record.nbytes))
        self._pool = BufferPool(min(self._budget, _CHUNKS * self._chunk))
        self.max_size = shape.numel()
        self._storage, self.initialized = self._view(self._slots), True

    def commit(self) -> None:
        """Make the records so far those that are there after a crash. Blocks until they are on stable storage.

        Raises:
            OSError: If the drive cannot be written. The last commit remains. If records could not be flushed, nothing more can be
                written: open the storage again.
        """
        with self._lock:
            self._check_open()
            if not self.initialized:
                return
            try:
                self._engine.fsync(self._file).result()
            except OSError:
                self._flush_failed = True  # the system forgets what it could not write, so another fsync would succeed
                raise
            memory = memory_of(self._places.view(torch.uint8))
            cursor = self._last_cursor_index
            fields = {
                **self._record.as_fields(), "shape": tuple(self._shape), "places": self._count, "length": len(self),
                "cursor": -1 if cursor is None else int(cursor), "crc32": crc32(memory),
            }  # fmt: skip
            replace_durably(self.path / STATE, with_checksum(_KIND, fields) + bytes(memory))
            with defer_interrupts():
                self._free = torch.cat([self._free, *self._released])
                self._released, self._uncommitted = [], 0

    def close(self) -> None:
        """Commit, and release the directory. Idempotent. Raises OSError as :meth:`commit`; the storage is closed all the same."""
        with self._lock:
            if not self._closed and self._process == os.getpid():
                try:
                    if not self._flush_failed:
                        self.commit()
                finally:
                    self._closed = True
                    self._resources.close()

    def __enter__(self) -> NVMeStorage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_open(self, writing: bool = True) -> None:
        if self._closed or self._process != os.getpid():
            raise ValueError(f"the storage is {state_text(self._closed, self._process)}")
        if writing and self._flush_failed:
            raise ValueError("records could not be flushed to the drive: open the storage again, with those of the last commit")

    # Records.

    def _load(self, places: torch.Tensor, leaves: Sequence[_Leaf]) -> dict[_Leaf, torch.Tensor]:
        """Read tensors of the records at these places. Those of a slot that was never written, at place -1, are zeros."""
        written = (places >= 0).nonzero()[:, 0]
        if len(written) < len(places):
            found = {leaf: torch.zeros(len(places), *leaf.shape, dtype=leaf.dtype) for leaf in leaves}
            for leaf, part in self._load(places[written], leaves).items():
                found[leaf][written] = part
            return found
        found = {leaf: torch.empty(len(places), *leaf.shape, dtype=leaf.dtype) for leaf in leaves}
        step = self._chunk // self._record.nbytes

        def start(begin: int, chunk: torch.Tensor) -> Any:
            ids = places[begin : begin + step]
            return self._engine.gather(self._file, ids, self._records_in(chunk, len(ids)))

        with self._lock:
            self._check_open(writing=False)
            for begin, chunk in read_ahead(range(0, len(places), step), start, self._pool, self._chunk):
                end = min(begin + step, len(places))
                records = self._records_in(chunk, end - begin)
                for leaf in leaves:
                    found[leaf][begin:end].copy_(leaf.of(records))
        return found

    def _records_in(self, memory: torch.Tensor, count: int) -> torch.Tensor:
        return memory[: count * self._record.nbytes].view(count, self._record.nbytes)

    @torch.no_grad()
    def _store(self, slots: torch.Tensor, values: Mapping[_Leaf, torch.Tensor]) -> None:
        """Write records, or only some of their tensors. If a slot occurs several times, its last values count."""
        distinct, position = slots.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        if len(distinct) < len(slots):
            last = torch.zeros(len(distinct), dtype=torch.int64).scatter_reduce_(0, position, torch.arange(len(slots)), "amax")
            slots, values = slots[last], {leaf: value[last] for leaf, value in values.items()}
        begin = 0
        with self._lock:
            self._check_open()
            while begin < len(slots):
                left = len(slots) - begin
                if self._uncommitted and left > min(self._spare - self._uncommitted, len(self._free)):
                    self.commit()
                count = min(left, self._spare - self._uncommitted, len(self._free))
                if count == 0:
                    raise OSError(
                        errno.ENOSPC, "writes that failed have used up the spare places: open the storage again", str(self.path)
                    )
                part = slots[begin : begin + count]
                places, self._free = self._free[:count], self._free[count:]
                parts = {leaf: value[begin : begin + count] for leaf, value in values.items()}
                self._write(places, parts, None if len(values) == len(self._record.leaves) else self._places[part])
                with defer_interrupts():
                    former = self._places[part]
                    self._released.append(former[former >= 0])
                    self._places[part] = places
                    for leaf in self._kept.keys() & parts.keys():
                        self._kept[leaf][part] = parts[leaf].to(leaf.dtype).cpu()
                    self._uncommitted += count
                begin += count

    def _write(self, places: torch.Tensor, values: Mapping[_Leaf, torch.Tensor], former: torch.Tensor | None) -> None:
        """Write records to places. Tensors without a value are those of the records at the ``former`` places."""
        step = self._chunk // self._record.nbytes
        ring, writes = ChunkRing(self._pool, self._chunk, wait=True), Transfers()
        try:
            for begin in range(0, len(places), step):
                ids = places[begin : begin + step]
                memory = ring.memory(0, len(ids) * self._record.nbytes)
                assert memory is not None
                records = self._records_in(memory, len(ids))
                if former is not None:
                    self._engine.gather(self._file, former[begin : begin + step], records).result()
                for leaf, value in values.items():
                    leaf.of(records).copy_(value[begin : begin + step])
                ring.sent([writes.start(self._engine.scatter, self._file, ids, records)])
            writes.result()
        finally:
            ring.release()

    def _read(self, leaf: _Leaf, slots: torch.Tensor) -> torch.Tensor:
        """Read one tensor of records. Keep it of all records, if it is read of most of them, and the budget allows."""
        with self._lock:
            kept = sum(each.nbytes for each in self._kept.values()) + self._pool.budget
            if (
                leaf not in self._kept
                and slots.numel() > len(self) // 2
                and kept + leaf.nbytes * len(self._places) <= self._budget
            ):
                self._kept[leaf] = self._load(self._places, [leaf])[leaf]
            if leaf in self._kept:
                found = self._kept[leaf][slots.flatten()]
            else:
                found = self._load(self._places[slots.flatten()], [leaf])[leaf]
        return found.view((*slots.shape, *leaf.shape))

    def _view(self, slots: torch.Tensor) -> Any:
        return self._record.filled(slots.shape, lambda leaf: _Column(self, leaf, slots))

    # torchrl's interface.

    @property
    def next_cursor(self) -> int:
        """The row after the one that was written last, where a writer that fills the buffer round robin goes on."""
        last = self._last_cursor_index
        return 0 if last is None else (int(last) + 1) % self._shape[0]

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write transitions. Blocks until they are written.

        Raises:
            TypeError: If the data has something else than dense tensors.
            ValueError: If its keys or shapes are not those of the storage.
            OSError: If the drive cannot be written, or has too little space. The slots have their former transitions, or some of
                the new ones.
        """
        data = _flip_list(data) if isinstance(data, list) else data
        tensors = _tensors_in(data)
        with self._lock:
            self._check_open()
            if not self.initialized:
                self._init(data if _is_int(cursor) else data[0])
            slots = self._slots[torch.as_tensor(cursor) if isinstance(cursor, range) else cursor]
            if tensors.keys() != self._record.leaves.keys():
                raise ValueError(f"transitions of this storage have {_named(self._record.leaves)}, got {_named(tensors)}")
            values = {}
            for key, leaf in self._record.leaves.items():
                if tensors[key].shape != (*slots.shape, *leaf.shape):
                    wanted = (*slots.shape, *leaf.shape)
                    raise ValueError(f"'{'.'.join(key)}' must have shape {wanted}, got {tuple(tensors[key].shape)}")
                values[leaf] = tensors[key].reshape(slots.numel(), *leaf.shape)
            self._store(slots.flatten(), values)
            if set_cursor:
                self._set_last_cursor(cursor)
                self._get_new_len(data, cursor)
            self._sets += 1
            if self._commit_every is not None and self._sets % self._commit_every == 0:
                self.commit()
        self._bump_mutation_revision()

    def get(self, index: Any) -> Any:
        """Read transitions. Blocks, except for a slice, whose tensors are read when they are used.

        Raises:
            RuntimeError: If nothing was ever written.
            IndexError: If there are no such transitions.
            OSError: If the drive cannot be read.
        """
        if not self.initialized:
            raise RuntimeError("Cannot get elements out of a non-initialized storage.")
        slots = self._slots[: self._len_along_dim0]
        slots = slots[torch.as_tensor(index) if isinstance(index, range) else index]
        if _is_sliced(index):
            return self._view(slots)
        found = self._load(self._places[slots.flatten()], list(self._record.leaves.values()))
        return self._record.filled(slots.shape, lambda leaf: found[leaf].view((*slots.shape, *leaf.shape)))

    def state_dict(self) -> dict[str, Any]:
        """Read all transitions into memory. Blocks. ``dumps`` needs no memory.

        Raises:
            MemoryError: If they take more than is available.
        """
        nbytes = len(self._places) * sum(leaf.nbytes for leaf in self._record.leaves.values()) if self.initialized else 0
        if nbytes > available_memory():
            raise MemoryError(f"a state_dict has all {size_for_people(nbytes)} in memory: use dumps()")
        state: dict[str, Any] = super().state_dict()
        if isinstance(state["_storage"], _Column):
            state["_storage"] = state["_storage"]._read()
        else:  # changed in place: an OrderedDict with an attribute
            state["_storage"].update(tree_map_only(_Column, _Column._read, dict(state["_storage"])))
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Write all transitions of a state_dict, also of torchrl's tensor storages. Blocks. Raises as :meth:`set`."""
        data = state_dict["_storage"]
        data = data if isinstance(data, torch.Tensor) else TensorDict().load_state_dict(data, strict=False)
        self._empty()
        if state_dict["initialized"]:
            self.set(range(len(data)), data, set_cursor=False)
        self._len = state_dict["_len"]

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an NVMeStorage cannot be pickled or sent to another process: open its directory there after close()")


def _named(keys: Iterable[Key]) -> str:
    return ", ".join(repr(".".join(key)) for key in keys)


def _parse_state(data: bytes) -> tuple[Mapping[str, Any], torch.Tensor]:
    """Return the fields and the map of a state. Raises ValueError if it is damaged."""
    head, body, places = data.split(b"\n", 2)
    fields = checked_fields(_KIND, head + b"\n" + body)
    if crc32(places) != fields.get("crc32") or not places or len(places) % 4:
        raise ValueError("the map does not match its checksum")
    return fields, torch.frombuffer(bytearray(places), dtype=torch.int32)
