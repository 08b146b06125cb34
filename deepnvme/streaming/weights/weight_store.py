"""The store of a model's weights on one or several drives: built once from a model or checkpoint, then read by extents."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn

from deepnvme._former_names import former_names
from deepnvme.checkpoint.weight_locations import Location, OpenFiles, Source, source_of
from deepnvme.drives.mounts import warn_of_memory
from deepnvme.drives.profiles import engine_for
from deepnvme.engine import Engine
from deepnvme.files.directory_lock import DirectoryOwner
from deepnvme.memory.alignment import padded
from deepnvme.memory.pool import BufferPool
from deepnvme.memory.tensor_bytes import crc32, memory_of
from deepnvme.model.quantization import SCHEMES, Scheme
from deepnvme.store.futures import StoreFuture
from deepnvme.store.manifest import CorruptManifest
from deepnvme.store.tensor_store import TensorStore
from deepnvme.store.volumes import Directory, as_directories
from deepnvme.telemetry.descriptions import path_list, representation, shorten, size_for_people, state_text
from deepnvme.telemetry.progress import ProgressOption, shown_progress

from .build_pipeline import ExtentBuilder, build, read_ahead, structure_for
from .extent_store import ExtentStore
from .manifest import LARGEST, NAME, Extent, WeightManifest, decode, key_of

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig

Directories = Directory | Sequence[Directory]
"""One or several directories of a store."""
Given = nn.Module | str | os.PathLike[str] | Mapping[str, torch.Tensor | Location] | Source
"""Types of ``model_or_checkpoint`` in :meth:`WeightStore.build`."""
_VERIFIED_AT_A_TIME = 3
"""Extents in memory in :meth:`WeightStore.verify`: two are read while the checksum of a third is computed."""
IN_FLIGHT_BYTES = 32 << 20
"""Most bytes that each of a drive's workers reads at a time: enough for its full speed, and few enough that extents are read one
after the other. With 128 MiB, three extents of 45 MB were read at once and all completed late: a pass over int8 weights took a
fourth longer."""


class CorruptExtent(OSError):
    """Raised (errno EBADMSG) if an extent's bytes differ from those that were built. The message names extent and weights."""


class WeightStore(ExtentStore):
    """A model's weights on the drive, grouped into extents: the ranges of bytes that are read as one when a block needs them.

    >>> store = WeightStore.build("checkpoint/", "/mnt/nvme/model", model=model)
    >>> store = WeightStore.open("/mnt/nvme/model")

    Made by :meth:`build` and :meth:`open`. It is a persisted :class:`deepnvme.swap.TensorStore`, opened read-only, so any number
    of processes may have it open any number of times. A context manager, which closes it. Thread-safe. In a forked child every
    method that reads raises RuntimeError.
    """

    def __init__(self, tensors: TensorStore, engine: Engine, where: Path) -> None:
        self._tensors, self._engine = tensors, engine
        self._where = where
        self._process = os.getpid()
        nbytes = tensors.info(NAME).nbytes
        if nbytes > LARGEST:
            raise CorruptManifest(where, f"what it says of weights has {nbytes} bytes, and may have {LARGEST}")
        said = tensors.get(NAME).result()
        manifest = decode(memory_of(said).tobytes(), where)
        self._model = manifest.model
        super().__init__(manifest.extents, manifest.blocks, manifest.ties)
        self.origin = manifest.origin
        """Text about the source of the weights, as given to :meth:`build`."""
        self._unverified = set(self.extents)
        self._lock = threading.Lock()
        for extent in self.extents.values():
            there = tensors.info(key_of(extent.name)).nbytes if key_of(extent.name) in tensors else None
            if there != extent.nbytes:
                found = "none" if there is None else f"{there} bytes"
                text = f"extent {extent.name!r} should have {extent.nbytes} bytes, found {found}; build the store again"
                raise CorruptExtent(errno.EBADMSG, text, str(where))

    # Building and opening.

    @classmethod
    @former_names(config="aio_config")
    def build(
        cls,
        model_or_checkpoint: Given,
        path: Directories,
        *,
        quantize: Scheme | None = None,
        model: nn.Module | None = None,
        blocks: Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
        progress: ProgressOption = None,
        origin: str = "",
        aio_config: AioConfig | None = None,
    ) -> WeightStore:
        """Write a model's or checkpoint's weights to one or several directories as a new store, and open it. Blocks.

        At most four extents are in memory at a time, and for two of them also the weights in the form of their files, if that
        differs from the tensors. The store exists only once all of it is written: files left by an error, Ctrl-C or a crash
        cannot be opened, and are removed at once or by the next build.

        Args:
            model_or_checkpoint: One of: a module; a .safetensors file; a .pt file that torch.save wrote of a state_dict; the
                index.json of several such files, or the directory that they are in; a mapping of names to tensors or
                :class:`Location`; or a :class:`Source`.
            path: One or several directories, as for TensorStore, without a store in them.
            quantize: "int8" or "int4" for weights of blocks that become smaller by it; they are dequantised when they are read.
                None for no quantisation. Weights in no block stay as they are.
            model: Only with a checkpoint: the module it is for, which may be on the meta device. It determines the blocks
                and the tied weights; the names must be the same. Without it, the blocks are derived from the names.
            blocks: Names or patterns of the modules that become blocks; None to find them. See
                :func:`deepnvme.model.structure.structure_of`.
            dtype: Dtype to which floating-point weights are converted; None for no conversion.
            progress: None for a progress bar on stderr after two seconds, if stderr is a terminal or a notebook's; True
                for one from the beginning, False for none; or a function that is called with the bytes written so far and
                the bytes in all.
            origin: Text to keep in the store about the source of its weights.
            aio_config: Settings of the engine; None for the profile of the drives, see :func:`deepnvme.engine_for`.
                The drives are those of the directories and of the files that the weights are read from.

        Raises:
            WeightMismatch: If the checkpoint's weights are not those of ``model``.
            CorruptCheckpoint: If the checkpoint is damaged, incomplete, or changed while it is read.
            FileNotFoundError: If the checkpoint, or one of its files, is missing.
            FileExistsError: If a directory has a store already.
            StoreLocked: If a directory is in use.
            ValueError: If an argument is out of range, a file is not a readable checkpoint, or a value cannot be quantised.
            UnpicklingError: If a .pt file holds anything but tensors.
            TypeError: If ``model_or_checkpoint`` has no weights, or ``aio_config`` is not an AioConfig.
            OSError: ENOSPC, before anything is written, if there is not enough space; otherwise from reading and writing.
        """
        if quantize is not None and quantize not in SCHEMES:
            raise ValueError(f"quantize must be one of {', '.join(SCHEMES)}, or None, got {quantize!r}")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype must be one of floating point, got {dtype}")
        if model is not None and isinstance(model_or_checkpoint, nn.Module):
            raise ValueError("model= is for a checkpoint: a module says itself what its blocks are")
        where = as_directories(path)
        warn_of_memory(where)
        places = [*where, *_read_from(model_or_checkpoint)]
        with engine_for(places, aio_config) as engine, contextlib.closing(OpenFiles(engine)) as files:
            source = source_of(model_or_checkpoint, files)
            tree = model_or_checkpoint if isinstance(model_or_checkpoint, nn.Module) else model
            infos = {name: source.info(name) for name in source.names()}
            structure, names = structure_for(infos, source.ties(), tree, blocks)
            builders = [ExtentBuilder(plan, source, names, dtype, quantize) for plan in structure.extents()]
            kind = "" if tree is None else type(tree).__name__
            manifest = WeightManifest(kind, {}, structure.needs(), structure.ties, origin)
            with shown_progress(progress, f"building {where[0]}") as report:
                build(builders, source, manifest, where, engine, report)
        return cls.open(path, aio_config=aio_config)

    @classmethod
    @former_names(config="aio_config")
    def open(cls, path: Directories, *, aio_config: AioConfig | None = None) -> WeightStore:
        """Open a weight store that was built before. The checksum of each extent is checked when it is read for the first time.

        Args:
            path: All directories of the store.
            aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`. With None,
                each worker has at most 32 MiB in flight, so that extents are read one after the other.

        Raises:
            FileNotFoundError: If the directories have no store, or one that was not built to its end.
            ValueError: If the directories have another kind of store, or are not all directories of one store.
            CorruptManifest: If the manifest of the weights is damaged.
            CorruptExtent: If an extent is missing or has the wrong size.
            StoreLocked: If the store is being built.
            TypeError: If ``aio_config`` is not an AioConfig.
            OSError: If the kernel refuses the backend that ``aio_config`` names, or a directory cannot be read.
        """
        directories = as_directories(path)
        engine = engine_for(directories, aio_config, IN_FLIGHT_BYTES)
        tensors = None
        try:
            owner = DirectoryOwner("WeightStore", "call its close(), or that of the stream that has it (model.streaming)")
            tensors = TensorStore(path, read_only=True, engine=engine, owner=owner)
            where = directories[0]
            if NAME not in tensors:
                raise ValueError(f"the store in '{where}' holds {len(tensors)} tensors, and no weights that were built")
            return cls(tensors, engine, where)
        except BaseException:
            if tensors is not None:
                tensors.close()
            engine.close()
            raise

    @property
    def title(self) -> str:
        """What the weights are read from, for error messages."""
        return f"the store in '{self._where}'{f' (built for {self._model})' if self._model else ''}"

    # Reading.

    def read(self, extent: str, out: torch.Tensor) -> StoreFuture[torch.Tensor]:
        """Start reading an extent into ``out``; return at once.

        Args:
            extent: Name of the extent.
            out: ``extents[extent].nbytes`` bytes (uint8), contiguous, on any device. It must not be touched until the future is
                done. Memory leased from a BufferPool is filled directly, without a copy.

        Returns:
            A future whose result is a view of ``out``. Its ``result()`` raises later errors, including CorruptExtent: if
            :meth:`verifies` is true, the thread that calls ``result()`` computes the checksum.

        Raises:
            KeyError: If there is no such extent.
            ValueError: If ``out`` has another size, or is not contiguous.
        """
        wanted = self.extents.get(extent)
        if wanted is None:
            raise KeyError(f"the store in '{self._where}' has no extent {extent!r}; it has {len(self.extents)}, see extents")
        future = self._tensors.get(key_of(extent), out)
        if not self.verifies(extent):
            return future

        def conclude(read: torch.Tensor) -> torch.Tensor:
            """Check the checksum, and remember that it was right."""
            self._check(wanted, read)
            with self._lock:
                self._unverified.discard(extent)
            return read

        return future.then(conclude)

    def verifies(self, extent: str) -> bool:
        """Return whether :meth:`read` will check the extent's checksum: until it was found right once."""
        return extent in self._unverified

    def verify(self) -> None:
        """Read all extents and check their checksums. Blocks.

        Raises:
            CorruptExtent: If a checksum is wrong; the message names all such extents.
        """
        wanted = list(self.extents.values())
        largest = padded(max((extent.nbytes for extent in wanted), default=0))
        pool = BufferPool(_VERIFIED_AT_A_TIME * (largest + largest // 8))  # a lease may take up to an eighth more than asked for
        wrong: list[str] = []

        def start(extent: Extent, memory: torch.Tensor) -> StoreFuture[torch.Tensor]:
            """Start reading an extent without checking it."""
            return self._tensors.get(key_of(extent.name), memory)

        for extent, lease, future in read_ahead(wanted, _VERIFIED_AT_A_TIME, pool, lambda extent: extent.nbytes, start):
            try:
                self._check(extent, future.result())
            except CorruptExtent as error:
                wrong.append(str(error.strerror))
            lease.release()
            del future  # which would keep the memory that it read into
        if wrong:
            raise CorruptExtent(errno.EBADMSG, "; ".join(wrong), str(self._where))
        with self._lock:
            self._unverified.clear()

    # Closing.

    def close(self) -> None:
        """Wait for reads in flight, and unlock the directories. Idempotent."""
        with contextlib.closing(self._engine):
            self._tensors.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.closing(self._engine):
            self._tensors.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return representation(
            self,
            lambda: f"in {path_list(self._tensors.directories)}",
            lambda: f"of {self._model}" if self._model else "",
            lambda: f"{len(self.weights)} weights, {len(self.blocks)} blocks",
            lambda: size_for_people(self.nbytes),
            lambda: state_text(self._tensors.closed, self._process),
        )

    def _check(self, extent: Extent, read: torch.Tensor) -> None:
        """Raise CorruptExtent if the checksum of the bytes read is not the extent's."""
        read = read.cpu()
        found = crc32(memory_of(read))
        if found == extent.crc32:
            return
        names = shorten(repr(weight.name) for weight in extent.weights)
        text = f"extent {extent.name!r} ({names}) is corrupt: expected CRC-32 {extent.crc32:#010x}, found {found:#010x}"
        raise CorruptExtent(errno.EBADMSG, f"{text}; build the store again", str(self._where))


def _read_from(given: Given) -> list[str | os.PathLike[str]]:
    """Return the files, or directories of files, that weights are read from; none for weights in memory or a Source."""
    if isinstance(given, str | os.PathLike):
        return [given]
    if isinstance(given, Mapping):  # perhaps thousands of files, in few directories
        return list({os.path.dirname(weight.path): None for weight in given.values() if isinstance(weight, Location)})
    return []
