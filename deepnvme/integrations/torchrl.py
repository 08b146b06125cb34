"""A storage for torchrl's replay buffers whose transitions are on the drive, and survive crashes.

    storage = NVMeStorage(1_000_000, "/mnt/nvme/replay")
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=256)
    buffer.writer.load_state_dict({"_cursor": storage.next_cursor})  # goes on where the last run has committed

The file of records has more places than the buffer has slots. A map in memory says which place has the record of each slot;
``docs/formats.md`` has the format.

1. A commit flushes the records, then replaces the file of the map. It finds as many free places, which the map does not name, as
   the file has more places than there are slots.
2. A record is written to one of these free places, whether its slot is new or overwritten, and the map changes when the write
   has ended. Until the next commit no place is used again. So the records of the last commit are whole at any time, and a write
   that fails, is interrupted, or is still in progress changes nothing.
3. A write that needs more places than are still free commits first. Only one of more records than a commit finds places for is
   itself committed in parts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from deepnvme._interrupts import defer_interrupts
from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.profiles import engine_for
from deepnvme.engine import Future
from deepnvme.files.directory_lock import DirectoryLock, DirectoryOwner
from deepnvme.files.manifest import checked_fields, read_manifest, with_checksum
from deepnvme.files.preallocation import reserve
from deepnvme.files.replacing import replace_durably, sync_directory
from deepnvme.memory.alignment import padded
from deepnvme.memory.budget import MemoryBudget, budget_bytes
from deepnvme.memory.pool import BufferPool
from deepnvme.memory.tensor_bytes import check_storable, crc32, dtype_named, memory_of
from deepnvme.tables.layout import Column
from deepnvme.transfer.gather import CHUNK, CHUNKS
from deepnvme.transfer.scatter import transfer_ahead

from ._serving import require_version

TESTED = ("0.14.1",)
"""Versions of torchrl that the tests ran with."""

try:
    import torchrl
    from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
except ImportError as error:
    what = f"needs torchrl {TESTED[-1]} (pip install torchrl=={TESTED[-1]})"
    raise ImportError(f"deepnvme.integrations.torchrl {what}: {error}") from error
require_version("torchrl", torchrl.__version__, TESTED)

from torchrl.data.replay_buffers.storages import TensorStorage  # noqa: E402
from torchrl.data.replay_buffers.utils import _is_int  # noqa: E402

__all__ = ["NVMeStorage"]

RECORDS, STATE = "deepnvme-replay.records", "deepnvme-replay.state"
"""Names of the files."""
_KIND = ("deepnvme replay", 2)
_SEPARATOR = "::"
"""Joins the keys of nested TensorDicts."""
_MOST_SLOTS = (1 << 31) // 17 * 16
"""The map has int32 numbers of places, and there is a place more for each 16 slots."""


def _flattened(data: Any) -> TensorDictBase:
    """Return a TensorDict without nested ones.

    Raises TypeError for other data, and unless it has dense tensors only; ValueError for a key that looks like a nested one.
    """
    if not isinstance(data, TensorDictBase):
        raise TypeError(f"NVMeStorage stores TensorDicts, got {type(data).__name__}: give what its to_tensordict() returns")
    if any(_SEPARATOR in part for key in data.keys(True) for part in ([key] if isinstance(key, str) else key)):
        raise ValueError(f"keys of transitions must not have '{_SEPARATOR}', which joins nested keys: {list(data.keys(True))}")
    flat = data.detach().flatten_keys(_SEPARATOR, is_leaf=lambda kind: kind not in (TensorDict, LazyStackedTensorDict))
    for name, value in flat.items():
        check_storable(name, value)
    return flat


class NVMeStorage(TensorStorage, contextlib.AbstractContextManager["NVMeStorage"]):  # type: ignore[misc]  # whatever torchrl is
    """A storage of fixed-size transitions on the drive, for ``ReplayBuffer``, ``TensorDictReplayBuffer`` and their samplers.

    Each transition is one record of whole sectors, read and written by direct I/O. It is a TensorDict; tensors from devices are
    copied, and read into memory. All transitions have the keys and shapes of the first; further keys are ignored, and values cast
    as by ``copy_``.

    After a crash, or a power cut, the storage has the records of the last commit. A commit is made by :meth:`commit`, by
    :meth:`close`, by ``dumps``, with ``commit_every``, and before more than 1/16 of ``max_size`` transitions would be lost. Only
    an ``extend`` of more transitions than that is committed in parts.

    ``dumps`` commits, and copies the files to another directory; ``loads`` copies them back. With the storage's own directory
    nothing is copied, and ``loads`` goes back to the last commit. There is no ``state_dict``.

    A sample, and any other index, is read into tensors of its own. Only ``storage[:]`` is not: it is the storage itself, which
    reads some transitions by an index, or one tensor of all transitions by its key, ``storage["next", "reward"]``. Such a tensor
    is kept in memory once it was read, if the budget allows; so samplers of slices read their keys once. Whole transitions are
    assigned; ``set_at_``, ``set_`` and ``update_`` of the buffer are refused.

    Thread-safe. A forked child cannot use it, and it cannot be pickled.

    Args:
        max_size: Transitions that the buffer has room for; in several dimensions rounded up to whole rows, as torchrl does.
        path: Directory of the storage, created if it is missing, and locked. What a storage of the same size has committed
            there is opened. Its space is reserved when the first transition is written.
        memory_budget: Most bytes of pinned memory (at most 16 MiB, if records have at most 4 MiB) and of tensors kept in memory.
            The maps take 8 bytes for each transition in addition.
        ndim: Dimensions of the buffer, as for torchrl's ``LazyMemmapStorage``.
        commit_every: Commit after so many calls of :meth:`set`, that is of ``extend`` and ``add``; 0 for no such schedule.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Raises:
        ValueError: If a number is out of range, or the directory has a storage of another size.
        StoreLocked: If another storage has the directory.
        OSError: If a file cannot be read, or is damaged (EBADMSG).
    """

    supports_conditional_update = False

    def __init__(
        self, max_size: int, path: str | os.PathLike[str], *, memory_budget: MemoryBudget = "64MiB", ndim: int = 1,
        commit_every: int = 0, aio_config: AioConfig | None = None,
    ) -> None:  # fmt: skip
        self._budget = budget_bytes(memory_budget, "memory_budget")
        if not (1 <= max_size <= _MOST_SLOTS and ndim >= 1 and commit_every >= 0):
            least = f"max_size must be in [1, {_MOST_SLOTS}], ndim at least 1, and commit_every not negative"
            raise ValueError(f"{least}, got {max_size}, {ndim} and {commit_every}")
        super().__init__(None, max_size, ndim=ndim)
        self.path = Path(path).absolute()
        """The storage's directory."""
        self._commit_every = commit_every
        self._lock = threading.RLock()
        with contextlib.ExitStack() as stack:
            stack.enter_context(DirectoryLock(self.path, DirectoryOwner("NVMeStorage")))
            self._engine = stack.enter_context(engine_for([self.path], aio_config))
            self._file = stack.enter_context(self._engine.open(self.path / RECORDS, "rw", whole_sectors=True))
            if (self.path / STATE).exists():
                self._start(*self._read_state(self.path))
            self._resources = stack.pop_all()

    # The files.

    def _read_state(self, directory: Path) -> tuple[dict[str, Any], torch.Tensor]:
        """Return what was committed last in a directory: the fields of the state, and the map."""

        def parse(data: bytes) -> tuple[dict[str, Any], torch.Tensor]:
            """Return the state in the bytes of its file."""
            head, body, places = data.split(b"\n", 2)
            layout = checked_fields(_KIND, head + b"\n" + body)
            if crc32(places) != layout["crc32"]:
                raise ValueError("the map does not match its checksum")
            if (directory / RECORDS).stat().st_size < layout["places"] * layout["record_bytes"]:
                raise ValueError(f"'{RECORDS}' was cut off")
            return layout, torch.frombuffer(bytearray(places), dtype=torch.int32)

        def corrupt(path: Path, reason: str) -> OSError:
            """Return the error for a damaged state."""
            return OSError(errno.EBADMSG, f"it is damaged, or no state of a replay buffer: {reason}", os.fspath(path))

        layout, places = read_manifest(directory / STATE, 1 << 40, parse, corrupt)
        rows, *inner = layout["shape"]
        if len(inner) != self.ndim - 1 or rows != -(-self.max_size // torch.Size(inner).numel()):
            raise ValueError(f"'{directory}' has a storage of shape {layout['shape']}: open it with its max_size and ndim")
        return layout, places

    def _init(self, data: TensorDictBase, flat: TensorDictBase, dimensions: int) -> None:
        """Reserve the space for transitions like those in ``data``, which has so many dimensions of the buffer."""
        inner = data.batch_size[dimensions - self.ndim + 1 : dimensions]
        if len(inner) < self.ndim - 1 or 0 in inner:
            raise ValueError(f"a storage of {self.ndim} dimensions stores rows of {self.ndim - 1}, got shape {tuple(data.shape)}")
        leaves, end = [], 0
        for name, tensor in flat.items():
            shape, offset = tensor.shape[dimensions:], padded(end, tensor.itemsize)
            leaves.append((name, str(tensor.dtype).removeprefix("torch."), shape, offset))
            end = offset + shape.numel() * tensor.itemsize
        record_bytes = padded(max(end, 1), max(self._file.sector_size, 512))  # 512 also aligns tensors of all dtypes
        shape = torch.Size((-(-self.max_size // inner.numel()), *inner))
        places = shape.numel() + max(shape.numel() // 16, min(shape.numel(), CHUNK // record_bytes), 1)
        reserve(self.path / RECORDS, places * record_bytes, "give a smaller max_size, or use another drive")
        nested = [(k, v.batch_size[dimensions:]) for k, v in data.items(True) if getattr(v, "batch_dims", 0) > data.batch_dims]
        layout = {"shape": shape, "places": places, "record_bytes": record_bytes, "leaves": leaves, "nested": nested}
        self._start(layout, torch.full((shape.numel(),), -1, dtype=torch.int32))

    def _start(self, layout: dict[str, Any], places: torch.Tensor) -> None:
        """Start with the transitions of a state."""
        self._layout, self._places = layout, places
        leaves = [Column(name, dtype_named(dtype), tuple(shape), offset) for name, dtype, shape, offset in layout["leaves"]]
        self._columns = {column.name: column for column in leaves}
        self._record_bytes: int = layout["record_bytes"]
        self._find_free_places()
        self._kept: dict[str, torch.Tensor] = {}  # tensors of all slots
        self._chunk = max(CHUNK, padded(self._record_bytes))
        self._pool = BufferPool(min(self._budget, CHUNKS * self._chunk))
        self._total_shape_value = torch.Size(layout["shape"])  # which torchrl reads
        self._slots = torch.arange(len(places), dtype=torch.int32).view(self._total_shape_value)  # indexed as the buffer is
        self.max_size = len(places)
        self._storage, self.initialized = self, True
        self._len = layout.get("length", 0)
        self._set_last_cursor(layout.get("cursor"))

    def _find_free_places(self) -> None:
        """Find the places that may be written before the next commit: as many as there are more places than slots."""
        free = torch.ones(self._layout["places"], dtype=torch.bool)
        free[self._places[self._places >= 0].long()] = False
        self._spare = len(free) - len(self._places)
        self._free = free.nonzero()[: self._spare, 0].int()

    def commit(self) -> None:
        """Make the records so far those that are there after a crash. Blocks until they are on stable storage.

        Raises:
            OSError: If the drive cannot be written. The last commit remains. If records could not be flushed, the storage is
                closed: open it again.
        """
        with self._lock:
            if not self.initialized:
                return
            self._flush()
            memory = memory_of(self._places.view(torch.uint8))
            state = {**self._layout, "length": len(self), "cursor": self._last_cursor_index, "crc32": crc32(memory)}
            replace_durably(self.path / STATE, with_checksum(_KIND, state) + bytes(memory))
            self._find_free_places()

    def _flush(self) -> None:
        """Flush the records. Blocks. All writes have ended then, those that were interrupted, too."""
        try:
            self._engine.fsync(self._file).result()
        except OSError:
            self._resources.close()  # the system forgets what it could not write, so another fsync would succeed
            raise

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Commit, and copy the files into a directory, unless it is the storage's own. Blocks.

        Raises:
            RuntimeError: If nothing was ever written.
            StoreLocked: If a storage has the directory.
            OSError: If a file cannot be written.
        """
        if not self.initialized:
            raise RuntimeError("Cannot save a non-initialized storage.")
        with self._lock:
            self.commit()
            self._copy(self.path, Path(path).absolute())

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Go back to the commit in a directory, after copying its files unless it is the storage's own. Blocks.

        Raises:
            ValueError: If the directory has a storage of another size.
            StoreLocked: If a storage has the directory.
            OSError: If a file cannot be read or written, or is damaged (EBADMSG). If copying failed, the storage is empty.
        """
        with self._lock:
            self._flush()
            self._copy(Path(path).absolute(), self.path)
            self._start(*self._read_state(self.path))
        self._bump_mutation_revision()

    def _copy(self, source: Path, target: Path) -> None:
        """Copy the last commit from the storage's directory to another one, or back. Nothing to do if they are the same.

        After a crash in between, the target has no transitions.
        """
        if source == target:
            return
        with DirectoryLock(target if source == self.path else source, DirectoryOwner("NVMeStorage")):
            self._read_state(source)  # refuses a storage of another size before anything is lost
            self.initialized = source == self.path  # else not before it starts with what is copied
            (target / STATE).unlink(missing_ok=True)
            sync_directory(target)
            shutil.copyfile(source / RECORDS, target / RECORDS)
            self._engine.fsync(target / RECORDS).result()
            replace_durably(target / STATE, (source / STATE).read_bytes())

    def close(self) -> None:
        """Commit, and release the directory. Idempotent. Raises OSError as :meth:`commit`; the storage is closed all the same."""
        with self._lock, self._resources:
            if not self._engine.closed:
                self.commit()

    def __exit__(self, *_: object) -> None:
        self.close()

    # Records.

    def _transfer(self, count: int, start: Callable[[slice, torch.Tensor], Future]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Transfer so many records through chunks of memory, some ahead of those that the caller is using.

        Args:
            count: Number of records.
            start: Starts to transfer a range of them, from or into memory of shape (records, bytes of a record).

        Yields:
            Each range, in order, with its memory, when its transfer has ended.
        """

        def records(part: slice, chunk: torch.Tensor) -> torch.Tensor:
            """Return the memory of these records in a chunk."""
            return chunk[: (part.stop - part.start) * self._record_bytes].view(-1, self._record_bytes)

        step = self._chunk // self._record_bytes
        parts = [slice(begin, min(begin + step, count)) for begin in range(0, count, step)]
        moved = transfer_ahead(parts, lambda part, chunk: start(part, records(part, chunk)), self._pool, self._chunk)
        yield from ((part, records(part, chunk)) for part, chunk in moved)

    def _load(self, slots: torch.Tensor, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read tensors of the records of these slots, each of shape ``slots.shape`` followed by that of the tensor."""
        columns = [self._columns[name] for name in names]
        found = [torch.empty(slots.numel(), *column.shape, dtype=column.dtype) for column in columns]
        with self._lock:
            ids = self._places[slots.flatten()]
            if bool((ids < 0).any()):
                raise IndexError("some of these transitions were never written")
            for part, records in self._transfer(len(ids), lambda part, out: self._engine.gather(self._file, ids[part], out)):
                for column, tensor in zip(columns, found, strict=True):
                    tensor[part].copy_(column.of(records))
        return {each.name: tensor.view((*slots.shape, *each.shape)) for each, tensor in zip(columns, found, strict=True)}

    def _column(self, name: str) -> torch.Tensor:
        """Read one tensor of all transitions. It is kept, and read from memory the next time, if the budget allows."""
        with self._lock:
            rows = self._slots[: self._len_along_dim0]
            if name in self._kept:
                return self._kept[name][: len(rows)].clone()
            column = self._load(rows, [name])[name]
            kept = sum(each.nbytes for each in self._kept.values()) + self._pool.budget
            if kept + len(self._places) * self._columns[name].nbytes <= self._budget:
                self._kept[name] = torch.cat([column, column.new_zeros(len(self._slots) - len(rows), *column.shape[1:])])
            return column

    def _store(self, slots: torch.Tensor, values: TensorDictBase) -> None:
        """Write records, not more than there are spare places, and then change the map."""

        def start(part: slice, records: torch.Tensor) -> Future:
            """Start writing some of the records."""
            for name, column in self._columns.items():
                column.of(records).copy_(values[name][part])
            return self._engine.scatter(self._file, places[part], records)

        if len(slots) > len(self._free):
            self.commit()
        places, self._free = self._free.tensor_split([len(slots)])
        for _ in self._transfer(len(slots), start):
            pass
        with defer_interrupts():
            self._places[slots] = places
            for name, column in self._kept.items():
                column.flatten(0, self.ndim - 1)[slots] = values[name].to(column)

    # torchrl's interface.

    @property
    def next_cursor(self) -> int:
        """The row after the one that was written last, where a writer that fills the buffer round robin goes on."""
        return 0 if self._last_cursor_index is None else (self._last_cursor_index + 1) % len(self._slots)

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write transitions. Blocks until they are written.

        Raises:
            TypeError: If the data is no TensorDict, or has something else than dense tensors.
            ValueError: If a key is missing or has "::", a shape is another one than the storage's, or an index occurs twice.
            OSError: If the drive cannot be written, or has too little space. The slots have their former transitions, or some of
                the new ones.
        """
        data = torch.stack(data) if isinstance(data, list) else data
        flat = _flattened(data)
        with self._lock:
            if not self.initialized:
                self._init(data, flat, self.ndim - _is_int(cursor))
            slots = self._slots[cursor]
            wanted = {name: (*slots.shape, *column.shape) for name, column in self._columns.items()}
            if {name: tensor.shape for name, tensor in flat.select(*wanted, strict=False).items()} != wanted:
                raise ValueError(f"the transitions must have tensors of the shapes {wanted}, got {flat}")
            if len(slots.unique()) < slots.numel():  # type: ignore[no-untyped-call]
                raise ValueError("an index occurs twice: write at most max_size transitions at a time, each to another index")
            rows = flat.flatten(0, slots.ndim - 1) if slots.ndim else flat.unsqueeze(0)
            for part, values in zip(torch.split(slots.flatten(), self._spare), rows.split(self._spare), strict=True):
                self._store(part, values)
            if set_cursor:
                self._set_last_cursor(cursor)
                self._get_new_len(data, cursor)
            self._bump_mutation_revision()
            if self._commit_every and self._mutation_revision % self._commit_every == 0:
                self.commit()

    def __getitem__(self, index: Any) -> Any:
        """Read transitions; or, given a key, one tensor of all transitions. A slice of all transitions is the storage itself.

        Blocks while something is read.

        Raises:
            RuntimeError: If nothing was ever written.
            IndexError: If there are no such transitions.
            KeyError: If no tensor has this key.
            OSError: If the drive cannot be read.
        """
        if not self.initialized:
            raise RuntimeError("Cannot get elements out of a non-initialized storage.")
        if all(isinstance(part, slice) and part == slice(None) for part in (index if isinstance(index, tuple) else [index])):
            return self
        if isinstance(index, (str, tuple)) and all(isinstance(part, str) for part in index):
            return self._column(index if isinstance(index, str) else _SEPARATOR.join(index))
        slots = self._slots[: self._len_along_dim0][index]
        found = TensorDict(self._load(slots, self._columns), slots.shape, device="cpu").unflatten_keys(_SEPARATOR)
        for key, sizes in self._layout["nested"]:
            found[key if isinstance(key, str) else tuple(key)].batch_size = (*slots.shape, *sizes)
        return found

    get = Mapping.get  # torchrl's samplers also ask for keys that transitions lack

    def _refuse(self, *_: Any, **__: Any) -> Any:
        """Raise NotImplementedError, and say what to call instead."""
        raise NotImplementedError("not possible on a drive: assign whole transitions, storage[index] = ..., or use dumps()")

    state_dict = load_state_dict = register_save_hook = register_load_hook = __getstate__ = _refuse
    set_ = set_at_ = update_ = transpose = _refuse  # torchrl calls these of storage[:]
