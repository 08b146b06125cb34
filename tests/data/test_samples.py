"""Samples that were written come back, in any order; damage and changes are errors that name the sample."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchLoader

from deepnvme.data import CorruptSamples, SampleDataset, SampleUnreadable, SampleWriter, TokenDataset, merge_samples
from deepnvme.data.sample_files import ENTRY, SampleColumn
from deepnvme.files.directory_lock import StoreLocked

from ..support.files import flip, open_files
from ..support.patience import PATIENCE
from .conftest import COLUMNS, Write, made, same

ROOT = str(Path(__file__).parents[2])


def shuffled(count: int, seed: int = 0) -> list[int]:
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)
    return numbers


def test_samples_come_back_in_any_order(write: Write) -> None:
    dataset = SampleDataset(write(500))
    assert len(dataset) == 500
    numbers = shuffled(500)
    for begin in range(0, 500, 50):
        part = numbers[begin : begin + 50]
        assert all(same(found, made(number)) for found, number in zip(dataset.__getitems__(part), part, strict=True))
    assert same(dataset[123], made(123))
    assert same(dataset[-1], made(499))
    assert all(same(found, made(3)) for found in dataset.__getitems__([3, 3, 3]))
    assert dataset.__getitems__([]) == []


KINDS = st.sampled_from(["bytes", "str", torch.int64, torch.bfloat16, torch.bool])
SHAPES = st.lists(st.integers(0, 3), max_size=2).map(tuple)


@st.composite
def columns(draw: st.DrawFn) -> dict[str, Any]:
    dtypes = st.sampled_from([torch.uint8, torch.float32, torch.int16, torch.complex64])
    tensors = st.tuples(dtypes, st.one_of(SHAPES, SHAPES.filter(lambda shape: 0 not in shape).map(lambda shape: (-1, *shape))))
    return draw(st.dictionaries(st.text("abc", min_size=1, max_size=2), st.one_of(KINDS, tensors), min_size=1, max_size=4))


def drawn(draw: st.DataObject, kind: Any) -> Any:
    if kind == "bytes":
        return draw.draw(st.binary(max_size=2000))
    if kind == "str":
        return draw.draw(st.text(max_size=50))
    dtype, shape = kind if isinstance(kind, tuple) else (kind, ())
    sizes = [draw.draw(st.integers(0, 4)) if size == -1 else size for size in shape]
    return torch.randint(0, 2, sizes).to(dtype)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds=columns(), data=st.data(), batches=st.lists(st.integers(0, 6), max_size=3), disks=st.integers(1, 3))
def test_any_columns_are_what_a_list_would_be(
    drive: Path, kinds: dict[str, Any], data: st.DataObject, batches: list[int], disks: int
) -> None:
    path = drive / str(time.monotonic_ns())
    expected: list[dict[str, Any]] = []
    for count in batches:  # each by a writer of its own, with a commit in the middle
        with SampleWriter(path, kinds, directories=[path / str(disk) for disk in range(disks)]) as writer:
            for number in range(count):
                sample = {name: drawn(data, kind) for name, kind in kinds.items()}
                assert writer.append(**sample) == number
                expected.append(sample)
                if number == 2:
                    assert writer.commit() == len(expected)
    if not batches:
        return
    dataset = SampleDataset(path)
    found = dataset.__getitems__(shuffled(len(expected)))
    assert len(dataset) == len(expected)
    assert all(same(one, expected[number]) for one, number in zip(found, shuffled(len(expected)), strict=True))


def test_a_sample_larger_than_the_writers_memory(drive: Path) -> None:
    images = [random.Random(number).randbytes(size) for number, size in enumerate([10, 65 << 20, 4 << 20, 3, (4 << 20) - 64])]
    with SampleWriter(drive / "large", {"image": "bytes"}) as writer:
        for image in images:
            writer.append(image=image)
    assert [sample["image"] for sample in SampleDataset(drive / "large")] == images


def test_padding_is_told_and_small(drive: Path) -> None:
    with SampleWriter(drive / "samples", {"image": "bytes"}) as writer:
        for _ in range(1000):
            writer.append(image=bytes(10_241))
        writer.commit()
        assert 0 < writer.padding < 0.05 * 1000 * 10_241
    assert sum(path.stat().st_size for path in (drive / "samples").glob("*.samples")) == 1000 * 10_241 + writer.padding


@pytest.mark.parametrize(
    ("sample", "error"),
    [
        ({"label": 1}, TypeError),
        ({"label": 1, "image": b"", "more": 1}, TypeError),
        ({"label": 1.5, "image": b""}, ValueError),
        ({"label": torch.tensor(1.0), "image": b""}, ValueError),
        ({"label": torch.zeros(1, dtype=torch.int64), "image": b""}, ValueError),
        ({"label": 1, "image": "text"}, TypeError),
        ({"label": "1", "image": b""}, ValueError),
        ({"label": 1 << 70, "image": b""}, ValueError),
        ({"label": float("nan"), "image": b""}, ValueError),
        ({"label": object(), "image": b""}, ValueError),
    ],
)
def test_a_sample_that_does_not_fit_is_refused_and_the_writer_goes_on(drive: Path, sample: Any, error: type[Exception]) -> None:
    with SampleWriter(drive / "samples", {"image": "bytes", "label": torch.int64}) as writer:
        writer.append(image=b"0", label=0)
        with pytest.raises(error, match=r"label|image"):
            writer.append(**sample)
        writer.append(image=b"1", label=1)
    assert [(each["image"], int(each["label"])) for each in SampleDataset(drive / "samples")] == [(b"0", 0), (b"1", 1)]


def test_tensors_at_any_address_are_aligned() -> None:
    values = torch.arange(3)
    for start in range(8):
        data = bytearray(start) + values.numpy().tobytes()
        found = SampleColumn("numbers", "int64", (3,)).decode(memoryview(data)[start:])
        assert torch.equal(found, values)
        assert found.data_ptr() % 8 == 0


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (signal.SIGINT, torch.int64), ((1 << 64) - 1, torch.uint64), (True, torch.uint8), (False, torch.bool),
        (2, torch.float32), (0.5, torch.bfloat16), (0.5, torch.complex64), (1j, torch.complex64),
    ],
)  # fmt: skip
def test_numbers_are_converted_where_nothing_is_lost(drive: Path, value: Any, dtype: torch.dtype) -> None:
    with SampleWriter(drive / "samples", {"label": dtype}) as writer:
        writer.append(label=value)
    found = SampleDataset(drive / "samples")[0]["label"]
    assert (found.item(), found.dtype) == (value, dtype)


@pytest.mark.parametrize(("value", "dtype"), [(0.5, torch.int64), (2, torch.bool), (1j, torch.float32), (256, torch.uint8)])
def test_numbers_that_a_column_cannot_hold_are_refused(drive: Path, value: Any, dtype: torch.dtype) -> None:
    with SampleWriter(drive / "samples", {"label": dtype}) as writer, pytest.raises(ValueError, match="'label'"):
        writer.append(label=value)


@pytest.mark.parametrize("kinds", [{}, {"a": "text"}, {"a": (torch.int8, (2, -1))}, {"a": (torch.int8, (-1, 0))}, {1: "bytes"}])
def test_columns_that_cannot_be_are_refused(drive: Path, kinds: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        SampleWriter(drive / "samples", kinds)
    assert open_files(drive) == []


def test_a_writer_that_raises_leaves_the_last_commit_and_the_next_one_removes_its_files(write: Write) -> None:
    path = write(10)
    before = sorted(os.listdir(path))

    def write_some() -> None:
        with SampleWriter(path) as writer:
            for number in range(10, 20):
                writer.append(**made(number))
            raise KeyError

    with pytest.raises(KeyError):
        write_some()
    assert len(SampleDataset(path)) == 10
    assert open_files(path) == []
    for _ in range(2):
        SampleWriter(path).close()
    assert len(os.listdir(path)) == len(before) + 2  # those of the last writer


def test_a_writer_that_died_leaves_nothing_to_the_next_one_and_nobody_loses_files(drive: Path) -> None:
    """Two datasets have their data in one directory; each writer removes what its own dataset's dead writers left."""
    shared = drive / "shared"
    for name in ("a", "b"):
        program = f"""
import os
from deepnvme.data import SampleWriter
with SampleWriter({str(drive / name)!r}, {{"text": "str"}}, directories=[{str(shared)!r}]) as writer:
    writer.append(text={name!r})
writer = SampleWriter({str(drive / name)!r}, directories=[{str(shared)!r}])
writer.append(text="lost")
os._exit(0)
"""
        subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": ROOT})
    assert len(list(shared.glob("*.samples"))) == 4
    with SampleWriter(shared, {"text": "str"}) as writer:
        writer.append(text="c")
    for name in ("a", "b"):
        with SampleWriter(drive / name, directories=[shared]) as writer:
            writer.append(text="more")
        assert len(list((drive / name).glob("*.index"))) == 2
    assert len(list(shared.glob("*.samples"))) == 5
    expected = {"a": ["a", "more"], "b": ["b", "more"], "shared": ["c"]}
    for name, texts in expected.items():
        assert [sample["text"] for sample in SampleDataset(drive / name)] == texts


def test_a_second_writer_and_other_columns_are_refused(write: Write) -> None:
    path = write(3)
    with SampleWriter(path, COLUMNS), pytest.raises(StoreLocked):
        SampleWriter(path)
    with pytest.raises(ValueError, match="other columns"):
        SampleWriter(path, {"image": "bytes"})
    with pytest.raises(ValueError, match="give columns"):
        SampleWriter(path.with_name("nothing"))


def test_a_reader_keeps_its_commit_while_a_writer_goes_on(write: Write) -> None:
    path = write(20)
    dataset = SampleDataset(path)
    with SampleWriter(path) as writer:
        for number in range(20, 40):
            writer.append(**made(number))
        assert len(SampleDataset(path)) == 20
        writer.commit()
        assert len(dataset) == 20
        assert len(SampleDataset(path)) == 40
        assert same(dataset[19], made(19))
    assert same(SampleDataset(path)[39], made(39))


def test_merged_datasets_follow_one_another(write: Write, drive: Path) -> None:
    paths = [write(10, "a"), write(5, "b/c"), write(0, "empty")]
    assert merge_samples(drive / "merged", paths) == 15
    assert merge_samples(drive / "merged", paths[1:2]) == 20
    dataset = SampleDataset(drive / "merged")
    expected = [*range(10), *range(5), *range(5)]
    assert all(same(dataset[at], made(number)) for at, number in enumerate(expected))
    with SampleWriter(drive / "merged") as writer:  # whose leftovers are not those of the sources
        writer.append(**made(77))
    assert same(SampleDataset(drive / "merged")[20], made(77))
    assert same(SampleDataset(paths[0])[9], made(9))
    with pytest.raises(ValueError, match="same columns"):
        merge_samples(drive / "none", [])


def test_a_dataset_behind_a_symbolic_link(drive: Path) -> None:
    (drive / "real" / "deep").mkdir(parents=True)
    (drive / "link").symlink_to(drive / "real" / "deep")
    for first in (0, 10):
        with SampleWriter(drive / "link", COLUMNS, directories=[drive / "one", drive / "two"]) as writer:
            for number in range(first, first + 10):
                writer.append(**made(number))
    assert all(same(sample, made(number)) for number, sample in enumerate(SampleDataset(drive / "link")))


KILLED = """
import sys
from deepnvme.data import SampleWriter
from tests.data.conftest import COLUMNS, made
with SampleWriter(sys.argv[1], COLUMNS, directories=[sys.argv[1], sys.argv[1] + "/second"]) as writer:
    for number in range(10**9):
        writer.append(**made(number))
        if number % 7 == 6:
            print(writer.commit(), flush=True)
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_its_last_commit(drive: Path) -> None:
    path = drive / "samples"
    committed = 0
    for turn in range(8):
        command = [sys.executable, "-c", KILLED, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ROOT}) as writer:
            assert writer.stdout is not None
            said = [int(writer.stdout.readline()) for _ in range(2 + turn)]
            time.sleep(0.003 * turn)
            writer.kill()
            said += map(int, writer.stdout.read().split())
        dataset = SampleDataset(path)
        assert said[-1] <= len(dataset) <= said[-1] + 7
        assert all(same(dataset[number], made(number - committed)) for number in range(committed, len(dataset)))
        committed = len(dataset)


@pytest.mark.parametrize("errors", ["raise", "skip"])
def test_a_damaged_sample_is_named_or_counted(write: Write, errors: Any) -> None:
    path = write(60)
    (file,) = path.glob("*.samples")
    (index,) = path.glob("*.index")
    damaged = next(number for number in range(30, 60) if len(made(number)["image"]) > 1000)
    offset, nbytes, _ = ENTRY.unpack_from(index.read_bytes(), damaged * ENTRY.size)
    flip(file, offset + nbytes // 2)
    dataset = SampleDataset(path, errors=errors)
    with pytest.raises(SampleUnreadable, match=f"sample {damaged}, {nbytes} bytes at offset {offset}: .*CRC-32") as raised:
        dataset[damaged]
    assert (raised.value.errno, raised.value.filename) == (errno.EBADMSG, str(file))
    assert (raised.value.sample, raised.value.offset) == (damaged, offset)
    if errors == "raise":
        with pytest.raises(SampleUnreadable):
            dataset.__getitems__(range(60))
    else:
        found = dataset.__getitems__(range(60))
        assert [int(sample["label"]) for sample in found] == [number for number in range(60) if number != damaged]
        assert dataset.skipped == 1


def test_a_truncated_file_is_an_error_of_the_samples_that_are_gone(write: Write) -> None:
    path = write(60)
    (file,) = path.glob("*.samples")
    dataset = SampleDataset(path, errors="skip")
    dataset[0]
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    found = dataset.__getitems__(range(60))
    assert 0 < dataset.skipped < 60
    assert len(found) + dataset.skipped == 60
    assert all(same(sample, made(int(sample["label"]))) for sample in found)
    with pytest.raises(CorruptSamples, match="its commit"):
        SampleDataset(path)


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"format": "deepnvme samples", "version": 2, "crc32": 0}\n{}\n', b"\xff" * 50])
def test_a_damaged_manifest_is_an_error(write: Write, damage: bytes) -> None:
    path = write(3)
    (path / "deepnvme-samples.json").write_bytes(damage)
    with pytest.raises(CorruptSamples):
        SampleDataset(path)
    with pytest.raises(CorruptSamples):
        SampleWriter(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), which=st.sampled_from(["*.samples", "*.index", "*.json"]))
def test_no_flipped_bit_becomes_a_wrong_sample(drive: Path, at: float, bit: int, which: str) -> None:
    path = drive / "flipped"
    if not path.exists():
        with SampleWriter(path, COLUMNS) as writer:
            for number in range(8):
                writer.append(**made(number))
    (file,) = path.glob(which)
    sound = file.read_bytes()
    data = bytearray(sound)
    data[int(at * len(data))] ^= 1 << bit
    file.write_bytes(data)
    try:
        try:
            dataset = SampleDataset(path, errors="skip")
            found = dataset.__getitems__(range(len(dataset)))
        except CorruptSamples:
            return
        assert len(found) + dataset.skipped == 8
        assert all(same(sample, made(int(sample["label"]))) for sample in found)
    finally:
        file.write_bytes(sound)


class Failing:
    """An engine whose reads of these tensors fail."""

    def __init__(self, engine: Any, indices: list[int]) -> None:
        self._engine, self._indices = engine, indices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def read_many(self, *arguments: Any) -> Any:
        future, error = self._engine.read_many(*arguments), OSError(errno.EIO, "Input/output error", "drive")
        error.indices = self._indices  # type: ignore[attr-defined]
        future.result()

        class Failed:
            def exception(self) -> OSError:
                return error

        return Failed()


def test_samples_that_the_drive_cannot_read_are_named(write: Write) -> None:
    dataset = SampleDataset(write(50), errors="skip")
    (index,) = dataset._layout.files[0].parent.glob("*.index")
    entries = list(ENTRY.iter_unpack(index.read_bytes()))
    numbers, end = [], -9000
    for number, (offset, nbytes, _) in enumerate(entries):
        if offset - end > 9000:  # too far from one another to be read together
            numbers.append(number)
            end = offset + nbytes
    assert len(numbers) > 5
    reader = dataset._files_here()
    reader.engine = Failing(reader.engine, [1])  # type: ignore[assignment]
    assert [int(each["label"]) for each in dataset.__getitems__(numbers)] == [numbers[0], *numbers[2:]]
    strict = SampleDataset(dataset._layout.files[0].parent)
    reader = strict._files_here()
    reader.engine = Failing(reader.engine, [1])  # type: ignore[assignment]
    with pytest.raises(SampleUnreadable, match=f"sample {numbers[1]}, .*Input/output error") as raised:
        strict.__getitems__(numbers)
    assert raised.value.errno == errno.EIO


def test_numbers_that_are_none_of_a_sample_are_refused(write: Write) -> None:
    dataset = SampleDataset(write(5))
    for wrong in (5, -6):
        with pytest.raises(IndexError, match="the dataset has 5"):
            dataset[wrong]
        with pytest.raises(IndexError):
            dataset.__getitems__([0, wrong])
    with pytest.raises(TypeError):
        dataset[1.0]  # type: ignore[index]


def test_samples_of_a_batch_do_not_share_bytes(drive: Path) -> None:
    """A transform may change a sample in place."""
    with SampleWriter(drive / "samples", {"number": torch.int64}) as writer:
        for number in range(3):
            writer.append(number=number)
    (drive / "tokens").write_bytes(torch.arange(20, dtype=torch.int16).numpy().tobytes())
    for sample in (found := SampleDataset(drive / "samples").__getitems__([2, 2, 1, 2])):
        sample["number"] += 10
    assert [int(sample["number"]) for sample in found] == [12, 12, 11, 12]
    for window in (windows := TokenDataset(drive / "tokens", torch.int16, 4, 1).__getitems__([5, 6, 7, 5])):
        window += 100
    assert [window.tolist() for window in windows] == [[number + at + 100 for at in range(4)] for number in (5, 6, 7, 5)]


def test_samples_own_their_memory(write: Write) -> None:
    dataset = SampleDataset(write(300))
    kept = [dataset.__getitems__([number, number + 1]) for number in range(0, 300, 2)]
    assert all(same(sample, made(number)) for number, sample in enumerate(sample for pair in kept for sample in pair))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_torchs_loader_read_the_samples(write: Write, context: str) -> None:
    dataset = SampleDataset(write(64))
    dataset[0]  # its engine has threads by now
    loader = TorchLoader(
        dataset, 8, sampler=shuffled(64), num_workers=2, multiprocessing_context=context, collate_fn=list, timeout=PATIENCE
    )
    found = [sample for batch in loader for sample in batch]
    assert all(same(sample, made(number)) for sample, number in zip(found, shuffled(64), strict=True))
    assert same(dataset[5], made(5))


def test_copies_and_threads_read_the_same_commit(write: Write) -> None:
    path = write(40)
    dataset = SampleDataset(path)
    pickled = pickle.dumps(dataset)
    with SampleWriter(path) as writer:
        writer.append(**made(40))
    others = [pickle.loads(pickled), copy.deepcopy(dataset)]
    assert [len(each) for each in others] == [40, 40]
    failed = []

    def read(each: SampleDataset, seed: int) -> None:
        for number in shuffled(40, seed):
            if not same(each[number], made(number)):
                failed.append(number)

    threads = [threading.Thread(target=read, args=(others[seed % 2], seed)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_closed_dataset_opens_its_files_again(write: Write) -> None:
    path = write(4)
    dataset = SampleDataset(path)
    assert same(dataset[1], made(1))
    dataset.close()
    dataset.close()
    assert open_files(path, "*.samples") == []
    assert same(dataset[1], made(1))


@pytest.mark.parametrize(("stride", "offset"), [(8, 0), (1, 0), (3, 6), (5, 3)])
def test_windows_of_tokens(drive: Path, stride: int, offset: int) -> None:
    tokens = torch.randint(0, 30_000, (3000,), dtype=torch.int16)
    (drive / "tokens").write_bytes(bytes(offset) + tokens.numpy().tobytes())
    dataset = TokenDataset(drive / "tokens", torch.int16, 8, stride, offset=offset)
    expected = tokens.unfold(0, 8, stride)
    assert len(dataset) == len(expected)
    numbers = shuffled(len(expected))
    assert torch.equal(torch.stack(dataset.__getitems__(numbers)), expected[numbers])
    with pytest.raises(ValueError, match="a window has 4000"):
        TokenDataset(drive / "tokens", torch.int16, 4000)


def test_a_file_that_changes_under_the_reader_is_an_error(drive: Path) -> None:
    path = drive / "tokens"
    path.write_bytes(bytes(4096))
    dataset = TokenDataset(path, torch.int32, 16)
    assert torch.equal(dataset[3], torch.zeros(16, dtype=torch.int32))
    with path.open("r+b") as file:
        file.write(b"\1" * 4096)
    os.utime(path, ns=(time.time_ns(), time.time_ns()))
    with pytest.raises(SampleUnreadable, match=r"sample 3, .*was changed") as raised:
        dataset[3]
    assert raised.value.errno == errno.ESTALE


def test_rows_of_tensors_in_files(drive: Path) -> None:
    numpy = pytest.importorskip("numpy")
    safetensors = pytest.importorskip("safetensors.torch")
    values = torch.randn(100, 3, 5)
    numpy.save(drive / "rows.npy", values.numpy())
    safetensors.save_file({"a": values, "b": torch.zeros(2, 2)}, drive / "rows.safetensors")
    for dataset in (SampleDataset(drive / "rows.npy"), SampleDataset(drive / "rows.safetensors", name="a")):
        assert len(dataset) == 100
        assert torch.equal(torch.stack(dataset.__getitems__(shuffled(100))), values[shuffled(100)])


def test_an_index_that_is_cut_off_under_the_reader_is_an_error(write: Write) -> None:
    path = write(3000)
    (index,) = path.glob("*.index")
    dataset = SampleDataset(path)
    os.truncate(index, 100 * ENTRY.size + 5)
    assert same(dataset[99], made(99))
    with pytest.raises(CorruptSamples, match="ends before its entry 100") as raised:
        dataset.__getitems__([3, 100])
    assert raised.value.filename == str(index)
    with pytest.raises(CorruptSamples, match="its commit 48000"):
        SampleDataset(path)


def test_entries_of_an_index_that_is_not_kept_in_memory(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write(40, "a"), write(300, "b"), write(20, "c")]
    merge_samples(paths[0], paths[1:])
    monkeypatch.setattr("deepnvme.data.reading._INDEX_BYTES", 60 * ENTRY.size)
    dataset = SampleDataset(paths[0])
    expected = [*range(40), *range(300), *range(20)]
    for _ in range(2):
        found = dataset.__getitems__(shuffled(360))
        assert all(same(one, made(expected[number])) for one, number in zip(found, shuffled(360), strict=True))
    (index,) = paths[1].glob("*.index")
    os.truncate(index, 100 * ENTRY.size + 5)
    assert same(dataset[139], made(99))
    with pytest.raises(CorruptSamples, match="ends before its entry 100"):
        dataset.__getitems__([3, 140])


def test_paths_that_are_no_dataset(drive: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SampleDataset(drive / "nothing")
    (drive / "file.xyz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"file\.xyz' is neither"):
        SampleDataset(drive / "file.xyz")
    with pytest.raises(ValueError, match="needs a path"):
        SampleDataset([])
    with pytest.raises(ValueError, match="merge_samples joins directories"):
        SampleDataset([drive, drive])
    with pytest.raises(ValueError, match="no tensors with names"):
        SampleDataset(drive, name="a")


CTRL_C = """
import sys
from deepnvme.data import SampleWriter
from tests.data.conftest import COLUMNS, made
print("begun", flush=True)
try:
    with SampleWriter(sys.argv[1], COLUMNS) as writer:
        for number in range(10**9):
            writer.append(**made(number % 50))
            if number % 50 == 49:
                writer.commit()
except KeyboardInterrupt:
    print("heard", flush=True)
"""


@pytest.mark.slow
def test_ctrl_c_leaves_whole_commits(drive: Path) -> None:
    for turn in range(5):
        path = drive / str(turn)
        command = [sys.executable, "-c", CTRL_C, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ROOT}) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(1 + 0.07 * turn)
            writer.send_signal(signal.SIGINT)
            assert writer.communicate(timeout=PATIENCE)[0] == "heard\n"
        dataset = SampleDataset(path)
        assert len(dataset) > 0
        assert len(dataset) % 50 == 0
        found = dataset.__getitems__(range(len(dataset)))
        assert all(same(sample, made(number % 50)) for number, sample in enumerate(found))
