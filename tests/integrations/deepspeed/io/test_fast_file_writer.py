"""FastFileWriter: what is written to it is in the file, byte for byte, or an error says that it is not."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepnvme.integrations.deepspeed.io import FastFileWriter, FastFileWriterConfig

from ....support.disks import MIB, Disk

PAGE = 4096
Open = Callable[..., FastFileWriter]

# a test's directory and handle serve all its examples
examples = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def fast(handle: Any) -> Open:
    """Opens a file with a pinned tensor of its own."""

    def opened(path: Path, nbytes: int = 4 * PAGE, **more: Any) -> FastFileWriter:
        tensor = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
        return FastFileWriter(path, FastFileWriterConfig(handle, tensor, **more))

    return opened


def open_files(directory: Path) -> list[str]:
    """Those in ``directory`` that this process has open."""
    found = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    return [path for path in found if path.startswith(f"{directory}/")]


def as_saved(saved: object, **more: Any) -> bytes:
    file = io.BytesIO()
    torch.save(saved, file, **more)
    return file.getvalue()


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nbytes", "double_buffer"), [(0, True), (1, True), (2 * PAGE - 1, True), (PAGE - 1, False)])
def test_a_tensor_too_small_for_whole_pages_is_refused_and_the_file_not_touched(
    fast: Open, drive: Path, nbytes: int, double_buffer: bool
) -> None:
    (drive / "file").write_bytes(b"mine")
    least = 2 * PAGE if double_buffer else PAGE
    with pytest.raises(ValueError, match=f"at least {least} of them, got {nbytes} bytes"):
        fast(drive / "file", nbytes, double_buffer=double_buffer)
    assert (drive / "file").read_bytes() == b"mine"


@pytest.mark.parametrize("tensor", [
    torch.empty(4 * PAGE, dtype=torch.float32), torch.empty(8 * PAGE, dtype=torch.uint8)[::2],
])  # fmt: skip
def test_a_tensor_that_is_not_contiguous_bytes_is_refused(handle: Any, drive: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="must be contiguous bytes"):
        FastFileWriter(drive / "file", FastFileWriterConfig(handle, tensor))
    assert not (drive / "file").exists()


@pytest.mark.parametrize(("name", "error"), [("missing/file", FileNotFoundError), ("", IsADirectoryError)])
def test_what_cannot_be_opened_is_an_error_at_once(fast: Open, drive: Path, name: str, error: type[OSError]) -> None:
    with pytest.raises(error) as caught:
        fast(drive / name)
    assert caught.value.filename == os.path.normpath(drive / name)


def test_a_closed_file_takes_nothing_more(fast: Open, drive: Path) -> None:
    file = fast(drive / "file")
    file.write(b"all")
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.write(b"more")
    with pytest.raises(ValueError, match="closed"):
        file.write(b"")
    assert (drive / "file").read_bytes() == b"all"


def test_nobody_gets_the_descriptor_because_torch_would_write_past_this_object(fast: Open, drive: Path) -> None:
    with fast(drive / "file") as file:
        assert file.fileno() == -1


def test_several_writers_of_one_file_are_refused_and_the_file_not_touched(fast: Open, drive: Path) -> None:
    with pytest.raises(ValueError, match=r"num_parallel_writers must be 1, got 2: write a file of its own on each rank"):
        fast(drive / "file", num_parallel_writers=2, writer_rank=1)
    assert not (drive / "file").exists()


def test_a_position_that_is_none_is_refused(fast: Open, drive: Path) -> None:
    with fast(drive / "file") as file:
        file.write(b"abc")
        for wrong in ((-1,), (-4, os.SEEK_CUR), (-4, os.SEEK_END), (0, 9)):
            with pytest.raises(ValueError, match="must"):
                file.seek(*wrong)
        file.write(b"def")
    assert (drive / "file").read_bytes() == b"abcdef"
    with pytest.raises(ValueError, match="closed"):
        file.seek(0)


def test_only_whole_buffers_of_bytes_can_be_written(fast: Open, drive: Path) -> None:
    with fast(drive / "file") as file:
        for wrong in ("text", 7, None, memoryview(b"abcd")[::2]):
            with pytest.raises(TypeError):
                file.write(wrong)
        assert file.tell() == 0
    assert (drive / "file").read_bytes() == b""


class FailsBehind:
    """A handle whose writes start well and fail later."""

    def __init__(self) -> None:
        self.under_way = 0

    def async_pwrite(self, tensor: torch.Tensor, descriptor: int, offset: int) -> None:
        self.under_way += 1

    def wait(self) -> int:
        if self.under_way:
            self.under_way = 0
            raise OSError(errno.EIO, "broken drive")
        return 0


@pytest.mark.parametrize("double_buffer", [True, False])
@pytest.mark.parametrize("ending", ["write", "flush", "close"])
def test_a_write_that_failed_behind_is_raised_by_what_comes_next(drive: Path, double_buffer: bool, ending: str) -> None:
    handle = FailsBehind()
    tensor = torch.empty(4 * PAGE, dtype=torch.uint8)
    file = FastFileWriter(drive / "file", FastFileWriterConfig(handle, tensor, double_buffer))
    half = bytes(2 * PAGE if double_buffer else 4 * PAGE - 1)
    file.write(half)
    with pytest.raises(OSError, match="broken drive"):
        {"write": lambda: file.write(half), "flush": file.flush, "close": file.close}[ending]()
    assert handle.under_way == 0
    with contextlib.suppress(OSError):  # of what the write that raised had begun with
        file.close()
    assert file.closed
    assert open_files(drive) == []


@pytest.mark.root
def test_a_full_disk_is_an_error_with_the_name_of_the_file(fast: Open, small_disk: Disk) -> None:
    file = fast(small_disk / "file", MIB)
    with pytest.raises(OSError, match="No space left on device") as caught:
        file.write(bytes(small_disk.bytes_free() + MIB))
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(small_disk / "file"))
    with pytest.raises(OSError, match="No space left on device"):
        file.close()
    assert file.closed
    assert open_files(small_disk.path) == []


# -- what is written is there ------------------------------------------------------------------------------------------


@examples
@given(
    numel=st.integers(min_value=0, max_value=60_000),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex64]),
    double_buffer=st.booleans(),
    legacy=st.booleans(),
)
def test_torch_saves_what_it_saves_to_memory(
    fast: Open, drive: Path, numel: int, dtype: torch.dtype, double_buffer: bool, legacy: bool
) -> None:
    saved = OrderedDict(weight=torch.zeros(numel, dtype=dtype), bias=torch.arange(numel % 7), step=numel)
    with fast(drive / "file", 3 * PAGE, double_buffer=double_buffer) as file:
        torch.save(saved, file, _use_new_zipfile_serialization=not legacy)
    if legacy:  # which numbers its storages by their address
        loaded = torch.load(drive / "file", weights_only=True)
        assert loaded["step"] == numel
        assert torch.equal(loaded["weight"], saved["weight"])
        assert torch.equal(loaded["bias"], saved["bias"])
    else:
        assert (drive / "file").read_bytes() == as_saved(saved)


def test_a_file_left_open_is_closed_with_all_that_was_written(fast: Open, drive: Path) -> None:
    file = fast(drive / "file")
    file.write(b"to the end")
    del file
    assert (drive / "file").read_bytes() == b"to the end"
    assert open_files(drive) == []


def test_whole_halves_go_past_the_page_cache(handle: Any, drive: Path) -> None:
    with (drive / "probe").open("wb") as probe:
        try:
            os.close(os.open(probe.name, os.O_RDWR | os.O_DIRECT))
        except OSError:
            pytest.skip("needs direct I/O")
    tensor = handle.new_cpu_locked_tensor(8 * PAGE, torch.empty(0, dtype=torch.uint8))
    with FastFileWriter(drive / "file", FastFileWriterConfig(handle, tensor)) as file:
        file.write(bytes(64 * PAGE + 100))
    stats = handle.stats()
    assert (stats["bytes_zero_copy"], stats["bytes_buffered"] + stats["bytes_staged"]) == (64 * PAGE, 100)


@examples
@given(
    steps=st.lists(
        st.one_of(
            st.integers(0, 40_000).map(lambda n: ("write", n)),
            st.integers(0, 60_000).map(lambda n: ("seek", n)),
            st.integers(-3_000, 3_000).map(lambda n: ("back", n)),
            st.just(("flush", 0)),
        ),
        max_size=10,
    ),
    pages=st.integers(min_value=2, max_value=7),
    double_buffer=st.booleans(),
)
def test_any_writes_seeks_and_flushes_make_the_file_that_they_make_in_memory(
    fast: Open, drive: Path, steps: list[tuple[str, int]], pages: int, double_buffer: bool
) -> None:
    (drive / "file").write_bytes(bytes(600_000))  # longer, to be gone
    expected = io.BytesIO()
    with fast(drive / "file", pages * PAGE + 100, double_buffer=double_buffer) as file:
        for step, number in steps:
            if step == "write":
                data = os.urandom(number)
                assert file.write(data) == expected.write(data)
            elif step == "seek":
                assert file.seek(number) == expected.seek(number)
            elif step == "back":
                end = len(expected.getbuffer())
                assert file.seek(max(number, -end), os.SEEK_END) == expected.seek(max(0, end + number))
            else:
                file.flush()
                assert (drive / "file").read_bytes() == expected.getvalue()
            assert file.tell() == expected.tell()
    assert (drive / "file").read_bytes() == expected.getvalue()


# -- closing -----------------------------------------------------------------------------------------------------------


def test_an_fsync_that_fails_names_the_file_and_closes_it(fast: Open, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "broken")  # as fsync(2) fails: without a name

    file = fast(drive / "file")
    file.write(b"all")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="broken") as caught:
        file.close()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(drive / "file"))
    assert open_files(drive) == []
    file.close()


def test_a_close_that_was_interrupted_writes_to_no_file_that_has_its_number_now(
    fast: Open, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropping the object closes it once more."""

    def interrupted(self: FastFileWriter) -> None:
        raise KeyboardInterrupt

    file = fast(drive / "file")
    file.write(b"all")
    with monkeypatch.context() as patched:
        patched.setattr(FastFileWriter, "flush", interrupted)
        with pytest.raises(KeyboardInterrupt):
            file.close()
    others = [os.open(drive / "other", os.O_RDWR | os.O_CREAT) for _ in range(8)]
    file.close()
    del file
    assert (drive / "other").read_bytes() == b""
    for other in others:
        os.close(other)
