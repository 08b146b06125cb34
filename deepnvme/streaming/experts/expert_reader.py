"""Reads experts from the files of a checkpoint, which must not change meanwhile."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Mapping

import torch

from deepnvme.cache.block import Block
from deepnvme.checkpoint.file_io import Version
from deepnvme.checkpoint.formats.pt_records import CorruptCheckpoint
from deepnvme.engine import Engine, File
from deepnvme.memory.alignment import padded
from deepnvme.memory.lease import Transfer
from deepnvme.streaming.weights.checkpoint_weights import CheckedRead, check_unchanged

from .expert_files import ExpertSlice, FileRange


class ExpertBlock(Block):
    """One expert's part of a weight, as a block of a :class:`deepnvme.cache.block_cache.BlockCache`."""

    __slots__ = ("moved", "part", "worth")

    def __init__(self, part: ExpertSlice) -> None:
        super().__init__(f"{part.weight}[{part.expert}]", part.memory_nbytes, stored=True)
        self.part = part
        self.moved = False
        """Whether the part lies where it is used. After a read it lies where a direct read put it."""
        self.worth = float("-inf")
        """Logarithm of how often and how recently tokens have chosen the expert: see :class:`ExpertCache`."""


class ExpertReader:
    """Reads parts of weights from files that stay open. Not thread-safe.

    Args:
        engine: Reads the files.
        parts: The parts that will be read.
        versions: Version of each file, by path, from before its header was read.

    Raises:
        CorruptCheckpoint: If a file was changed since.
        OSError: If a file cannot be opened.
    """

    def __init__(self, engine: Engine, parts: Iterable[ExpertSlice], versions: Mapping[str, Version]) -> None:
        self.bytes_read = 0
        """Bytes of all reads started so far, with the pages around them."""
        self.seconds_reading = 0.0
        """Seconds with at least one read in flight, up to the last :meth:`record_ended`."""
        self._in_flight: list[Transfer] = []
        self._since = 0.0
        self._engine = engine
        paths = dict.fromkeys(path for part in parts for path, _, _ in (*part.ranges, *part.scale_ranges))
        self._versions = versions
        self._files: dict[str, File] = {path: engine.open(path) for path in paths}
        try:
            check_unchanged(paths, versions)
        except BaseException:
            self.close()
            raise

    def read(self, block: Block, buffer: torch.Tensor) -> Transfer:
        """Start reading a block's part of a weight into ``buffer``, which begins at a page; return at once.

        The transfer's error is CorruptCheckpoint if a file was replaced, or written to, since its header was read.

        Raises:
            OSError: If a file cannot be read.
        """
        assert isinstance(block, ExpertBlock)
        part = block.part
        block.moved = part.place == part.start
        at, pieces = part.start, []
        for each in part.ranges:
            pieces.append((self._files[each.path], each.offset, buffer[at : at + each.nbytes]))
            at += each.nbytes
        if len(part.ranges) == 1:
            begin, end = self._whole_pages(part.ranges[0], part.start)
            pieces = [(self._files[part.ranges[0].path], begin, buffer[: end - begin])]
        at = part.scales_start
        for each in part.scale_ranges:
            pieces.append((self._files[each.path], each.offset, buffer[at : at + each.nbytes]))
            at += each.nbytes
        files, offsets, tensors = zip(*pieces, strict=True)
        self.bytes_read += sum(tensor.nbytes for tensor in tensors)
        self.record_ended()
        if len(tensors) == 1:
            transfer: Transfer = self._engine.read(tensors[0], files[0], offsets[0])
        else:
            transfer = self._engine.read_many(tensors, files, offsets)
        self._in_flight.append(transfer)
        return CheckedRead(
            transfer, list(dict.fromkeys(each.path for each in (*part.ranges, *part.scale_ranges))), self._versions
        )

    def record_ended(self) -> None:
        """Record which reads have ended. A read counts as in flight until a call of this method finds it done. Never blocks."""
        now = time.perf_counter()
        if self._in_flight:
            self.seconds_reading += now - self._since
            self._in_flight = [transfer for transfer in self._in_flight if not transfer.done()]
        self._since = now

    def write(self, block: Block, buffer: torch.Tensor) -> Transfer:
        """Raise RuntimeError: experts are only read."""
        raise RuntimeError(f"{block!r} cannot be written: experts are only read")

    def close(self) -> None:
        """Close the files. Reads must have ended."""
        for file in self._files.values():
            file.close()

    def _whole_pages(self, wanted: FileRange, start: int) -> tuple[int, int]:
        """Return the range of whole pages around ``wanted``, up to the end of the file: read without a copy of their ends.

        ``start``: bytes of memory before those of ``wanted``; 0 if the range has to begin where it is, or begins at a page.
        """
        end = wanted.offset - start + padded(start + wanted.nbytes)
        return wanted.offset - start, min(end, self._versions[wanted.path][2])


def explain(error: OSError, part: ExpertSlice) -> OSError:
    """Return an error like ``error`` that also says which expert could not be read, and where it lies."""
    path, offset, nbytes = (*part.ranges, *part.scale_ranges)[min(getattr(error, "indices", None) or [0])]
    text = f"{error.strerror or error}: {part} could not be read, {nbytes} bytes at offset {offset}"
    if isinstance(error, CorruptCheckpoint):
        return CorruptCheckpoint(error.filename, text)
    return OSError(error.errno or errno.EIO, text, os.fspath(error.filename or path))
