"""Named tensors on drives."""

from __future__ import annotations

import errno
import io
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from deepnvme.engine import Engine, without_python
from deepnvme.memory.pool import BufferPool, buffer_pool
from deepnvme.memory.tensor_bytes import all_storable, checksums, seen_as

from .allocator import FilesTooSmall
from .catalog import Catalog, CatalogEntry, CorruptTensor, TensorInfo, TensorVersion, note_gets
from .data_file import DataFile, map_files
from .futures import Operation, StoreFuture
from .reading import read_into, read_new
from .scheduler import OperationScheduler
from .volumes import Directory, Volumes, weights_of
from .writing import Writing

__all__ = ["CorruptTensor", "TensorInfo", "TensorStore"]

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")


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

    ``read_only``: what the last commit of a persisted store has published. Any number of such stores, in any number of processes,
    may have the directories at a time, and no other; nothing is made there, nor need it be possible. Putting, deleting, reserving
    and committing raise ``io.UnsupportedOperation``.

    ``checksum``: keep the CRC-32 of each tensor, 0.4 s of one core for each GB, and verify it when it is got.
    ``engine``, ``pool``: to share among stores; None for an engine of its own, and for the process's buffer pool.

    Transfers of one name happen in the order of the calls: a call that conflicts with one under way waits for that; reads of
    one name, and all of different names, are independent. A put that fails leaves what a persisted store had under the name.
    Elsewhere the name is damaged: getting it raises the error until it is put again, or deleted. So is what was put since the
    last commit, where :meth:`commit` fails to flush it. A directory that is removed meanwhile keeps its space until the store
    is closed, and the store works on; only :meth:`commit` raises.

    Raises StoreLocked naming the owner of a directory; FileExistsError for one with a persisted store, without ``persist``;
    FileNotFoundError for one without, with ``read_only``;
    CorruptManifest, and ValueError for directories that are not those of one store; OSError from making and opening files.

    Tensors are written and read by direct I/O, so a put that succeeded was taken by the drive. Where the file system has no
    direct I/O, or sectors larger than a page, they go through the page cache. If the drive then fails to take them later,
    :meth:`get` may return old bytes without an error, unless ``checksum`` is set or a :meth:`commit` has reported it.

    Thread-safe, but for finalizers and signal handlers: where they run in the midst of another call of their thread, methods may
    raise RuntimeError. In a forked child every method does, and its end leaves the files alone.
    """

    def __init__(
        self,
        directories: Directory | Sequence[Directory] | Mapping[Directory, float],
        *,
        persist: bool = False,
        read_only: bool = False,
        checksum: bool = False,
        engine: Engine | None = None,
        pool: BufferPool | None = None,
    ) -> None:
        weights = weights_of(directories)
        self._persist = persist or read_only
        self._read_only = read_only
        self._checksum = checksum
        self._pool = pool
        self._engine = Engine() if engine is None else engine
        self._own_engine = engine is None
        self._turns = OperationScheduler()
        self._closing = threading.Lock()
        self._committing: Operation | None = None
        self._flush: Operation | None = None  # of the last commit
        try:
            self._directories = Volumes(weights, self._persist, self._engine, read_only)
            self._catalogue = Catalog(self._directories.files, self._persist)
            self._space = self._catalogue.space
            self._paths = [file.path for file in self._directories.files]
            self._handles = [file.file for file in self._directories.files]
            self._restore()
        except BaseException:
            if hasattr(self, "_directories"):
                self._directories.leave()
            if self._own_engine:
                self._engine.close()
            raise

    # What is there.

    def __contains__(self, name: object) -> bool:
        with self._turns.lock:
            self._turns.settle_interrupted()
            found = name in self._catalogue.entries
        return found

    def __len__(self) -> int:
        with self._turns.lock:
            self._turns.settle_interrupted()
            count = len(self._catalogue.entries)
        return count

    def names(self) -> list[str]:
        """In the order in which they were first put."""
        with self._turns.lock:
            self._turns.check_open()
            self._turns.settle_interrupted()
            names = list(self._catalogue.entries)
        return names

    def info(self, name: str) -> TensorInfo:
        """What the name holds once all that is under way has ended well. Raises KeyError."""
        with self._turns.lock:
            self._turns.check_open()
            self._turns.settle_interrupted()
            return self._catalogue.entry(name).newest.info

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        with self._turns.lock:
            self._turns.check_open()
            self._turns.settle_interrupted()
            nbytes = sum(entry.newest.info.nbytes for entry in self._catalogue.entries.values())
        return nbytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the files."""
        with self._turns.lock:
            self._turns.check_open()
            nbytes = sum(file.capacity for file in self._space.files)
        return nbytes

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
        self._check_writable()
        names = list(tensors)
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"a name must be a str, got {name!r}")
        dense, addresses = all_storable(tensors)
        crcs: list[tuple[int, ...] | None] = [None] * len(names)
        if self._checksum:
            crcs = [checksums(tensor, self._space.part_sizes(tensor.nbytes)) for tensor in dense]
        return self._put(names, dense, addresses, crcs)

    def get(self, name: str, out: torch.Tensor | None = None) -> StoreFuture[torch.Tensor]:
        """Start reading a tensor; return at once. The future's result: the tensor, in new memory on the CPU, or over ``out``.

        ``out``: contiguous, as many bytes, of any dtype and device, not to be touched until the future is done. Memory of a lease
        is read in place. Raises KeyError, ValueError for another ``out``, and OSError for a damaged name; what fails later is
        raised by ``Future.result``, CorruptTensor too.
        """
        if out is None:
            return self._get([name], lambda tensors: tensors[name])
        return self._get_into(name, out)

    def get_many(self, names: Iterable[str]) -> StoreFuture[dict[str, torch.Tensor]]:
        """Like :meth:`get` for each, with one future, in few requests. Its result: the tensors by name, in the order given.

        Neighbours in the file share memory, of up to 16 MiB, which lives for as long as one of them.
        """
        if isinstance(names, str):
            raise TypeError(f"get_many needs several names, got one, '{names}': use get")
        wanted = list(dict.fromkeys(names))
        return self._get(wanted, lambda tensors: tensors)

    def delete(self, name: str) -> StoreFuture[int]:
        """Remove a name, after all that is under way with it. The future's result: its bytes. Raises KeyError."""

        self._check_writable()
        nbytes = self._in_turn([name], lambda: self._catalogue.remove(name), writing=True)
        operation = self._turns.operation()
        operation.complete = True
        return StoreFuture(operation, nbytes, lambda: nbytes)

    def map(self, name: str) -> torch.Tensor:
        """The tensor as a private mapping of the files: a page is read when it is touched, and copied when it is written to.

        Valid until the name is next put or deleted. Waits for a put under way. The pages come through the page cache, one after
        the other: to read all of a tensor, :meth:`get` is faster. Raises KeyError, and OSError for a damaged name.

        ``OffloadedOptimizer.state_dict`` maps its store's files in the same way. The store's lock keeps other stores
        from it; a process that ignores that and cuts it off, or a drive that fails to read a page, ends this process with SIGBUS
        when the page is touched. :meth:`get` raises OSError instead.
        """
        info = self.info(name)
        return self.map_ranges([(name, 0, info.nbytes)]).view(info.dtype).view(info.shape)

    def map_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> torch.Tensor:
        """Bytes of several tensors, each (name, first byte, count), as one tensor of bytes, mapped like :meth:`map`.

        First bytes are multiples of 4096, and so are all counts but the last. SIGBUS, as there, where the drive fails.
        """

        names = [name for name, _, _ in ranges]
        operation = self._turns.operation()

        def begin() -> list[tuple[DataFile, int, int]]:
            entries = self._catalogue.readable(names)
            self._turns.begin(operation)
            note_gets(list(dict.fromkeys(entries)), operation)
            parts = []
            for entry, (_, first, count) in zip(entries, ranges, strict=True):
                for part in entry.newest.parts:
                    inside = min(count, part.nbytes - first)
                    if inside > 0:
                        parts.append((self._space.files[part.file], part.offset + first, inside))
                        count -= inside
                    first = max(0, first - part.nbytes)
            return parts

        with operation.starting:
            mapped = map_files(self._in_turn(names, begin), sum(count for _, _, count in ranges))
            operation.complete = True
        operation.settle()
        return mapped

    def reserve(self, nbytes: int) -> None:
        """Have room for ``nbytes`` bytes of tensors in all, those that are there included; each takes whole pages of 4096 bytes.

        Blocks while the files grow; other calls of the store go on meanwhile. Raises OSError (ENOSPC) naming the directory, the
        bytes wanted and those free.
        """
        self._check_writable()
        if nbytes < 0:
            raise ValueError(f"nbytes must not be negative, got {nbytes}")
        operation = self._turns.operation()  # close() waits for it
        with operation.starting:
            with self._turns.lock:
                self._turns.check_open()
                self._turns.begin(operation)
                self._space.mend()
            for file, size in self._space.sizes_for(nbytes):
                file.grow_to(size, exactly=True)
            operation.complete = True
        operation.settle()

    # Ending.

    def commit(self) -> None:
        """Make what has been put, replaced and deleted so far what the directories hold from now on, whatever happens.

        Waits for what is under way. Raises the first error of a put that nobody was told of, and OSError from writing the
        manifest: the last commit stands then, or this one. ValueError for a store that does not persist, and for so many tensors
        that the manifest would have more than 1 GiB: the last commit stands then.

        Raises OSError, too, where a file cannot be flushed (fsync): the last commit stands then. What was put since into that
        file may be lost, whatever its puts said; the system does not say which, and a second fsync would succeed. These names
        are damaged: getting or mapping one raises the error, and so does the next commit, until each is put again or deleted.
        What was got from them between the loss and this error may have been wrong; with ``checksum`` it raised CorruptTensor.
        """
        self._check_writable()
        if not self._persist:
            raise ValueError("this store's files go when it is closed: open it with persist=True to commit")
        self._turns.wait_for_all()
        operation = self._turns.operation()
        flush = self._turns.operation(self._catalogue.end_flush)
        with operation.starting, flush.starting:  # the next commit waits for both
            versions = self._turns.after(self._commits_under_way, lambda: self._begin_commit(operation, flush))
            # An operation, so that an error that the kernel tells only once is heeded, even if Ctrl-C ends this call before.
            files = [(file,) for file in range(len(self._handles))]
            flush.submit(without_python(self._engine.fsync), self._handles, subjects=files)
            flush.complete = True
            error = flush.settle()
            if error is not None:
                flush.seen = True
                raise error
            self._directories.publish({name: version.stored() for name, version in versions.items()})
            with self._turns.lock:
                self._catalogue.committed()
            operation.complete = True
        operation.settle()

    def close(self) -> None:
        """Wait for what is under way, remove the files unless they persist, and unlock the directories. Idempotent.

        What was not committed goes. Raises the first error that nobody was told of, when all is done. Ctrl-C interrupts the
        waiting: call it again then. Leaving ``with`` does it too; after an exception there, without raising another.
        """
        self._turns.close()
        self._turns.wait_for_all()
        with self._closing:  # who closes it at the same time waits, and finds it closed
            if not self._directories.left:
                try:
                    if self._persist and not self._read_only:
                        self._space.trim()
                finally:
                    self._directories.leave()
                    self._end_engine()
                self._turns.raise_unseen()
            self._end_engine()  # where Ctrl-C came before that was done

    def __enter__(self) -> TensorStore:
        with self._turns.lock:
            self._turns.check_open()
            return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except OSError:
            if error is None:
                raise

    def _check_writable(self) -> None:
        if self._read_only:
            raise io.UnsupportedOperation("the store was opened to be read only: open it with persist=True to change it")

    def _end_engine(self) -> None:
        if self._own_engine:
            self._engine.close()

    # Each call begins with the lock held, and goes on without it.

    def _in_turn(self, names: Sequence[str], start: Callable[[], Result], writing: bool = False) -> Result:
        """``start()``, with the lock held, once nothing is under way that it conflicts with."""
        return self._turns.after(lambda: self._conflicts(names, writing), start)

    def _with_room(self, start: Callable[[], Result]) -> Result:
        """Call ``start`` again after growing the files it found too small. The store's lock is not held while a file grows.

        There is no bound on the tries in theory: each time other threads may allocate what has grown before this one does.
        """
        while True:
            try:
                return start()
            except FilesTooSmall as error:
                sizes = error.sizes
            for file, size in sizes:
                file.grow_to(size)

    def _conflicts(self, names: Sequence[str], writing: bool) -> set[Operation]:
        conflicts = self._catalogue.conflicts(names, writing)
        flush = self._flush
        if flush is not None and not flush.settled and flush.ended():  # it may have damaged them
            conflicts.add(flush)
        return conflicts

    def _put(
        self,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        addresses: Sequence[int],
        checksums: Sequence[tuple[int, ...] | None],
    ) -> StoreFuture[int]:
        operation = self._turns.operation(self._catalogue.end_put)

        def begin() -> tuple[list[CatalogEntry], list[TensorVersion]]:
            self._turns.begin(operation)
            return self._catalogue.begin_put(names, tensors, checksums, operation)

        with operation.starting:
            try:
                entries, versions = self._with_room(lambda: self._in_turn(names, begin, writing=True))
                pool = buffer_pool() if self._pool is None else self._pool
                writing = Writing(self._engine, pool, self._handles, operation)
                writing.start([version.parts for version in versions], tensors, addresses, entries)
            except BaseException as error:  # some may have been started, but none counts as put
                if isinstance(error, OSError):
                    operation.reason = OSError(error.errno, error.strerror, error.filename)  # without the frames it came through
                else:
                    operation.reason = OSError(errno.ECANCELED, f"the put was interrupted by {error!r}")
                raise
            operation.complete = True
        nbytes = sum(version.info.nbytes for version in versions)
        return StoreFuture(operation, nbytes, lambda: nbytes)

    def _get(self, names: Sequence[str], choose: Callable[[dict[str, torch.Tensor]], Result]) -> StoreFuture[Result]:
        operation = self._turns.operation()

        def begin() -> tuple[list[CatalogEntry], list[TensorVersion]]:
            entries = self._catalogue.readable(names)
            self._turns.begin(operation)
            note_gets(entries, operation)
            return entries, [entry.newest for entry in entries]

        with operation.starting:
            entries, versions = self._in_turn(names, begin)
            tensors = read_new(self._engine, self._handles, operation, entries, versions)
            operation.complete = True

        def conclude() -> Result:
            for name, version, tensor in zip(names, versions, tensors, strict=True) if self._checksum else ():
                version.verify(name, tensor, self._paths)
            return choose(dict(zip(names, tensors, strict=True)))

        return StoreFuture(operation, sum(version.info.nbytes for version in versions), conclude)

    def _get_into(self, name: str, out: torch.Tensor) -> StoreFuture[torch.Tensor]:
        operation = self._turns.operation()

        def begin() -> tuple[CatalogEntry, TensorVersion, torch.Tensor]:
            (entry,) = self._catalogue.readable([name])
            version = entry.newest
            target = seen_as(out, version.info.dtype, version.info.shape)
            self._turns.begin(operation)
            note_gets([entry], operation)
            return entry, version, target

        with operation.starting:
            entry, version, target = self._in_turn([name], begin)
            read_into(self._engine, self._handles, operation, entry, version, out)
            operation.complete = True

        def conclude() -> torch.Tensor:
            if self._checksum:
                version.verify(name, target, self._paths)
            return target

        return StoreFuture(operation, version.info.nbytes, conclude)

    def _commits_under_way(self) -> list[Operation]:
        return [each for each in (self._flush, self._committing) if each is not None and not each.settled]

    def _begin_commit(self, operation: Operation, flush: Operation) -> dict[str, TensorVersion]:
        self._turns.raise_unseen()
        versions = self._catalogue.begin_flush()
        self._turns.begin(operation)
        self._turns.begin(flush)
        self._committing, self._flush = operation, flush
        return versions

    # Opening.

    def _restore(self) -> None:
        known = self._directories.known
        for name, stored in known.tensors.items() if known is not None else ():
            try:
                self._catalogue.restore(name, stored)
            except ValueError as error:
                raise self._directories.corrupt(f"tensor {name!r}: {error}") from error
        self._catalogue.restored()
