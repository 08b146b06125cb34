"""What a file system could not write it may say when the file is flushed or closed, and only then: NFS and FUSE do."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme.swap import TensorStore

from ..support.faulty_filesystem import FaultyFilesystem
from ..support.memory import page_aligned, pattern
from ..support.patience import PATIENCE

CONTENT = pattern(100_001)


def test_a_write_whose_file_cannot_be_closed_has_failed(faulty_disk: FaultyFilesystem, engine: deepnvme.Engine) -> None:
    faulty_disk.fail("flush", errno.EDQUOT)
    with pytest.raises(OSError, match=r"write of 100001 bytes at offset 0: close") as caught:
        engine.write(page_aligned(CONTENT), faulty_disk / "file").result()
    assert (caught.value.errno, caught.value.filename) == (errno.EDQUOT, str(faulty_disk / "file"))
    assert engine.stats().failed_requests == 1
    engine.write(page_aligned(CONTENT), faulty_disk / "file").result()


def test_every_transfer_of_a_call_to_a_file_that_cannot_be_closed_has_failed(
    direct_disk: FaultyFilesystem, engine: deepnvme.Engine
) -> None:
    """Also those of the first part of the call (256 tensors), whose request had ended well."""
    count = 600
    direct_disk.fail("flush", errno.EDQUOT, name="file")
    paths = [direct_disk / ("other" if index == 300 else "file") for index in range(count)]
    future = engine.write_many([page_aligned(bytes(4096))] * count, paths, [4096 * index for index in range(count)])
    error: Any = future.exception(PATIENCE)
    direct_disk.heal()
    assert (error.errno, error.filename) == (errno.EDQUOT, str(direct_disk / "file"))
    assert error.indices == [index for index in range(count) if index != 300]


def test_a_cancel_waits_for_no_close(faulty_disk: FaultyFilesystem, faulty: Any, gate: Any) -> None:
    engine = faulty("threads", queue_depth=1, gate=gate)
    first, second = (engine.write(page_aligned(CONTENT), faulty_disk / str(index)) for index in range(2))
    faulty_disk.fail("flush", effect="hang", times=-1)
    cancelling = threading.Thread(target=second.cancel)
    cancelling.start()
    cancelling.join(PATIENCE)
    waits = cancelling.is_alive()
    assert not second.done()
    faulty_disk.resume()
    gate.release()
    assert not waits
    assert second.exception(PATIENCE).errno == errno.ECANCELED
    assert first.result(PATIENCE) == len(CONTENT)


def test_what_the_page_cache_could_not_write_is_not_called_written(
    writeback_disk: FaultyFilesystem, engine: deepnvme.Engine
) -> None:
    """Without that, the fsync that opens the file again would succeed, and the end of the file be lost unheard."""
    writeback_disk.fail("write", errno.EIO, skip=1)  # the first is the direct body, the second the tail
    with pytest.raises(OSError, match="close") as caught:
        engine.write(page_aligned(CONTENT), writeback_disk / "file").result()
    assert writeback_disk.heal() == ["write:EIO"]
    assert caught.value.errno == errno.EIO


def test_a_file_that_is_closed_under_its_last_transfer_tells_that(direct_disk: FaultyFilesystem, engine: deepnvme.Engine) -> None:
    file = engine.open(direct_disk / "file", "rw")
    direct_disk.fail("write", effect="hang", times=-1)
    future = engine.write(page_aligned(CONTENT), file)
    file.close()
    direct_disk.fail("flush", times=-1)
    direct_disk.resume()
    with pytest.raises(OSError, match="close"):
        future.result(PATIENCE)
    direct_disk.heal()


def test_a_file_that_is_closed_after_its_last_transfer_tells_that(direct_disk: FaultyFilesystem, engine: deepnvme.Engine) -> None:
    def written() -> deepnvme.engine.File:
        file = engine.open(direct_disk / "file", "rw")
        engine.write(page_aligned(CONTENT), file).result()
        direct_disk.fail("flush", errno.EDQUOT)
        return file

    def check(error: OSError) -> None:
        assert (error.errno, error.filename) == (errno.EDQUOT, str(direct_disk / "file"))
        assert direct_disk.heal() == ["flush:EDQUOT"]

    file = written()
    with pytest.raises(OSError, match="close") as caught:
        file.close()
    check(caught.value)
    assert file.closed
    file.close()
    with pytest.raises(OSError, match="close") as caught, written():
        pass
    check(caught.value)
    with pytest.raises(ZeroDivisionError), written():
        raise ZeroDivisionError
    assert direct_disk.heal() == ["flush:EDQUOT"]
    with engine.open(direct_disk / "file", "r"):
        direct_disk.fail("flush")
    assert direct_disk.heal() == ["flush:EIO"]


@pytest.mark.parametrize("fsync", [False, True])
def test_a_save_whose_file_cannot_be_closed_publishes_nothing(direct_disk: FaultyFilesystem, fsync: bool) -> None:
    path = direct_disk / "model.pt"
    deepnvme.save([1], path)
    direct_disk.fail("flush", errno.EDQUOT, times=-1)
    with pytest.raises(OSError, match="close") as caught:
        deepnvme.save([2], path, fsync=fsync)
    direct_disk.heal()
    assert (caught.value.errno, caught.value.filename) == (errno.EDQUOT, str(path))
    assert "in place" not in str(caught.value)
    assert deepnvme.load(path) == [1]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_save_whose_lock_cannot_be_closed_says_that_the_new_file_is_there(direct_disk: FaultyFilesystem) -> None:
    path = direct_disk / "model.pt"
    deepnvme.save([1], path)
    direct_disk.fail("flush", errno.EDQUOT, skip=2)  # the first are the engine's, direct and buffered
    with pytest.raises(OSError, match="unlocked and closed: the new file is in place") as caught:
        deepnvme.save([2], path, fsync=False)
    assert (caught.value.errno, caught.value.filename) == (errno.EDQUOT, str(path))
    assert "power cut" not in str(caught.value)
    assert deepnvme.load(path) == [2]


@pytest.mark.slow
def test_of_two_last_requests_that_end_together_one_tells_it(testing: Any, drive: Path) -> None:
    rounds = 5_000
    assert testing.told_of_a_failed_close(str(drive / "file"), rounds) == rounds


def test_a_read_does_not_mind(direct_disk: FaultyFilesystem, engine: deepnvme.Engine) -> None:
    engine.write(page_aligned(CONTENT), direct_disk / "file").result()
    direct_disk.fail("flush", times=-1)
    assert engine.read(page_aligned(bytes(len(CONTENT))), direct_disk / "file").result() == len(CONTENT)


def test_what_a_store_s_commit_could_not_flush_is_neither_got_nor_published(writeback_disk: FaultyFilesystem) -> None:
    """The drive may have dropped it, and another fsync succeeds."""
    old, new = torch.full((10_000,), 1, dtype=torch.uint8), torch.full((9_999,), 2, dtype=torch.uint8)
    with TensorStore(writeback_disk / "store", persist=True) as store:
        store.put("name", old).result()
        store.commit()
        store.put("name", new).result()
        writeback_disk.fail("fsync", errno.EIO, times=-1)
        with pytest.raises(OSError, match="fsync") as failed:
            store.commit()
        assert "fsync:EIO" in writeback_disk.heal()
        assert (failed.value.errno, failed.value.filename) == (errno.EIO, str(writeback_disk / "store" / "deepnvme-store.data"))
        with pytest.raises(OSError, match="'name' is damaged") as damaged:
            store.get("name")
        assert (damaged.value.errno, damaged.value.filename) == (errno.EIO, failed.value.filename)
        with pytest.raises(OSError, match="put them again"):
            store.commit()
    with TensorStore(writeback_disk / "store", persist=True) as store:
        assert torch.equal(store.get("name").result(), old)
        store.put("name", new).result()
        store.commit()
    with TensorStore(writeback_disk / "store", persist=True) as store:
        assert torch.equal(store.get("name").result(), new)
