"""Storage reader for ``torch.distributed.checkpoint``: :class:`NVMeReader` loads checkpoints at the speed of the drive."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from deepnvme._former_names import former_names
from deepnvme.checkpoint import file_io
from deepnvme.checkpoint.formats.dcp_tensor import HEAD, KnownArchives
from deepnvme.checkpoint.formats.elements import Elements
from deepnvme.checkpoint.formats.pt_records import CorruptCheckpoint
from deepnvme.checkpoint.loading import resolve_weights_only
from deepnvme.engine import Engine
from deepnvme.files.regular_files import open_regular
from deepnvme.files.replacing import with_filename
from deepnvme.memory.pool import buffer_pool
from deepnvme.memory.tensor_bytes import flat_bytes, memory_of
from deepnvme.transfer.gather import DIRECT_FROM
from deepnvme.transfer.scatter import scatter

from .metadata import load_metadata
from .objects import check_object
from .writer import done

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig

_COPIED = 64 << 20
"""Most bytes of buffers that are filled before their elements are copied into tensors, unless one part is larger."""
_TORCHS = "not the archive of a plain tensor, such as one written with extensions: use torch's FileSystemReader"


class RequestedPart(NamedTuple):
    """A requested part of a tensor, and where its elements are in the file."""

    request: ReadItem
    """torch's request, for which the planner provides the target tensor."""
    elements: Elements
    """Where the part is in the file."""


class _Item(NamedTuple):
    """One item that a rank saved: its place in the file, how much of it is read first, and the requests for its parts."""

    offset: int
    nbytes: int
    """Bytes that are read first: all of a small item, or the beginning of a large one, which tells its format."""
    length: int
    """Bytes of the whole item."""
    requests: list[ReadItem]


class NVMeReader(FileSystemReader):
    """A drop-in replacement for torch's ``FileSystemReader``, at the speed of the drive.

    >>> dcp.load(state_dict, storage_reader=NVMeReader(path))

    It reads the checkpoints of :class:`NVMeWriter` and of torch's writer. A requested part of a tensor is read directly
    into its target, on the CPU or a CUDA device, if both have the same dtype and both are contiguous. For any other part,
    the file's bytes from its first to its last element are read into a buffer, from which its elements are copied or cast.

    Memory beyond the state: 16 MiB leased from the process's pool, and 64 MiB or the largest part that has to be copied.

    ``dcp.load`` wraps the errors below in a CheckpointException. Since torch 2.9, it replaces an error from reading the
    metadata by an AssertionError with the same text; :meth:`read_metadata` itself raises the original error.

    Args:
        path: Directory of the checkpoint.
        weights_only: Among the items that are not tensors, True accepts only what ``torch.load(weights_only=True)``
            accepts: numbers, text, containers, dtypes, and classes given to ``torch.serialization.add_safe_globals``.
            False lets torch's planner unpickle anything, which can run code of the checkpoint's writer. None (the
            default) is True unless TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set, as for :func:`load`.
            TORCH_FORCE_WEIGHTS_ONLY_LOAD makes it True in any case.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.
        *args: As for ``FileSystemReader``.
        **kwargs: As for ``FileSystemReader``.

    Raises:
        RuntimeError: From the constructor, if TORCH_FORCE_WEIGHTS_ONLY_LOAD and
            TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD are both set.
        CorruptCheckpoint: If a file is damaged. Names the file and the item, with the bytes expected and found. Also for
            quantised and sparse tensors, which torch's reader supports and this one does not.
        OSError: If a file cannot be opened (FileNotFoundError and others) or read. ESTALE if another checkpoint was saved
            over this one meanwhile; some tensors may then have the values of the other checkpoint.
        UnpicklingError: If an item is not allowed by ``weights_only``, or the metadata refer to classes that torch's writer
            does not use.
        ValueError: If a requested part is outside the saved tensor; or for an item written with torch's stream extensions.
    """

    _metadata_read: tuple[Path, file_io.Version] | None = None
    """(path, version) of the metadata file that was read; None before :meth:`read_metadata`."""

    @former_names(config="aio_config")
    def __init__(
        self, path: str | os.PathLike[str], *args: Any, weights_only: bool | None = None, aio_config: AioConfig | None = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(path, *args, **kwargs)
        self._weights_only = resolve_weights_only(weights_only)
        self._aio_config = aio_config

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # torch 2.9 passes rank= if the signature has "kwargs"
        """Read the checkpoint's metadata. Called by ``dcp.load``. Blocks.

        Args:
            *args: Ignored.
            **kwargs: ``rank``, with torch 2.9 and later: read the metadata of that rank alone. Others are ignored.

        Raises:
            UnpicklingError: If the metadata refer to classes that torch's writer does not use.
            CorruptCheckpoint: If the file is damaged.
            OSError: If the file cannot be read.
        """
        rank = kwargs.get("rank")
        file = Path(self.path) / (".metadata" if rank is None else f"__{rank}.metadata")
        self._metadata_read = file, file_io.file_version(file)
        metadata = load_metadata(file, whole=rank is None)
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors and objects that this rank loads. Called by ``dcp.load``. Blocks.

        Args:
            plan: What this rank loads.
            planner: Provides the tensors to fill, and takes the other objects.

        Returns:
            A completed future.

        Raises:
            Exception: The errors listed for :class:`NVMeReader`.
        """
        by_file: dict[Path, list[ReadItem]] = {}
        for request in plan.items:
            if request.storage_index not in self.storage_data:
                metadata = self._metadata_read[0] if self._metadata_read else Path(self.path)
                raise CorruptCheckpoint(metadata, f"it does not say where item {_name(request)} is")
            by_file.setdefault(Path(self.path) / self.storage_data[request.storage_index].relative_path, []).append(request)
        # torch's writer writes over the files of an earlier checkpoint. NVMeWriter never does.
        versions: dict[str | os.PathLike[str], file_io.Version] = dict([self._metadata_read] if self._metadata_read else [])
        for path in by_file:
            with contextlib.suppress(FileNotFoundError):  # raised when the file is opened
                versions[path] = file_io.file_version(path)
        engine = file_io.shared_engine(self.path, self._aio_config)
        with file_io.unless_replaced(versions, "the checkpoint"):
            for path, requests in by_file.items():
                with with_filename(path), _open_item_file(path, requests[0]) as file:
                    self._read(file, path, requests, planner, engine)
        return done(None)

    def _read(self, file: BinaryIO, path: Path, requests: Sequence[ReadItem], planner: LoadPlanner, engine: Engine) -> None:
        """Read the requested items of one file."""
        wanted: list[RequestedPart] = []
        known = KnownArchives()
        items = self._items(path, os.fstat(file.fileno()).st_size, requests)
        places = [(item.offset, item.nbytes) for item in items]
        with engine.open(os.fspath(path), "r") as source:
            for run, chunk, begin in file_io.read_small_pieces(places, source, engine, buffer_pool()):
                inside: list[RequestedPart] = []
                for item in map(items.__getitem__, run):
                    request = item.requests[0]
                    head = memory_of(chunk, item.offset - begin, item.nbytes)
                    if request.type == LoadItemType.BYTE_IO:
                        if item.nbytes < item.length:
                            file.seek(item.offset)
                            head = memoryview(file.read(item.length))
                        value = io.BytesIO(head)
                        if self._weights_only:
                            check_object(path, _name(request), value)
                        planner.load_bytes(request, value)
                        continue
                    elements = known.elements(file, head, item.offset, item.length)
                    if elements is None:
                        raise CorruptCheckpoint(path, f"item {_name(request)} is damaged, or {_TORCHS}")
                    parts = [RequestedPart(each, _part(elements, each)) for each in item.requests]
                    (inside if item.nbytes == item.length else wanted).extend(parts)
                _place(inside, chunk, begin, planner)
        _fill(path, wanted, planner, engine)

    def _items(self, path: Path, size: int, requests: Sequence[ReadItem]) -> list[_Item]:
        """Group the requests for one file by item. Raises CorruptCheckpoint if an item ends past the end of the file."""
        by_item: dict[MetadataIndex, list[ReadItem]] = {}
        for request in requests:
            by_item.setdefault(request.storage_index, []).append(request)
        items = []
        for index, of_item in by_item.items():
            info = self.storage_data[index]
            if getattr(info, "transform_descriptors", None):  # since torch 2.7
                raise ValueError(f"item {_name(of_item[0])} of '{path}' is {_TORCHS}")
            if info.offset + info.length > size:
                raise _cut_off(path, of_item[0], info.offset, info.length, size)
            items.append(_Item(info.offset, info.length if info.length < DIRECT_FROM else HEAD, info.length, of_item))
        return items


def _fill(path: Path, wanted: Sequence[RequestedPart], planner: LoadPlanner, engine: Engine) -> None:
    """Read parts of tensors from a file into the tensors that the planner provides for them. Blocks.

    Args:
        path: The file.
        wanted: The parts.
        planner: Provides the target tensor of each part, and is told when that tensor is filled.
        engine: Engine that does the transfers.

    Raises:
        CorruptCheckpoint: If a part is not wholly in the file.
        ValueError: If a part and its target have different shapes.
        OSError: The first error, after all started transfers have ended.
    """
    size = os.path.getsize(path)
    for request, elements in wanted:
        if elements.nbytes and elements.offset + elements.nbytes > size:  # an empty part may be past the end of the file
            raise _cut_off(path, request, elements.offset, elements.nbytes, size)
    pending: list[tuple[ReadItem, Elements, torch.Tensor, torch.Tensor | None]] = []
    to_copy = 0

    def end() -> None:
        """Read all pending parts, copy buffered parts into their targets, and report all to the planner. Blocks."""
        memory = [file_io.FileSlice(each.offset, flat_bytes(to) if buffer is None else buffer) for _, each, to, buffer in pending]
        file_io.read([each for each in memory if each.nbytes], path, engine, buffer_pool())
        for request, elements, target, buffer in pending:
            if buffer is not None:
                _copy(buffer, elements, target)
            planner.commit_tensor(request, target)
        pending.clear()

    for each in wanted:
        target = _target(each, planner)
        buffer = None
        nbytes = each.elements.nbytes
        if not _reads_directly(each.elements, target) or (target.device.type != "cpu" and nbytes < DIRECT_FROM):
            if to_copy + nbytes > _COPIED:
                end()
                to_copy = 0
            to_copy += nbytes
            buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        pending.append((*each, target, buffer))
    end()


@contextlib.contextmanager
def _open_item_file(path: Path, request: ReadItem) -> Iterator[BinaryIO]:
    """Open the file of a requested item for reading. Raises OSError that names the item besides the file."""
    try:
        file = open_regular(path)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}, where item {_name(request)} should be", str(path)) from error
    with file:
        yield file


def _place(wanted: Sequence[RequestedPart], chunk: torch.Tensor, begin: int, planner: LoadPlanner) -> None:
    """Copy parts of tensors from a chunk, which has the bytes of the file from ``begin`` on, into their target tensors."""
    targets = [_target(each, planner) for each in wanted]
    places = []
    addresses = []
    for (_, elements), target in zip(wanted, targets, strict=True):
        if target.device.type == "cpu" and _reads_directly(elements, target):
            places.append((elements.offset, elements.nbytes))
            addresses.append(target.data_ptr())
        else:
            buffer = chunk[elements.offset - begin :][: elements.nbytes].clone()  # its address is aligned for any dtype
            _copy(buffer, elements, target)
    scatter(addresses, places, chunk, begin)
    for each, target in zip(wanted, targets, strict=True):
        planner.commit_tensor(each.request, target)


def _part(elements: Elements, request: ReadItem) -> Elements:
    """Return where the requested part of a tensor is. Raises ValueError, naming the item, for a part outside the tensor."""
    try:
        return elements.narrow(request.storage_offsets, request.lengths)
    except ValueError as error:
        raise ValueError(f"item {_name(request)}: {error}") from error


def _target(wanted: RequestedPart, planner: LoadPlanner) -> torch.Tensor:
    """Return the planner's tensor for a part. Raises ValueError if the shapes differ."""
    target = planner.resolve_tensor(wanted.request).detach()
    if target.shape != wanted.elements.shape:
        raise ValueError(
            f"item {_name(wanted.request)}: {list(wanted.elements.shape)} elements are for a tensor of {list(target.shape)}"
        )
    return target


def _reads_directly(elements: Elements, target: torch.Tensor) -> bool:
    """Return whether the bytes in the file can be read directly into the target: same dtype, both contiguous, CPU or CUDA."""
    return (
        type(target) is torch.Tensor
        and target.dtype == elements.dtype
        and target.device.type in ("cpu", "cuda")
        and elements.contiguous
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )


def _copy(buffer: torch.Tensor, elements: Elements, target: torch.Tensor) -> None:
    """Copy elements into the target tensor, from a buffer that begins with the first of them."""
    if elements.nbytes:
        target.copy_(buffer.view(elements.dtype).as_strided(elements.shape, elements.stride))


def _cut_off(path: Path, request: ReadItem, offset: int, nbytes: int, size: int) -> CorruptCheckpoint:
    """Return the error for an item whose bytes end past the end of the file, which has ``size`` bytes."""
    found = max(0, size - offset)
    why = f"item {_name(request)} is cut off: expected {nbytes} bytes from byte {offset} on, found {found}; the file has {size}"
    return CorruptCheckpoint(path, why)


def _name(request: ReadItem) -> str:
    """Return an item's name for messages, with the offsets of its shard if it has any."""
    index = request.storage_index
    return repr(index.fqn) if index.offset is None else f"{index.fqn!r} at {list(index.offset)}"
