"""The store: tensors under names, in preallocated files on one or several drives."""

from __future__ import annotations

import errno
import io
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import torch

from deepnvme._former_names import former_names
from deepnvme._interrupts import defer_interrupts
from deepnvme.drives.profiles import engine_for
from deepnvme.engine import Engine
from deepnvme.files.directory_lock import DirectoryOwner
from deepnvme.memory.alignment import padded
from deepnvme.memory.host import empty_aligned
from deepnvme.memory.tensor_bytes import check_storable, checksums, viewed_as
from deepnvme.telemetry.descriptions import path_list, representation, state_text
from deepnvme.telemetry.sizes import ByteCount, byte_count

from .allocator import FilesTooSmall
from .catalog import Catalog, CatalogEntry, CorruptTensor, TensorInfo, TensorVersion, record_gets
from .data_file import DataFile, map_files
from .futures import Operation, OperationScheduler, StoreFuture
from .transfers import start_transfers
from .volumes import Directory, Volumes, as_directories

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig

__all__ = ["CorruptTensor", "TensorInfo", "TensorStore"]

Result = TypeVar("Result")


class TensorStore:
    """Tensors stored by name in a few preallocated files, in one or several directories.

    >>> with deepnvme.swap.TensorStore("/mnt/nvme/swap") as store:
    ...     store.put("weights", tensor).result()
    ...     tensor = store.get("weights").result()

    Operations on one name take effect in the order of the calls: a put waits for earlier puts and gets of its name, and a get
    waits for earlier puts. Gets of one name do not wait for each other, and neither do operations on different names.

    If a put fails, a persistent store keeps the previous tensor. In other stores the name is marked damaged: getting it
    raises the error until it is put again or deleted. If :meth:`commit` fails to flush a file, tensors put since the last
    commit are marked damaged in the same way. If a directory is removed, its space stays in use until the store is closed,
    and all methods but :meth:`commit` keep working.

    Tensors are written and read by direct I/O, so when a put has succeeded, the drive has accepted the data. Where the file
    system has no direct I/O, or sectors larger than a page, tensors go through the page cache. If the kernel then fails to
    write them to the drive later, :meth:`get` may return old bytes without an error, unless ``checksum`` is set or a
    :meth:`commit` has reported the failure.

    Thread-safe, except in finalizers and signal handlers: if one of these interrupts another call of the store in the same
    thread, methods may raise RuntimeError. In a forked child every method raises RuntimeError, and the child's exit does not
    touch the files.

    Args:
        path: A directory, or several. Tensors of 4 MiB or more are split over all directories equally. Smaller ones are
            stored whole, in the emptiest directory. Directories are created if they are missing. Each is locked by one store.
            Files that a dead process has left in a directory are removed.
        persist: Keep the files. When the store is opened again, also after a crash, with the same directories in any order,
            it has the state that the last :meth:`commit` has published; later puts and deletions are lost. Without
            ``persist``, the files are removed by :meth:`close`, when the store is dropped, and at exit.
        read_only: Open the state that the last commit of a persistent store has published. Any number of read-only stores, in
            any number of processes, can have the directories open at a time, but no other store can. Nothing is created in
            the directories, so no write permission is needed. Putting, deleting, reserving and committing raise
            ``io.UnsupportedOperation``.
        checksum: Keep the CRC-32 of each tensor, and verify it when the tensor is read. Takes 0.1 s of one core for each GB.
        engine: An engine to share among stores; None for an engine of the store's own.
        aio_config: Settings of the store's own engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.
        owner: The object that the store is a part of. The errors of other stores name it as the owner of the directories.
            None for the store itself.

    Raises:
        StoreLocked: If a directory is locked by another store, which the message names. Unreferenced stores are
            garbage-collected before this is raised.
        FileExistsError: Without ``persist``, if a directory has a persistent store.
        FileNotFoundError: With ``read_only``, if a directory has no persistent store.
        CorruptManifest: If the manifest is damaged.
        ValueError: If the directories are not exactly those of one store or of one copy of it, no directory is given, one is
            given twice, or both ``engine`` and ``aio_config`` are given.
        OSError: From creating and opening files.
    """

    @former_names(directories="path", config="aio_config")
    def __init__(
        self,
        path: Directory | Sequence[Directory],
        *,
        persist: bool = False,
        read_only: bool = False,
        checksum: bool = False,
        engine: Engine | None = None,
        aio_config: AioConfig | None = None,
        owner: DirectoryOwner | None = None,
    ) -> None:
        if engine is not None and aio_config is not None:
            raise ValueError("aio_config is for the store's own engine: give either engine or aio_config")
        owner = DirectoryOwner("TensorStore") if owner is None else owner
        self._paths = tuple(as_directories(path))
        self._persist = persist or read_only
        self._read_only = read_only
        self._checksum = checksum
        self._engine = engine_for(self._paths, aio_config) if engine is None else engine
        self._own_engine = engine is None
        self._scheduler = OperationScheduler()
        self._closing = threading.Lock()
        self._last_commit: tuple[Operation, ...] = ()  # all of it, and its flush
        try:
            self._volumes = Volumes(self)
            self._volumes.open(self._paths, self._persist, self._engine, read_only, owner)
            self._catalog = Catalog(self._volumes.files, self._volumes.tensors, self._persist)
            self._space = self._catalog.space
            self._handles = [file.file for file in self._volumes.files]
        except BaseException:
            if hasattr(self, "_volumes"):
                self._volumes.leave()
            self._end_engine()
            raise

    # Queries.

    def __contains__(self, name: object) -> bool:
        return self._read_catalog(lambda catalog: name in catalog.entries, even_if_closed=True)

    def __len__(self) -> int:
        return self._read_catalog(lambda catalog: len(catalog.entries), even_if_closed=True)

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories, in the order in which they were given: absolute, without symbolic links."""
        return self._paths

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called. Never blocks."""
        return self._scheduler.closed

    def __repr__(self) -> str:
        return representation(
            self,
            lambda: f"in {path_list(self._paths)}",
            lambda: f"{len(self._catalog.entries)} tensors",
            lambda: "read-only" if self._read_only else "persisted" if self._persist else "",
            lambda: state_text(self.closed, self._scheduler.process),
        )

    def names(self) -> list[str]:
        """Return all names, in the order in which they were first put."""
        return self._read_catalog(lambda catalog: list(catalog.entries))

    def info(self, name: str) -> TensorInfo:
        """Return the shape, dtype, size and checksum of a name's tensor, without reading it.

        A put in progress counts as if it had succeeded.

        Raises:
            KeyError: If the store has no such name.
        """
        return self._read_catalog(lambda catalog: catalog.entry(name).newest.info)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together, as they are in memory."""
        return self._read_catalog(lambda catalog: sum(entry.newest.info.nbytes for entry in catalog.entries.values()))

    @property
    def allocated_bytes(self) -> int:
        """Sizes of the store's files together, in bytes, free space within them included."""
        return self._read_catalog(lambda catalog: sum(file.capacity for file in catalog.space.files))

    @property
    def used_bytes(self) -> tuple[int, ...]:
        """Bytes that tensors take in the file of each directory, in whole pages. The rest of the file is free for others."""
        return self._read_catalog(lambda catalog: catalog.space.used())

    def _read_catalog(self, read: Callable[[Catalog], Result], even_if_closed: bool = False) -> Result:
        """Undo failed operations, then return ``read(catalog)``, with the lock held."""
        with self._scheduler.locked():
            if not even_if_closed:
                self._scheduler.check_open()
            self._scheduler.settle_failed()
            return read(self._catalog)

    # Transfers.

    def put(self, name: str, tensor: torch.Tensor) -> StoreFuture[int]:
        """Start storing a tensor under a name, replacing the name's previous tensor if it has one; return at once.

        If the store does not persist, and the previous tensor has the same number of bytes, the previous tensor is
        overwritten in place. That is faster than writing to new space.

        Args:
            name: Any string.
            tensor: On the CPU or a CUDA device, any dtype and shape. A tensor that is not contiguous is copied first. Not to
                be changed until the future is done. Until then its storage is kept, and must not be resized.

        Returns:
            A future. Its result is the number of bytes stored.

        Raises:
            TypeError: If ``tensor`` is not a dense tensor with data, or ``name`` is not a string.
            OSError: With ENOSPC, naming the directory, if there is too little space. The name keeps its previous tensor.
                Later errors are raised by ``Future.result``.
        """
        return self.put_many({name: tensor})

    def put_many(self, tensors: Mapping[str, torch.Tensor]) -> StoreFuture[int]:
        """Start storing several tensors, like :meth:`put` for each, with one future.

        New names are stored side by side, in the order given. Small tensors go to the engine in one call.

        Args:
            tensors: The tensors by name.
        """
        self._check_writable()
        names = list(tensors)
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"a name must be a str, got {name!r}")
        for name, tensor in tensors.items():
            check_storable(name, tensor)
        dense = [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors.values()]
        crcs: list[tuple[int, ...] | None] = [None] * len(names)
        if self._checksum:
            crcs = [checksums(tensor, self._space.part_sizes(tensor.nbytes)) for tensor in dense]
        operation = self._scheduler.operation(self._catalog.end_put)

        def begin() -> tuple[list[CatalogEntry], list[TensorVersion]]:
            """Record the put in the scheduler and the catalog. Called with the lock held."""
            self._scheduler.begin(operation)
            return self._catalog.begin_put(names, dense, crcs, operation)

        with operation.starting:
            try:
                entries, versions = self._in_turn(names, begin, writing=True)
                places = [version.parts for version in versions]
                start_transfers(self._engine.write, self._engine.write_many, self._handles, operation, places, dense, entries)
            except BaseException as error:  # some transfers may have been started, but no tensor counts as put
                if isinstance(error, OSError):
                    operation.fail(OSError(error.errno, error.strerror, error.filename))  # without traceback and frames
                else:
                    operation.fail(OSError(errno.ECANCELED, f"the put was interrupted by {error!r}"))
                raise
            operation.complete = True
        nbytes = sum(version.info.nbytes for version in versions)
        return StoreFuture(operation, nbytes, lambda: nbytes)

    def get(self, name: str, out: torch.Tensor | None = None) -> StoreFuture[torch.Tensor]:
        """Start reading a tensor; return at once.

        Args:
            name: The tensor's name.
            out: Where to read the tensor to: a contiguous tensor with the same number of bytes, of any dtype, on any device.
                Not to be touched until the future is done. Memory leased from a BufferPool is filled directly. None for new
                memory on the CPU.

        Returns:
            A future. Its result is the tensor, which uses the memory of ``out`` if that is given.

        Raises:
            KeyError: If the store has no such name.
            TypeError: If ``out`` is not a tensor.
            ValueError: If ``out`` is not contiguous, or has another number of bytes.
            OSError: If the tensor is damaged; CorruptTensor if a data file is too short. Later errors, CorruptTensor among
                them, are raised by ``Future.result``.
        """
        return self._get([name], lambda tensors: tensors[name], out)

    def get_many(self, names: Iterable[str]) -> StoreFuture[dict[str, torch.Tensor]]:
        """Start reading several tensors, like :meth:`get` for each, with one future.

        Args:
            names: Names of the tensors; repeated ones are read once.

        Returns:
            A future. Its result is the tensors by name, in the order given.

        Raises:
            TypeError: If ``names`` is a single string.
            KeyError, OSError: As for :meth:`get`.
        """
        if isinstance(names, str):
            raise TypeError(f"get_many needs several names, got one, '{names}': use get")
        wanted = list(dict.fromkeys(names))
        return self._get(wanted, lambda tensors: tensors)

    def delete(self, name: str) -> StoreFuture[int]:
        """Remove a name. Blocks until all operations under way with the name have ended.

        Returns:
            A future that is already done. Its result is the number of bytes that the name held.

        Raises:
            KeyError: If the store has no such name.
        """
        self._check_writable()
        nbytes = self._in_turn([name], lambda: self._catalog.remove(name), writing=True)
        operation = self._scheduler.operation()
        operation.complete = True
        return StoreFuture(operation, nbytes, lambda: nbytes)

    def map(self, name: str) -> torch.Tensor:
        """Return a tensor that is a private mapping of the store's files, so that nothing is read yet.

        A page is read when it is touched, and copied when it is written to. The pages come through the page cache, one after
        the other; to read all of a tensor, :meth:`get` is faster. The mapping is valid until the name is next put or deleted.
        Blocks until a put in progress has ended. ``OffloadedOptimizer.state_dict`` maps its store's files in the same way.

        If the drive fails to read a page, this process ends with SIGBUS when the page is touched; :meth:`get` raises OSError
        instead. The same happens if a file is truncated. The store's lock keeps other stores from truncating it, but not
        processes that ignore the lock.

        Raises:
            KeyError: If the store has no such name.
            OSError: If the tensor is damaged.
        """
        info = self.info(name)
        return self.map_ranges([(name, 0, info.nbytes)]).view(info.dtype).view(info.shape)

    def map_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> torch.Tensor:
        """Map byte ranges of several tensors as one uint8 tensor, with pages private and read on demand as in :meth:`map`.

        As with :meth:`map`, the process ends with SIGBUS if the drive fails to read a page when it is touched.

        Args:
            ranges: (name, first byte, count) of each range. First bytes are multiples of 4096, and so are all counts but the
                last.
        """
        names = [name for name, _, _ in ranges]
        operation = self._scheduler.operation()

        def begin() -> list[tuple[DataFile, int, int]]:
            """Record the read in scheduler and catalog. Return (file, offset, length) of each part. Called with the lock held."""
            entries = self._catalog.readable(names)
            self._scheduler.begin(operation)
            record_gets(list(dict.fromkeys(entries)), operation)
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

    def reserve(self, nbytes: ByteCount) -> None:
        """Preallocate file space for ``nbytes`` bytes of tensors in total, including the tensors already stored.

        Each tensor takes whole pages of 4096 bytes. Blocks while the files grow; other calls of the store can run meanwhile.

        Args:
            nbytes: Bytes, or a size such as "100GB".

        Raises:
            TypeError, ValueError: If ``nbytes`` is not a valid size, or negative.
            OSError: With ENOSPC, naming the directory, the bytes wanted and the bytes free.
        """
        wanted = byte_count(nbytes, "nbytes")
        self._check_writable()
        operation = self._scheduler.operation()  # close() waits for it
        with operation.starting:
            self._in_turn((), lambda: self._scheduler.begin(operation))
            for file, size in self._space.sizes_for(wanted):
                file.grow_to(size, exactly=True)
            operation.complete = True
        operation.settle()

    # Committing and closing.

    def commit(self) -> None:
        """Make all puts, replacements and deletions so far durable.

        When this has returned, opening the store again gives this state, even after a crash.

        Blocks until all operations in progress have ended, then flushes the files and replaces the manifest (the file that
        lists the committed tensors).

        If flushing a file (fsync) fails, tensors put into the file since the last commit may be lost, even if their puts
        succeeded. The system does not say which tensors are lost, and a second fsync would succeed. So the names of all these
        tensors are marked damaged: getting or mapping one raises the error, and so does the next commit, until each name is
        put again or deleted. Reads of such a tensor between the loss and this error may have returned wrong bytes; with
        ``checksum``, they raised CorruptTensor.

        Raises:
            ValueError: If the store does not persist, or has so many tensors that the manifest would exceed 256 MiB. The last
                commit remains valid.
            OSError: The first error of a put that no caller has seen, or an error of flushing a file: the last commit remains
                valid. Or an error of writing the manifest: then either the last commit is valid, or this one.
        """
        self._check_writable()
        if not self._persist:
            raise ValueError("this store's files go when it is closed: open it with persist=True to commit")
        self._scheduler.wait_for_all()
        operation = self._scheduler.operation()
        flush = self._scheduler.operation(self._catalog.end_flush)
        with operation.starting, flush.starting:  # the next commit waits for both
            versions = self._scheduler.after(self._commits_under_way, lambda: self._begin_commit(operation, flush))
            # An operation, because the kernel reports an error only once: so it is recorded even if Ctrl-C comes in the wait.
            for number, handle in enumerate(self._handles):
                flush.submit(self._engine.fsync, handle, subjects=[number])
            flush.complete = True
            StoreFuture(flush, 0, lambda: None).result()
            self._volumes.publish({name: version.stored() for name, version in versions.items()})
            with self._scheduler.locked():
                self._catalog.committed()
            operation.complete = True
        operation.settle()

    def close(self) -> None:
        """Wait for all operations in progress, remove the files unless they persist, and unlock the directories. Idempotent.

        Changes that were not committed are lost. Ctrl-C interrupts the wait; call ``close`` again then. Leaving a ``with``
        block closes the store too; if an exception leaves the block, an OSError from closing is not raised.

        Raises:
            OSError: The first error that no caller has seen, after everything else is done.
        """
        self._scheduler.close()
        self._scheduler.wait_for_all()
        with self._closing, defer_interrupts():  # a thread that closes the store at the same time finds it closed
            if not self._volumes.left:
                try:
                    if self._persist and not self._read_only:
                        self._space.trim()
                finally:
                    self._volumes.leave()
                    self._end_engine()
                self._scheduler.raise_unseen()

    def __enter__(self) -> TensorStore:
        with self._scheduler.locked():
            self._scheduler.check_open()
            return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except OSError:
            if error is None:
                raise

    def _check_writable(self) -> None:
        """Raise io.UnsupportedOperation if the store is read-only."""
        if self._read_only:
            raise io.UnsupportedOperation("the store was opened to be read only: open it with persist=True to change it")

    def _end_engine(self) -> None:
        """Close the engine if it is the store's own. Idempotent."""
        if self._own_engine:
            self._engine.close()

    # Each operation begins with the lock held, and goes on without it.

    def _in_turn(self, names: Sequence[str], start: Callable[[], Result], writing: bool = False) -> Result:
        """Call ``start`` with the lock held, once no conflicting operation is in progress. Return its result.

        If ``start`` raises FilesTooSmall, the files are grown without the lock, and ``start`` is called again. In theory the
        number of tries has no bound: each time, other threads may allocate the new space first.
        """
        while True:
            try:
                return self._scheduler.after(lambda: self._conflicts(names, writing), start)
            except FilesTooSmall as error:
                sizes = error.sizes
            for file, size in sizes:
                file.grow_to(size)

    def _conflicts(self, names: Sequence[str], writing: bool) -> set[Operation]:
        """Return the operations that must end before the names can be read or written."""
        commits = {each for each in self._commits_under_way() if each.ended()}  # settling a flush may mark tensors as damaged
        return self._catalog.conflicts(names, writing) | commits

    def _get(
        self, names: Sequence[str], choose: Callable[[dict[str, torch.Tensor]], Result], out: torch.Tensor | None = None
    ) -> StoreFuture[Result]:
        """Start reading tensors: one into ``out`` if that is given, else all into new memory.

        The future's result is what ``choose`` returns for the tensors by name.
        """
        operation = self._scheduler.operation()

        def begin() -> tuple[list[CatalogEntry], list[TensorVersion], list[torch.Tensor]]:
            """Record the reads. Return entries, versions, and ``out``, if given, as a view. Called with the lock held."""
            entries = self._catalog.readable(names)
            versions = [entry.newest for entry in entries]
            targets = [] if out is None else [viewed_as(out, each.info.dtype, each.info.shape) for each in versions]
            self._scheduler.begin(operation)
            record_gets(entries, operation)
            return entries, versions, targets

        with operation.starting:
            entries, versions, tensors = self._in_turn(names, begin)
            if out is None:
                tensors = [_new_tensor(version.info) for version in versions]
            places, into = [version.parts for version in versions], tensors if out is None else [out]
            start_transfers(self._engine.read, self._engine.read_many, self._handles, operation, places, into, entries)
            operation.complete = True

        def conclude() -> Result:
            """Verify the checksums, if the store has any, and return the result."""
            for name, version, tensor in zip(names, versions, tensors, strict=True) if self._checksum else ():
                version.verify(name, tensor, [file.path for file in self._volumes.files])
            return choose(dict(zip(names, tensors, strict=True)))

        return StoreFuture(operation, sum(version.info.nbytes for version in versions), conclude)

    def _commits_under_way(self) -> list[Operation]:
        """Return the operations of the last commit that are not settled."""
        return [each for each in self._last_commit if not each.settled]

    def _begin_commit(self, operation: Operation, flush: Operation) -> dict[str, TensorVersion]:
        """Begin the two operations of a commit. Return the versions to flush and publish. Called with the lock held."""
        self._scheduler.raise_unseen()
        versions = self._catalog.begin_flush()
        self._scheduler.begin(operation)
        self._scheduler.begin(flush)
        self._last_commit = operation, flush
        return versions


def _new_tensor(info: TensorInfo) -> torch.Tensor:
    """Return a new tensor on the CPU, aligned for direct I/O. Its contents are undefined."""
    if not info.nbytes:
        return torch.empty(info.shape, dtype=info.dtype, device="cpu")
    return empty_aligned(padded(info.nbytes))[: info.nbytes].view(info.dtype).view(info.shape)
