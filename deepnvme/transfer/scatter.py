"""Reading many small pieces of files in few large transfers: neighbours together, some chunks ahead of their use."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch

from deepnvme.engine import Future
from deepnvme.memory.pool import BufferPool
from deepnvme.memory.tensor_bytes import copy_many

from .gather import CHUNK, Chunk, ChunkRing

Each = TypeVar("Each")


class Run(NamedTuple):
    """Pieces of one file that lie close together, and the range of the file that contains them."""

    members: list[int]
    """Indices of the pieces, in the order of the file."""
    begin: int
    """First byte to read."""
    end: int
    """End of the range to read: the offset after its last byte."""


def runs(places: Sequence[tuple[int, int, int]], limit: int, alignment: int, gap: int = 0) -> Iterator[Run]:
    """Group pieces of files into runs, so that one transfer can read each run.

    Args:
        places: (file, offset, bytes) of each piece, in any order. Pieces may overlap.
        limit: Most bytes of a run, unless it has only one piece.
        alignment: Runs begin and end at multiples of this many bytes.
        gap: Most bytes between two pieces of one run. These bytes are read too, although no piece needs them.

    Yields:
        The runs in the order of the files.
    """
    members: list[int] = []
    begin = end = 0
    last = -1
    for index in sorted(range(len(places)), key=places.__getitem__):
        file, offset, nbytes = places[index]
        piece_end = -(-(offset + nbytes) // alignment) * alignment  # padded(), without a call for each of many pieces
        if file != last or offset - end > gap or piece_end - begin > limit or end - begin > limit:
            if members:
                yield Run(members, begin, end)
            members, last, begin = [], file, offset // alignment * alignment
            end = begin
        members.append(index)
        if piece_end > end:  # pieces may overlap
            end = piece_end
    if members:
        yield Run(members, begin, end)


def transfer_ahead(
    ranges: Iterable[Each], start: Callable[[Each, torch.Tensor], Future], pool: BufferPool, nbytes: int = CHUNK
) -> Iterator[tuple[Each, torch.Tensor]]:
    """Read or write ranges of files through leased chunks, some ranges ahead of the one that the caller is using.

    At most four chunks are leased at a time.

    Args:
        ranges: Ranges to transfer, in any form that ``start`` takes.
        start: Starts reading a range into the beginning of a chunk, or fills the chunk and starts writing the range from it.
        pool: Pool of the chunks.
        nbytes: Bytes of a chunk.

    Yields:
        Each range, in order, with its chunk, when its transfer has ended. The chunk's memory is used again when the next range
        is requested.

    Raises:
        OutOfBuffers: If the pool's budget does not allow a chunk.
        Exception: The first error of ``start`` or of a transfer, after all started transfers have ended.
    """
    ring = ChunkRing(pool, nbytes, wait=True)
    ahead: deque[tuple[Each, Chunk]] = deque()

    def first() -> tuple[Each, torch.Tensor]:
        """Wait for the oldest read. Returns its range and its memory."""
        each, chunk = ahead[0]
        chunk.transfers.result()
        return each, chunk.buffer

    try:
        for each in ranges:
            chunk = ring.lease()
            if chunk is None:
                yield first()
                _, chunk = ahead.popleft()
            chunk.transfers.start(start, each, chunk.buffer)
            ahead.append((each, chunk))
        while ahead:
            yield first()
            ahead.popleft()[1].release()
    finally:
        for _, chunk in ahead:
            chunk.transfers.exception()
        ring.release()


def scatter(addresses: Iterable[int], places: Sequence[tuple[int, int]], chunk: torch.Tensor, begin: int) -> None:
    """Copy pieces of a file from a chunk, which has a range of the file, to addresses in host memory. Blocks.

    Args:
        addresses: Address that each piece is copied to. Not checked.
        places: (offset, bytes) of each piece in the file; wholly in the chunk.
        chunk: Bytes of the file.
        begin: Offset of the chunk in the file.
    """
    base = chunk.data_ptr() - begin
    copy_many(
        array("Q", addresses), array("Q", [base + offset for offset, _ in places]), array("Q", [nbytes for _, nbytes in places])
    )
