"""Many transfers by one call: what each moves, what fails and what goes on, and what one future says of all."""

from __future__ import annotations

import errno
import gc
import os
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deepnvme

from ..support.examples import examples
from ..support.memory import PAGE, Guarded, bytes_of, page_aligned, pattern, zeros
from ..support.patience import PATIENCE
from ..support.transfers import lengths

Faulty = Callable[..., Any]

SETTINGS = st.fixed_dictionaries({
    "block_size": st.sampled_from([512, 5000, 4096, 65536, 1 << 20]),
    "queue_depth": st.sampled_from([1, 3, 32]),
    "num_threads": st.sampled_from([1, 1, 3]),
})  # fmt: skip
MISALIGNMENTS = st.sampled_from([0, 0, 1, 64, 512, 4095])


@st.composite
def ranges(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(file, offset, length) of ranges that do not overlap, in any order."""
    drawn = []
    for file in range(draw(st.integers(1, 3))):
        offset = 0
        for gap, length in draw(st.lists(st.tuples(st.one_of(st.just(0), lengths(9000)), lengths(20_000)), max_size=8)):
            drawn.append((file, offset + gap, length))
            offset += gap + length
    return draw(st.permutations(drawn))


def tensors_of(contents: list[bytes], adjacent: bool, misalignment: int) -> tuple[list[torch.Tensor], list[Guarded]]:
    """Tensors of these contents, each by itself or one after the other; and the memory that they are in."""
    if not adjacent:
        memory = [Guarded(content, misalignment) for content in contents]
        return [each.tensor for each in memory], memory
    whole = Guarded(b"".join(contents), misalignment)
    return list(torch.split(whole.tensor, [len(content) for content in contents])), [whole]


@given(
    ranges=ranges(),
    adjacent=st.booleans(),
    misalignment=MISALIGNMENTS,
    settings=SETTINGS,
    opened=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(60), deadline=None)
def test_many_tensors_are_written_and_read_as_plain_python_would(
    io_dir: Path,
    backends: list[Any],
    ranges: list[tuple[int, int, int]],
    adjacent: bool,
    misalignment: int,
    settings: dict[str, Any],
    opened: bool,
    seed: int,
) -> None:
    contents = [pattern(length, seed + index) for index, (_, _, length) in enumerate(ranges)]
    offsets = [offset for _, offset, _ in ranges]
    with tempfile.TemporaryDirectory(dir=io_dir) as directory:
        for backend in backends:
            paths = [Path(directory, f"{backend}{number}") for number in range(3)]
            model = [bytearray(pattern(10_000, number)) for number in range(3)]
            for path, before in zip(paths, model, strict=True):
                path.write_bytes(before)
            for (file, offset, length), content in zip(ranges, contents, strict=True):
                if length:
                    model[file].extend(bytes(max(offset - len(model[file]), 0)))
                    model[file][offset : offset + length] = content
            with deepnvme.Engine(backend=backend, **settings) as engine:
                targets = [engine.open(path, "rw") if opened else path for path in paths]
                chosen = [targets[file] for file, _, _ in ranges]
                sources, memory = tensors_of(contents, adjacent, misalignment)
                assert engine.write_many(sources, chosen, offsets).result() == sum(map(len, contents))
                assert [path.read_bytes() for path in paths] == model, backend
                assert all(each.guards_are_intact() for each in memory)
                places = [index for index, (file, offset, length) in enumerate(ranges) if offset + length <= len(model[file])]
                back, memory = tensors_of([bytes(len(contents[index])) for index in places], adjacent, misalignment)
                future = engine.read_many(back, [chosen[index] for index in places], [offsets[index] for index in places])
                assert future.result() == future.nbytes == sum(len(contents[index]) for index in places)
                assert [bytes_of(tensor) for tensor in back] == [contents[index] for index in places], backend
                assert all(each.guards_are_intact() for each in memory)


@given(
    ids=st.lists(st.integers(0, 19) | st.integers(5, 9), min_size=1, max_size=30),
    in_order=st.booleans(),
    record=st.sampled_from([1, 100, 512, 4096, 4096, 5000, 8192, 12288]),
    base=st.sampled_from([0, 1, 512, 4096]),
    misalignment=MISALIGNMENTS,
    settings=SETTINGS,
)
@settings(max_examples=examples(60), deadline=None)
def test_gathered_rows_are_the_records_of_the_file(
    io_dir: Path,
    backends: list[Any],
    ids: list[int],
    in_order: bool,
    record: int,
    base: int,
    misalignment: int,
    settings: dict[str, Any],
) -> None:
    content = pattern(base + 20 * record, record)
    numbers = torch.tensor(sorted(ids) if in_order else ids)
    with tempfile.TemporaryDirectory(dir=io_dir) as directory:
        path = Path(directory, "file")
        path.write_bytes(content)
        for backend in backends:
            memory = zeros(len(ids) * record, misalignment)
            with deepnvme.Engine(backend=backend, **settings) as engine:
                future = engine.gather(path, numbers, memory.tensor.view(-1, record), record_size=record, base=base)
                assert future.result() == future.nbytes == len(ids) * record
            expected = b"".join(content[base + index * record : base + (index + 1) * record] for index in numbers.tolist())
            assert memory.content() == expected, backend
            assert memory.guards_are_intact()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (3, 0)], ids=str)
def test_ids_of_any_integer_type_and_shape_choose_records(
    engine: deepnvme.Engine, drive: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    table = torch.randn(50, 3, 5)
    engine.write(table, drive / "file").result()
    ids = torch.randint(0, 50, shape, dtype=dtype)
    out = torch.empty(*shape, 3, 5)
    with engine.open(drive / "file") as file:
        assert engine.gather(file, ids, out).result() == ids.numel() * 60
    assert out.equal(table[ids.long()])


def test_neighbours_are_one_block_and_others_are_not(backend: Any, drive: Path) -> None:
    (drive / "file").write_bytes(pattern(64 * PAGE))
    with deepnvme.Engine(backend=backend) as engine:
        out = engine.empty_pinned((64, PAGE), torch.uint8)

        def blocks_of(ids: torch.Tensor) -> int:
            before = engine.stats().blocks
            engine.gather(drive / "file", ids, out[: len(ids)]).result()
            return engine.stats().blocks - before

        assert blocks_of(torch.arange(64)) == 1
        assert blocks_of(torch.arange(63, -1, -1)) == 64
        assert blocks_of(torch.tensor([3, 4, 5, 9, 9, 10])) == 3
        before = engine.stats().blocks
        engine.read_many(list(out), drive / "file", range(0, 64 * PAGE, PAGE)).result()
        assert engine.stats().blocks == before + 1


class _Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("make", [
    pytest.param(lambda tensor: torch.nn.Parameter(tensor), id="a parameter"),
    pytest.param(lambda tensor: tensor.as_subclass(_Subclass), id="a subclass"),
    pytest.param(lambda tensor: tensor.t(), id="transposed"),
    pytest.param(lambda tensor: tensor[:, ::2], id="every other column"),
    pytest.param(lambda tensor: tensor.to(torch.complex64).conj(), id="a lazy conjugate"),
    pytest.param(lambda tensor: tensor.to(torch.complex64).conj().imag, id="a lazy negative"),
    pytest.param(lambda tensor: tensor.expand(3, 4, 6), id="expanded"),
    pytest.param(lambda tensor: tensor[0, 0], id="a scalar"),
    pytest.param(lambda tensor: tensor[:0], id="empty"),
])  # fmt: skip
def test_tensors_of_any_kind_are_written_as_they_are_seen(
    engine: deepnvme.Engine, drive: Path, make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = make(torch.randn(4, 6))
    engine.write_many([tensor, torch.ones(1)], drive / "file", [0, tensor.nbytes]).result()
    assert (drive / "file").read_bytes() == bytes_of(tensor.as_subclass(torch.Tensor)) + bytes_of(torch.ones(1))


def test_whole_pages_are_padded_each(engine: deepnvme.Engine, drive: Path) -> None:
    contents = [pattern(length) for length in (100, PAGE, PAGE + 1, 3 * PAGE - 1)]
    offsets = [0, PAGE, 2 * PAGE, 4 * PAGE]
    with engine.open(drive / "file", "rw", whole_pages=True) as file:
        engine.write_many([page_aligned(content) for content in contents], file, offsets).result()
        back = [torch.empty(len(content), dtype=torch.uint8) for content in contents]
        engine.read_many(back, file, offsets).result()
        buffered = engine.stats().bytes_buffered
    assert [bytes_of(tensor) for tensor in back] == contents
    padded = [content + bytes(-len(content) % PAGE) for content in contents]
    if not buffered:  # where there is direct I/O
        assert (drive / "file").read_bytes() == b"".join(padded)


def test_a_file_named_several_times_is_opened_once(held: Any, gate: Any, drive: Path) -> None:
    tensors = [torch.ones(PAGE, dtype=torch.uint8) for _ in range(9)]
    future = held.write_many(tensors, [str(drive / "ab"[index % 2]) for index in range(9)], range(0, 9 * PAGE, PAGE))
    opened = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    gate.release()
    assert future.result() == 9 * PAGE
    assert [opened.count(str(drive / name)) for name in "ab"] == [1, 1]


# Arguments.


def test_arguments_that_cannot_be_are_refused_before_anything_is_read(engine: Any, drive: Path) -> None:
    path = drive / "file"
    path.write_bytes(bytes(1000))
    row, ids = torch.empty(10, dtype=torch.uint8), torch.tensor([0, 1])
    rows = torch.empty(2, 10, dtype=torch.uint8)
    with engine.open(path) as closed:
        pass
    write_only = engine.open(drive / "other", "w")
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, "offsets are needed", lambda: engine.read_many([row], path)),
        (ValueError, "as many offsets as tensors, got 1 and 2", lambda: engine.read_many([row, row], path, [0])),
        (ValueError, "as many files as tensors, got 3 and 2", lambda: engine.read_many([row, row], [path] * 3)),
        (ValueError, "must not be negative, got -1 at 1", lambda: engine.read_many([row, row], path, [0, -1])),
        (ValueError, "out of range", lambda: engine.read_many([row], path, [1 << 64])),
        (ValueError, "past the largest file offset", lambda: engine.write_many([row, row], path, [0, (1 << 63) - 5])),
        (TypeError, "offset must be an integer", lambda: engine.read_many([row], path, [0.5])),
        (TypeError, "offsets must be a sequence", lambda: engine.read_many([row], path, 0)),
        (TypeError, "tensors must be a sequence", lambda: engine.read_many(7, path, [0])),
        (TypeError, r"tensors\[1\]: expected a torch.Tensor, got str", lambda: engine.read_many([row, "x"], path, [0, 0])),
        (TypeError, "source must be a sequence", lambda: engine.read_many([row], 7, [0])),
        (TypeError, "PathLike", lambda: engine.read_many([row], [7], [0])),
        (ValueError, r"tensors\[1\]: .* not contiguous", lambda: engine.read_many([row, row[::2]], path, [0, 0])),
        (ValueError, "the file is closed", lambda: engine.read_many([row], closed, [0])),
        (ValueError, "not opened for reading", lambda: engine.read_many([row, row], write_only, [0, 0])),
        (ValueError, "past the end", lambda: engine.read_many([row, row], path, [0, 991])),
        (FileNotFoundError, "missing", lambda: engine.read_many([row], drive / "missing", [0])),
        (TypeError, "tensor of integers", lambda: engine.gather(path, ids.float(), rows)),
        (TypeError, "tensor of integers", lambda: engine.gather(path, ids.bool(), rows)),
        (TypeError, "expected a torch.Tensor", lambda: engine.gather(path, [0, 1], rows)),
        (ValueError, "got -1 at index 0", lambda: engine.gather(path, ids - 1, rows)),
        (ValueError, r"\[1000, 1010\) is past the end", lambda: engine.gather(path, ids + 99, rows)),
        (ValueError, "ids must be in", lambda: engine.gather(path, ids + (1 << 62), rows)),
        (ValueError, "base must not be negative", lambda: engine.gather(path, ids, rows, base=-1)),
        (ValueError, "record_size is 20", lambda: engine.gather(path, ids, rows, record_size=20)),
        (ValueError, "out must have the shape of ids", lambda: engine.gather(path, ids, rows.view(4, 5))),
        (ValueError, "not contiguous", lambda: engine.gather(path, ids, rows.t().contiguous().t())),
    ]
    for kind, message, call in cases:
        with pytest.raises(kind, match=message):
            call()
    assert engine.stats().requests == 0


@pytest.mark.parametrize("count", [10, 1000])
def test_a_call_that_fails_halfway_leaves_nothing_under_way(engine: deepnvme.Engine, drive: Path, count: int) -> None:
    tensors = [torch.full((300,), index, dtype=torch.int16) for index in range(count)]
    alive = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    paths = [drive / str(index % 50) / "file" for index in range(count - 1)]
    for path in paths[:50]:
        path.parent.mkdir()
    with pytest.raises(FileNotFoundError, match="missing"):
        engine.write_many(tensors, [*paths, drive / "missing" / "file"], [600 * index for index in range(count)])
    requests = engine.stats().requests
    assert requests > 0
    del tensors
    gc.collect()
    assert not any(reference() is not None for reference in alive)
    assert engine.stats().requests == requests


# What fails while it is transferred.


@pytest.fixture
def held(faulty: Faulty, gate: Any, backend: Any) -> Any:
    """An engine whose requests do not end before the gate is opened."""
    return faulty(backend, gate=gate)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_error_says_which_transfers_failed_and_the_others_are_done(
    faulty: Faulty, backend: Any, drive: Path, num_threads: int
) -> None:
    contents = [pattern(PAGE, index) for index in range(300)]
    files = [drive / f"file{index % 7}" for index in range(300)]
    offsets = [index // 7 * 2 * PAGE for index in range(300)]
    with deepnvme.Engine() as sound:
        sound.write_many([page_aligned(content) for content in contents], files, offsets).result()
    back = [zeros(PAGE) for _ in range(300)]
    engine = faulty(backend, error_every=20, error=errno.EIO, num_threads=num_threads)
    future = engine.read_many([each.tensor for each in back], files, offsets)
    error: Any = future.exception()
    # Each worker counts for itself.
    assert len(error.indices) == 15 if num_threads == 1 else 1 <= len(error.indices) <= 15
    assert error.indices == sorted(set(error.indices))
    assert error.errno == errno.EIO
    assert error.strerror.endswith(f"({len(error.indices)} of 300 transfers failed)")
    assert error.filename in {str(files[index]) for index in error.indices}
    assert [index for index, each in enumerate(back) if each.content() != contents[index]] == error.indices
    assert all(each.guards_are_intact() for each in back)
    with pytest.raises(OSError, match="transfers failed") as caught:
        future.result()
    assert caught.value.indices == error.indices  # type: ignore[attr-defined]


def test_gathered_records_that_failed_are_told_by_their_place(faulty: Faulty, backend: Any, drive: Path) -> None:
    content = pattern(100 * PAGE)
    (drive / "file").write_bytes(content)
    ids = torch.randperm(100).view(10, 10)
    memory = zeros(100 * PAGE)
    engine = faulty(backend, error_every=9, error=errno.EIO)
    error: Any = engine.gather(drive / "file", ids, memory.tensor.view(10, 10, PAGE)).exception()
    wrong = [
        index for index, record in enumerate(ids.flatten().tolist())
        if memory.content()[index * PAGE : (index + 1) * PAGE] != content[record * PAGE : (record + 1) * PAGE]
    ]  # fmt: skip
    assert error.indices == wrong
    assert error.strerror.endswith(f"({len(wrong)} of 100 transfers failed)")


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_backend_that_breaks_fails_what_it_had_not_done(faulty: Faulty, backend: Any, drive: Path, num_threads: int) -> None:
    content = pattern(200 * PAGE)
    (drive / "file").write_bytes(content)
    back = [zeros(PAGE) for _ in range(200)]
    engine = faulty(backend, break_after=50, num_threads=num_threads)
    error: Any = engine.read_many([each.tensor for each in back], drive / "file", range(0, 200 * PAGE, PAGE)).exception()
    assert error.errno == errno.EBADF
    told = set(error.indices)
    assert all(back[index].content() == content[index * PAGE : (index + 1) * PAGE] for index in range(200) if index not in told)


@pytest.mark.parametrize(
    "fault",
    [{"short_every": 2}, {"error_every": 3, "error": errno.EAGAIN}, {"refuse_every": 3}, {"refuse_direct": True}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:transfers of:RuntimeWarning")
def test_short_refused_and_repeated_transfers_are_finished(
    faulty: Faulty, backend: Any, drive: Path, fault: dict[str, Any]
) -> None:
    contents = [pattern(length, length) for length in (1, PAGE, 3 * PAGE + 7, 20 * PAGE, 5000)]
    offsets = [0, PAGE, 3 * PAGE, 10 * PAGE, 40 * PAGE + 3]
    engine = faulty(backend, **fault)
    engine.write_many([page_aligned(content) for content in contents], drive / "file", offsets).result()
    back = [zeros(len(content), 64) for content in contents]
    engine.read_many([each.tensor for each in back], drive / "file", offsets).result()
    assert [each.content() for each in back] == contents


# Waiting, lifetimes.


def many(engine: Any, path: Path, count: int = 20) -> Any:
    tensors = [torch.ones(PAGE, dtype=torch.uint8) for _ in range(count)]
    return engine.write_many(tensors, path, range(0, 2 * count * PAGE, 2 * PAGE))


def test_a_timeout_is_an_error_and_the_transfers_go_on(held: Any, gate: Any, drive: Path) -> None:
    future = many(held, drive / "file")
    with pytest.raises(TimeoutError, match=r"write of 81920 bytes in 20 transfers has not ended within 0.05 s"):
        future.result(0.05)
    assert not future.done()
    gate.release()
    assert future.result() == 20 * PAGE
    assert future.done()


@pytest.mark.alone
@pytest.mark.parametrize("files", [1, 20])
def test_ctrl_c_interrupts_the_waiting_and_not_the_transfers(faulty: Faulty, gate: Any, drive: Path, files: int) -> None:
    engine = faulty("threads", gate=gate)
    future = engine.write_many([torch.ones(PAGE, dtype=torch.uint8)] * 20, [drive / str(index % files) for index in range(20)])
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        future.result()
    gate.release()
    assert future.result() == 20 * PAGE


@pytest.mark.parametrize("keep", [True, False], ids=["future kept", "future dropped"])
def test_tensors_live_until_all_transfers_have_ended(held: Any, gate: Any, drive: Path, keep: bool) -> None:
    tensors = [page_aligned(pattern(PAGE, index)) for index in range(10)]
    alive = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    future = held.write_many(tensors, [drive / str(index % 3) for index in range(10)], range(0, 10 * PAGE, PAGE))
    if not keep:
        del future
    del tensors
    gc.collect()
    assert all(reference() is not None for reference in alive)
    gate.release()
    if keep:
        future.result()
    held.close()
    assert not any(reference() is not None for reference in alive)
    for index in range(10):
        assert (drive / str(index % 3)).read_bytes()[index * PAGE : (index + 1) * PAGE] == pattern(PAGE, index)


def test_close_waits_for_all_and_a_closed_engine_refuses(drive: Path) -> None:
    with deepnvme.Engine() as engine:
        future = many(engine, drive / "file")
    assert future.done()
    for start in (
        lambda: many(engine, drive / "file"),
        lambda: engine.read_many([], drive / "file", []),
        lambda: engine.gather(drive / "file", torch.zeros(1, dtype=torch.int64), torch.empty(1, 4)),
    ):
        with pytest.raises(ValueError, match="the engine is closed"):
            start()


def test_close_in_the_middle_of_a_call_is_an_error_and_loses_nothing(drive: Path) -> None:
    engine = deepnvme.Engine()
    tensors, offsets = [torch.ones(1)] * 100_000, list(range(0, 400_000, 4))
    ended: list[object] = []

    def write() -> None:
        try:
            ended.append(engine.write_many(tensors, drive / "file", offsets).result())
        except ValueError as error:
            ended.append(str(error))

    thread = threading.Thread(target=write)
    thread.start()
    while engine.stats().requests == 0 and thread.is_alive():
        time.sleep(0)
    engine.close()
    thread.join(PATIENCE)
    assert ended in ([400_000], ["the engine is closed"])


@pytest.mark.parametrize("files", [1, 3])
def test_cancelled_transfers_end_and_are_told(held: Any, gate: Any, drive: Path, files: int) -> None:
    tensors = [torch.ones(PAGE, dtype=torch.uint8) for _ in range(200)]
    future = held.write_many(tensors, [drive / str(index % files) for index in range(200)], range(0, 400 * PAGE, 2 * PAGE))
    assert future.cancel()
    gate.release()
    error: Any = future.exception()
    assert (error.errno, error.indices) == (errno.ECANCELED, list(range(200)))
    assert not future.cancel()
    assert many(held, drive / "file").result() == 20 * PAGE
