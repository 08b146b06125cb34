"""Never a wrong byte: kills, damaged and cut files, drives that fail, threads and processes beside one another."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import errno
import gc
import mmap
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepnvme.kvstore import BlockStore
from deepnvme.kvstore.block_files import FILE_NAME, RECORD_BYTES

from ..support.disks import Disk
from ..support.faulty_filesystem import FaultyFilesystem
from ..support.files import flip
from ..support.interpreters import Interpreters
from ..support.interrupts import ctrl_c_every, lost_in_finalizers
from ..support.kv_blocks import BLOCK, content, keys_of
from ..support.patience import PATIENCE

CAPACITY = 64 * (BLOCK + 512)


def opened(path: Path, **more: Any) -> BlockStore:
    return BlockStore(path, CAPACITY, BLOCK, **more)


def check(store: BlockStore, keys: list[bytes]) -> int:
    """Get all keys; return how many were hits, all of which must be right."""
    out = torch.zeros(len(keys), BLOCK, dtype=torch.uint8)
    hits = store.get_many(keys, out).result()
    for hit, key, row in zip(hits, keys, out, strict=True):
        assert not hit or torch.equal(row, content(key)), key
    return sum(hits)


def put(store: BlockStore, keys: list[bytes]) -> list[bool]:
    return store.put_many(keys, [content(key) for key in keys]).result()


WRITER = """
import itertools, random, sys
from deepnvme.kvstore import BlockStore
from tests.support.kv_blocks import content, keys_of
numbers = random.Random({seed})
store = BlockStore({path!r}, {capacity}, {block})
for turn in itertools.count():
    keys = keys_of(numbers.sample(range(200), 8))
    if not all(store.put_many(keys, [content(key) for key in keys]).result()):
        sys.exit("not stored")
    if turn % 5 == 4:
        store.delete(keys[:2])
    if turn == 10:
        print("warm", flush=True)
"""


def kill_writers(interpreters: Interpreters, path: Path, times: int, seed: int) -> None:
    for turn in range(times):
        child = interpreters.start(WRITER.format(seed=seed + turn, path=str(path), capacity=CAPACITY, block=BLOCK))
        interpreters.wait_for("warm")
        time.sleep(random.Random(seed + turn).random() * 0.05)
        os.kill(child, signal.SIGKILL)
        said = interpreters.wait(child)
        assert said.returncode == -signal.SIGKILL, said.stderr
        with opened(path) as store:
            stats = store.stats()
            assert (path / FILE_NAME).stat().st_size <= CAPACITY
            assert stats.used > stats.slots // 2
            there = [key for key in keys_of(range(200)) if store.contains_many([key])[0]]
            assert len(there) == stats.used
            assert check(store, there) == len(there)  # what is found is whole
            assert store.stats().corrupt == 0


def test_after_a_kill_every_block_that_is_found_is_whole(interpreters: Interpreters, drive: Path) -> None:
    kill_writers(interpreters, drive / "kv", 4, 1)


@pytest.mark.slow
def test_after_many_kills_every_block_that_is_found_is_whole(interpreters: Interpreters, drive: Path) -> None:
    kill_writers(interpreters, drive / "kv", 60, 100)


def test_a_kill_while_the_file_is_made_leaves_nothing_in_the_way(drive: Path) -> None:
    (drive / "kv").mkdir()
    (drive / "kv" / f"{FILE_NAME}.new").write_bytes(b"half")
    (drive / "kv" / FILE_NAME).write_bytes(b"deep")  # as a file system may leave it after a power cut
    with opened(drive / "kv") as store:
        assert put(store, [b"key"]) == [True]
        assert check(store, [b"key"]) == 1
        assert sorted(each.name for each in (drive / "kv").iterdir()) == [FILE_NAME, "deepnvme-store.lock"]


@pytest.mark.parametrize("part", ["first header", "second header", "record", "key", "unused", "block", "all"])
def test_a_flipped_bit_is_at_most_a_miss(drive: Path, part: str) -> None:
    keys = keys_of(range(40))
    with opened(drive / "kv") as store:
        put(store, keys)
        layout = store._layout
    file = drive / "kv" / FILE_NAME
    record = layout.records_begin + 3 * RECORD_BYTES
    block = layout.blocks_begin + 3 * layout.slot_bytes + 5000
    places = {
        "first header": [50],
        "second header": [4096 + 50],
        "record": [record + 5],
        "key": [record + 24],
        "unused": [record + 127],
        "block": [block],
        "all": [50, *(layout.records_begin + slot * RECORD_BYTES + slot % 128 for slot in range(0, 40, 2))],
    }[part]
    for place in places:
        flip(file, place)
    lost = 0 if "header" in part else 20 if part == "all" else 1
    with opened(drive / "kv") as store:
        assert check(store, keys) == 40 - lost
        assert store.stats().corrupt == (1 if part == "block" else 0)
        assert ("does not match" in store.stats().last_error) == (part == "block")
        assert all(put(store, keys))
        assert check(store, keys) == 40


def test_both_headers_damaged_is_an_error_that_names_the_file(drive: Path) -> None:
    opened(drive / "kv").close()
    for place in (50, 4096 + 50):
        flip(drive / "kv" / FILE_NAME, place)
    with pytest.raises(OSError, match="remove it") as caught:
        opened(drive / "kv")
    assert (caught.value.errno, caught.value.filename) == (errno.EBADMSG, str(drive / "kv" / FILE_NAME))


@pytest.mark.parametrize("left", [0, 100, 4096, 8192, 10_000, 8192 + 20 * RECORD_BYTES, 200_000, 400_001])
def test_a_file_that_was_cut_off_is_opened(drive: Path, left: int) -> None:
    keys = keys_of(range(40))
    with opened(drive / "kv") as store:
        put(store, keys)
        size = (drive / "kv" / FILE_NAME).stat().st_size
    os.truncate(drive / "kv" / FILE_NAME, left)
    with opened(drive / "kv") as store:
        assert check(store, keys) < 40
        assert (drive / "kv" / FILE_NAME).stat().st_size == size
        assert all(put(store, keys))
        assert check(store, keys) == 40


def test_a_file_that_is_cut_off_while_it_is_used_loses_blocks_only(drive: Path) -> None:
    keys = keys_of(range(40))
    with opened(drive / "kv") as store:
        put(store, keys)
        os.truncate(drive / "kv" / FILE_NAME, 200_000)
        with BlockStore(drive / "kv", read_only=True) as reader:
            left = (200_000 - reader._layout.blocks_begin) // reader._layout.slot_bytes
            assert check(reader, keys) == left
            assert reader.stats().corrupt == 40 - left
        assert check(store, keys) <= left  # a transfer of several neighbours fails as one
        assert store.stats().set_aside == 0
        assert all(put(store, keys))
        assert check(store, keys) == 40


def test_blocks_in_the_wrong_slots_are_misses(drive: Path) -> None:
    """As after a power cut that has lost writes of records, or of blocks."""
    keys = keys_of(range(40))
    with opened(drive / "kv") as store:
        put(store, keys)
        layout = store._layout
    with (drive / "kv" / FILE_NAME).open("r+b") as file:
        file.seek(layout.blocks_begin)
        first = file.read(layout.slot_bytes)
        file.seek(layout.blocks_begin + 7 * layout.slot_bytes)
        file.write(first)
        file.seek(layout.records_begin + 2 * RECORD_BYTES)
        record = file.read(RECORD_BYTES)
        file.seek(layout.records_begin + 20 * RECORD_BYTES)
        file.write(record)
    with opened(drive / "kv") as store:
        assert check(store, keys) >= 37
        assert store.stats().corrupt in (1, 2)


def test_a_deleted_key_does_not_come_back_by_an_earlier_block(drive: Path) -> None:
    """As a kill leaves one that was evicted, but whose record was not cleared yet, when another put had stored the key again."""
    with opened(drive / "kv") as store:
        put(store, [b"key"])
        layout = store._layout
    with (drive / "kv" / FILE_NAME).open("r+b") as file:
        for begin, nbytes in ((layout.records_begin, RECORD_BYTES), (layout.blocks_begin, layout.slot_bytes)):
            file.seek(begin)
            copy = file.read(nbytes)
            file.seek(begin + 7 * nbytes)
            file.write(copy)
    with opened(drive / "kv") as store:
        assert store.stats().used == 1
        assert check(store, [b"key"]) == 1
        assert store.delete([b"key"]) == [True]
    with opened(drive / "kv") as store:
        assert store.contains_many([b"key"]) == [False]


def test_a_record_that_cannot_be_cleared_stops_no_put(direct_disk: FaultyFilesystem) -> None:
    with opened(direct_disk / "kv") as store:
        direct_disk.fail("write", errno.EIO, times=1)
        assert put(store, [b"key"]) == [True]
        assert direct_disk.heal() == ["write:EIO"]
        assert check(store, [b"key"]) == 1


@pytest.mark.parametrize("part", [1, 2], ids=["blocks", "records"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_blocks_that_cannot_be_written_are_not_stored(direct_disk: FaultyFilesystem, error: int, part: int) -> None:
    keys = keys_of(range(8))
    with opened(direct_disk / "kv") as store:
        assert put(store, keys[:2]) == [True, True]
        direct_disk.fail("write", error, times=1, skip=part)  # the first write clears records
        flags = put(store, keys)
        direct_disk.heal()
        assert flags[:2] == [True, True]
        assert not all(flags)
        stats = store.stats()
        assert (stats.set_aside, stats.write_errors) == (flags.count(False), flags.count(False))
        assert FILE_NAME in stats.last_error
        assert "at offset" in stats.last_error
        assert store.contains_many(keys) == flags
        assert put(store, keys) == [True] * 8
        assert check(store, keys) == 8
        assert store.stats().set_aside == stats.set_aside
    with opened(direct_disk / "kv") as store:
        assert store.stats().set_aside == 0
        assert check(store, keys) == 8


def test_a_full_drive_makes_misses_and_the_store_goes_on(small_disk: Disk) -> None:
    """A file whose space is not reserved any more, as a copy with holes, on a drive without room."""
    keys = keys_of(range(40))
    with opened(small_disk / "kv") as store:
        layout = store._layout
        begin, nbytes = layout.blocks_begin + 10 * layout.slot_bytes, 20 * layout.slot_bytes
        punch = ["fallocate", "--punch-hole", "--offset", str(begin), "--length", str(nbytes), str(small_disk / "kv" / FILE_NAME)]
        subprocess.run(punch, check=True)
        with (small_disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        flags = put(store, keys)
        assert flags == [True] * 10 + [False] * 20 + [True] * 10
        stats = store.stats()
        assert (stats.set_aside, stats.write_errors, stats.stored) == (20, 20, 20)
        assert os.strerror(errno.ENOSPC) in stats.last_error
        assert check(store, keys) == 20
        assert put(store, keys) == [True] * 40  # in other slots
        assert check(store, keys) == 40
        assert store.stats().set_aside == 20


def test_blocks_for_which_memory_was_short_are_misses_and_stay(direct_disk: FaultyFilesystem) -> None:
    keys = keys_of(range(8))
    with opened(direct_disk / "kv") as store:
        put(store, keys)
        direct_disk.fail("read", errno.ENOMEM, times=1)
        assert check(store, keys) < 8
        assert direct_disk.heal() == ["read:ENOMEM"]
        assert store.stats().set_aside == 0
        assert check(store, keys) == 8


def test_blocks_that_cannot_be_read_are_misses_and_forgotten(direct_disk: FaultyFilesystem) -> None:
    keys = keys_of(range(8))
    with opened(direct_disk / "kv") as store:
        put(store, keys)
        direct_disk.fail("read", errno.EIO, times=1)
        hits = check(store, keys)
        direct_disk.heal()
        assert hits < 8
        assert (store.stats().read_errors, store.stats().set_aside) == (8 - hits, 8 - hits)
        assert check(store, keys) == hits
        assert all(put(store, keys))
        assert check(store, keys) == 8


def test_records_that_cannot_be_read_lose_blocks_only(direct_disk: FaultyFilesystem) -> None:
    keys = keys_of(range(8))
    with opened(direct_disk / "kv") as store:
        put(store, keys)
    direct_disk.fail("read", errno.EIO, times=1, skip=2)  # the first two read the headers
    with opened(direct_disk / "kv") as store:
        assert direct_disk.heal() == ["read:EIO"]
        assert "at offset 8192" in store.stats().last_error
        assert check(store, keys) == 0
        assert all(put(store, keys))
        assert check(store, keys) == 8


def test_a_record_that_a_reader_cannot_read_again_loses_its_block_only(direct_disk: FaultyFilesystem) -> None:
    keys = keys_of(range(8))
    with opened(direct_disk / "kv") as store:
        put(store, keys)
    with BlockStore(direct_disk / "kv", read_only=True) as reader:
        before = direct_disk.counts()["read"]
        assert check(reader, keys) == 8
        blocks = direct_disk.counts()["read"] - before - 8  # the last eight reads are those of the records
        direct_disk.fail("read", errno.EIO, times=1, skip=blocks)
        assert check(reader, keys) == 7
        assert direct_disk.heal() == ["read:EIO"]
        assert reader.stats().read_errors == 1
        assert "read of 128 bytes" in reader.stats().last_error


def test_a_drive_that_drops_writes_gives_misses(direct_disk: FaultyFilesystem) -> None:
    keys = keys_of(range(8))
    with opened(direct_disk / "kv") as store:
        direct_disk.fail("write", effect="lie", times=1, skip=1)
        put(store, keys)
        direct_disk.heal()
        assert check(store, keys) < 8


def test_a_deletion_that_the_drive_does_not_take_is_counted(direct_disk: FaultyFilesystem) -> None:
    with opened(direct_disk / "kv") as store:
        put(store, [b"key"])
        direct_disk.fail("write", errno.EIO, times=1)
        assert store.delete([b"key"]) == [True]
        direct_disk.heal()
        assert store.contains_many([b"key"]) == [False]
        assert store.stats().write_errors == 1
        assert "at offset" in store.stats().last_error


def test_close_raises_the_error_of_a_flush_and_closes_all_the_same(direct_disk: FaultyFilesystem) -> None:
    store = opened(direct_disk / "kv")
    put(store, [b"key"])
    direct_disk.fail("fsync", errno.EIO)
    with pytest.raises(OSError, match="fdatasync") as caught:
        store.close()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(direct_disk / "kv" / FILE_NAME))
    assert direct_disk.heal() == ["fsync:EIO"]
    assert store.closed
    with opened(direct_disk / "kv") as again:
        assert check(again, [b"key"]) == 1


def test_close_flushes_the_other_drives_where_one_fails(direct_disk: FaultyFilesystem) -> None:
    store = BlockStore([direct_disk / "a", direct_disk / "b"], 2 * CAPACITY, BLOCK)
    put(store, keys_of(range(8)))
    before = direct_disk.counts()["fsync"]
    direct_disk.fail("fsync", errno.EIO)
    with pytest.raises(OSError, match="fdatasync") as caught:
        store.close()
    assert caught.value.filename == str(direct_disk / "a" / FILE_NAME)
    assert direct_disk.counts()["fsync"] - before == 2


def test_memory_that_cannot_be_written_to_is_not_blamed_on_the_drive(drive: Path) -> None:
    """The pages of a read-only mapping, which a tensor does not tell of."""
    with opened(drive / "kv") as store:
        put(store, [b"key"])
        (drive / "zeros").write_bytes(bytes(BLOCK))
        libc = ctypes.CDLL(None)
        with mmap.mmap(-1, 4 * mmap.PAGESIZE) as memory:
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), mmap.PROT_READ) == 0
            view = memoryview(memory)[:BLOCK]
            assert store.get_many([b"key"], [view]).result() == [False]
            view.release()
        assert store.stats().set_aside == 0


def test_a_block_that_another_process_has_removed_is_a_miss_though_its_bytes_are_there_still(drive: Path) -> None:
    """A reader cannot hold slots of the process that writes: it must see that a block may be overwritten while it is read."""
    with opened(drive / "kv") as store, BlockStore(drive / "kv", read_only=True) as reader:
        put(store, [b"key", b"other"])
        reader.refresh()
        assert check(reader, [b"key", b"other"]) == 2
        store.delete([b"key"])
        assert check(reader, [b"key", b"other"]) == 1
        assert reader.stats().corrupt == 0


def test_a_future_on_a_drive_that_hangs_times_out(direct_disk: FaultyFilesystem) -> None:
    with opened(direct_disk / "kv") as store:
        direct_disk.fail("write", effect="hang", value=0, times=-1)
        future = store.put_many([b"key"], [content(b"key")])
        with pytest.raises(TimeoutError):
            future.result(0.2)
        assert not future.done()
        assert store.contains_many([b"key"]) == [False]  # nothing else waits
        direct_disk.heal()
        assert future.result(PATIENCE) == [True]


def test_ctrl_c_interrupts_the_waiting_for_a_drive_that_hangs_and_loses_nothing(direct_disk: FaultyFilesystem) -> None:
    with opened(direct_disk / "kv") as store:
        direct_disk.fail("write", effect="hang", value=0, times=-1)
        future = store.put_many([b"key"], [content(b"key")])
        for wait in (future.result, store.close):
            timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                wait()
            timer.join()
        assert not store.closed
        direct_disk.heal()
        assert future.result(PATIENCE) == [True]
        assert check(store, [b"key"]) == 1


def test_ctrl_c_at_exit_ends_a_process_whose_drive_hangs(interpreters: Interpreters, direct_disk: FaultyFilesystem) -> None:
    """The first one gives up the store, the next one the engine."""
    opened(direct_disk / "kv").close()
    direct_disk.fail("write", effect="hang", value=0, times=-1, skip=1, name=FILE_NAME)  # the first write clears a record
    child = interpreters.start(f"""
        from deepnvme.kvstore import BlockStore
        store = BlockStore({str(direct_disk / "kv")!r})
        future = store.put_many([b"key"], [bytes({BLOCK})])
        print("ending", flush=True)
    """)
    interpreters.wait_for("ending")
    for _ in range(4):
        time.sleep(0.5)
        os.kill(child, signal.SIGINT)
    assert interpreters.wait(child).returncode == -signal.SIGINT
    direct_disk.heal()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed file")
@pytest.mark.filterwarnings("ignore:Exception ignored in")
def test_ctrl_c_at_any_moment_leaves_a_store_that_goes_on(drive: Path) -> None:
    """Also one that comes while a store is opened or closed."""
    (drive / "kv").mkdir()
    numbers, deadline = random.Random(3), time.monotonic() + 5
    with ctrl_c_every(0.003) as ctrl_c, lost_in_finalizers():
        while time.monotonic() < deadline:
            with contextlib.suppress(KeyboardInterrupt):
                store = opened(drive / "kv")
                try:
                    for _ in range(5):
                        put(store, keys_of(numbers.sample(range(100), 8)))
                        check(store, keys_of(numbers.sample(range(100), 8)))
                finally:
                    while not store.closed:
                        with contextlib.suppress(KeyboardInterrupt):
                            store.close()
    assert ctrl_c.count > 20
    gc.collect()
    with opened(drive / "kv") as store:
        assert check(store, keys_of(range(100))) > 0
        store.clear()
        assert store.stats().used == 0


def test_random_faults_never_give_a_wrong_byte(direct_disk: FaultyFilesystem) -> None:
    numbers = random.Random(5)
    with opened(direct_disk / "kv") as store:
        direct_disk.fail("read,write", errno.EIO, times=-1, probability=0.05, seed=5)
        for _ in range(60):
            put(store, keys_of(numbers.sample(range(100), 8)))
            check(store, keys_of(numbers.sample(range(100), 20)))
        direct_disk.heal()
        stats = store.stats()
        assert stats.set_aside > 0
        assert stats.hits > 0
    with opened(direct_disk / "kv") as store:
        check(store, keys_of(range(100)))


def test_threads_beside_one_another(drive: Path) -> None:
    """Puts, gets, deletes, pins and evictions of the same keys: what is hit is right, and nothing is left held."""

    def work(seed: int) -> int:
        numbers, hits = random.Random(seed), 0
        for _ in range(150):
            keys = keys_of(numbers.sample(range(120), 8))
            what = numbers.random()
            if what < 0.4:
                put(store, keys)
            elif what < 0.8:
                hits += check(store, keys)
            elif what < 0.9:
                store.delete(keys[:2])
            else:
                pinned = [key for key, there in zip(keys, store.pin(keys), strict=True) if there]
                hits += check(store, pinned)
                assert all(store.unpin(pinned))
        return hits

    with opened(drive / "kv") as store, concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(work, range(6))) > 0
        stats = store.stats()
        assert (stats.corrupt, stats.pinned, stats.write_errors) == (0, 0, 0)
        store.clear()
        assert store.stats().used == 0
        slots = stats.slots
        assert all(put(store, keys_of(range(1000, 1000 + slots))))
        assert check(store, keys_of(range(1000, 1000 + slots))) == slots


Steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "delete", "pin", "unpin", "reopen", "clear"]),
        st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True),
    ),
    max_size=30,
)


@settings(max_examples=40)
@given(Steps)
def test_it_behaves_like_a_dictionary_that_forgets(io_dir: Path, steps: list[tuple[str, list[int]]]) -> None:
    """Each put of a key has other bytes. What is there has the bytes of its last put."""
    path, capacity = Path(tempfile.mkdtemp(dir=io_dir)), 100_000  # 20 slots
    store = BlockStore(path, capacity, 4096)
    expected: dict[bytes, torch.Tensor] = {}
    pins: dict[bytes, int] = {}
    try:
        for turn, (what, numbers) in enumerate(steps):
            keys = keys_of(numbers)
            there = store.contains_many(keys)
            before = store.stats()
            assert all(key in expected for key, known in zip(keys, there, strict=True) if known)
            if what == "put":
                blocks = [content(key + b"%d" % turn, 4096) for key in keys]
                flags = store.put_many(keys, blocks).result()
                for key, known, block, flag in zip(keys, there, blocks, flags, strict=True):
                    if not known and flag:
                        expected[key] = block
            elif what == "get":
                out = torch.zeros(len(keys), 4096, dtype=torch.uint8)
                assert store.get_many(keys, out).result() == there
                assert all(torch.equal(row, expected[key]) for row, key, hit in zip(out, keys, there, strict=True) if hit)
            elif what == "delete":
                removed = store.delete(keys)
                assert removed == [known and not pins.get(key) for key, known in zip(keys, there, strict=True)]
                for key, gone in zip(keys, removed, strict=True):
                    if gone:
                        del expected[key]
            elif what == "pin":
                assert store.pin(keys) == there
                for key, known in zip(keys, there, strict=True):
                    pins[key] = pins.get(key, 0) + known
            elif what == "unpin":
                assert store.unpin(keys) == [pins.get(key, 0) > 0 for key in keys]
                for key in keys:
                    pins[key] = max(pins.get(key, 0) - 1, 0)
            elif what == "clear":
                store.clear()
                expected = {key: block for key, block in expected.items() if pins.get(key)}
            else:
                store.close()
                store = BlockStore(path, capacity, 4096)
                pins.clear()
            after = store.stats()
            assert all(store.contains_many([key])[0] for key, count in pins.items() if count)
            assert after.used <= after.slots
            if what in ("get", "pin", "unpin", "reopen"):
                assert store.contains_many(list(expected)).count(True) == before.used
    finally:
        store.close()
