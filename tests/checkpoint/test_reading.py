"""Pieces of a file, read together: each is in its chunk, however they lie."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import deepnvme
from deepnvme._tensor_memory import memory_of
from deepnvme.checkpoint.file_image import CHUNK
from deepnvme.checkpoint.reading import in_chunks
from deepnvme.swap.buffers import BufferPool

SIZE = 300_000


class Piece(NamedTuple):
    offset: int
    nbytes: int


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(
        st.builds(lambda at, n: Piece(at, min(n, SIZE - at)), st.integers(0, SIZE - 1), st.integers(0, SIZE)), max_size=12
    ),
    budget=st.sampled_from([CHUNK, 8 * CHUNK]),
)
def test_each_piece_is_in_its_chunk_however_they_overlap(
    engine: deepnvme.Engine, drive: Path, pieces: list[Piece], budget: int
) -> None:
    data = os.urandom(SIZE)
    (drive / "file").write_bytes(data)
    pool = BufferPool(budget)
    lease = pool.lease(CHUNK)  # which is leased again below, and has nothing of the file
    lease.buffer.zero_()
    lease.release()
    found = []
    with engine.open(drive / "file") as file:
        for run, chunk, begin in in_chunks(pieces, file, engine, pool):
            for piece in run:
                assert memory_of(chunk, piece.offset - begin, piece.nbytes) == data[piece.offset :][: piece.nbytes]
            found += run
    assert sorted(found) == sorted(pieces)
