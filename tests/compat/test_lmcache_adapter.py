"""``NVMeL2Adapter`` with real LMCache: its factory, its interface, and its controllers, without a GPU."""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepnvme.files.directory_lock import StoreLocked
from deepnvme.kvstore.block_files import FILE_NAME

from ..support.disks import Disk
from ..support.faulty_filesystem import FaultyFilesystem
from ..support.kv_blocks import content
from ..support.patience import PATIENCE
from . import serving

CHUNK = 256 << 10

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def lmcache(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The names of LMCache that the tests use."""
    return serving.lmcache(request.config)


@pytest.fixture
def make(lmcache: SimpleNamespace, drive: Path) -> Iterator[Make]:
    """Makes adapters as LMCache does, from a configuration of type plugin."""
    made = []

    def adapter(**settings: Any) -> Any:
        given = {"path": str(drive / "kv"), "capacity": "16MiB", **settings}
        made.append(serving.lmcache_plugin(lmcache, given))
        return made[-1]

    yield adapter
    for each in made:
        each.close()


def key_of(lmcache: SimpleNamespace, number: int, **fields: Any) -> Any:
    return lmcache.ObjectKey(**{"chunk_hash": number.to_bytes(32, "big"), "model_name": "org/model", "kv_rank": 0, **fields})


def objects_of(lmcache: SimpleNamespace, keys: Sequence[Any] | int, nbytes: int = CHUNK) -> list[Any]:
    """Objects with the chunks of the keys, or so many empty ones."""
    if isinstance(keys, int):
        return [serving.lmcache_object(lmcache, torch.zeros(nbytes, dtype=torch.uint8)) for _ in range(keys)]
    return [serving.lmcache_object(lmcache, content(repr(key).encode(), nbytes)) for key in keys]


def right(found: Any, key: Any) -> bool:
    expected = content(repr(key).encode(), len(memoryview(found.byte_array)))
    return bytes(found.byte_array) == expected.numpy().tobytes()


def wait(descriptor: int) -> None:
    assert select.select([descriptor], [], [], PATIENCE)[0], "no event"
    os.eventfd_read(descriptor)


def store(adapter: Any, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
    number = adapter.submit_store_task(list(keys), list(objects))
    wait(adapter.get_store_event_fd())
    (finished,) = adapter.pop_completed_store_tasks().items()
    assert finished[0] == number
    return finished[1]


def look_up(adapter: Any, keys: Sequence[Any]) -> list[bool]:
    number = adapter.submit_lookup_and_lock_task(list(keys), {})
    wait(adapter.get_lookup_and_lock_event_fd())
    bitmap = adapter.query_lookup_and_lock_result(number)
    assert adapter.query_lookup_and_lock_result(number) is None
    return [bitmap.test(index) for index in range(len(keys))]


def load(adapter: Any, keys: Sequence[Any], objects: Sequence[Any]) -> list[bool]:
    number = adapter.submit_load_task(list(keys), list(objects))
    wait(adapter.get_load_event_fd())
    bitmap = adapter.query_load_result(number)
    assert adapter.query_load_result(number) is None
    return [bitmap.test(index) for index in range(len(keys))]


def test_chunks_come_back(lmcache: SimpleNamespace, make: Make) -> None:
    adapter = make()
    keys = [key_of(lmcache, number) for number in range(5)]
    assert look_up(adapter, keys) == [False] * 5
    result = store(adapter, keys[:4], objects_of(lmcache, keys[:4]))
    assert (result.is_successful(), result.bytes_transferred()) == (True, 4 * CHUNK)
    assert look_up(adapter, keys) == [True] * 4 + [False]
    found = objects_of(lmcache, 5)
    assert load(adapter, keys, found) == [True] * 4 + [False]
    assert all(right(*pair) for pair in zip(found[:4], keys, strict=False))
    adapter.submit_unlock(keys[:4])
    assert adapter.pop_completed_store_tasks() == {}


def test_descriptors_are_three_different_ones(make: Make) -> None:
    adapter = make()
    events = [adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()]
    assert len(set(events)) == 3
    assert select.select(events, [], [], 0)[0] == []


@pytest.mark.parametrize(
    "fields",
    [
        {"model_name": "org/other"},
        {"kv_rank": 1},
        {"object_group_id": 1},
        {"cache_salt": "tenant"},
        {"chunk_hash": b"\0" * 31},
        {"model_name": "org/model@0".replace("@", ""), "kv_rank": 0x10},
    ],
)
def test_every_field_of_a_key_counts(lmcache: SimpleNamespace, make: Make, fields: dict[str, Any]) -> None:
    adapter = make()
    key = key_of(lmcache, 0)
    store(adapter, [key], objects_of(lmcache, [key]))
    assert look_up(adapter, [key, key_of(lmcache, 0, **fields)]) == [True, False]


def test_a_damaged_chunk_is_missed(lmcache: SimpleNamespace, make: Make, drive: Path) -> None:
    adapter = make()
    keys = [key_of(lmcache, number) for number in range(3)]
    objects = objects_of(lmcache, keys)
    store(adapter, keys, objects)
    serving.flip_bytes(drive / "kv" / FILE_NAME, bytes(objects[1].byte_array))
    assert look_up(adapter, keys) == [True] * 3
    found = objects_of(lmcache, 3)
    assert load(adapter, keys, found) == [True, False, True]
    assert right(found[0], keys[0])
    assert right(found[2], keys[2])
    assert look_up(adapter, keys) == [True, False, True]
    assert adapter.report_status()["corrupt"] == 1


def test_a_chunk_of_another_length_is_missed(lmcache: SimpleNamespace, make: Make) -> None:
    adapter = make()
    key = key_of(lmcache, 0)
    store(adapter, [key], objects_of(lmcache, [key]))
    assert load(adapter, [key], objects_of(lmcache, 1, CHUNK - 4096)) == [False]
    assert load(adapter, [key], objects_of(lmcache, 1)) == [True]


def test_a_load_beside_a_store_of_the_same_keys_has_a_whole_chunk_or_misses(lmcache: SimpleNamespace, make: Make) -> None:
    adapter = make()
    for turn in range(20):
        keys = [key_of(lmcache, 4 * turn + number) for number in range(4)]
        given, found = objects_of(lmcache, keys), objects_of(lmcache, 4)  # LMCache, too, keeps them until the tasks have ended
        putting = adapter.submit_store_task(keys, given)
        getting = adapter.submit_load_task(keys, found)
        wait(adapter.get_load_event_fd())
        bitmap = adapter.query_load_result(getting)
        assert all(right(each, key) for index, (each, key) in enumerate(zip(found, keys, strict=True)) if bitmap.test(index))
        wait(adapter.get_store_event_fd())
        assert adapter.pop_completed_store_tasks()[putting].is_successful()


def test_locked_chunks_are_neither_evicted_nor_deleted(lmcache: SimpleNamespace, make: Make) -> None:
    adapter = make()
    locked = [key_of(lmcache, number) for number in range(4)]
    store(adapter, locked, objects_of(lmcache, locked))
    assert look_up(adapter, locked) == [True] * 4
    for turn in range(1, 40):
        keys = [key_of(lmcache, 4 * turn + number) for number in range(4)]
        assert store(adapter, keys, objects_of(lmcache, keys)).is_successful()
    adapter.delete(locked)
    found = objects_of(lmcache, 4)
    assert load(adapter, locked, found) == [True] * 4
    assert all(right(*pair) for pair in zip(found, locked, strict=True))
    usage = adapter.get_usage()
    assert usage.total_bytes_used <= usage.total_capacity_bytes <= 16 << 20
    adapter.submit_unlock(locked)
    adapter.delete(locked)
    assert look_up(adapter, locked) == [False] * 4


def test_more_chunks_than_can_be_locked_fail_and_the_others_stay(lmcache: SimpleNamespace, make: Make) -> None:
    adapter = make()
    number = 0
    while store(adapter, [key := key_of(lmcache, number)], objects_of(lmcache, [key])).is_successful():
        assert look_up(adapter, [key]) == [True]
        number += 1
    assert number == adapter.report_status()["slots"]
    first = objects_of(lmcache, 1)
    assert load(adapter, [key_of(lmcache, 0)], first) == [True]
    assert right(first[0], key_of(lmcache, 0))


def test_listeners_hear_of_stores_loads_and_deletions(lmcache: SimpleNamespace, make: Make) -> None:
    heard: list[Any] = []

    class Listener(lmcache.L2AdapterListener):  # type: ignore[misc,name-defined]
        def on_l2_keys_stored(self, keys: Any, sizes: Any) -> None:
            heard.append(("stored", keys, sizes))

        def on_l2_keys_accessed(self, keys: Any) -> None:
            heard.append(("accessed", keys))

        def on_l2_keys_deleted(self, keys: Any) -> None:
            heard.append(("deleted", keys))

    adapter = make()
    adapter.register_listener(Listener())
    keys = [key_of(lmcache, number) for number in range(2)]
    store(adapter, keys, objects_of(lmcache, keys))
    load(adapter, [*keys, key_of(lmcache, 9)], objects_of(lmcache, 3))
    adapter.delete([keys[0], key_of(lmcache, 9)])
    assert heard == [("stored", keys, [CHUNK] * 2), ("accessed", keys), ("deleted", keys[:1])]


def test_chunks_are_found_again_by_the_next_server(lmcache: SimpleNamespace, make: Make) -> None:
    adapter = make()
    keys = [key_of(lmcache, number) for number in range(3)]
    store(adapter, keys, objects_of(lmcache, keys))
    look_up(adapter, keys)  # the lock ends with the server
    adapter.close()
    adapter.close()
    again = make()
    assert again.get_usage().total_bytes_used == 3 * CHUNK
    assert look_up(again, keys) == [True] * 3
    found = objects_of(lmcache, 3)
    assert load(again, keys, found) == [True] * 3
    assert all(right(*pair) for pair in zip(found, keys, strict=True))


def test_a_drive_that_was_replaced_loses_its_own_chunks_only(lmcache: SimpleNamespace, make: Make, drive: Path) -> None:
    paths = [drive / "a", drive / "b"]
    adapter = make(path=[str(path) for path in paths])
    keys = [key_of(lmcache, number) for number in range(16)]
    store(adapter, keys, objects_of(lmcache, keys))
    adapter.close()
    (paths[0] / FILE_NAME).unlink()
    assert 0 < sum(look_up(make(path=[str(path) for path in paths]), keys)) < 16


def test_close_ends_the_tasks_under_way_and_frees_the_directory(lmcache: SimpleNamespace, make: Make) -> None:
    adapter = make()
    keys = [key_of(lmcache, number) for number in range(32)]
    objects = objects_of(lmcache, keys)
    for first in range(0, 32, 8):
        adapter.submit_store_task(keys[first : first + 8], objects[first : first + 8])
    adapter.close()
    del objects
    with pytest.raises(ValueError, match="closed"):
        adapter.submit_load_task(keys[:1], objects_of(lmcache, 1))
    assert not adapter.report_status()["is_healthy"]
    assert look_up(make(), keys) == [True] * 32


def test_close_frees_the_descriptors_though_a_drive_fails(make: Make, direct_disk: FaultyFilesystem) -> None:
    adapter = make(path=str(direct_disk / "kv"), block_bytes=CHUNK)
    events = [adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()]
    direct_disk.fail("fsync", errno.EIO)
    with pytest.raises(OSError, match="fdatasync"):
        adapter.close()
    for event in events:
        with pytest.raises(OSError, match="descriptor"):
            os.eventfd_read(event)


def test_close_beside_other_calls_raises_nothing(lmcache: SimpleNamespace, make: Make) -> None:
    keys = [key_of(lmcache, number) for number in range(4)]
    errors: list[Exception] = []

    def call(adapter: Any, stopped: threading.Event) -> None:
        try:
            while not stopped.is_set():
                adapter.get_usage()
                adapter.report_status()
                adapter.delete(keys)
        except Exception as error:
            errors.append(error)

    for _ in range(5):
        adapter, stopped = make(block_bytes=CHUNK), threading.Event()
        threads = [threading.Thread(target=call, args=(adapter, stopped)) for _ in range(2)]
        for thread in threads:
            thread.start()
        adapter.close()
        stopped.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert adapter.get_usage().total_bytes_used == 0


def test_a_chunk_larger_than_the_slots_fails_its_task(
    lmcache: SimpleNamespace, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = make(block_bytes=CHUNK)
    key = key_of(lmcache, 0)
    assert not store(adapter, [key], objects_of(lmcache, [key], CHUNK + 1)).is_successful()
    assert f"1 to {CHUNK} bytes, got {CHUNK + 1}" in caplog.text
    assert adapter.report_status()["is_healthy"]


def test_a_full_drive_is_an_error_once_and_then_misses(
    lmcache: SimpleNamespace, make: Make, small_disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OSError, match="smaller capacity"):
        make(path=str(small_disk.path), capacity="1TB", block_bytes=CHUNK)
    adapter = make(path=str(small_disk.path), capacity="1TB")
    key = key_of(lmcache, 0)
    for _ in range(3):
        assert not store(adapter, [key], objects_of(lmcache, [key])).is_successful()
        assert look_up(adapter, [key]) == [False]
        assert load(adapter, [key], objects_of(lmcache, 1)) == [False]
    assert caplog.text.count("smaller capacity") == 1
    assert not adapter.report_status()["is_healthy"]
    assert "smaller capacity" in adapter.report_status()["error"]


def test_a_second_server_or_another_fingerprint_is_refused(make: Make) -> None:
    make(block_bytes=CHUNK, fingerprint="float16")
    with pytest.raises(StoreLocked, match="BlockStore of this process"):
        make(block_bytes=CHUNK, fingerprint="float16")


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"capcity": "1GB"}, TypeError, "capcity"),
        ({"capacity": "1KiB", "block_bytes": CHUNK}, ValueError, "no room for a block"),
        ({"capacity": "16 apples"}, ValueError, "capacity"),
        ({"aio_config": {"queue_dept": 3}}, ValueError, "queue_dept"),
    ],
)
def test_wrong_settings_are_refused(make: Make, settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make(**settings)


def test_two_threads_store_and_load_at_the_same_time(lmcache: SimpleNamespace, make: Make) -> None:
    """As LMCache's two controllers do."""
    adapter = make()
    keys = [key_of(lmcache, number) for number in range(40)]
    wrong: list[Any] = []

    def stores() -> None:
        for key in keys:
            store(adapter, [key], objects_of(lmcache, [key]))

    def loads() -> None:
        for _ in range(3):
            for key in keys:
                if look_up(adapter, [key]) == [True]:
                    found = objects_of(lmcache, 1)
                    if load(adapter, [key], found) == [True] and not right(found[0], key):
                        wrong.append(key)
                    adapter.submit_unlock([key])

    threads = [threading.Thread(target=target) for target in (stores, loads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert wrong == []
    assert look_up(adapter, keys) == [True] * 40
