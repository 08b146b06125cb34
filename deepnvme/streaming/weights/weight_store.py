"""A model's weights on one or several drives, as they are needed: extent by extent."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from deepnvme._listed import listed
from deepnvme._progress import Progress, Wanted, counting, following
from deepnvme.engine import Engine
from deepnvme.memory.alignment import padded
from deepnvme.memory.lease import Lease
from deepnvme.memory.pool import BufferPool
from deepnvme.memory.tensor_bytes import memory_of
from deepnvme.store.futures import StoreFuture
from deepnvme.store.manifest import CorruptManifest
from deepnvme.store.tensor_store import TensorStore
from deepnvme.store.volumes import Directory
from deepnvme.store.volumes import weights_of as directories_of

from .blocks import Structure, structure_of, structure_of_names
from .building import Coming, build
from .comparing import StoreMismatch, described, differences
from .manifest import LARGEST, NAME, Extent, Weight, WeightManifest, decode, encode
from .quantization import SCHEMES, Scheme
from .sources import Location, Source, Weights, source_of

Directories = Directory | Sequence[Directory] | Mapping[Directory, float]
Given = nn.Module | str | os.PathLike[str] | Mapping[str, torch.Tensor | Location] | Source
_VERIFIED_AT_A_TIME = 3
"""Extents: two are read while the checksum of a third is computed."""
_QUEUE_DEPTH = 32
"""Blocks under way for each drive: enough for all it gives, and few enough that extents arrive in turn. With 128, three of 45 MB
shared the drive and came together, late: a pass over int8 took a fourth longer."""
_CHECKSUM_DIGITS = 10
"""Of a number of 32 bits, which takes the place of null."""


class CorruptExtent(OSError):
    """What was read is not what was built (EBADMSG); the message names the extent and its weights."""


class WeightStore:
    """The weights of a model, in the extents that its blocks need; a persisted, read-only :class:`deepnvme.swap.TensorStore`.

    >>> store = WeightStore.build("checkpoint/", "/mnt/nvme/model", model=model)
    >>> store = WeightStore.open("/mnt/nvme/model")

    Made by :meth:`build` and :meth:`open`. Any number of them, in any number of processes, may be open at a time. Thread-safe. In
    a forked child every method that reads raises RuntimeError.
    """

    def __init__(self, tensors: TensorStore, engine: Engine, where: Path, verify: bool) -> None:
        self._tensors, self._engine = tensors, engine
        self._where = where
        nbytes = tensors.info(NAME).nbytes
        if nbytes > LARGEST:
            raise CorruptManifest(where, f"what it says of weights has {nbytes} bytes, and may have {LARGEST}")
        said = tensors.get(NAME).result()
        self._manifest = decode(memory_of(said).tobytes(), where)
        checked = [extent.name for extent in self.extents.values() if extent.crc32 is not None]
        self._unverified = set(checked if verify else ())
        self._lock = threading.Lock()
        self._weights = {weight.name: (extent, weight) for extent in self.extents.values() for weight in extent.weights}
        for extent in self.extents.values():
            there = tensors.info(_key(extent.name)).nbytes if _key(extent.name) in tensors else None
            if there != extent.nbytes:
                found = "none" if there is None else f"{there} bytes"
                text = f"extent {extent.name!r} should have {extent.nbytes} bytes, found {found}; build the store again"
                raise CorruptExtent(errno.EBADMSG, text, str(where))

    # Making.

    @classmethod
    def build(
        cls,
        model_or_checkpoint: Given,
        path: Directories,
        *,
        quantize: Scheme | None = None,
        model: nn.Module | None = None,
        blocks: Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
        checksum: bool = True,
        progress: Wanted = None,
        origin: str = "",
    ) -> WeightStore:
        """Write weights to one or several directories, and open what was written. Blocks.

        ``model_or_checkpoint``: a module; a .safetensors file; a .pt, as torch.save writes it of a state_dict; the index.json of
        several such files, or the directory that they are in; a mapping of names to tensors or Locations; or a Source. ``path``:
        directories as of TensorStore, without a store.

        ``model``: of a checkpoint, the module that it is for, which may be on the meta device: it says what the blocks are, and
        which weights are tied; the names have to be the same. Otherwise the blocks are found by the names. ``blocks``: see
        :func:`deepnvme.streaming.weights.blocks.structure_of`. ``dtype``: what weights of floating point are converted to.
        ``quantize``: "int8" or "int4", for weights of blocks that are smaller for it, and are dequantised when they are read.
        ``checksum``: keep the CRC-32 of each extent, 0.4 s of one core for each GB. ``progress``: True for a bar on stderr, where
        that is a terminal, or a function that is called with the bytes written and those in all. ``origin``: what the store is to
        say of where its weights are from.

        Of the weights, four extents are in memory at a time. The store is there when all of it is written, or not at all: what
        was built before an error, Ctrl-C or a crash does not open, and is removed, by the next build at the latest.

        Raises StoreMismatch for a checkpoint that is not the model's; CorruptCheckpoint, FileNotFoundError and ValueError for one
        that is not whole, or none; ValueError for a value that cannot be quantised; TypeError for what has no weights;
        FileExistsError for a directory with a store, StoreLocked for one that is in use; OSError (ENOSPC) before anything is
        written if there is no room.
        """
        if quantize is not None and quantize not in SCHEMES:
            raise ValueError(f"quantize must be one of {', '.join(SCHEMES)}, or None, got {quantize!r}")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype must be one of floating point, got {dtype}")
        if model is not None and isinstance(model_or_checkpoint, nn.Module):
            raise ValueError("model= is for a checkpoint: a module says itself what its blocks are")
        where = next(iter(directories_of(path)))
        with Engine() as engine:
            source = source_of(model_or_checkpoint, engine)
            try:
                tree = model_or_checkpoint if isinstance(model_or_checkpoint, nn.Module) else model
                structure, names = _structure(source, tree, blocks)
                coming = [Coming(plan, source, names, dtype, quantize) for plan in structure.extents()]
                kind = "" if tree is None else type(tree).__name__
                manifest = WeightManifest(kind, {}, structure.needs(), structure.ties, origin)
                with following(progress, f"building {where}") as told:
                    _build(coming, source, manifest, path, engine, checksum, told)
            finally:
                if isinstance(source, Weights):
                    source.close()
        return cls.open(path)

    @classmethod
    def open(cls, path: Directories, *, verify: bool = True) -> WeightStore:
        """Open what was built. ``path``: all of its directories. ``verify``: look at the checksum of each extent when it is read
        for the first time.

        Raises FileNotFoundError where nothing was built, or not to its end; ValueError for directories with another store, or
        not all of one's; CorruptManifest and CorruptExtent for one that is not whole; StoreLocked while it is being built.
        """
        directories = directories_of(path)
        engine = Engine(queue_depth=_QUEUE_DEPTH * len(directories))
        tensors = None
        try:
            tensors = TensorStore(path, read_only=True, engine=engine)
            where = next(iter(directories))
            if NAME not in tensors:
                raise ValueError(f"the store in '{where}' holds {len(tensors)} tensors, and no weights that were built")
            return cls(tensors, engine, where, verify)
        except BaseException:
            if tensors is not None:
                tensors.close()
            engine.close()
            raise

    # What is there.

    @property
    def extents(self) -> Mapping[str, Extent]:
        """By name, in the order in which they are first needed."""
        return self._manifest.extents

    @property
    def blocks(self) -> Mapping[str, tuple[str, ...]]:
        """By the module's name: the extents that it needs, REST excepted, which is always needed."""
        return self._manifest.blocks

    @property
    def ties(self) -> Mapping[str, str]:
        """Further names of weights, with the first."""
        return self._manifest.ties

    @property
    def weights(self) -> Mapping[str, tuple[Extent, Weight]]:
        """By their first names, with the extents that they are in."""
        return self._weights

    @property
    def origin(self) -> str:
        """What :meth:`build` was told of where the weights are from."""
        return self._manifest.origin

    @property
    def nbytes(self) -> int:
        """Of all extents."""
        return sum(extent.nbytes for extent in self.extents.values())

    # Reading.

    def read(self, extent: str, out: torch.Tensor) -> StoreFuture[torch.Tensor]:
        """Start reading an extent; return at once. The future's result: a view of ``out``.

        ``out``: ``extents[extent].nbytes`` bytes (uint8), contiguous, on any device, not to be touched until the future is done;
        memory of a lease is read in place. Raises KeyError, and ValueError for another ``out``; what fails later is raised by
        ``Future.result``, CorruptExtent too, whose checksum is computed by the thread that looks if :meth:`verifies` says so.
        """
        wanted = self._extent(extent)
        future = self._tensors.get(_key(extent), out)
        if not self.verifies(extent):
            return future

        def conclude(read: torch.Tensor) -> torch.Tensor:
            self._check(wanted, read)
            with self._lock:
                self._unverified.discard(extent)
            return read

        return future.then(conclude)

    def verifies(self, extent: str) -> bool:
        """Whether :meth:`read` looks at its checksum: until that was right once, if there is one and ``open`` was to verify."""
        return extent in self._unverified

    def verify(self) -> None:
        """Read all extents and look at their checksums. Blocks. Raises CorruptExtent naming all that differ, ValueError for a
        store without."""
        wanted = list(self.extents.values())
        if any(extent.crc32 is None for extent in wanted):
            raise ValueError(f"the store in '{self._where}' was built without checksums: build it with checksum=True")
        largest = padded(max((extent.nbytes for extent in wanted), default=0))
        pool = BufferPool(_VERIFIED_AT_A_TIME * (largest + largest // 8))  # what leases may take beyond what they ask for
        under_way: deque[tuple[Extent, Lease, StoreFuture[torch.Tensor]]] = deque()
        wrong: list[str] = []

        def finish() -> None:
            extent, lease, future = under_way.popleft()
            try:
                self._check(extent, future.result())
            except CorruptExtent as error:
                wrong.append(str(error.strerror))
            lease.release()

        for extent in wanted:
            lease = pool.lease(extent.nbytes)
            under_way.append((extent, lease, self._tensors.get(_key(extent.name), lease.buffer)))
            del lease
            if len(under_way) == _VERIFIED_AT_A_TIME:
                finish()
        while under_way:
            finish()
        if wrong:
            raise CorruptExtent(errno.EBADMSG, "; ".join(wrong), str(self._where))
        with self._lock:
            self._unverified.clear()

    # Whose weights they are.

    def compare(self, model: nn.Module) -> list[str]:
        """What differs from a model's parameters and persistent buffers, by name: missing, unexpected, other shapes and dtypes,
        tied and not. The model may be on the meta device. Values are not looked at."""
        wanted, ties = described(model)
        found = {name: weight.info for name, (_, weight) in self.weights.items()}
        found |= {alias: found[name] for alias, name in self.ties.items()}
        return differences(wanted, ties, found, self.ties)

    def check(self, model: nn.Module) -> None:
        """Raise StoreMismatch naming what differs, if anything does."""
        found = self.compare(model)
        if found:
            kind = f" (built for {self._manifest.model})" if self._manifest.model else ""
            raise StoreMismatch(f"the store in '{self._where}'{kind} is not of this {type(model).__name__}", found)

    # Ending.

    def close(self) -> None:
        """Wait for what is under way, and unlock the directories. Idempotent."""
        with contextlib.closing(self._engine):
            self._tensors.close()

    def __enter__(self) -> WeightStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.closing(self._engine):
            self._tensors.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"<WeightStore in '{self._where}': {len(self.weights)} weights, {len(self.blocks)} blocks, {self.nbytes} bytes>"

    def _extent(self, name: str) -> Extent:
        extent = self.extents.get(name)
        if extent is None:
            raise KeyError(f"the store in '{self._where}' has no extent {name!r}; it has {len(self.extents)}, see extents")
        return extent

    def _check(self, extent: Extent, read: torch.Tensor) -> None:
        read = read.cpu()
        found = zlib.crc32(memory_of(read))
        if found == extent.crc32:
            return
        names = listed(repr(weight.name) for weight in extent.weights)
        text = f"extent {extent.name!r} ({names}) is corrupt: expected CRC-32 {extent.crc32:#010x}, found {found:#010x}"
        raise CorruptExtent(errno.EBADMSG, f"{text}; build the store again", str(self._where))


def _key(extent: str) -> str:
    """The tensor that an extent is."""
    return f"extent/{extent}"


def _structure(source: Source, model: nn.Module | None, blocks: Sequence[str] | None) -> tuple[Structure, dict[str, str]]:
    """And by which names the source knows the weights. Raises StoreMismatch."""
    found = {name: source.info(name) for name in source.names()}
    if not found:
        raise ValueError("there is no weight to build a store of")
    if model is None:
        structure = structure_of_names({name: info.nbytes for name, info in found.items()}, source.ties(), blocks)
        return structure, {name: name for name in found}
    wanted, ties = described(model)
    wrong = differences(wanted, ties, found, source.ties(), dtypes=False)
    if wrong:
        raise StoreMismatch(f"these are not the weights of {type(model).__name__}", wrong)
    structure = structure_of(model, blocks)
    names = {name: name for name in wanted if name not in ties}
    names |= {ties[name]: name for name in reversed(wanted) if name in ties and ties[name] not in found and name in found}
    return structure, names


def _build(
    coming: Sequence[Coming],
    source: Source,
    manifest: WeightManifest,
    path: Directories,
    engine: Engine,
    checksum: bool,
    told: Progress | None,
) -> None:
    total = sum(each.extent.nbytes for each in coming)
    store = TensorStore(path, persist=True, engine=engine)
    try:
        if len(store):
            kind = "weights" if NAME in store else f"{len(store)} tensors"
            text = f"here is a store of {kind}: open it, choose another directory, or remove its files"
            raise FileExistsError(errno.EEXIST, text, str(next(iter(directories_of(path)))))
        planned = replace(manifest, extents={each.extent.name: each.extent for each in coming})
        store.reserve(total + padded(len(encode(planned)) + _CHECKSUM_DIGITS * len(coming)))
        extents = build(coming, store, _key, checksum, counting(told, total))
        if isinstance(source, Weights):
            source.check_unchanged()
        said = encode(replace(manifest, extents={extent.name: extent for extent in extents}))
        store.put(NAME, torch.frombuffer(bytearray(said), dtype=torch.uint8)).result()
        store.commit()
        store.close()
    except BaseException:  # of closing, too, which may be interrupted as it begins; ``with`` would not try again
        with contextlib.suppress(OSError):
            store.close()
        raise
