"""Describe the content of a file to be written as a list of pieces of memory."""

from __future__ import annotations

import bisect
import ctypes
import hashlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from deepnvme.memory.alignment import PAGE
from deepnvme.memory.tensor_bytes import copy_many, flat_bytes
from deepnvme.transfer.gather import CHUNK, DIRECT_FROM

if TYPE_CHECKING:
    from deepnvme.ops.aio.async_io_op.checkpoint import Checksums

_PADDING = ctypes.create_string_buffer(b"Z" * PAGE, PAGE)
_PADDING_ADDRESS = ctypes.addressof(_PADDING)

Source = torch.Tensor | torch.UntypedStorage
_Source = TypeVar("_Source", bound=Source)


class WriteRange(NamedTuple):
    """A range of the file that one request writes."""

    begin: int
    end: int
    tensor: torch.Tensor | None
    """The bytes of the range, as uint8. None if they have to be gathered from several small pieces first."""


class FileImage:
    """The contents of a file as a list of pieces of memory, in the order of the file.

    Tensors and storages are referenced, not copied. They are kept alive, and must not be changed until they are written.
    """

    # The pieces are kept in columns, not rows, because there are many: three for each tensor. Pieces may be empty.

    def __init__(self) -> None:
        self._texts: list[bytearray] = []
        """Copies of the texts that were added. The pieces hold the addresses of these copies."""
        self._sources: dict[int, Source] = {}
        self._on_devices: set[int] = set()
        self._kept: list[torch.Tensor] = []
        self.spread: list[tuple[int, int]] = []
        """Ranges (begin, end) of the file, in bytes, of which this process has only parts: one for each DTensor."""
        self.held: list[tuple[int, int]] = []
        """Ranges (begin, end) of the file, in bytes, that lie within ``spread`` and that this process has."""
        self._addresses = array("Q")
        self._lengths = array("Q")
        self._ends = array("Q")
        self._large: list[int] = []
        self.nbytes = 0
        """Bytes of the file that were added so far."""
        self.checksums: Checksums | None = None
        """Checksums that :func:`add_checksums` still has to compute and write into the file; None if there are none."""

    def add_text(self, text: bytes) -> None:
        """Append a copy of the bytes."""
        self._append(self._kept_text(text), len(text))

    def add_padding(self, nbytes: int) -> None:
        """Append this many meaningless bytes, at most PAGE."""
        self._append(_PADDING_ADDRESS, nbytes)

    def add(self, source: Source) -> None:
        """Append the bytes of a contiguous tensor or of a storage.

        A source that is neither on the CPU nor on a CUDA device is first copied to the CPU, as torch.save does.
        """
        self.add_each([source])

    def add_each(
        self, sources: Sequence[Source], text: bytes = b"", headers: array[int] | None = None, paddings: array[int] | None = None
    ) -> None:
        """Append several tensors or storages as :meth:`add` does, each with text and padding before it.

        Takes a tenth of the time of adding them one by one: there can be tens of thousands.

        Args:
            sources: Tensors and storages to append.
            text: The texts before the sources, one after the other.
            headers: For each source, how many bytes of ``text`` stand before it. None for 0.
            paddings: For each source, the bytes of padding between its text and the source. None for 0.
        """
        if not sources:
            return
        nothing = array("Q", bytes(8 * len(sources)))
        headers, paddings = headers or nothing, paddings or nothing
        pieces = range(len(self._lengths) + 2, len(self._lengths) + 3 * len(sources), 3)
        if any(device.type != "cpu" for device in {source.device for source in sources}):
            sources = [_reachable(source) for source in sources]
            self._on_devices.update(piece for piece, source in zip(pieces, sources, strict=True) if source.device.type != "cpu")
        nbytes = array("Q", [each.nbytes() if isinstance(each, torch.UntypedStorage) else each.nbytes for each in sources])
        addresses = array("Q", [source.data_ptr() for source in sources])
        rows = nothing * 3
        rows[0::3] = array("Q", accumulate(headers[:-1], initial=self._kept_text(text)))
        rows[1::3] = array("Q", [_PADDING_ADDRESS]) * len(sources)
        rows[2::3] = addresses
        self._addresses += rows
        rows[0::3], rows[1::3], rows[2::3] = headers, paddings, nbytes
        self._lengths += rows
        self._ends += array("Q", accumulate(rows, initial=self.nbytes))[1:]
        self.nbytes = self._ends[-1]
        self._sources.update(zip(pieces, sources, strict=True))
        self._large += [piece for piece, size in zip(pieces, nbytes, strict=True) if size >= DIRECT_FROM]

    def begin_of(self, source: Source) -> int:
        """Return the offset in the file of a tensor or storage that was added. Raises ValueError for any other."""
        piece = next((piece for piece, added in self._sources.items() if added is source), None)
        if piece is None:
            raise ValueError("nothing of this tensor or storage was added")
        return self._ends[piece] - self._lengths[piece]

    def add_part(self, data: torch.Tensor, runs: Sequence[tuple[int, int]], nbytes: int) -> None:
        """Append a range of the file of which this process has only some runs of bytes.

        The runs are recorded in ``held`` and the range in ``spread``. The other bytes of the range can be neither written nor
        copied.

        Args:
            data: The bytes of the runs, one run after the other, on the CPU or a CUDA device.
            runs: (begin, end) of each run, in bytes from the start of the range.
            nbytes: Bytes of the range.
        """
        if not nbytes:
            return
        data = _reachable(data)
        start, at = self.nbytes, 0
        self.spread.append((start, start + nbytes))
        for first, last in runs:
            self._append(0, start + first - self.nbytes)
            self.held.append((start + first, start + last))
            length = last - first
            if length >= DIRECT_FROM or data.device.type != "cpu":
                self.add(data[at : at + length])
            else:
                self._append(data.data_ptr() + at, length)
            at += length
        self._append(0, start + nbytes - self.nbytes)
        self._kept.append(data)

    def digest(self) -> bytes:
        """Return a SHA-256 hash of the added texts: of all bytes of the file but those of tensors and padding."""
        return hashlib.sha256(b"".join(self._texts)).digest()

    def ranges(self, begin: int = 0, end: int | None = None) -> Iterator[WriteRange]:
        """Yield the ranges in which [begin, end) of the file is written, in order: one for each write request.

        The boundaries between ranges are page-aligned, so that each request can bypass the page cache.
        """
        end = self.nbytes if end is None else end
        at = begin
        first = bisect.bisect_right(self._large, self._piece_at(begin) - 1) if self._large else 0
        for piece in self._large[first:]:
            start = self._ends[piece] - self._lengths[piece]
            inner_begin = max(-(-start // PAGE) * PAGE, begin)
            inner_end = min(self._ends[piece] // PAGE * PAGE, end)
            if inner_begin >= end:
                break
            if inner_end <= inner_begin:
                continue
            yield from _chunks(at, inner_begin)
            yield WriteRange(inner_begin, inner_end, flat_bytes(self._sources[piece])[inner_begin - start : inner_end - start])
            at = inner_end
        yield from _chunks(at, end)

    def copy(self, begin: int, end: int, into: torch.Tensor) -> None:
        """Copy [begin, end) of the file into host memory. Blocks, without holding the GIL.

        Bytes on a device are copied after the work of its current stream, and at the speed of its copy engine if ``into`` is
        pinned.

        Args:
            begin: First byte.
            end: Byte after the last.
            into: Tensor of end - begin bytes on the CPU.
        """
        if begin == end:
            return
        first, last = self._piece_at(begin), self._piece_at(end - 1)
        sources, lengths = self._addresses[first : last + 1], self._lengths[first : last + 1]
        skipped = begin - (self._ends[first] - self._lengths[first])
        sources[0] += skipped
        lengths[0] -= skipped
        lengths[-1] -= self._ends[last] - end
        destinations = array("Q", accumulate(lengths[:-1], initial=into.data_ptr()))
        devices = set()
        for piece in self._on_devices.intersection(range(first, last + 1)):
            start = self._ends[piece] - self._lengths[piece]
            at = max(start, begin)
            part = flat_bytes(self._sources[piece])[at - start : min(self._ends[piece], end) - start]
            into[at - begin : at - begin + part.numel()].copy_(part, non_blocking=True)
            devices.add(part.device)
            lengths[piece - first] = 0
        copy_many(destinations, sources, lengths)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def _append(self, address: int, nbytes: int) -> None:
        """Append ``nbytes`` bytes at a memory address to the file."""
        end = self.nbytes = self.nbytes + nbytes
        self._addresses.append(address)
        self._lengths.append(nbytes)
        self._ends.append(end)

    def _piece_at(self, offset: int) -> int:
        """Return the index of the piece that has this byte of the file."""
        return bisect.bisect_right(self._ends, offset)

    def _kept_text(self, text: bytes) -> int:
        """Keep a copy of the text and return its address."""
        if not text:
            return 0
        self._texts.append(bytearray(text))
        return ctypes.addressof(ctypes.c_char.from_buffer(self._texts[-1]))


def add_checksums(checksums: Checksums, begin: int, memory: torch.Tensor) -> None:
    """Compute checksums over the next bytes of a file, and fill in the checksums that are stored among these bytes.

    Blocks, without holding the GIL. Called for all bytes of the file, in order. A chunk of gathered pieces has to be
    passed before it is written to the file, because its checksums are written into it. A tensor's own memory is only
    read, so its transfer to the drive may be in flight.

    Args:
        checksums: The checksums of the image.
        begin: Offset of the bytes in the file.
        memory: The bytes. Bytes on a device are only counted: they have no checksums here.
    """
    address, nbytes = memory.data_ptr(), memory.nbytes
    for at in range(0, nbytes, _MOST_SUMMED):  # Ctrl-C is seen in between
        checksums.advance(begin + at, address + at, min(_MOST_SUMMED, nbytes - at))


_MOST_SUMMED = 256 << 20


def _chunks(begin: int, end: int) -> Iterator[WriteRange]:
    """Divide [begin, end) of the file into ranges of at most CHUNK bytes, whose pieces have to be gathered."""
    while begin < end:
        border = min(begin // PAGE * PAGE + CHUNK, end)
        yield WriteRange(begin, border, None)
        begin = border


def _reachable(source: _Source) -> _Source:
    """Return the source itself, or a copy on the CPU if the engine cannot read the memory of its device."""
    return source if source.device.type in ("cpu", "cuda") else source.cpu()  # type: ignore[return-value]
