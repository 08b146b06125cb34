"""Chunks of positions on a drive, and the memory that they come and go through."""

from __future__ import annotations

import errno
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from deepnvme.streaming.kv import drive as kv_drive
from deepnvme.streaming.kv.drive import KVChunk, KVChunkStore
from deepnvme.streaming.kv.strip import KVShape

from ...support.interpreters import Interpreters
from .states import states

CPU = torch.device("cpu")


@pytest.fixture
def there(drive: Path) -> Iterator[KVChunkStore]:
    there = KVChunkStore(drive, layers=3, prefetch=1)
    yield there
    there.close()


def test_after_an_error_nothing_is_used_until_it_is_mended(there: KVChunkStore) -> None:
    with pytest.raises(ZeroDivisionError), there.changing():
        _ = 1 / 0
    with pytest.raises(RuntimeError, match=r"ZeroDivisionError.*reset\(\)"), there.changing():
        pass
    there.mend()
    with pytest.raises(OSError, match="bad sector"), there.changing():
        raise OSError(errno.EIO, "bad sector", "data")
    with pytest.raises(RuntimeError, match=r"bad sector: 'data'.*reset\(\)") as raised, there.changing():
        pass
    cause = raised.value.__cause__
    assert isinstance(cause, OSError)
    assert (cause.errno, cause.filename) == (errno.EIO, "data")
    there.mend()
    with there.changing():
        pass


def test_a_closed_one_says_so_and_has_removed_its_files(there: KVChunkStore, drive: Path) -> None:
    there.write(0, 0, *states())
    there.close()
    there.close()
    with pytest.raises(ValueError, match="closed"), there.changing():
        pass
    assert not any(drive.iterdir())


def test_what_a_killed_process_has_left_goes(drive: Path, interpreters: Interpreters) -> None:
    killed = interpreters.run(
        f"""
        import os, torch
        from deepnvme.streaming.kv.drive import KVChunkStore
        drive = KVChunkStore({str(drive)!r}, layers=1, prefetch=1)
        drive.write(0, 0, *torch.zeros(2, 1, 1, 100, 8))
        os.kill(os.getpid(), 9)
        """
    )
    assert killed.returncode == -9
    assert list(drive.rglob("*.data"))
    KVChunkStore(drive, layers=1, prefetch=1).close()
    assert not list(drive.rglob("*.data"))


def test_memory_that_a_device_copies_from_goes_to_nobody_before_that_has_ended(
    there: KVChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Copy:
        of: ClassVar[list[Copy]] = []
        ended = False

        def __init__(self, device: torch.device) -> None:
            self.device = device
            self.of.append(self)

        def done(self) -> bool:
            return self.ended

        def exception(self, timeout: float | None = None) -> None: ...

    monkeypatch.setattr(kv_drive, "Computed", Copy)
    there.write(0, 0, *states())
    there.write(0, 1, *states())
    for chunk, device in zip(there.chunks[0], ("cuda:1", "cpu"), strict=True):
        there.read(chunk, torch.device(device), lambda _: None)
    (copied,) = Copy.of
    assert copied.device == torch.device("cuda", 1), "the layer's, whichever is current"
    assert there.pool.in_use
    copied.ended = True
    assert not there.pool.in_use


def test_chunks_come_back_as_they_were_written(there: KVChunkStore) -> None:
    written = [states(positions=positions, seed=positions) for positions in (3, 5)]
    there.write(1, 0, *written[0])
    there.write(1, 3, *written[1])
    for part in (*written[0], *written[1]):
        part.zero_()  # it may change afterwards
    for chunk, positions in zip(there.chunks[1], (3, 5), strict=True):
        read: list[torch.Tensor] = []
        there.read(chunk, CPU, lambda pair, read=read: read.extend(part.clone() for part in pair))
        assert all(map(torch.equal, read, states(positions=positions, seed=positions)))


def in_memory(there: KVChunkStore) -> set[KVChunk]:
    return {chunk for chunks in there.chunks for chunk in chunks if chunk.in_memory}


def test_the_next_layers_chunks_are_read_ahead_and_none_beyond_them(there: KVChunkStore) -> None:
    for layer in range(3):
        there.write(layer, 0, *states(positions=4))
    there.cache.drain()
    there.whole(KVShape.of(*states()), 4, CPU)
    there.expect(2)
    assert in_memory(there) == {*there.chunks[2], *there.chunks[0]}, "the first comes after the last"
    there.expect(1)
    there.cache.discard(there.chunks[0][0])  # which is let go of when it has been read
    assert in_memory(there) == {*there.chunks[1], *there.chunks[2]}


def test_a_chunk_that_is_deleted_while_it_is_read_is_let_go_of(there: KVChunkStore) -> None:
    there.write(0, 0, *states(positions=4))
    there.whole(KVShape.of(*states()), 4, CPU)
    there.expect(0)
    there.delete(0, 0)
    there.release_whole()
    assert there.chunks[0] == []
    assert there.pool.in_use == 0


def test_a_change_that_was_interrupted_before_it_began_breaks_nothing_when_it_is_dropped(there: KVChunkStore) -> None:
    dropped = there.changing()
    dropped.__enter__()
    with pytest.raises(RuntimeError, match="not whole any more"):
        there.check()
    there.mend()
    del dropped
    gc.collect()
    there.check()
