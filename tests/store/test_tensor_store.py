"""The store as its users know it: what is put is got, however it lies."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import tempfile
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepnvme.memory.pool import BufferPool
from deepnvme.store.data_file import DATA_NAME
from deepnvme.store.tensor_store import TensorStore

from ..support.examples import examples
from ..support.memory import bytes_of, numbered
from ..support.patience import PATIENCE, until

MIB = 1 << 20


@pytest.fixture
def pool():
    return BufferPool(64 * MIB)


@pytest.fixture
def store(drive, engine):
    with TensorStore(drive / "store", engine=engine) as store:
        yield store


@pytest.fixture
def striped(drive, engine):
    with TensorStore([drive / "a", drive / "b", drive / "c"], engine=engine) as store:
        yield store


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.uint8,
    torch.int64, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3, 0, 2), (1025,), (3, 5, 700), (6, 1, 2, 1)], ids=str)
def test_a_tensor_comes_back_as_it_was(store, dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    assert store.put("name", tensor).result() == tensor.nbytes
    got = store.get("name").result()
    assert (got.dtype, got.shape, got.device) == (dtype, tensor.shape, torch.device("cpu"))
    assert bytes_of(got) == bytes_of(tensor)
    assert store.info("name") == (shape, dtype, tensor.nbytes, None)
    assert bytes_of(store.map("name")) == bytes_of(tensor)
    store.put("another", tensor).result()
    for together in store.get_many(["name", "another"]).result().values():
        assert (together.dtype, together.shape, together.stride()) == (dtype, tensor.shape, tensor.stride())
        assert bytes_of(together) == bytes_of(tensor)


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, MIB - 1, 4 * MIB, 4 * MIB + 1, 9 * MIB + 12345])
def test_a_tensor_in_several_directories_comes_back_as_it_was(striped, nbytes):
    tensor = numbered(nbytes)
    striped.put("name", tensor).result()
    assert torch.equal(striped.get("name").result(), tensor)
    assert torch.equal(striped.get_many(["name"]).result()["name"], tensor)
    assert torch.equal(striped.get("name", out=torch.empty(nbytes, dtype=torch.uint8)).result(), tensor)
    assert torch.equal(striped.map("name"), tensor)


def test_a_large_tensor_is_divided_equally_and_small_ones_go_where_there_is_least(striped):
    striped.put("large", numbered(12 * MIB)).result()
    assert striped.used_bytes == (4 * MIB,) * 3
    striped.delete("large").result()
    for index in range(30):
        striped.put(str(index), numbered(MIB)).result()
    assert striped.used_bytes == (10 * MIB,) * 3


def test_out_of_another_dtype_is_seen_as_the_tensor(store):
    tensor = torch.arange(6000, dtype=torch.float32).reshape(60, 100)
    store.put("name", tensor).result()
    for out in (torch.empty(24000, dtype=torch.uint8), torch.empty(3000, dtype=torch.float64), torch.empty(100, 60)):
        got = store.get("name", out=out).result()
        assert got.data_ptr() == out.data_ptr()
        assert torch.equal(got, tensor)
    exact = torch.empty(60, 100)
    assert store.get("name", out=exact).result().data_ptr() == exact.data_ptr()


def test_a_lease_is_written_and_read_in_place(store, pool, engine):
    with pool.lease(2 * MIB) as lease:
        lease.buffer.copy_(numbered(2 * MIB))
        before = engine.stats()
        store.put("name", lease.buffer).result()
        lease.buffer.zero_()
        store.get("name", out=lease.buffer).result()
        assert torch.equal(lease.buffer, numbered(2 * MIB))
        after = engine.stats()
    assert after.bytes_direct - before.bytes_direct in (4 * MIB, 0)  # 0: a file system without direct I/O
    assert after.bytes_zero_copy - before.bytes_zero_copy == after.bytes_direct - before.bytes_direct


def test_replacing_is_in_place_for_as_many_bytes(store, drive):
    def place(tensor):
        return (drive / "store" / DATA_NAME).read_bytes().index(bytes_of(tensor))

    tensor, other = numbered(20_000), numbered(20_000, 1)
    store.put_many({"before": numbered(5000, 2), "name": tensor}).result()
    at = place(tensor)
    store.put("name", other.view(torch.int16)).result()
    assert place(other) == at
    assert store.info("name").shape == (10000,)
    assert torch.equal(store.get("name").result(), other.view(torch.int16))


def test_many_at_once_come_back_in_order(store):
    tensors = {str(seed): numbered(1 + seed * 997 % 70000, seed) for seed in range(500)}
    assert store.put_many(tensors).result() == sum(tensor.nbytes for tensor in tensors.values())
    got = store.get_many(reversed(tensors)).result()
    assert list(got) == list(reversed(tensors))
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
    assert store.names() == list(tensors)
    assert (len(store), store.nbytes) == (500, sum(tensor.nbytes for tensor in tensors.values()))


@pytest.mark.parametrize("name", ["", "/", "a/b", "..", "\0", "é\n", "\ud800", "x" * 10000])
def test_any_string_is_a_name(drive, name):
    with TensorStore(drive / "store", persist=True) as store:
        store.put(name, torch.ones(3)).result()
        store.commit()
    with TensorStore(drive / "store", persist=True) as store:
        assert name in store
        assert torch.equal(store.get(name).result(), torch.ones(3))


def test_transfers_of_one_name_happen_in_order(store):
    for step in range(10):
        put = store.put("name", numbered(3 * MIB, step))
        got = store.get("name")
        store.put("name", numbered(3 * MIB, 1000 + step))
        again = store.get("name")
        deleted = store.delete("name")
        assert torch.equal(got.result(), numbered(3 * MIB, step))
        assert torch.equal(again.result(), numbered(3 * MIB, 1000 + step))
        assert (put.result(), deleted.result()) == (3 * MIB, 3 * MIB)


@contextlib.contextmanager
def released_in_the_end(gate):
    """Or a test that fails would hang in closing the store."""
    try:
        yield
    finally:
        gate.release()


def test_a_put_waits_for_the_gets_before_it(drive, faulty, gate):
    with TensorStore(drive / "store", engine=faulty("threads", gate=gate)) as store, released_in_the_end(gate):
        gate.release()
        store.put("name", torch.zeros(100_000)).result()
        gate.hold()
        first, second = store.get("name"), store.get("name")
        assert not first.done()
        waiting = threading.Thread(target=lambda: store.put("name", torch.ones(100_000)))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        assert "name" in store  # others are not kept waiting
        gate.release()
        waiting.join()
        assert torch.equal(first.result(), torch.zeros(100_000))
        assert torch.equal(second.result(), torch.zeros(100_000))
        assert torch.equal(store.get("name").result(), torch.ones(100_000))


def test_a_future_that_is_not_done_times_out_and_ends_later(drive, faulty, gate):
    with TensorStore(drive / "store", engine=faulty("threads", gate=gate)) as store, released_in_the_end(gate):
        future = store.put("name", torch.zeros(100_000))
        assert not future.done()
        with pytest.raises(TimeoutError):
            future.result(timeout=0.01)
        gate.release()
        assert future.result() == future.nbytes == 400_000
        assert future.done()


def test_a_mapping_is_private_and_outlives_the_store(drive):
    with TensorStore([drive / "a", drive / "b"]) as store:
        store.put("name", numbered(9 * MIB + 5)).result()
        mapped = store.map("name")
        mapped[::4096] += 1
        assert torch.equal(store.get("name").result(), numbered(9 * MIB + 5))
        assert torch.equal(store.map("name"), numbered(9 * MIB + 5))
    expected = numbered(9 * MIB + 5)
    expected[::4096] += 1
    assert torch.equal(mapped, expected)


def test_ranges_of_one_tensor_are_mapped_side_by_side(store):
    store.put_many({"a": numbered(3 * 4096), "b": numbered(5000, 1)}).result()
    mapped = store.map_ranges([("a", 8192, 4096), ("a", 0, 4096), ("b", 4096, 904)])
    assert torch.equal(mapped, torch.cat([numbered(12288)[8192:], numbered(4096), numbered(5000, 1)[4096:]]))
    store.put("a", numbered(3 * 4096, 2)).result()
    assert torch.equal(store.get("a").result(), numbered(3 * 4096, 2))


def test_files_go_with_the_store_and_directories_that_it_made(drive):
    with TensorStore([drive / "made" / "a", drive / "made" / "b"]) as store:
        store.put("name", torch.ones(5))
        assert sorted(os.listdir(drive / "made" / "a")) == ["deepnvme-store.data", "deepnvme-store.lock"]
    assert list(drive.iterdir()) == []
    store.close()


def test_a_dropped_store_removes_its_files(drive):
    store = TensorStore(drive / "store")
    store.put("name", numbered(MIB))
    del store
    gc.collect()
    assert list(drive.iterdir()) == []


def test_reserve_makes_room_once(store, drive):
    store.put("name", numbered(MIB)).result()
    store.reserve(64 * MIB)
    store.reserve(64 * MIB)
    store.reserve(1)
    assert store.allocated_bytes == 64 * MIB
    status = (drive / "store" / "deepnvme-store.data").stat()
    assert status.st_blocks * 512 >= 64 * MIB
    store.put_many({str(index): numbered(15 * MIB) for index in range(4)}).result()
    assert store.allocated_bytes == 64 * MIB


def test_threads_use_one_store_at_once(striped):
    def work(thread: int) -> None:
        for step in range(5):
            seed = thread * 100 + step
            tensors = {f"{thread}.{index}": numbered(5000 * (index + 1), seed + index) for index in range(10)}
            striped.put_many(tensors)
            striped.put(f"large {thread}", numbered(5 * MIB, seed))
            striped.put("shared", numbered(70000, seed))
            assert striped.get("shared").result().numel() == 70000
            got = striped.get_many(tensors).result()
            assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
            assert torch.equal(striped.get(f"large {thread}").result(), numbered(5 * MIB, seed))
            striped.delete(f"{thread}.3").result()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))


@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.booleans(), st.booleans())
def test_a_store_is_a_dictionary(drive, engine, data, persist, checksum):
    expected: dict[str, torch.Tensor] = {}
    committed: dict[str, torch.Tensor] = {}
    arguments = {"persist": persist, "checksum": checksum, "engine": engine}
    place = Path(tempfile.mkdtemp(dir=drive))
    store = TensorStore([place / "a", place / "b"], **arguments)
    name = st.sampled_from("abcdefgh")
    nbytes = st.sampled_from([0, 1, 4095, 4096, 12288, 50001, 600_000, 4 * MIB, 5 * MIB + 3])
    for step in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["put", "put many", "get", "delete", "commit", "reopen"])):
            case "put":
                chosen = data.draw(name)
                expected[chosen] = numbered(data.draw(nbytes), step)
                store.put(chosen, expected[chosen])
            case "put many":
                sizes = data.draw(st.dictionaries(name, nbytes))
                several = {each: numbered(size, step + index) for index, (each, size) in enumerate(sizes.items())}
                store.put_many(several)
                expected |= several
            case "get":
                assert all(torch.equal(store.get(each).result(), tensor) for each, tensor in expected.items())
            case "delete" if expected:
                chosen = data.draw(st.sampled_from(sorted(expected)))
                store.delete(chosen)
                del expected[chosen]
            case "commit" if persist:
                store.commit()
                committed = dict(expected)
            case "reopen":
                store.close()
                expected = dict(committed)
                store = TensorStore([place / "b", place / "a"], **arguments)
        assert set(store.names()) == set(expected)
    got = store.get_many(expected).result()
    assert all(torch.equal(got[each], tensor) for each, tensor in expected.items())
    for each in expected:
        store.delete(each)
    if persist:
        store.commit()
        assert store.used_bytes == (0, 0)
    store.close()


class TestPersisted:
    def test_what_was_committed_is_there_when_it_is_opened_again(self, drive):
        tensors = {"a": torch.randn(300, 5), "b": torch.arange(6 * MIB).to(torch.uint8), "c": torch.tensor(3, dtype=torch.int64)}
        with TensorStore([drive / "a", drive / "b"], persist=True, checksum=True) as store:
            store.put_many(tensors)
            store.commit()
            sums = {name: store.info(name).checksum for name in tensors}
        with TensorStore([drive / "b", drive / "a"], persist=True, checksum=True) as store:
            assert store.names() == list(tensors)
            assert {name: store.info(name).checksum for name in tensors} == sums
            got = store.get_many(tensors).result()
            assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())

    def test_closing_gives_back_what_was_preallocated(self, drive):
        with TensorStore(drive / "store", persist=True) as store:
            store.put("name", numbered(MIB))
            store.commit()
            store.reserve(100 * MIB)
        assert (drive / "store" / "deepnvme-store.data").stat().st_size == MIB

    def test_a_store_that_does_not_persist_cannot_commit(self, store):
        with pytest.raises(ValueError, match="persist=True"):
            store.commit()


def test_a_tensor_whose_future_is_dropped_is_let_go_when_it_has_been_read(drive, faulty, gate):
    """Without another call of the store: what a stream has read ahead may be the last that is ever asked of it."""
    engine = faulty("threads", gate=gate)
    with TensorStore(drive / "store", engine=engine) as store:
        gate.release()
        store.put("name", numbered(MIB)).result()
        gate.hold()
        tensor = torch.empty(MIB, dtype=torch.uint8)
        alive = weakref.ref(tensor.untyped_storage())
        reading = store.get("name", tensor)
        del tensor, reading
        gate.release()
        until(lambda: gc.collect() is not None and alive() is None)


def test_what_is_cancelled_ends_with_an_error(drive, faulty, gate):
    engine = faulty("threads", gate=gate)
    with TensorStore(drive / "store", engine=engine) as store:
        gate.release()
        store.put("name", numbered(MIB)).result()
        gate.hold()
        reading = store.get("name", torch.empty(MIB, dtype=torch.uint8))
        assert reading.cancel()
        gate.release()
        assert reading.exception(PATIENCE).errno == errno.ECANCELED
        assert not reading.cancel()
        assert torch.equal(store.get("name").result(), numbered(MIB))
