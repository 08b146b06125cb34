"""DeepSpeed's handle, method by method: its names, its order, its results (docs/engine.md, the contract)."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ..support.memory import bytes_of, page_aligned, pattern, zeros

SIZE = 10_001


@pytest.fixture
def path(drive: Path) -> str:
    """Of a file that is not there yet. DeepSpeed's callers pass strings."""
    return str(drive / "file")


@pytest.fixture
def file(path: str) -> str:
    """Of a file of 10 001 bytes, the pattern."""
    Path(path).write_bytes(pattern(SIZE))
    return path


@pytest.fixture
def tensor() -> torch.Tensor:
    return page_aligned(pattern(SIZE))


# The constructor


@pytest.mark.parametrize("name", ["block_size", "queue_depth", "intra_op_parallelism", "num_threads"])
@pytest.mark.parametrize("value", [0, -1, 2**40])
def test_an_absurd_setting_is_refused_with_its_range_and_value(op: ModuleType, name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"must be in \[\d+, \d+\], got {value}"):
        op.aio_handle(**{name: value})


@pytest.mark.parametrize("value", ["2", 2.5, [2]], ids=str)
def test_a_number_of_workers_that_is_none_is_a_type_error(op: ModuleType, value: Any) -> None:
    with pytest.raises(TypeError):
        op.aio_handle(num_threads=value)


def settings(handle: Any) -> tuple[Any, ...]:
    return (
        handle.get_block_size(), handle.get_queue_depth(), handle.get_single_submit(), handle.get_overlap_events(),
        handle.get_intra_op_parallelism(),
    )  # fmt: skip


def test_settings_have_deepspeeds_defaults_order_and_names(op: ModuleType) -> None:
    assert settings(op.aio_handle()) == (1048576, 128, False, False, 1)
    assert settings(op.aio_handle(4096, 7, True, True, 2)) == (4096, 7, True, True, 2)
    named = op.aio_handle(block_size=4096, queue_depth=7, single_submit=True, overlap_events=True, intra_op_parallelism=2)
    assert settings(named) == (4096, 7, True, True, 2)
    by_the_tutorial = op.aio_handle(num_threads=3)
    assert (by_the_tutorial.get_intra_op_parallelism(), by_the_tutorial.get_thread_count()) == (3, 3)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_alignment_is_a_sector_for_each_worker(op: ModuleType, threads: int) -> None:
    assert op.aio_handle(intra_op_parallelism=threads).get_alignment() == 512 * threads


# Bad input

READS: dict[str, Callable[[Any, Any, Any], object]] = {
    "read": lambda handle, tensor, path: handle.read(tensor, path, False),
    "pread": lambda handle, tensor, path: handle.pread(tensor, path, False, False),
    "pread, asynchronous": lambda handle, tensor, path: handle.pread(tensor, path, False, True),
    "sync_pread": lambda handle, tensor, path: handle.sync_pread(tensor, path),
    "async_pread": lambda handle, tensor, path: handle.async_pread(tensor, path),
}
WRITES: dict[str, Callable[[Any, Any, Any], object]] = {
    "write": lambda handle, tensor, path: handle.write(tensor, path, False),
    "pwrite": lambda handle, tensor, path: handle.pwrite(tensor, path, False, False),
    "pwrite, asynchronous": lambda handle, tensor, path: handle.pwrite(tensor, path, False, True),
    "sync_pwrite": lambda handle, tensor, path: handle.sync_pwrite(tensor, path),
    "async_pwrite": lambda handle, tensor, path: handle.async_pwrite(tensor, path),
}
CALLS = {**READS, **WRITES}


@pytest.mark.parametrize("name", READS)
def test_a_missing_file_is_named_and_nothing_is_pending(handle: Any, tensor: torch.Tensor, path: str, name: str) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        READS[name](handle, tensor, path)
    assert caught.value.filename == path
    assert handle.wait() == 0


@pytest.mark.parametrize("name", READS)
def test_a_file_shorter_than_the_tensor_is_refused(handle: Any, file: str, name: str) -> None:
    with pytest.raises(ValueError, match="which has 10001 bytes"):
        READS[name](handle, torch.empty(SIZE + 1, dtype=torch.uint8), file)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("no_tensor", [None, b"bytes", [1.0]], ids=lambda value: type(value).__name__)
def test_what_is_no_tensor_is_a_type_error(handle: Any, file: str, name: str, no_tensor: Any) -> None:
    with pytest.raises(TypeError):
        CALLS[name](handle, no_tensor, file)


# What each method returns and does


def test_write_and_read_return_zero_in_silence(handle: Any, tensor: torch.Tensor, path: str, capfd: Any) -> None:
    target = zeros(SIZE)
    assert handle.write(tensor, path, False) == 0
    assert Path(path).read_bytes() == pattern(SIZE)
    assert handle.read(target.tensor, path, False) == 0
    assert target.content() == pattern(SIZE)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("name", "pending"), [("pread", False), ("pread", True), ("pwrite", False), ("pwrite", True)])
def test_pread_and_pwrite_return_what_they_completed(
    handle: Any, tensor: torch.Tensor, file: str, name: str, pending: bool
) -> None:
    assert getattr(handle, name)(tensor, file, False, pending) == (0 if pending else 1)
    assert handle.wait() == (1 if pending else 0)


@pytest.mark.parametrize("direction", ["read", "write"])
def test_synchronous_calls_return_one_and_asynchronous_ones_zero_and_wait_the_count(
    handle: Any, tensor: torch.Tensor, file: str, direction: str
) -> None:
    assert [getattr(handle, f"async_p{direction}")(tensor, file) for _ in range(5)] == [0] * 5
    assert getattr(handle, f"sync_p{direction}")(tensor, file) == 1  # leaves what is pending to wait
    assert handle.wait() == 5


def test_many_are_started_by_one_call_and_counted_each(handle: Any, drive: Path) -> None:
    tensors = [page_aligned(pattern(5000, index)) for index in range(50)]
    files = [str(drive / str(index % 20)) for index in range(50)]
    offsets = [index // 20 * 5000 for index in range(50)]
    assert handle.async_pwrite_many(tensors, files, offsets) == 0
    handle.async_pwrite(tensors[0], files[0])
    assert (handle.wait(), handle.wait()) == (51, 0)
    back = [torch.zeros(5000, dtype=torch.uint8) for _ in range(50)]
    assert handle.async_pread_many(back, files, offsets) == 0
    assert handle.wait() == 50
    assert [bytes_of(tensor) for tensor in back] == [pattern(5000, index) for index in range(50)]


@pytest.mark.parametrize("name", ["read", "write"])
def test_read_and_write_take_an_offset_last(handle: Any, path: str, name: str) -> None:
    Path(path).write_bytes(bytes(5000))
    tensor = page_aligned(b"x" * 1000)
    getattr(handle, name)(tensor, path, False, 100)
    expected = bytes(100) + b"x" * 1000 + bytes(3900) if name == "write" else bytes(5000)
    assert (Path(path).read_bytes(), bytes_of(tensor)) == (expected, b"x" * 1000 if name == "write" else bytes(1000))


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_writes_and_reads_take_an_offset_by_name(handle: Any, tensor: torch.Tensor, path: str, kind: str) -> None:
    target = zeros(5000)
    getattr(handle, f"{kind}_pwrite")(buffer=tensor, filename=path, file_offset=3)
    handle.wait()
    assert Path(path).read_bytes() == bytes(3) + pattern(SIZE)
    getattr(handle, f"{kind}_pread")(buffer=target.tensor, filename=path, file_offset=6)
    handle.wait()
    assert target.content() == pattern(SIZE)[3:5003]


# wait


@pytest.fixture
def doomed(file: str) -> Callable[[Any], None]:
    """Starts a write that wait() finds wrong: the file is changed behind its back before it is validated."""

    def start(handle: Any) -> None:
        handle.pwrite(page_aligned(b"x" * 5000), file, True, True)
        until_ended(handle, 1)
        with open(file, "r+b") as opened:
            opened.seek(4321)
            opened.write(b"y")

    return start


def until_ended(handle: Any, count: int) -> None:
    """What wait() does, short of collecting the results."""
    while handle.stats()["requests"] < count:
        time.sleep(0.001)


def test_wait_raises_the_first_error_and_the_handle_serves_on(
    handle: Any, tensor: torch.Tensor, path: str, doomed: Callable[[Any], None]
) -> None:
    doomed(handle)
    with pytest.raises(OSError, match="differ at byte 4321"):
        handle.wait()
    assert handle.wait() == 0
    handle.async_pwrite(tensor, path)
    assert handle.wait() == 1


@pytest.mark.slow
def test_what_is_started_while_another_thread_waits_is_not_given_up(handle: Any, drive: Path) -> None:
    """wait() may count it or leave it to the next, but must not count it before it has ended: its tensor would be let go."""
    tensor = page_aligned(bytes(8 << 20))
    for index in range(4):
        handle.sync_pwrite(tensor, str(drive / str(index)))
    before = handle.stats()["requests"]
    started = 0
    stop = threading.Event()

    def start() -> None:
        nonlocal started
        while not stop.wait(0.002):
            handle.async_pwrite(tensor, str(drive / str(started % 4)))
            started += 1

    thread = threading.Thread(target=start)
    thread.start()
    counted = too_early = 0
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        counted += handle.wait()
        too_early = max(too_early, counted - (handle.stats()["requests"] - before))
    stop.set()
    thread.join()
    assert (too_early, counted + handle.wait()) == (0, started)


# validate


@pytest.mark.parametrize(("position", "offset"), [(0, 0), (4095, 0), (4096, 0), (10_000, 0), (7, 1000)])
def test_validation_finds_a_byte_that_differs(handle: Any, file: str, position: int, offset: int) -> None:
    tensor = zeros(SIZE - offset).tensor
    handle.pread(tensor, file, True, True, offset)
    until_ended(handle, 1)
    tensor[position] ^= 1
    with pytest.raises(OSError, match=f"tensor and file differ at byte {offset + position}") as caught:
        handle.wait()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, file)


def test_a_file_that_has_become_shorter_fails_validation(handle: Any, tensor: torch.Tensor, file: str) -> None:
    handle.pread(tensor, file, True, True)
    until_ended(handle, 1)
    os.truncate(file, 5000)
    with pytest.raises(OSError, match="differ at byte 5000"):
        handle.wait()


# Descriptors


@pytest.mark.parametrize("flags", [
    pytest.param(os.O_WRONLY, id="buffered"),
    pytest.param(os.O_RDWR, id="for reading too"),
    pytest.param(os.O_WRONLY | os.O_DIRECT, id="direct"),
    pytest.param(os.O_WRONLY | os.O_APPEND, id="appending"),
    pytest.param(os.O_WRONLY | os.O_APPEND | os.O_DIRECT, id="appending, direct"),
    pytest.param(os.O_WRONLY | os.O_SYNC, id="synchronous"),
])  # fmt: skip
@pytest.mark.parametrize("offset", [0, 777, 4096])
def test_a_descriptor_is_written_at_the_offset_and_nowhere_else(
    handle: Any, tensor: torch.Tensor, path: str, flags: int, offset: int
) -> None:
    Path(path).write_bytes(b"x" * 30_000)
    descriptor = os.open(path, flags)
    assert handle.async_pwrite(tensor, descriptor, offset) == 0
    assert handle.wait() == 1
    os.close(descriptor)
    assert Path(path).read_bytes() == b"x" * offset + pattern(SIZE) + b"x" * (30_000 - offset - SIZE)


def test_a_closed_descriptor_is_refused(handle: Any, tensor: torch.Tensor) -> None:
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.close(descriptor)
    with pytest.raises(OSError, match=f"file descriptor {descriptor}") as caught:
        handle.async_pwrite(tensor, descriptor)
    assert caught.value.errno == errno.EBADF
    assert handle.wait() == 0


def test_a_pipe_is_refused(handle: Any, tensor: torch.Tensor) -> None:
    read, write = os.pipe()
    with pytest.raises(OSError, match="neither a regular file nor a block device"):
        handle.async_pwrite(tensor, write)
    os.close(read)
    os.close(write)


# Locked tensors


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.float64]
)
def test_a_locked_tensor_has_the_examples_dtype_and_the_length_asked_for(handle: Any, dtype: torch.dtype) -> None:
    for count in (0, 1000):
        locked = handle.new_cpu_locked_tensor(count, torch.empty(3, dtype=dtype))
        assert (locked.dtype, locked.shape, locked.device.type) == (dtype, (count,), "cpu")
        assert locked.is_contiguous()


@pytest.mark.parametrize("count", [2**62, 2**50, -1])
def test_fewer_elements_than_none_or_more_than_there_is_memory_for_are_refused(handle: Any, count: int) -> None:
    with pytest.raises(ValueError if count < 0 else (MemoryError, ValueError)):
        handle.new_cpu_locked_tensor(count, torch.empty(1, dtype=torch.float64))


def test_a_locked_tensor_and_its_views_are_pinned_for_every_handle_and_freed_once(op: ModuleType, engine: Any) -> None:
    locked = op.aio_handle().new_cpu_locked_tensor(1000, torch.empty(1))
    handle = op.aio_handle()
    assert handle.is_pinned(locked)
    assert handle.is_pinned(locked.narrow(0, 500, 500))
    assert handle.is_pinned(engine.empty_pinned(1000))
    assert not handle.is_pinned(torch.empty(1000))
    locked.fill_(3)
    assert (handle.free_cpu_locked_tensor(locked), handle.free_cpu_locked_tensor(locked)) == (True, False)
    assert not op.aio_handle().is_pinned(locked)
    assert not handle.free_cpu_locked_tensor(torch.empty(1000))
    assert locked.eq(3).all()  # it may still be looked at


# The functions


def test_the_functions_write_and_read_a_file_in_silence(op: ModuleType, tensor: torch.Tensor, path: str, capfd: Any) -> None:
    target = zeros(SIZE)
    assert op.aio_write(tensor, path, 1048576, 32, False, True, False) == 0
    assert op.aio_read(target.tensor, path, 1048576, 32, True, False, True) == 0
    assert target.content() == pattern(SIZE)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["aio_read", "aio_write"])
@pytest.mark.parametrize(("block_size", "queue_depth"), [(0, 32), (1048576, 0)])
def test_the_functions_refuse_absurd_settings(
    op: ModuleType, tensor: torch.Tensor, file: str, name: str, block_size: int, queue_depth: int
) -> None:
    with pytest.raises(ValueError, match="must be in"):
        getattr(op, name)(tensor, file, block_size, queue_depth, False, False, False)


@pytest.mark.parametrize("make", [
    pytest.param(lambda: (torch.zeros(1000), torch.randn(1000)), id="alike"),
    pytest.param(lambda: (torch.zeros(10, 100), torch.randn(1000)), id="other shapes"),
    pytest.param(lambda: (torch.zeros(4000, dtype=torch.uint8), torch.randn(1000)), id="other dtypes"),
    pytest.param(lambda: (torch.zeros(1000), torch.randn(2000)[::2]), id="a strided source"),
    pytest.param(lambda: (torch.zeros(0), torch.zeros(0)), id="nothing"),
    pytest.param(lambda: (torch.nn.Parameter(torch.zeros(10)), torch.randn(10)), id="into a parameter"),
])  # fmt: skip
def test_memcpy_copies_bytes(op: ModuleType, make: Any) -> None:
    dest, src = make()
    assert op.deepspeed_memcpy(dest, src) == 0
    assert bytes_of(dest) == bytes_of(src)


@pytest.mark.parametrize(
    ("dest", "src", "error", "match"),
    [
        (torch.zeros(10), torch.ones(11), ValueError, "dest has 40 bytes and src 44"),
        (torch.zeros(20)[::2], torch.ones(10), ValueError, "not contiguous"),
        (torch.zeros(10), None, TypeError, "got NoneType"),
        (torch.zeros(10), b"bytes", TypeError, "got bytes"),
    ],
    ids=["sizes", "strides", "None", "bytes"],
)
def test_memcpy_refuses_what_it_cannot_copy(
    op: ModuleType, dest: torch.Tensor, src: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        op.deepspeed_memcpy(dest, src)
    assert not dest.any()
