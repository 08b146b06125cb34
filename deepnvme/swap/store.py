"""Named tensors on drives."""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from deepnvme.engine import Engine

from . import memory
from .batches import Buffer, Writing, neighbours, pieces
from .buffers import BufferPool, buffer_pool
from .contents import CorruptTensor, Entry, TensorInfo, Version
from .directories import Directories, Directory, weights_of
from .extents import padded
from .futures import Failure, Operation, StoreFuture
from .space import Parts, Space

__all__ = ["CorruptTensor", "TensorInfo", "TensorStore"]

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")

_SWEPT_FROM = 64
"""Operations that nobody has looked at, before those that have ended are let go."""


class _Put(NamedTuple):
    name: str
    tensor: torch.Tensor
    checksums: tuple[int, ...] | None


class TensorStore:
    """Tensors under names, in few preallocated files in one or several directories.

    >>> with deepnvme.swap.TensorStore("/mnt/nvme/swap") as store:
    ...     store.put("weights", tensor).result()
    ...     tensor = store.get("weights").result()

    ``directories``: a path, several, or weights by path. Tensors of 4 MiB or more are split over all in proportion to the
    weights, which are equal by default; smaller ones lie whole where there is least. Directories are made if missing. Each is
    locked to one store, and what a dead process has left in it is removed.

    ``persist``: keep the files. What :meth:`commit` has published is there when the store is opened again, with the same
    directories in any order, after a crash too; what was put, replaced or deleted since is not. Otherwise the files are removed
    by :meth:`close`, when the store is dropped, and at exit.

    ``checksum``: keep the CRC-32 of each tensor, 0.4 s of one core for each GB, and verify it when it is got.
    ``engine``, ``pool``: to share among stores; None for an engine of its own, and for the process's buffer pool.

    Transfers of one name happen in the order of the calls: a call that conflicts with one under way waits for that; reads of
    one name, and all of different names, are independent. A put that fails leaves what a persisted store had under the name.
    Elsewhere the name is damaged: getting it raises the error until it is put again. A directory that is removed meanwhile keeps
    its space until the store is closed, and the store works on; only :meth:`commit` raises.

    Raises StoreLocked naming the owner of a directory; FileExistsError for one with a persisted store, without ``persist``;
    CorruptManifest, and ValueError for directories that are not those of one store; OSError from making and opening files.
    Thread-safe. In a forked child every method raises RuntimeError, and its end leaves the files alone.
    """

    def __init__(
        self,
        directories: Directory | Sequence[Directory] | Mapping[Directory, float],
        *,
        persist: bool = False,
        checksum: bool = False,
        engine: Engine | None = None,
        pool: BufferPool | None = None,
    ) -> None:
        weights = weights_of(directories)
        self._process = os.getpid()
        self._persist = persist
        self._checksum = checksum
        self._pool = pool
        self._engine = Engine() if engine is None else engine
        self._own_engine = engine is None
        self._lock = threading.RLock()
        self._closed = False
        self._entries: dict[str, Entry] = {}
        self._under_way: set[Operation] = set()
        self._swept = _SWEPT_FROM
        self._failed: list[Operation] = []
        self._retired: list[Parts] = []  # not the store's any more, but the last commit's
        with contextlib.ExitStack() as undo:
            if self._own_engine:
                undo.callback(self._engine.close)
            self._directories = Directories(weights, persist, self._engine)
            undo.callback(self._directories.leave)
            self._space = Space(self._directories.files)
            self._restore()
            undo.pop_all()
        self._paths = [file.path for file in self._directories.files]
        self._handles = [file.file for file in self._directories.files]

    # What is there.

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def names(self) -> list[str]:
        """In the order in which they were first put."""
        with self._locked():
            return list(self._entries)

    def info(self, name: str) -> TensorInfo:
        """What the name holds once all that is under way has ended well. Raises KeyError."""
        with self._locked():
            return self._entry(name).newest.info

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        with self._locked():
            return sum(entry.newest.info.nbytes for entry in self._entries.values())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the files."""
        with self._locked():
            return sum(file.capacity for file in self._space.files)

    # Transfers.

    def put(self, name: str, tensor: torch.Tensor) -> StoreFuture[int]:
        """Start storing a tensor, in place of what the name held; return at once. The future's result: bytes.

        ``tensor``: on the CPU or a CUDA device, any dtype and shape; one that is not contiguous is copied first. Kept alive, and
        not to be changed, until the future is done. A name of as many bytes is overwritten in place, where the store does not
        persist: that is faster than new space. ``name``: any string.

        Raises TypeError for what is no dense tensor with data, OSError (ENOSPC) naming the directory if there is no room, and
        leaves the name as it was then; what fails later is raised by ``Future.result``.
        """
        return self.put_many({name: tensor})

    def put_many(self, tensors: Mapping[str, torch.Tensor]) -> StoreFuture[int]:
        """Like :meth:`put` for each, with one future, in few requests.

        New names are laid side by side in the order given. Neighbours in the file that are neighbours in memory too are one
        request; small ones are copied into leased buffers as they lie in the file. Blocks while 16 MiB of these are under way.
        """
        pending = []
        for name, tensor in tensors.items():
            if not isinstance(name, str):
                raise TypeError(f"a name must be a str, got {name!r}")
            dense = memory.storable(name, tensor)
            sums = memory.checksums(dense, self._space.lengths(dense.nbytes)) if self._checksum else None
            pending.append(_Put(name, dense, sums))
        return self._in_turn(list(tensors), lambda: self._put(pending), writing=True)

    def get(self, name: str, out: torch.Tensor | None = None) -> StoreFuture[torch.Tensor]:
        """Start reading a tensor; return at once. The future's result: the tensor, in new memory on the CPU, or over ``out``.

        ``out``: contiguous, as many bytes, of any dtype and device, not to be touched until the future is done. Memory of a lease
        is read in place. Raises KeyError, ValueError for another ``out``, and OSError for a damaged name; what fails later is
        raised by ``Future.result``, CorruptTensor too.
        """
        if out is None:
            return self._in_turn([name], lambda: self._get([name], lambda tensors: tensors[name]))
        given = out
        return self._in_turn([name], lambda: self._get_into(name, given))

    def get_many(self, names: Iterable[str]) -> StoreFuture[dict[str, torch.Tensor]]:
        """Like :meth:`get` for each, with one future, in few requests. Its result: the tensors by name, in the order given.

        Neighbours in the file share memory, of up to 16 MiB, which lives for as long as one of them.
        """
        if isinstance(names, str):
            raise TypeError(f"get_many needs several names, got one, '{names}': use get")
        wanted = list(dict.fromkeys(names))
        return self._in_turn(wanted, lambda: self._get(wanted, lambda tensors: tensors))

    def delete(self, name: str) -> StoreFuture[int]:
        """Remove a name, after all that is under way with it. The future's result: its bytes. Raises KeyError."""

        def start() -> StoreFuture[int]:
            entry = self._entry(name)
            del self._entries[name]
            self._release(entry.newest)
            nbytes = entry.newest.info.nbytes
            return StoreFuture(self._begin(self._ended), nbytes, lambda: nbytes)

        return self._in_turn([name], start, writing=True)

    def map(self, name: str) -> torch.Tensor:
        """The tensor as a private mapping of the files: a page is read when it is touched, and copied when it is written to.

        Valid until the name is next put or deleted. Waits for a put under way. The pages come through the page cache, one after
        the other: to read all of a tensor, :meth:`get` is faster. Raises KeyError, and OSError for a damaged name.
        """
        info = self.info(name)
        return self.map_ranges([(name, 0, info.nbytes)]).view(info.dtype).view(info.shape)

    def map_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> torch.Tensor:
        """Bytes of several tensors, each (name, first byte, count), as one tensor of bytes, mapped like :meth:`map`.

        First bytes are multiples of 4096, and so are all counts but the last.
        """

        def start() -> torch.Tensor:
            parts = []
            for name, first, count in ranges:
                for part in self._whole(name).newest.parts:
                    inside = min(count, part.nbytes - first)
                    if inside > 0:
                        parts.append((self._space.files[part.file].descriptor, part.offset + first, inside))
                        count -= inside
                    first = max(0, first - part.nbytes)
            return memory.map_files(parts, sum(count for _, _, count in ranges))

        return self._in_turn([name for name, _, _ in ranges], start)

    def reserve(self, nbytes: int) -> None:
        """Have room for ``nbytes`` bytes of tensors in all, those that are there included; each takes whole pages of 4096 bytes.

        Raises OSError (ENOSPC) naming the directory, the bytes wanted and those free.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes must not be negative, got {nbytes}")
        with self._locked():
            self._space.reserve(nbytes)

    # Ending.

    def commit(self) -> None:
        """Make what has been put, replaced and deleted so far what the directories hold from now on, whatever happens.

        Waits for what is under way. Raises the first error of a put that nobody was told of, and OSError from writing the
        manifest: the last commit stands then. ValueError for a store that does not persist.
        """
        if not self._persist:
            raise ValueError("this store's files go when it is closed: open it with persist=True to commit")
        self._check_process()
        self._wait_for_all()
        with self._locked():
            self._raise_unseen()
            for flush in [self._engine.fsync(handle) for handle in self._handles]:
                flush.result()
            versions = {name: entry.version for name, entry in self._entries.items() if entry.version is not None}
            for version in versions.values():
                version.committed = True  # from here on, even if publishing fails: it may have got through
            self._directories.publish({name: version.stored() for name, version in versions.items()})
            for parts in self._retired:
                self._space.give_back(parts)
            self._retired.clear()

    def close(self) -> None:
        """Wait for what is under way, remove the files unless they persist, and unlock the directories. Idempotent.

        What was not committed goes. Raises the first error that nobody was told of, when all is done. Ctrl-C interrupts the
        waiting: call it again then. Leaving ``with`` does it too; after an exception there, without raising another.
        """
        self._check_process()
        with self._lock:
            self._closed = True
        if not self._directories.leave.alive:
            return
        self._wait_for_all()
        if self._persist:
            self._space.trim()
        self._directories.leave()
        if self._own_engine:
            self._engine.close()
        self._raise_unseen()

    def __enter__(self) -> TensorStore:
        with self._locked():
            return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OSError:
            if error is None:
                raise

    # Order.

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError("the store is the parent process's: a forked child needs one of its own, in another directory")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._check_process()
        with self._lock:
            if self._closed:
                raise ValueError("the store is closed")
            yield

    def _in_turn(self, names: Sequence[str], start: Callable[[], Result], writing: bool = False) -> Result:
        """``start()``, with the lock held, once nothing is under way that it conflicts with. Waits without the lock."""
        while True:
            with self._locked():
                conflicts = self._conflicts(names, writing)
                if not conflicts:
                    return start()
            for operation in conflicts:
                operation.settle()

    def _conflicts(self, names: Sequence[str], writing: bool) -> set[Operation]:
        found: set[Operation] = set()
        for name in names:
            entry = self._entries.get(name)
            if entry is not None:
                found.update(entry.conflicts(writing))
        return found

    def _begin(self, finish: Callable[[Operation, list[Failure]], None]) -> Operation:
        operation = Operation(self._lock, finish)
        self._under_way.add(operation)
        if len(self._under_way) > self._swept:  # futures that were dropped would keep their tensors
            for other in [other for other in self._under_way if other is not operation and other.ended()]:
                other.settle()
            self._swept = max(_SWEPT_FROM, 2 * len(self._under_way))
        return operation

    def _ended(self, operation: Operation, failures: Sequence[Failure]) -> None:
        self._under_way.discard(operation)
        if failures:
            self._failed = [*(other for other in self._failed if not other.seen), operation]

    def _wait_for_all(self) -> None:
        with self._lock:
            under_way = list(self._under_way)
        for operation in under_way:
            operation.settle()

    def _raise_unseen(self) -> None:
        """Raise the first error that nobody was told of, and forget the others."""
        unseen = [operation.error for operation in self._failed if not operation.seen]
        self._failed.clear()
        if unseen and unseen[0] is not None:
            raise unseen[0]

    # Names.

    def _entry(self, name: str) -> Entry:
        entry = self._entries.get(name)
        if entry is None:
            close = difflib.get_close_matches(name, list(self._entries)[:10_000], n=3) if isinstance(name, str) else []
            hint = f"; there is {', '.join(map(repr, close))}" if close else f", nor anything like it among {len(self._entries)}"
            raise KeyError(f"the store has no tensor {name!r}{hint}")
        return entry

    def _whole(self, name: str) -> Entry:
        """The entry, if what it holds can be read."""
        entry = self._entry(name)
        if entry.damage is not None:
            text = f"{name!r} is damaged, because its last put failed ({entry.damage}): put it again, or delete it"
            raise OSError(entry.damage.errno or errno.EIO, text, entry.damage.filename)
        return entry

    def _release(self, version: Version) -> None:
        if version.committed:
            self._retired.append(version.parts)
        else:
            self._space.give_back(version.parts)

    # Putting.

    def _put(self, pending: Sequence[_Put]) -> StoreFuture[int]:
        entries = [self._entries.get(put.name) or Entry(put.name) for put in pending]
        versions = self._versions(entries, pending)
        operation = self._begin(functools.partial(self._put_ended, entries))
        for entry, version in zip(entries, versions, strict=True):
            self._entries[entry.name] = entry
            entry.put = operation
            entry.damage = None
            if self._persist:
                entry.coming = version
                continue
            if entry.version is not None and entry.version.parts is not version.parts:
                self._release(entry.version)
            entry.version = version
        try:
            self._write(entries, versions, pending, operation)
        except BaseException as error:
            # Some may have been started, but none counts as put.
            reason = error if isinstance(error, OSError) else OSError(errno.ECANCELED, f"the put was interrupted by {error!r}")
            operation.fail(reason, entries)
            operation.seen = True
            raise
        nbytes = sum(version.info.nbytes for version in versions)
        return StoreFuture(operation, nbytes, lambda: nbytes)

    def _versions(self, entries: Sequence[Entry], pending: Sequence[_Put]) -> list[Version]:
        """What the names will hold: in place where that can be, else in new space. Raises OSError and changes nothing then."""
        versions: list[Version | None] = []
        wanted = []
        for entry, (_, tensor, checksums) in zip(entries, pending, strict=True):
            nbytes = tensor.nbytes
            old = None if self._persist else entry.version
            if old is None or old.info.nbytes != nbytes:
                versions.append(None)
                wanted.append(nbytes)
            elif checksums is None and old.info.dtype == tensor.dtype and old.info.shape == tensor.shape:
                versions.append(old)
            else:
                versions.append(Version(tensor.shape, tensor.dtype, nbytes, old.parts, checksums))
        places = iter(self._space.allocate(wanted))
        return [
            version or Version(put.tensor.shape, put.tensor.dtype, put.tensor.nbytes, next(places), put.checksums)
            for version, put in zip(versions, pending, strict=True)
        ]

    def _write(
        self, entries: Sequence[Entry], versions: Sequence[Version], pending: Sequence[_Put], operation: Operation
    ) -> None:
        pool = buffer_pool() if self._pool is None else self._pool
        writing = Writing(self._engine, pool, self._handles, operation)
        for entry, version, (_, tensor, _) in zip(entries, versions, pending, strict=True):
            if len(version.parts) == 1:
                writing.add(version.parts[0], tensor, entry)
                continue
            for part, piece in pieces(version.parts, tensor):
                operation.add(self._engine.write(piece, self._handles[part.file], part.offset), (entry,))
        writing.start()

    def _put_ended(self, entries: Sequence[Entry], operation: Operation, failures: list[Failure]) -> None:
        self._ended(operation, failures)
        failed = {entry: error for error, subjects in reversed(failures) for entry in subjects}
        if not self._persist:
            for entry, error in failed.items():
                entry.damage = error
            return
        for entry in entries:
            coming, entry.coming = entry.coming, None
            old = entry.version
            if coming is None:
                continue
            if entry not in failed:
                entry.version = coming
                if old is not None:
                    self._release(old)
                continue
            self._release(coming)
            if old is None:
                del self._entries[entry.name]

    # Getting.

    def _get(self, names: Sequence[str], choose: Callable[[dict[str, torch.Tensor]], Result]) -> StoreFuture[Result]:
        entries = [self._whole(name) for name in names]
        versions = [entry.newest for entry in entries]
        operation = self._begin(self._ended)
        tensors: dict[str, torch.Tensor] = {}
        try:
            shared = (operation,)
            alone = []
            for index, (entry, version) in enumerate(zip(entries, versions, strict=True)):
                entry.reading(shared)
                if len(version.parts) == 1:
                    alone.append(index)
                    continue
                buffer = Buffer(sum(padded(part.nbytes) for part in version.parts))
                tensors[entry.name] = buffer.tensor(0, version.info.dtype, version.info.shape)
                self._read(entry, version, tensors[entry.name], operation)
            for run in neighbours([versions[index].parts[0] for index in alone]):
                members = [alone[index] for index in run]
                first, last = versions[members[0]].parts[0], versions[members[-1]].parts[0]
                buffer = Buffer(last.offset + padded(last.nbytes) - first.offset)
                transfer = self._engine.read(buffer.memory, self._handles[first.file], first.offset)
                operation.add(transfer, [entries[index] for index in members])
                for index in members:
                    info, (part,) = versions[index].info, versions[index].parts
                    tensors[names[index]] = buffer.tensor(part.offset - first.offset, info.dtype, info.shape)
        except BaseException:
            operation.seen = True
            raise

        def conclude() -> Result:
            if self._checksum:
                for name, version in zip(names, versions, strict=True):
                    version.verify(name, tensors[name], self._paths)
            return choose({name: tensors[name] for name in names})

        return StoreFuture(operation, sum(version.info.nbytes for version in versions), conclude)

    def _get_into(self, name: str, out: torch.Tensor) -> StoreFuture[torch.Tensor]:
        entry = self._whole(name)
        version = entry.newest
        target = memory.seen_as(out, version.info.dtype, version.info.shape)
        operation = self._begin(self._ended)
        try:
            entry.reading((operation,))
            self._read(entry, version, out, operation)
        except BaseException:
            operation.seen = True
            raise

        def conclude() -> torch.Tensor:
            if self._checksum:
                version.verify(name, target, self._paths)
            return target

        return StoreFuture(operation, version.info.nbytes, conclude)

    def _read(self, entry: Entry, version: Version, target: torch.Tensor, operation: Operation) -> None:
        for part, piece in pieces(version.parts, target):
            operation.add(self._engine.read(piece, self._handles[part.file], part.offset), (entry,))

    # Opening.

    def _restore(self) -> None:
        known = self._directories.known
        for name, stored in known.tensors.items() if known is not None else ():
            entry = Entry(name)
            try:
                entry.version = Version.restored(stored)
                self._space.take(entry.version.parts)
            except ValueError as error:
                raise self._directories.corrupt(f"tensor {name!r}: {error}") from error
            self._entries[name] = entry
