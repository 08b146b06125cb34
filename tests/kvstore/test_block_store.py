"""Blocks by key: what is put is got, whatever the memory it is in; keys, pins, eviction and bounds."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import select
import stat
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepnvme import Engine
from deepnvme.files.directory_lock import StoreLocked
from deepnvme.kvstore import BlockStore
from deepnvme.kvstore.block_files import FILE_NAME, RECORD_BYTES

from ..support.disks import Disk
from ..support.faulty_filesystem import FaultyFilesystem
from ..support.files import open_files
from ..support.interpreters import Interpreters
from ..support.kv_blocks import BLOCK, content, keys_of
from ..support.patience import PATIENCE

MIB = 1 << 20


@pytest.fixture
def store(drive: Path) -> Any:
    with BlockStore(drive / "kv", "2MiB", BLOCK) as made:
        yield made


def all_of(path: Path) -> int:
    """Bytes that the files of a directory take."""
    return sum(each.stat().st_blocks * 512 for each in path.iterdir())


@pytest.mark.parametrize("nbytes", [1, 511, 4096, 10_000, BLOCK])
def test_what_is_put_is_got(store: BlockStore, nbytes: int) -> None:
    keys = keys_of(range(20))
    blocks = [content(key, nbytes) for key in keys]
    assert store.put_many(keys, blocks).result() == [True] * 20
    out = [torch.zeros(nbytes, dtype=torch.uint8) for _ in keys]
    order = random.Random(nbytes).sample(range(20), 20)
    assert store.get_many([keys[i] for i in order], [out[i] for i in order]).result() == [True] * 20
    assert all(torch.equal(*pair) for pair in zip(out, blocks, strict=True))
    stats = store.stats()
    assert (stats.stored, stats.hits, stats.misses, stats.bytes_read) == (20, 20, 0, 20 * nbytes)


def test_blocks_are_rows_of_one_buffer_by_their_numbers(store: BlockStore, engine: Engine) -> None:
    keys = keys_of(range(6))
    pool = engine.empty_pinned((40, 2, BLOCK // 4), dtype=torch.int16)
    rows = [7, 30, 2, 39, 0, 11]
    for row, key in zip(rows, keys, strict=True):
        pool[row] = content(key).view(torch.int16).view(2, -1)
    assert store.put_many(keys, pool, torch.tensor(rows)).result() == [True] * 6
    before = pool.clone()
    into = [5, 6, 7, 8, 9, 10]
    assert store.get_many(keys, pool, array("q", into)).result() == [True] * 6
    for key, row in zip(keys, into, strict=True):
        assert torch.equal(pool[row].view(-1).view(torch.uint8), content(key))
    untouched = [row for row in range(40) if row not in into]
    assert torch.equal(pool[untouched], before[untouched])
    with pytest.raises(IndexError, match="no block 40 in a buffer of 40"):
        store.put_many(keys[:1], pool, [40])


def test_blocks_are_memoryviews_with_gaps_between_rows(store: BlockStore) -> None:
    keys = keys_of(range(4))
    memory = memoryview(bytearray(8 * BLOCK)).cast("B", (8, BLOCK))
    numbers = [6, 1, 3, 0]
    assert store.put_many(keys, [bytes(content(key).tolist()) for key in keys]).result() == [True] * 4
    assert store.get_many(keys, memory, numbers).result() == [True] * 4
    found = torch.frombuffer(memory, dtype=torch.uint8).view(8, BLOCK)
    assert all(torch.equal(found[row], content(key)) for row, key in zip(numbers, keys, strict=True))
    wide = torch.zeros(4, BLOCK + 100, dtype=torch.uint8)
    assert store.get_many(keys, wide[:, :BLOCK]).result() == [True] * 4
    assert torch.equal(wide[:, :BLOCK], torch.stack([content(key) for key in keys]))
    assert not wide[:, BLOCK:].any()


def test_a_block_of_another_length_is_a_miss(store: BlockStore) -> None:
    store.put_many([b"key"], [content(b"key", 5000)]).result()
    for nbytes in (4999, 5001, BLOCK):
        assert store.get_many([b"key"], [torch.zeros(nbytes, dtype=torch.uint8)]).result() == [False]
    assert store.get_many([b"key", b"other"], torch.zeros(2, 5000, dtype=torch.uint8)).result() == [True, False]


@pytest.mark.parametrize("key", [b"", b"\0", b"\0" * 64, bytes(range(64))])
def test_keys_have_any_bytes(store: BlockStore, key: bytes) -> None:
    others = [bytes(63), b"\0\0", bytes(range(63))]
    assert store.put_many([key, *others], [content(each) for each in (key, *others)]).result() == [True] * 4
    out = torch.zeros(1, BLOCK, dtype=torch.uint8)
    assert store.get_many([key], out).result() == [True]
    assert torch.equal(out[0], content(key))


def test_what_cannot_be_stored_is_refused_by_name(store: BlockStore) -> None:
    block = torch.zeros(BLOCK, dtype=torch.uint8)
    for error, text, call in [
        (ValueError, "at most 64 bytes, got 65 at 1", lambda: store.put_many([b"a", bytes(65)], [block, block])),
        (TypeError, "must be bytes, got str at 0", lambda: store.put_many(["a"], [block])),  # type: ignore[list-item]
        (TypeError, "got one key", lambda: store.put_many(b"a", [block])),  # type: ignore[arg-type]
        (ValueError, "as many blocks as keys, got 2 and 1", lambda: store.put_many([b"a"], [block, block])),
        (ValueError, f"1 to {BLOCK} bytes, got {BLOCK + 1}", lambda: store.put_many([b"a"], [bytes(BLOCK + 1)])),
        (ValueError, f"1 to {BLOCK} bytes, got 0", lambda: store.put_many([b"a"], [b""])),
        (ValueError, "contiguous", lambda: store.put_many([b"a"], [block.view(-1, 2).t()])),
        (ValueError, "read-only", lambda: store.get_many([b"a"], [bytes(BLOCK)])),
        (ValueError, "on the CPU", lambda: store.put_many([b"a"], [block.to("meta")])),
        (TypeError, "bytes-like", lambda: store.put_many([b"a"], [7])),  # type: ignore[list-item]
        (TypeError, "Python objects", lambda: store.get_many([b"a"], [np.empty(1, dtype=object)])),
        (TypeError, "as an integer", lambda: store.put_many([b"a"], block[None], [0.9])),  # type: ignore[list-item]
    ]:
        with pytest.raises(error, match=text):
            call()
    assert store.stats().used == 0


def test_two_blocks_are_not_read_into_the_same_memory(store: BlockStore) -> None:
    keys = keys_of(range(2))
    assert store.put_many(keys, content(b"same").expand(2, -1)).result() == [True, True]
    out = torch.zeros(3, BLOCK, dtype=torch.uint8)
    overlapping = out.as_strided((2, BLOCK), (BLOCK - 1, 1))
    for memory, index in [(out, [1, 1]), (out[:1].expand(2, -1), None), (overlapping, None), ([out[2], out[2]], None)]:
        with pytest.raises(ValueError, match="same memory"):
            store.get_many(keys, memory, index)
    assert store.get_many(keys, out, [1, 2]).result() == [True, True]


def test_memory_is_let_go_of_once_a_future_is_known_to_be_done(store: BlockStore) -> None:
    given, out = bytearray(b"a" * BLOCK), bytearray(BLOCK)
    assert store.put_many([b"key"], [given]).result() == [True]
    given.clear()  # BufferError if the store still had a view of it
    future = store.get_many([b"key"], [out])
    while not future.done():
        time.sleep(0.001)
    out.clear()


def test_a_fingerprint_that_does_not_fit_into_the_header_is_refused(drive: Path) -> None:
    text = "\N{GREEK SMALL LETTER KAPPA}" * 1000  # 6 bytes each in JSON
    with pytest.raises(ValueError, match="1000 characters does not fit"):
        BlockStore(drive / "kv", "2MiB", BLOCK, fingerprint=text)
    with BlockStore(drive / "kv", "2MiB", BLOCK, fingerprint=text[:500]) as store:
        assert store.put_many([b"key"], [content(b"key")]).result() == [True]
    with BlockStore(drive / "kv", fingerprint=text[:500]) as store:
        assert store.contains_many([b"key"]) == [True]


@pytest.mark.parametrize("fingerprint", [None, b"model"])
def test_a_fingerprint_that_is_no_text_is_refused_before_a_file_is_made(drive: Path, fingerprint: Any) -> None:
    with pytest.raises(TypeError, match="must be a text"):
        BlockStore(drive / "kv", "2MiB", BLOCK, fingerprint=fingerprint)
    assert not (drive / "kv").exists()


def test_a_key_is_stored_once(store: BlockStore) -> None:
    first, second = content(b"first"), content(b"second")
    assert store.put_many([b"key", b"key"], [first, second]).result() == [True, True]
    futures = [store.put_many([b"key", b"new"], [second, first]) for _ in range(8)]
    assert [each.result() for each in futures] == [[True, True]] * 8
    assert (store.stats().stored, store.stats().duplicates, store.stats().used) == (2, 16, 2)
    out = torch.zeros(2, BLOCK, dtype=torch.uint8)
    assert store.get_many([b"key", b"new"], out).result() == [True, True]
    assert torch.equal(out[0], first)
    assert store.delete([b"key", b"missing"]) == [True, False]
    assert store.contains_many([b"key", b"new"]) == [False, True]
    assert store.put_many([b"key"], [second]).result() == [True]
    assert store.get_many([b"key"], out[:1]).result() == [True]
    assert torch.equal(out[0], second)


def test_capacity_is_kept_and_old_blocks_make_room(drive: Path) -> None:
    capacity = 40 * (BLOCK + 4096)
    with BlockStore(drive / "kv", capacity, BLOCK) as store:
        slots = store.stats().slots
        assert slots * BLOCK <= capacity < (slots + 2) * (BLOCK + 4096)
        reserved = all_of(drive / "kv")
        for number in range(0, 10 * slots, 8):
            keys = keys_of(range(number, number + 8))
            assert all(store.put_many(keys, [content(key) for key in keys]).result())
            assert store.stats().used <= slots
        assert all_of(drive / "kv") <= max(reserved, capacity + 8192)  # and the lock's file
        assert store.stats().used == slots
        assert store.stats().evictions == store.stats().stored - slots
        kept = [key for key in keys_of(range(10 * slots)) if store.contains_many([key])[0]]
        assert len(kept) == slots
        out = torch.zeros(slots, BLOCK, dtype=torch.uint8)
        assert all(store.get_many(kept, out).result())
        assert torch.equal(out, torch.stack([content(key) for key in kept]))


def test_what_is_pinned_stays_and_what_finds_no_slot_is_refused(store: BlockStore) -> None:
    slots = store.stats().slots
    keys = keys_of(range(slots))
    assert all(store.put_many(keys, [content(key) for key in keys]).result())
    assert all(store.pin(keys))
    assert all(store.pin(keys[:1]))
    assert store.stats().pinned == slots
    new = keys_of(range(slots, slots + 3))
    assert store.put_many(new, [content(key) for key in new]).result() == [False] * 3
    assert store.stats().refused == 3
    assert store.delete(keys) == [False] * slots
    assert store.clear() == 0
    assert store.unpin([*keys[:3], b"none"]) == [True, True, True, False]
    assert store.put_many(new, [content(key) for key in new]).result() == [True, True, False]
    assert store.contains_many(keys[:3]) == [True, False, False]  # the first has another pin
    assert store.unpin(keys[:1]) == [True]
    assert store.unpin(keys[:1]) == [False]
    assert store.clear() == 3  # the first, and two new ones
    assert store.stats().used == slots - 3


def test_what_is_used_often_outlives_a_scan(store: BlockStore) -> None:
    slots = store.stats().slots
    hot = keys_of(range(slots // 2))
    out = torch.zeros(len(hot), BLOCK, dtype=torch.uint8)
    store.put_many(hot, [content(key) for key in hot]).result()
    assert all(store.get_many(hot, out).result())
    for number in range(1000, 1000 + 5 * slots, 8):
        keys = keys_of(range(number, number + 8))
        assert all(store.put_many(keys, [content(key) for key in keys]).result())
    assert all(store.contains_many(hot))


def test_an_eviction_is_short_though_all_blocks_were_used_again(drive: Path) -> None:
    with BlockStore(drive / "kv", 64 * (BLOCK + 512), BLOCK) as store:
        keys = keys_of(range(store.stats().slots))
        assert all(store.put_many(keys, [content(key) for key in keys]).result())
        for key in keys:
            store.touch([key])
        new = keys_of(range(1000, 1003))
        assert store.put_many(new, [content(key) for key in new]).result() == [True] * 3
        assert store.contains_many(keys) == [False] * 3 + [True] * (len(keys) - 3)  # those that were used longest ago


def test_of_a_prompt_the_last_blocks_are_evicted_first(drive: Path) -> None:
    """Also of one whose puts and uses the store has forgotten, since it was opened again."""
    with BlockStore(drive / "kv", "2MiB", BLOCK) as store:
        slots = store.stats().slots
        prompt, more = keys_of(range(slots)), keys_of(range(1000, 1003))
        assert all(store.put_many(prompt, [content(key) for key in prompt]).result())
        assert all(store.put_many(more[:1], [content(more[0])]).result())
        assert store.contains_many(prompt) == [True] * (slots - 1) + [False]
    with BlockStore(drive / "kv", "2MiB", BLOCK) as store:
        assert store.delete(more[:1]) == [True]
        assert all(store.put_many(more[1:], [content(key) for key in more[1:]]).result())
        assert store.contains_many(prompt) == [True] * (slots - 2) + [False] * 2


def test_a_put_does_not_evict_the_blocks_of_its_own_keys(store: BlockStore) -> None:
    slots = store.stats().slots
    keys = keys_of(range(slots))
    assert all(store.put_many(keys, [content(key) for key in keys]).result())
    both = [*keys[-3:], *keys_of(range(1000, 1003))]  # the first three would be evicted next
    assert store.put_many(both, [content(key) for key in both]).result() == [True] * 6
    assert store.contains_many(both) == [True] * 6
    assert (store.stats().duplicates, store.stats().refused) == (3, 0)


def test_a_put_does_not_evict_the_blocks_of_its_own_keys_though_all_were_used_again(drive: Path) -> None:
    with BlockStore(drive / "kv", 64 * (BLOCK + 512), BLOCK) as store:
        keys = keys_of(range(store.stats().slots))
        assert all(store.put_many(keys, [content(key) for key in keys]).result())
        store.touch(keys)
        both = [*keys[:40], *keys_of(range(1000, 1008))]
        assert store.put_many(both, [content(key) for key in both]).result() == [True] * 48
        assert store.contains_many(both) == [True] * 48


@pytest.mark.slow
def test_many_blocks_are_cleared_in_several_steps(drive: Path) -> None:
    with BlockStore(drive / "kv", 40_000 * (4096 + RECORD_BYTES), 1) as store:
        keys = keys_of(range(39_000))
        assert all(store.put_many(keys, torch.ones(len(keys), 1, dtype=torch.uint8)).result())
        assert store.clear() == len(keys)
        assert (store.stats().used, store.stats().write_errors) == (0, 0)
    with BlockStore(drive / "kv") as store:
        assert store.stats().used == 0


def test_a_key_that_is_given_several_times_makes_room_for_one_block_only(store: BlockStore) -> None:
    slots = store.stats().slots
    keys = keys_of(range(slots))
    assert all(store.put_many(keys, [content(key) for key in keys]).result())
    assert store.put_many([b"new"] * 3, [content(b"new")] * 3).result() == [True] * 3
    assert (store.stats().evictions, store.stats().used) == (1, slots)


def test_it_is_found_again_when_it_is_opened_again(drive: Path) -> None:
    paths = [drive / "a", drive / "b"]
    with BlockStore(paths, "8MiB", BLOCK, fingerprint="model 1") as store:
        keys = keys_of(range(store.stats().slots))
        store.put_many(keys, [content(key) for key in keys]).result()
        assert store.delete(keys[:5]) == [True] * 5
    assert open_files(drive) == []
    for path in paths:
        assert stat.S_IMODE((path / FILE_NAME).stat().st_mode) == 0o600
        assert len(list(path.iterdir())) == 1
    for reopened in (reversed(paths), paths):
        with BlockStore(list(reopened), "8MiB", BLOCK, fingerprint="model 1") as store:
            assert store.contains_many(keys) == [False] * 5 + [True] * (len(keys) - 5)
            out = torch.zeros(len(keys) - 5, BLOCK, dtype=torch.uint8)
            assert all(store.get_many(keys[5:], out).result())
            assert torch.equal(out, torch.stack([content(key) for key in keys[5:]]))
    (paths[0] / FILE_NAME).unlink()
    with BlockStore(paths, "8MiB", BLOCK, fingerprint="model 1") as store:  # a lost drive loses its own blocks
        there = store.contains_many(keys)
        assert 0.3 * len(keys) < sum(there) < 0.7 * len(keys)


@pytest.mark.parametrize("missing", [0, 1])
def test_without_a_capacity_no_file_is_made_wherever_one_is_missing(drive: Path, missing: int) -> None:
    paths = [drive / "a", drive / "b"]
    BlockStore(paths, "4MiB", BLOCK).close()
    lost = paths[missing] / FILE_NAME
    lost.unlink()
    with pytest.raises(FileNotFoundError, match="give capacity and block_bytes") as caught:
        BlockStore(paths)
    assert caught.value.filename == str(lost)
    assert not lost.exists()


@pytest.mark.parametrize("other", [{"fingerprint": "model 2"}, {"block_bytes": BLOCK - 1}, {"capacity": "3MiB"}])
def test_a_store_of_another_kind_is_refused_by_name(drive: Path, other: dict[str, Any]) -> None:
    given = {"capacity": "2MiB", "block_bytes": BLOCK, "fingerprint": "model 1"}
    BlockStore(drive / "kv", **given).close()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="remove the file") as caught:
        BlockStore(drive / "kv", **{**given, **other})
    assert str(drive / "kv" / FILE_NAME) in str(caught.value)
    with BlockStore(drive / "kv", fingerprint="model 1") as store:
        assert store.block_bytes == BLOCK
    with pytest.raises(ValueError, match="fingerprint 'model 1', not ''"):
        BlockStore(drive / "kv")


def test_one_process_writes_and_others_read_beside_it(drive: Path) -> None:
    with pytest.raises(FileNotFoundError):
        BlockStore(drive / "kv", read_only=True)
    keys = keys_of(range(200))
    out = torch.zeros(1, BLOCK, dtype=torch.uint8)
    with BlockStore(drive / "kv", "2MiB", BLOCK) as store:
        with pytest.raises(StoreLocked, match="the BlockStore of this process"):
            BlockStore(drive / "kv", "2MiB", BLOCK)
        store.put_many(keys[:3], [content(key) for key in keys[:3]]).result()
        with BlockStore(drive / "kv", read_only=True) as reader:
            assert reader.contains_many(keys[:4]) == [True, True, True, False]
            store.put_many(keys[3:4], [content(keys[3])]).result()
            assert reader.get_many(keys[3:4], out).result() == [False]
            reader.refresh()
            assert reader.get_many(keys[3:4], out).result() == [True]
            assert torch.equal(out[0], content(keys[3]))
            for key in keys[4:]:  # overwrites what the reader knows
                store.put_many([key], [content(key)]).result()
            assert reader.contains_many(keys[:1]) == [True]
            assert reader.get_many(keys[:4], out.expand(4, -1).clone()).result() == [False] * 4
            assert (reader.stats().corrupt, reader.stats().misses) == (0, 5)  # overwritten, which is no damage
            for call in (
                lambda: reader.put_many(keys[:1], out),
                lambda: reader.delete(keys),
                lambda: reader.pin(keys),
                reader.clear,
            ):
                with pytest.raises(ValueError, match="for reading only"):
                    call()


def test_a_directory_has_any_name(drive: Path) -> None:
    path = drive / os.fsdecode(b"caf\xe9 \xf0\x9f\x97\x84")
    with BlockStore(path, "2MiB", BLOCK) as store:
        assert store.put_many([b"key"], [content(b"key")]).result() == [True]
    assert (path / FILE_NAME).exists()


def test_too_small_a_drive_is_told_before_anything_is_made(small_disk: Disk) -> None:
    with pytest.raises(OSError, match="give a smaller capacity") as caught:
        BlockStore(small_disk.path / "kv", "1GiB", BLOCK)
    assert caught.value.errno == errno.ENOSPC
    assert not (small_disk.path / "kv").exists()
    with pytest.raises(ValueError, match="no room for a block"):
        BlockStore(small_disk.path / "kv", 10_000, BLOCK)


def test_an_eventfd_tells_of_the_end(store: BlockStore) -> None:
    event = os.eventfd(0)
    try:
        future = store.put_many([b"key"], [content(b"key")], event_fd=event)
        assert select.select([event], [], [], PATIENCE)[0] == [event]
        assert os.eventfd_read(event) == 1
        assert future.done()
    finally:
        os.close(event)
    with pytest.raises(OSError, match="eventfd") as caught:
        store.put_many([b"key"], [content(b"key")], event_fd=event)
    assert caught.value.errno == errno.EBADF


def test_an_eventfd_that_is_closed_early_is_not_taken_for_another_file(direct_disk: FaultyFilesystem, tmp_path: Path) -> None:
    with BlockStore(direct_disk / "kv", "2MiB", BLOCK) as store:
        direct_disk.fail("write", effect="hang", value=0, times=-1)
        event = os.eventfd(0)
        future = store.put_many([b"key"], [content(b"key")], event_fd=event)
        os.close(event)
        other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
        assert other == event
        direct_disk.heal()
        assert future.result(PATIENCE) == [True]
        os.close(other)
    assert (tmp_path / "other").read_bytes() == b""


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_after_close_and_in_a_forked_child_nothing_works(drive: Path) -> None:
    store = BlockStore(drive / "kv", "2MiB", BLOCK)
    future = store.put_many([b"key"], [content(b"key")])
    child = os.fork()
    if child == 0:
        failed = 0
        try:
            for call in (
                future.done,
                store.stats,
                lambda: store.contains_many([b"key"]),
                lambda: store.delete([b"key"]),
                store.close,
            ):
                with contextlib.suppress(RuntimeError):
                    call()
                    failed += 1
            del future
            repr(store)
        finally:
            os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert future.result() == [True]
    store.close()
    store.close()
    assert store.closed
    for call in (lambda: store.put_many([b"key"], [content(b"key")]), lambda: store.contains_many([b"key"]), store.clear):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert future.done()


def test_a_dropped_store_ends_its_puts_and_frees_the_directory(drive: Path) -> None:
    keys = keys_of(range(30))
    store = BlockStore(drive / "kv", "2MiB", BLOCK)
    store.put_many(keys, [content(key) for key in keys])  # nobody waits, and nobody else has the memory
    del store
    with BlockStore(drive / "kv", "2MiB", BLOCK) as again:
        assert all(again.contains_many(keys))


def test_an_interpreter_that_ends_finishes_its_puts(interpreters: Interpreters, drive: Path) -> None:
    program = f"""
import torch
from deepnvme.kvstore import BlockStore
from tests.support.kv_blocks import content, keys_of
keys = keys_of(range(30))
store = BlockStore({str(drive / "kv")!r}, "2MiB", {BLOCK})
future = store.put_many(keys, [content(key) for key in keys])
"""
    said = interpreters.run(program)
    assert (said.returncode, said.stderr) == (0, "")
    with BlockStore(drive / "kv", "2MiB", BLOCK) as again:
        assert all(again.contains_many(keys_of(range(30))))


def test_the_index_takes_at_most_64_bytes_a_key(drive: Path) -> None:
    with BlockStore(drive / "kv", "2MiB", 1) as store:
        assert 0 < store.stats().index_bytes <= 64 * store.stats().slots
