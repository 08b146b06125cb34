"""Builds a store of weights as a pipeline: one extent is read while another is converted and earlier ones are written."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from deepnvme.checkpoint.weight_locations import Pending, Source, Weights
from deepnvme.engine import Engine
from deepnvme.files.directory_lock import DirectoryOwner
from deepnvme.memory.alignment import padded
from deepnvme.memory.lease import Lease
from deepnvme.memory.pool import BufferPool
from deepnvme.memory.tensor_bytes import crc32, memory_of
from deepnvme.model.quantization import Scheme, quantize
from deepnvme.model.structure import UNBLOCKED_EXTENT, ExtentPlan, Structure, structure_of, structure_of_names
from deepnvme.model.weight_differences import WeightInfo, WeightMismatch, described, differences
from deepnvme.store.tensor_store import TensorStore
from deepnvme.telemetry.progress import Progress, count_bytes
from deepnvme.transfer.gather import Transfers

from .manifest import NAME, Extent, WeightManifest, encode, key_of, layout_extent

T = TypeVar("T")
Started = TypeVar("Started")

_READ = 2
"""Extents in memory that are not being written: one is read while another is converted and checksummed."""
_WRITTEN = 2
"""Extents in memory that are being written."""
_CHECKSUM_DIGITS = 10
"""Most decimal digits of a 32-bit checksum: most bytes by which the manifest grows when a checksum replaces null."""


class ExtentBuilder:
    """Builds one extent: reads its weights from a source, and converts them to their form in the store.

    ``read`` is the layout of the weights as they are read, ``extent`` their layout in the store. They differ if weights are
    converted or quantised.
    """

    def __init__(
        self,
        plan: ExtentPlan,
        source: Source,
        names: Mapping[str, str],
        dtype: torch.dtype | None = None,
        scheme: Scheme | None = None,
    ) -> None:
        """Compute the layouts of an extent.

        Args:
            plan: Name of the extent and names of its weights.
            source: Where the weights are read from.
            names: The source's name of each weight.
            dtype: Dtype to which floating-point weights are converted; None for no conversion.
            scheme: How to quantise weights that quantisation makes smaller; None for no quantisation. Not for UNBLOCKED_EXTENT,
                whose weights stay in memory.
        """
        infos = {weight: source.info(names[weight]) for weight in plan.weights}
        self.read = layout_extent(plan.name, infos)
        if dtype is not None:
            infos |= {weight: WeightInfo(dtype, info.shape) for weight, info in infos.items() if info.dtype.is_floating_point}
        self.extent = layout_extent(plan.name, infos, None if plan.name == UNBLOCKED_EXTENT else scheme)
        self._source = source
        self._names = names

    @property
    def converts(self) -> bool:
        """Whether any weight is converted or quantised."""
        return self.read != self.extent

    def start(self, memory: torch.Tensor) -> list[Pending]:
        """Start reading all weights into ``memory``, which has ``read.nbytes`` bytes; return one pending read for each."""
        return [self._source.read_into(self._names[weight.name], weight.stored(memory)) for weight in self.read.weights]

    def convert(self, read: torch.Tensor, memory: torch.Tensor) -> None:
        """Convert and quantise the weights that were read.

        Args:
            read: The weights as they were read, ``read.nbytes`` bytes.
            memory: Memory for the result, ``extent.nbytes`` bytes.

        Raises:
            ValueError: If a weight cannot be quantised; the message names it.
        """
        for before, after in zip(self.read.weights, self.extent.weights, strict=True):
            if after.scheme is None:
                after.view(memory).copy_(before.view(read))
            else:
                quantize(before.view(read).to(after.info.dtype), after.scheme, out=after.stored(memory), name=after.name)


def structure_for(
    found: Mapping[str, WeightInfo], found_ties: Mapping[str, str], model: nn.Module | None, blocks: Sequence[str] | None = None
) -> tuple[Structure, dict[str, str]]:
    """Return the blocks of a new store, and the source's name of each weight.

    Args:
        found: Dtype and shape of the source's weights, by all of their names.
        found_ties: First name of each tied weight of the source, by its further names.
        model: The model that the weights are for; None to find the blocks by the weights' names.
        blocks: Names or patterns of the modules that become blocks; None to find them.

    Raises:
        WeightMismatch: If source and model differ.
        ValueError: If the source has no weights, or a name in ``blocks`` is not that of a block.
    """
    if not found:
        raise ValueError("there is no weight to build a store of")
    if model is None:
        structure = structure_of_names({name: info.nbytes for name, info in found.items()}, found_ties, blocks)
        return structure, {name: name for name in found}
    wanted, ties = described(model)
    wrong = differences(wanted, ties, found, found_ties, dtypes=False)
    if wrong:
        raise WeightMismatch(f"these are not the weights of {type(model).__name__}", wrong)
    names = {name: name for name in wanted if name not in ties}
    names |= {ties[name]: name for name in reversed(wanted) if name in ties and ties[name] not in found and name in found}
    return structure_of(model, blocks), names


def build(
    builders: Sequence[ExtentBuilder],
    source: Source,
    manifest: WeightManifest,
    where: Sequence[Path],
    engine: Engine,
    progress: Progress | None,
) -> None:
    """Write all extents and the manifest into a new TensorStore, and commit it. Blocks.

    Args:
        builders: The extents, at least one.
        source: Where the weights are read from. If they are in files, the files must not change until the end.
        manifest: The manifest of the store, without the extents.
        where: The store's directories.
        engine: Writes the extents.
        progress: Called after each extent with the bytes written so far and in all; None for no call.

    Raises:
        FileExistsError: If there is a store already.
        Exception: Whatever reading, converting and writing raise. There is no store then.
    """
    total = sum(each.extent.nbytes for each in builders)
    store = TensorStore(where, persist=True, engine=engine, owner=DirectoryOwner("WeightStore", "wait until it is built"))
    with store:
        if len(store):
            kind = "weights" if NAME in store else f"{len(store)} tensors"
            text = f"here is a store of {kind}: open it, choose another directory, or remove its files"
            raise FileExistsError(errno.EEXIST, text, str(where[0]))
        planned = replace(manifest, extents={each.extent.name: each.extent for each in builders})
        store.reserve(total + padded(len(encode(planned)) + _CHECKSUM_DIGITS * len(builders)))
        extents = write_extents(builders, store, count_bytes(progress, total))
        if isinstance(source, Weights):
            source.check_unchanged()
        said = encode(replace(manifest, extents={extent.name: extent for extent in extents}))
        store.put(NAME, torch.frombuffer(bytearray(said), dtype=torch.uint8)).result()
        store.commit()


def write_extents(builders: Sequence[ExtentBuilder], store: TensorStore, report: Callable[[int], None]) -> list[Extent]:
    """Read, convert and write all extents, without committing them. Blocks.

    Args:
        builders: The extents, at least one.
        store: Where they are written.
        report: Called with the bytes of each extent that has been written.

    Returns:
        The extents as they were written, with their checksums.
    """
    pool = BufferPool(_budget(builders))
    written = Transfers(ended=report)
    built = []
    for each, lease, reads in read_ahead(builders, _READ, pool, lambda each: each.read.nbytes, ExtentBuilder.start):
        while reads:  # a read that is kept would keep the memory that it was read into
            reads.pop(0).result()
        if each.converts:
            raw, lease = lease, pool.lease(each.extent.nbytes)
            each.convert(raw.buffer, lease.buffer)
            raw.release()
        memory = lease.buffer
        _clear_gaps(each.extent, memory)
        built.append(replace(each.extent, crc32=crc32(memory_of(memory))))
        lease.release(after=written.start(store.put, key_of(each.extent.name), memory))
        del memory, lease
        written.take_ended(most=_WRITTEN)
    written.result()
    return built


def read_ahead(
    items: Iterable[T], count: int, pool: BufferPool, nbytes: Callable[[T], int], start: Callable[[T, torch.Tensor], Started]
) -> Iterator[tuple[T, Lease, Started]]:
    """Start reading items, each into leased memory, and yield them in order while later ones are read.

    The caller waits for the read of each item. Before it takes the next item, it must release the lease of this one, and
    keep no view of its memory.

    Args:
        items: The items to read.
        count: Number of items in memory at a time, including the one that was yielded last.
        pool: Leases the memory.
        nbytes: Returns how many bytes of memory an item takes.
        start: Starts reading an item into memory.

    Yields:
        Each item with its lease, and what ``start`` has returned.
    """
    under_way: deque[tuple[T, Lease, Started]] = deque()
    for item in items:
        lease = pool.lease(nbytes(item))
        under_way.append((item, lease, start(item, lease.buffer)))
        del lease
        if len(under_way) == count:
            yield under_way.popleft()
    while under_way:
        yield under_way.popleft()


def _budget(builders: Sequence[ExtentBuilder]) -> int:
    """Return the most bytes of memory that :func:`write_extents` needs at a time."""
    read = [each.read.nbytes for each in builders]
    written = [each.extent.nbytes for each in builders]
    most = max(
        sum(written[max(0, at - _WRITTEN) : at]) + sum(read[at : at + _READ]) + (written[at] if each.converts else 0)
        for at, each in enumerate(builders)
    )
    return padded(most + most // 8)  # a lease may take up to an eighth more than asked for


def _clear_gaps(extent: Extent, memory: torch.Tensor) -> None:
    """Zero the bytes between and behind the weights.

    Otherwise old data from memory would get to the drive, and equal weights would have different checksums.
    """
    end = 0
    for weight in extent.weights:
        memory[end : weight.offset] = 0
        end = weight.end
    memory[end:] = 0
