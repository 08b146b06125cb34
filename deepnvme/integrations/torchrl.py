"""A storage for torchrl's replay buffers whose transitions are on the drive, and survive crashes.

    storage = NVMeStorage(1_000_000, "/mnt/nvme/replay")
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=256)
    buffer.writer.load_state_dict({"_cursor": storage.next_cursor})  # goes on where the last run has committed

The file of records has more places than the buffer has slots. A map in memory says which place has the record of each slot;
``docs/formats.md`` has the format.

1. A record is written to a free place, whether its slot is new or overwritten. The map changes when the write has ended. So a
   write that fails or is interrupted changes nothing. The next write waits for its transfers, since it takes the same places.
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
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deepnvme._interrupts import defer_interrupts
from deepnvme.drives.profiles import engine_for
from deepnvme.files.directory_lock import DirectoryLock, DirectoryOwner
from deepnvme.files.manifest import checked_fields, read_manifest, with_checksum
from deepnvme.files.preallocation import preallocate
from deepnvme.files.replacing import replace_durably, sync_directory, with_filename
from deepnvme.memory.alignment import padded
from deepnvme.memory.budget import MemoryBudget, budget_bytes
from deepnvme.memory.pool import BufferPool
from deepnvme.memory.tensor_bytes import check_storable, crc32, dtype_named, memory_of
from deepnvme.telemetry.descriptions import state_text
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


class _Leaf(NamedTuple):
    """One tensor of a record."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the record."""

    @property
    def nbytes(self) -> int:
        """Bytes of this tensor in one record."""
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, records: torch.Tensor) -> torch.Tensor:
        """Return the view of this tensor in records, given as bytes of shape (count, bytes of a record)."""
        part = records[:, self.offset : self.offset + self.nbytes]
        return part.view(self.dtype).view(len(records), *self.shape)


class _Transitions:
    """All transitions of a storage, as ``storage[:]`` returns them. Nothing is read before it is asked for.

    A key reads one tensor of all transitions; another index reads whole transitions.
    """

    def __init__(self, storage: NVMeStorage) -> None:
        self._storage = storage

    def get(self, key: str | Key, default: Any = None) -> Any:
        """Read one tensor of all transitions; return ``default`` if they have none with this key. Blocks."""
        try:
            return self[key]
        except KeyError:
            return default

    def __getitem__(self, index: Any) -> Any:
        return self._storage._column(_key(index)) if _is_key(index) else self._storage.get(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.set_(index, value)

    def __getattr__(self, name: str) -> Any:
        how = "read some, storage[index], or assign whole transitions, storage[index] = ..."
        raise AttributeError(f"'{name}' is not possible for all transitions of a drive at once: {how}")


def _key(name: str | Key) -> Key:
    return (name,) if isinstance(name, str) else name


def _is_key(index: Any) -> bool:
    return isinstance(index, (str, tuple)) and all(isinstance(part, str) for part in index)


def _is_leaf(kind: type) -> bool:
    return issubclass(kind, NonTensorStack) or not issubclass(kind, TensorDictBase)


def _contents(data: Any) -> tuple[dict[Key, torch.Tensor], dict[Key, TensorDictBase]]:
    """Return the tensors, and the nested TensorDicts, of a TensorDict. Raises TypeError for data that has no fixed size."""
    if not isinstance(data, TensorDictBase):
        raise TypeError(
            f"NVMeStorage stores TensorDicts, got {type(data).__name__}: give a TensorDict, such as its to_tensordict()"
        )
    tensors, nested = {}, {}
    for name, value in data.items(include_nested=True, is_leaf=_is_leaf):
        if not _is_leaf(type(value)):
            nested[_key(name)] = value
            continue
        check_storable(".".join(_key(name)), value)
        if value.is_nested:
            raise TypeError(f"'{name}' is a nested tensor, whose parts have no fixed size: pad it")
        tensors[_key(name)] = value
    return tensors, nested


def _parse_state(data: bytes) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the fields and the map of a state. Raises ValueError if it is damaged."""
    head, body, places = data.split(b"\n", 2)
    fields = checked_fields(_KIND, head + b"\n" + body)
    if crc32(places) != fields["crc32"]:
        raise ValueError("the map does not match its checksum")
    return fields, torch.frombuffer(bytearray(places), dtype=torch.int32)


def _corrupt(path: Path, reason: str) -> OSError:
    return OSError(errno.EBADMSG, f"it is damaged, or no state of a replay buffer: {reason}", os.fspath(path))


@contextlib.contextmanager
def _other_directory(storage: NVMeStorage, path: str | os.PathLike[str]) -> Iterator[Path]:
    """Lock a directory, unless it is the storage's, which is locked already. Yields its absolute path."""
    with contextlib.ExitStack() as stack:
        directory = Path(path).absolute()
        if directory != storage.path:
            stack.callback(DirectoryLock(directory, DirectoryOwner("NVMeStorage")).release)
        yield directory


def _copy(source: Path, target: Path) -> None:
    """Copy the files of a storage. After a crash in between, the target has no transitions."""
    (target / STATE).unlink(missing_ok=True)
    sync_directory(target)
    shutil.copyfile(source / RECORDS, target / RECORDS)
    with with_filename(target / RECORDS), open(target / RECORDS, "r+b") as file:
        os.fsync(file.fileno())
    replace_durably(target / STATE, (source / STATE).read_bytes())


class _Checkpointer(StorageCheckpointerBase):  # type: ignore[misc]  # whatever torchrl is
    """Copies the files of a storage: ``dumps`` after a commit, ``loads`` to go back to the commit in a directory."""

    def dumps(self, storage: NVMeStorage, path: str | os.PathLike[str]) -> None:
        """Commit, and copy the files into a directory, unless it is the storage's own. Blocks. Raises OSError."""
        if not storage.initialized:
            raise RuntimeError("Cannot save a non-initialized storage.")
        with storage._lock, _other_directory(storage, path) as target:
            storage.commit()
            if target != storage.path:
                _copy(storage.path, target)

    def loads(self, storage: NVMeStorage, path: str | os.PathLike[str]) -> None:
        """Take over the commit in a directory, after copying its files. Blocks. Raises OSError; the storage may then be empty."""
        with storage._lock, _other_directory(storage, path) as source:
            storage._check_open()
            state = storage._read_state(source)
            if source != storage.path:
                storage._writes.exception()  # of a write that was interrupted
                storage._empty()
                storage.initialized = False  # if copying fails
                _copy(source, storage.path)
            storage._start(*state)

    def register_save_hook(self, hook: Any) -> None:
        """Raise NotImplementedError: files are copied as they are."""
        raise NotImplementedError("NVMeStorage copies its files as they are: it calls no hooks")

    register_load_hook = register_save_hook


class NVMeStorage(TensorStorage):  # type: ignore[misc]
    """A storage of fixed-size transitions on the drive, for ``ReplayBuffer``, ``TensorDictReplayBuffer`` and their samplers.

    Each transition is one record of whole sectors, read and written by direct I/O. It is a TensorDict; tensors from devices are
    copied, and read into memory. All transitions have the same keys and shapes; values are cast as by ``copy_``.

    After a crash, or a power cut, the storage has the records of the last commit. A commit is made by :meth:`commit`, by
    :meth:`close`, by ``dumps``, with ``commit_every``, and before more than 1/16 of ``max_size`` transitions would be lost. Only
    an ``extend`` of more transitions than that is committed in parts.

    ``dumps`` commits, and copies the files to another directory; ``loads`` copies them back. With the storage's own directory
    nothing is copied, and ``loads`` goes back to the last commit. There is no ``state_dict``.

    A sample, and any other index, is read into tensors of its own. Only ``storage[:]`` is not: it reads what it is asked for, one
    tensor of all transitions by its key, or some transitions by an index. A tensor of all transitions is kept in memory once it
    was read, if the budget allows; so samplers of slices read their keys once. Whole transitions are assigned; ``set_at_``,
    ``set_`` and ``update_`` of the buffer are refused.

    Thread-safe. A forked child cannot use it, and it cannot be pickled.

    Args:
        max_size: Transitions that the buffer has room for; in several dimensions rounded up to whole rows, as torchrl does.
        path: Directory of the storage, created if it is missing, and locked. What a storage of the same size has committed
            there is opened. Its space is reserved when the first transition is written.
        memory_budget: Most bytes of pinned memory (at most 16 MiB, if records have at most 4 MiB) and of tensors kept in memory.
            The maps take 8 bytes for each transition in addition.
        ndim: Dimensions of the buffer, as for torchrl's ``LazyMemmapStorage``.
        commit_every: Commit after so many calls of :meth:`set`, that is of ``extend`` and ``add``.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Raises:
        ValueError: If a size is out of range, or the directory has a storage of another size.
        StoreLocked: If another storage has the directory.
        OSError: If a file cannot be read, or is damaged (EBADMSG).
    """

    _default_checkpointer = _Checkpointer
    supports_conditional_update = False

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
        self._budget = budget_bytes(memory_budget, "memory_budget")
        for name, value, least in (
            ("max_size", max_size, 1), ("ndim", ndim, 1), ("commit_every", commit_every, 1),
            ("memory_budget", self._budget, CHUNK),
        ):  # fmt: skip
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        super().__init__(None, max_size, ndim=ndim)
        self.path = Path(path).absolute()
        """The storage's directory."""
        self._commit_every, self._sets = commit_every, 0
        self._process, self._lock = os.getpid(), threading.RLock()
        self._closed = self._flush_failed = False
        self._writes = Transfers()
        with contextlib.ExitStack() as stack:
            stack.callback(DirectoryLock(self.path, DirectoryOwner("NVMeStorage")).release)
            self._engine = stack.enter_context(engine_for([self.path], aio_config))
            state = self._read_state(self.path) if (self.path / STATE).exists() else None
            self._file = self._engine.open(self.path / RECORDS, "r+" if state else "w+", whole_sectors=True)
            stack.callback(self._file.close)
            if state:
                self._start(*state)
            self._resources = stack.pop_all()

    # The files.

    def _read_state(self, directory: Path) -> tuple[dict[str, Any], torch.Tensor]:
        """Return what was committed last in a directory."""
        layout, places = read_manifest(directory / STATE, 4 * _MOST_PLACES, _parse_state, _corrupt)
        rows, *inner = layout["shape"]
        if len(inner) != self.ndim - 1 or rows != -(-self.max_size // math.prod(inner)):
            raise ValueError(f"'{directory}' has a storage of shape {layout['shape']}: open it with its max_size and ndim")
        if (directory / RECORDS).stat().st_size < layout["places"] * layout["record_bytes"]:
            raise _corrupt(directory / RECORDS, "the file was cut off")
        return layout, places

    def _init(self, data: TensorDictBase, dimensions: int) -> None:
        """Reserve the space for transitions like those in ``data``, which has so many dimensions of the buffer."""
        inner = data.batch_size[dimensions - self.ndim + 1 : dimensions]
        if len(inner) < self.ndim - 1 or 0 in inner:
            raise ValueError(f"a storage of {self.ndim} dimensions stores rows of {self.ndim - 1}, got shape {tuple(data.shape)}")
        leaves, offset = [], 0
        tensors, nested = _contents(data)
        for key, tensor in sorted(tensors.items()):
            offset = padded(offset, tensor.element_size())
            leaves.append((key, str(tensor.dtype).removeprefix("torch."), tensor.shape[dimensions:], offset))
            offset += tensor[(0,) * dimensions].nbytes
        record_bytes = padded(max(offset, 1), max(self._file.sector_size, _SECTOR))
        shape = (-(-self.max_size // math.prod(inner)), *inner)
        size = math.prod(shape)
        places = size + max(size // 16, min(size, CHUNK // record_bytes), 1)
        if places > _MOST_PLACES:
            raise ValueError(f"max_size must be at most {_MOST_PLACES * 16 // 17}, got {size}")
        with with_filename(self.path / RECORDS), open(self.path / RECORDS, "r+b") as file:
            remedy = "give a smaller max_size, or use another drive"
            preallocate(file.fileno(), 0, places * record_bytes, str(self.path / RECORDS), remedy)
        layout = {
            "shape": shape, "places": places, "record_bytes": record_bytes, "leaves": leaves,
            "nested": [(key, each.batch_size[dimensions:]) for key, each in sorted(nested.items())],
            "length": 0, "cursor": None,
        }  # fmt: skip
        self._start(layout, torch.full((size,), -1, dtype=torch.int32))

    def _start(self, layout: dict[str, Any], places: torch.Tensor) -> None:
        """Start with the transitions of a state."""
        self._layout, self._places = layout, places
        self._leaves = {
            tuple(key): _Leaf(dtype_named(dtype), tuple(shape), offset) for key, dtype, shape, offset in layout["leaves"]
        }
        self._nested = {tuple(key): tuple(sizes) for key, sizes in layout["nested"]}
        self._record_bytes: int = layout["record_bytes"]
        self._spare: int = layout["places"] - len(places)
        used = torch.zeros(layout["places"], dtype=torch.bool).index_fill_(0, places[places >= 0].long(), True)
        self._free = (~used).nonzero()[:, 0].int()
        self._released: list[torch.Tensor] = []  # places of the last commit, overwritten since
        self._uncommitted = 0
        self._kept: dict[Key, torch.Tensor] = {}  # tensors of all slots
        self._chunk = max(CHUNK, padded(self._record_bytes))
        self._pool = BufferPool(min(self._budget, _CHUNKS * self._chunk))
        self._total_shape_value = torch.Size(layout["shape"])  # which torchrl reads
        self._slots = torch.arange(len(places), dtype=torch.int32).view(self._total_shape_value)  # indexed as the buffer is
        self.max_size = len(places)
        self._storage, self.initialized = _Transitions(self), True
        self._len = layout["length"]
        self._set_last_cursor(layout["cursor"])

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
            state = {**self._layout, "length": len(self), "cursor": self._last_cursor_index, "crc32": crc32(memory)}
            replace_durably(self.path / STATE, with_checksum(_KIND, state) + bytes(memory))
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

    def _load(self, slots: torch.Tensor, keys: Iterable[Key]) -> dict[Key, torch.Tensor]:
        """Read tensors of the records of these slots."""
        leaves = {key: self._leaves[key] for key in keys}
        found = {key: torch.empty(len(slots), *leaf.shape, dtype=leaf.dtype) for key, leaf in leaves.items()}
        step = self._chunk // self._record_bytes

        def start(begin: int, chunk: torch.Tensor) -> Any:
            """Start reading the records of some places into a chunk."""
            ids = places[begin : begin + step]
            return self._engine.gather(self._file, ids, self._records_in(chunk, len(ids)))

        with self._lock:
            self._check_open(writing=False)
            places = self._places[slots]
            if bool((places < 0).any()):
                raise IndexError("some of these transitions were never written")
            for begin, chunk in read_ahead(range(0, len(places), step), start, self._pool, self._chunk):
                end = min(begin + step, len(places))
                records = self._records_in(chunk, end - begin)
                for key, leaf in leaves.items():
                    found[key][begin:end].copy_(leaf.of(records))
        return found

    def _records_in(self, memory: torch.Tensor, count: int) -> torch.Tensor:
        return memory[: count * self._record_bytes].view(count, self._record_bytes)

    def _column(self, key: Key) -> torch.Tensor:
        """Read one tensor of all transitions. It is kept, and read from memory the next time, if the budget allows."""
        leaf = self._leaves[key]
        with self._lock:
            column = self._kept.get(key)
            if column is None:
                written = (self._places >= 0).nonzero()[:, 0]
                column = torch.zeros(len(self._places), *leaf.shape, dtype=leaf.dtype)
                column[written] = self._load(written, [key])[key]
                if column.nbytes + sum(each.nbytes for each in self._kept.values()) + self._pool.budget <= self._budget:
                    self._kept[key] = column
            return column.view(*self._slots.shape, *leaf.shape)[: self._len_along_dim0].clone()

    def _store(self, slots: torch.Tensor, values: Mapping[Key, torch.Tensor]) -> None:
        """Write records to free places, and then change the map."""
        for begin in range(0, len(slots), self._spare):
            part = slots[begin : begin + self._spare]
            parts = {key: value[begin : begin + self._spare] for key, value in values.items()}
            if self._uncommitted + len(part) > self._spare:
                self.commit()
            places = self._free[: len(part)]
            self._write(places, parts)
            with defer_interrupts():
                former = self._places[part]
                self._free = self._free[len(part) :]
                self._released.append(former[former >= 0])
                self._places[part] = places
                self._uncommitted += len(part)
                for key, column in self._kept.items():
                    column[part] = parts[key].to(column)

    def _write(self, places: torch.Tensor, values: Mapping[Key, torch.Tensor]) -> None:
        self._writes.exception()  # a write that has failed, or was interrupted, may still write to these places
        self._writes = Transfers()
        step = self._chunk // self._record_bytes
        ring = ChunkRing(self._pool, self._chunk, wait=True)
        try:
            for begin in range(0, len(places), step):
                ids = places[begin : begin + step]
                memory = ring.memory(0, len(ids) * self._record_bytes)
                assert memory is not None
                records = self._records_in(memory, len(ids))
                for key, leaf in self._leaves.items():
                    leaf.of(records).copy_(values[key][begin : begin + step])
                with defer_interrupts():
                    ring.sent([self._writes.start(self._engine.scatter, self._file, ids, records)])
            self._writes.result()
        finally:
            ring.release()

    # torchrl's interface.

    @property
    def next_cursor(self) -> int:
        """The row after the one that was written last, where a writer that fills the buffer round robin goes on."""
        last = self._last_cursor_index
        return 0 if last is None else (int(last) + 1) % len(self._slots)

    def _slots_at(self, index: Any, rows: int | None = None) -> torch.Tensor:
        """Return the numbers of the slots at an index of the buffer, or of its first rows."""
        at = index if isinstance(index, (slice, tuple)) else torch.as_tensor(index, device="cpu")
        return self._slots[:rows][at]

    @torch.no_grad()
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write transitions. Blocks until they are written.

        Raises:
            TypeError: If the data is no TensorDict, or has something else than dense tensors.
            ValueError: If its keys or shapes are not those of the storage, or an index occurs twice.
            OSError: If the drive cannot be written, or has too little space. The slots have their former transitions, or some of
                the new ones.
        """
        data = torch.stack(data) if isinstance(data, list) else data
        tensors, _ = _contents(data)
        with self._lock:
            self._check_open()
            if not self.initialized:
                self._init(data, self.ndim - _is_int(cursor))
            slots = self._slots_at(cursor)
            wanted = {".".join(key): (*slots.shape, *leaf.shape) for key, leaf in self._leaves.items()}
            found = {".".join(key): tuple(tensor.shape) for key, tensor in tensors.items()}
            if found != wanted:
                raise ValueError(f"the transitions must have tensors of the shapes {wanted}, got {found}")
            if len(slots.unique()) < slots.numel():  # type: ignore[no-untyped-call]
                raise ValueError("an index occurs twice: write at most max_size transitions at a time, each to another index")
            values = {key: tensors[key].reshape(slots.numel(), *leaf.shape) for key, leaf in self._leaves.items()}
            self._store(slots.flatten(), values)
            if set_cursor:
                self._set_last_cursor(cursor)
                self._get_new_len(data, cursor)
            self._sets += 1
            if self._commit_every is not None and self._sets % self._commit_every == 0:
                self.commit()
        self._bump_mutation_revision()

    def get(self, index: Any) -> Any:
        """Read transitions. Blocks, except for a slice of all transitions, which are read when they are used.

        Raises:
            RuntimeError: If nothing was ever written.
            IndexError: If there are no such transitions.
            OSError: If the drive cannot be read.
        """
        if not self.initialized:
            raise RuntimeError("Cannot get elements out of a non-initialized storage.")
        if all(isinstance(part, slice) and part == slice(None) for part in (index if isinstance(index, tuple) else (index,))):
            return self._storage
        slots = self._slots_at(index, self._len_along_dim0)
        tensors = self._load(slots.flatten(), self._leaves)
        found = TensorDict(batch_size=slots.shape, device="cpu")
        for key, sizes in self._nested.items():
            found[key] = TensorDict(batch_size=(*slots.shape, *sizes), device="cpu")
        for key, tensor in tensors.items():
            found[key] = tensor.view(*slots.shape, *tensor.shape[1:])
        return found

    def state_dict(self, *_: Any) -> dict[str, Any]:
        """Raise NotImplementedError, and say what to call instead."""
        raise NotImplementedError("a state_dict would have all transitions in memory: use dumps() and loads(), or commit()")

    load_state_dict = state_dict

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an NVMeStorage cannot be pickled or sent to another process: open its directory there after close()")
