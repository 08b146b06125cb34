"""gds_handle between the drive and the memory of a GPU that is not there: NVIDIA's libraries are stand-ins."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import errno
import gc
import os
import tempfile
import textwrap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepnvme.ops.op_builder import AsyncIOBuilder, GDSBuilder

from ..support.disks import Disk
from ..support.examples import examples
from ..support.interpreters import Ended, Interpreters
from ..support.memory import EXCHANGES, Guarded, page_aligned, pattern, zeros
from ..support.transfers import lengths
from .gds_fixtures import CuFile, cached_stand_in, compile_stand_in, load_op
from .stand_in import DeviceTensor, StandIn

PAGE = 4096
CONTENT = pattern(1_000_001)
SOON = 0.15  # seconds: what does not wait for it is seen

Program = Callable[..., Ended]


@pytest.fixture(scope="session")
def libraries(libcuda: Path) -> tuple[Path, Path]:
    """libcuda's and libcufile's stand-ins, compiled."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcufile.so.0", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        pytest.skip("needs a torch without CUDA: this one has loaded NVIDIA's libcufile, in whose place the stand-in would be")
    return libcuda, cached_stand_in("libcufile.so.0")


@pytest.fixture
def cufile(driver: StandIn, libraries: tuple[Path, Path]) -> Iterator[CuFile]:
    cufile = CuFile(libraries[1])
    yield cufile
    cufile.forget_failures()
    driver.forget_failures()
    gc.collect()
    assert (cufile.files, cufile.calls("closed too early")) == (0, 0)
    assert cufile.tensors == 0


@pytest.fixture
def gds(cufile: CuFile) -> ModuleType:
    """The compiled op, with a cuFile that works."""
    return load_op()


@pytest.fixture
def handle(gds: ModuleType, request: pytest.FixtureRequest) -> Iterator[Any]:
    """One that goes by cuFile or fails. Gone when what is left is looked at."""
    yield gds.gds_handle(strict=True)
    del request.node.funcargs["handle"]


@pytest.fixture
def path(drive: Path) -> str:
    return str(drive / "file")


@pytest.fixture
def file(path: str) -> str:
    """Of a file that holds CONTENT."""
    Path(path).write_bytes(CONTENT)
    return path


@pytest.fixture
def program(libraries: tuple[Path, Path], interpreters: Interpreters, tmp_path: Path, drive: Path, gds: ModuleType) -> Program:
    """Runs a program in an interpreter of its own, in an empty directory.

    ``before``: what it does before the op is loaded. ``cuda``, ``cufile``: the libraries' files, or "" for a machine without.
    ``library``: where the builder has found libcufile."""
    (tmp_path / "here").mkdir()

    def run(
        text: str, *, before: str = "", cuda: object = libraries[0], cufile: object = libraries[1], library: object = ""
    ) -> Ended:
        prelude = f"""
            import os, sys, torch
            os.chdir({str(tmp_path / "here")!r})
            os.environ["CUFILE_STANDIN_LOG"] = {str(tmp_path / "log")!r}
            directory, content = {str(drive)!r}, bytes(range(256)) * 80
            from tests.device.gds_fixtures import CuFile, load_op
            from tests.device.stand_in import StandIn
            driver = StandIn({str(cuda)!r}) if {bool(cuda)} else None
            cufile = CuFile({str(cufile)!r}) if {bool(cufile)} else None
            if driver:
                torch.cuda.current_stream = driver.current_stream
        """
        after = f"gds = load_op({str(library)!r}, compiled={str(gds.__file__)!r})\n"
        parts = [textwrap.dedent(part) for part in (prelude, before, after, text)]
        return interpreters.run("\n".join(parts))

    return run


def logged(tmp_path: Path) -> list[str]:
    log = tmp_path / "log"
    return log.read_text().splitlines() if log.exists() else []


def whole_pages(offset: int, length: int, granule: int) -> int:
    """Bytes between the first and the last border of ``granule`` bytes within the range."""
    return max((offset + length) // granule * granule - -(-offset // granule) * granule, 0)


# Round trips


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "offset": draw(lengths(20_000)),
        "length": draw(lengths(300_000)),
        "misalignment": draw(st.sampled_from([0, 0, 1, 4, 511, 512, 4095])),
        "device": draw(st.integers(0, 1)),
        "pinned": draw(st.sampled_from(["none", "all", "a part"])),
        "settings": {
            "block_size": draw(st.sampled_from([512, 5000, 65536, 1 << 20])),
            "queue_depth": draw(st.sampled_from([1, 2, 7, 128])),
            "single_submit": draw(st.booleans()),
            "intra_op_parallelism": draw(st.integers(1, 4)),
        },
    }


@pytest.mark.slow
@given(world=worlds(), seed=st.integers(0, 1000))
@settings(max_examples=examples(60), deadline=None)
def test_what_is_written_from_a_device_comes_back_to_it(io_dir: Path, world: dict[str, Any], seed: int, request: Any) -> None:
    driver, gds = request.getfixturevalue("driver"), request.getfixturevalue("gds")
    content, offset = pattern(world["length"], seed), world["offset"]
    source = driver.tensor(content, world["device"], world["misalignment"])
    target = driver.tensor(bytes(len(content)), 1 - world["device"], world["misalignment"])
    handle = gds.gds_handle(**world["settings"], strict=True)
    third = len(content) // 3
    pinned = {"none": [], "all": [source, target], "a part": [source[third : 2 * third], target[third:]]}[world["pinned"]]
    pinned = [tensor for tensor in pinned if handle.pin_device_tensor(tensor)]
    with tempfile.TemporaryDirectory(dir=io_dir) as directory:
        path = Path(directory, "file")
        path.write_bytes(b"x" * offset)
        assert handle.sync_pwrite(source, str(path), offset) == 1
        assert path.read_bytes() == b"x" * offset + content
        assert handle.sync_pread(target, str(path), offset) == 1
        granule = min(max(path.stat().st_blksize, PAGE), 65536)
    assert [handle.unpin_device_tensor(tensor) for tensor in pinned] == [True] * len(pinned)
    assert driver.content(target) == content
    assert driver.content(source) == content
    assert not content or driver.guards_are_intact(target)
    stats, body = handle.stats(), whole_pages(offset, len(content), granule)
    assert (stats["bytes_gds"], stats["bytes_direct"]) == (2 * body, 2 * body)
    assert stats["bytes_buffered"] == 2 * (len(content) - body)
    assert (stats["backend"], stats["fallbacks"]) == ("gds", {})


def test_whole_pages_go_by_cufile_a_block_at_a_time(gds: ModuleType, driver: StandIn, cufile: CuFile, path: str) -> None:
    before = cufile.calls("cuFileWrite"), cufile.calls("cuFileRead")
    handle = gds.gds_handle(block_size=65536, strict=True)
    handle.sync_pwrite(driver.tensor(bytes(10 * 65536)), path)
    handle.sync_pread(driver.tensor(bytes(3 * 65536)), path)
    assert (cufile.calls("cuFileWrite") - before[0], cufile.calls("cuFileRead") - before[1]) == (10, 3)


@pytest.mark.parametrize("call", ["sync", "async", "plain", "validated"])
def test_every_call_of_the_handle_serves_devices(gds: ModuleType, driver: StandIn, path: str, call: str) -> None:
    handle = gds.gds_handle(65536, 8, False, True, 2, strict=True)
    source, target = driver.tensor(CONTENT), driver.tensor(bytes(len(CONTENT)), misalignment=3)
    if call == "sync":
        assert (handle.sync_pwrite(source, path, 100), handle.sync_pread(target, path, 100)) == (1, 1)
    elif call == "async":
        assert (handle.async_pwrite(source, path, 100), handle.wait()) == (0, 1)
        assert (handle.async_pread(target, path, 100), handle.wait()) == (0, 1)
    elif call == "plain":
        assert (handle.write(source, path, False, 100), handle.read(target, path, False, 100)) == (0, 0)
    else:
        handle.pwrite(source, path, True, True, 100)
        assert handle.wait() == 1
        assert handle.pread(target, path, True, False, 100) == 1
    assert Path(path).read_bytes() == bytes(100) + CONTENT
    assert driver.content(target) == CONTENT
    assert handle.stats()["bytes_gds"] == 2 * whole_pages(100, len(CONTENT), PAGE)


def test_a_descriptor_that_is_not_direct_is_written_by_cufile(handle: Any, driver: StandIn, path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    handle.async_pwrite(driver.tensor(CONTENT), descriptor, 777)
    os.close(descriptor)
    assert handle.wait() == 1
    assert Path(path).read_bytes() == bytes(777) + CONTENT
    assert handle.stats()["bytes_gds"] == whole_pages(777, len(CONTENT), PAGE)


def test_tensors_on_the_host_are_served_too_and_are_no_fallback(handle: Any, cufile: CuFile, path: str) -> None:
    calls = cufile.calls("cuFileHandleRegister")
    target = zeros(len(CONTENT), 1)
    handle.sync_pwrite(page_aligned(CONTENT), path)
    handle.sync_pread(target.tensor, path)
    assert target.content() == CONTENT
    assert target.guards_are_intact()
    stats = handle.stats()
    assert (stats["bytes_gds"], stats["fallbacks"]) == (0, {})
    assert stats["bytes_zero_copy"] > 0
    assert stats["bytes_staged"] > 0
    assert cufile.calls("cuFileHandleRegister") == calls


def test_a_transfer_that_holds_no_whole_page_is_none_of_cufiles(handle: Any, driver: StandIn, cufile: CuFile, path: str) -> None:
    calls = cufile.calls("cuFileHandleRegister")
    handle.sync_pwrite(driver.tensor(CONTENT[:5000]), path, 100)
    assert Path(path).read_bytes() == bytes(100) + CONTENT[:5000]
    assert cufile.calls("cuFileHandleRegister") == calls


def test_several_handles_and_many_requests_at_once(gds: ModuleType, driver: StandIn, cufile: CuFile, drive: Path) -> None:
    handles = [gds.gds_handle(16384, 8, index % 2 == 1, True, 1 + index, strict=True) for index in range(3)]
    contents = [pattern(100_000 + index, index) for index in range(60)]
    on_device = [driver.tensor(content, index % 2, index % 3) for index, content in enumerate(contents)]
    on_host = [Guarded(content, index % 2).tensor for index, content in enumerate(contents)]
    for index in range(60):
        handles[index % 3].async_pwrite((on_host if index % 4 == 0 else on_device)[index], str(drive / str(index)))
    assert [handle.wait() for handle in handles] == [20, 20, 20]
    targets = [driver.tensor(bytes(len(content)), index % 2) for index, content in enumerate(contents)]
    for index, target in enumerate(targets):
        handles[(index + 1) % 3].async_pread(target, str(drive / str(index)))
    assert [handle.wait() for handle in handles] == [20, 20, 20]
    assert [driver.content(target) for target in targets] == contents


def test_one_file_written_by_several_handles_at_once(gds: ModuleType, driver: StandIn, path: str) -> None:
    handles = [gds.gds_handle(4096, strict=True) for _ in range(4)]
    parts = [pattern(100_003, index) for index in range(4)]  # the pages at their borders are shared
    tensors = [driver.tensor(part) for part in parts]
    Path(path).write_bytes(bytes(400_012))
    for index, (handle, tensor) in enumerate(zip(handles, tensors, strict=True)):
        handle.async_pwrite(tensor, path, index * 100_003)
    assert [handle.wait() for handle in handles] == [1] * 4
    assert Path(path).read_bytes() == b"".join(parts)


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_short_transfer_is_resumed_where_it_stopped(
    gds: ModuleType, driver: StandIn, cufile: CuFile, file: str, direction: str
) -> None:
    handle, content = gds.gds_handle(block_size=65536, strict=True), CONTENT[::-1]
    cufile.most(10_000)
    if direction == "read":
        tensor = driver.tensor(bytes(len(CONTENT)), misalignment=1)
        handle.sync_pread(tensor, file)
        assert driver.content(tensor) == CONTENT
        assert driver.guards_are_intact(tensor)
    else:
        handle.sync_pwrite(driver.tensor(content), file)
        assert Path(file).read_bytes() == content
    stats = handle.stats()
    assert stats["short_transfers"] > 0
    assert stats["bytes_gds"] == whole_pages(0, len(CONTENT), PAGE)


def test_a_transfer_that_never_moves_a_whole_sector_fails_rather_than_hangs(
    handle: Any, driver: StandIn, cufile: CuFile, file: str
) -> None:
    cufile.most(100)
    with pytest.raises(OSError, match="no progress at byte 0") as caught:
        handle.sync_pread(driver.tensor(bytes(8192)), file)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, file)


# Registered memory


def test_a_block_within_registered_memory_goes_by_its_base_and_an_offset(
    gds: ModuleType, driver: StandIn, cufile: CuFile, path: str
) -> None:
    handle = gds.gds_handle(block_size=65536, strict=True)
    tensor = driver.tensor(CONTENT)
    before = cufile.calls_on_registered_memory
    handle.sync_pwrite(tensor, path)
    assert cufile.calls_on_registered_memory == before
    assert handle.pin_device_tensor(tensor)
    handle.sync_pwrite(tensor[123:500_000], path)
    assert cufile.calls_on_registered_memory == before + 8
    assert Path(path).read_bytes()[: 500_000 - 123] == CONTENT[123:500_000]
    assert handle.unpin_device_tensor(tensor)
    handle.sync_pwrite(tensor, path)
    assert cufile.calls_on_registered_memory == before + 8


@pytest.mark.parametrize("registered", [4096, 5000, 65536, 100_000])
def test_a_block_of_which_only_the_beginning_is_registered(
    gds: ModuleType, driver: StandIn, cufile: CuFile, path: str, registered: int
) -> None:
    handle = gds.gds_handle(block_size=65536, strict=True)
    source, target = driver.tensor(CONTENT), driver.tensor(bytes(len(CONTENT)))
    for tensor in (source, target):
        assert handle.pin_device_tensor(tensor[:registered])
    handle.sync_pwrite(source, path)
    handle.sync_pread(target, path)
    for tensor in (source, target):
        assert handle.unpin_device_tensor(tensor[:registered])
    assert Path(path).read_bytes() == driver.content(target) == CONTENT


@pytest.mark.parametrize("size", [0, 1, 100, 4095])
def test_a_tensor_that_holds_no_sector_is_not_registered_and_what_goes_on_behind_it_is_transferred(
    handle: Any, driver: StandIn, cufile: CuFile, path: str, size: int
) -> None:
    """cuFile would take its address for the whole of the block's memory."""
    source, target = driver.tensor(CONTENT), driver.tensor(bytes(len(CONTENT)))
    for tensor in (source, target):
        assert not handle.pin_device_tensor(tensor[:size])
    assert cufile.tensors == 0
    handle.sync_pwrite(source, path)
    handle.sync_pread(target, path)
    assert Path(path).read_bytes() == driver.content(target) == CONTENT
    assert not handle.unpin_device_tensor(source[:size])


def test_what_one_handle_registers_serves_the_others(gds: ModuleType, driver: StandIn, cufile: CuFile, path: str) -> None:
    tensor, before = driver.tensor(CONTENT), cufile.calls_on_registered_memory
    gds.gds_handle().pin_device_tensor(tensor)
    other = gds.gds_handle()
    other.sync_pwrite(tensor, path)
    assert cufile.calls_on_registered_memory > before
    assert other.unpin_device_tensor(tensor)


def test_memory_registered_twice_is_refused_and_stays_registered(handle: Any, driver: StandIn, cufile: CuFile) -> None:
    tensor = driver.tensor(CONTENT)
    assert handle.pin_device_tensor(tensor)
    with pytest.raises(FileExistsError, match="registered already") as caught:
        handle.pin_device_tensor(tensor)
    assert caught.value.errno == errno.EEXIST
    assert cufile.tensors == 1
    assert handle.unpin_device_tensor(tensor)
    assert not handle.unpin_device_tensor(tensor)


def test_what_is_not_registered_is_not_unregistered(handle: Any, driver: StandIn, cufile: CuFile) -> None:
    tensor = driver.tensor(CONTENT)
    assert not handle.unpin_device_tensor(tensor)
    assert not handle.free_pinned_device_tensor(tensor)
    assert handle.pin_device_tensor(tensor)
    assert not handle.unpin_device_tensor(tensor[1:])
    assert cufile.tensors == 1
    assert handle.unpin_device_tensor(tensor)


def test_memory_that_cannot_be_unregistered_now_can_be_later(handle: Any, driver: StandIn, cufile: CuFile, path: str) -> None:
    tensor, before = driver.tensor(CONTENT), cufile.calls_on_registered_memory
    assert handle.pin_device_tensor(tensor)
    driver.fail("cuCtxPushCurrent")
    with pytest.raises(OSError, match="cuCtxPushCurrent"):
        handle.unpin_device_tensor(tensor)
    assert cufile.tensors == 1
    handle.sync_pwrite(tensor, path)
    assert cufile.calls_on_registered_memory > before
    assert handle.unpin_device_tensor(tensor)
    assert cufile.tensors == 0


@pytest.mark.parametrize("verb", ["pin", "unpin"])
def test_a_tensor_laid_out_otherwise_cannot_be_registered(handle: Any, driver: StandIn, cufile: CuFile, verb: str) -> None:
    strided = driver.tensor(CONTENT)[::2]
    with pytest.raises(ValueError, match=f"^cannot {verb} a tensor that is not contiguous; {verb} a contiguous one and copy it$"):
        getattr(handle, f"{verb}_device_tensor")(strided)
    assert cufile.tensors == 0


@pytest.mark.parametrize("method", ["pin_device_tensor", "unpin_device_tensor", "free_pinned_device_tensor"])
def test_a_tensor_on_the_host_is_not_to_be_registered(handle: Any, method: str) -> None:
    with pytest.raises(ValueError, match="takes a tensor on a CUDA device"):
        getattr(handle, method)(torch.empty(4096))
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor"):
        getattr(handle, method)([1, 2])


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
def test_memory_lives_for_as_long_as_it_is_registered(
    handle: Any, driver: StandIn, cufile: CuFile, exchange: Callable[[Any, Any], object]
) -> None:
    tensor = driver.tensor(CONTENT)
    gone = weakref.ref(tensor.untyped_storage())
    handle.pin_device_tensor(tensor)
    exchange(tensor, driver.tensor(b"!"))
    kept = gone()
    assert kept is not None
    assert handle.unpin_device_tensor(tensor.set_(kept))  # type: ignore[call-overload]
    del tensor, kept
    assert gone() is None


def test_a_tensor_that_cannot_be_registered_is_not_kept(handle: Any, driver: StandIn, cufile: CuFile) -> None:
    tensor = driver.tensor(CONTENT)
    gone = weakref.ref(tensor.untyped_storage())
    cufile.fail("cuFileBufRegister", result=5036)
    with pytest.raises(OSError, match=f"cuFileBufRegister of {len(CONTENT)} bytes: .*could not be pinned") as caught:
        handle.pin_device_tensor(tensor)
    assert caught.value.errno == errno.ENOMEM
    assert not handle.unpin_device_tensor(tensor)
    del tensor, caught
    gc.collect()
    assert gone() is None


def test_a_new_tensor_is_like_its_example_and_registered(
    handle: Any, driver: StandIn, cufile: CuFile, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def empty(count: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        assert device == "the example's"
        return driver.tensor(b"\1" * (count * dtype.itemsize), dtype=dtype)

    example = driver.tensor(bytes(8), dtype=torch.float32)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(DeviceTensor, "device", "the example's", raising=False)
    tensor = handle.new_pinned_device_tensor(5000, example)
    assert (tensor.dtype, tensor.numel(), cufile.tensors) == (torch.float32, 5000, 1)
    handle.sync_pwrite(tensor, path)
    assert Path(path).read_bytes() == b"\1" * 20_000
    assert handle.free_pinned_device_tensor(tensor)
    assert cufile.tensors == 0


def test_tensors_on_both_devices_are_registered_under_their_own(handle: Any, driver: StandIn, cufile: CuFile, path: str) -> None:
    before = cufile.calls_on_registered_memory
    for device in (0, 1):
        tensor = driver.tensor(CONTENT, device)
        assert handle.pin_device_tensor(tensor)
        handle.sync_pwrite(tensor, path)
        assert handle.unpin_device_tensor(tensor)
    assert cufile.calls_on_registered_memory > before


# Files


def test_a_file_is_registered_once_for_a_transfer_and_let_go_before_it_is_closed(
    gds: ModuleType, driver: StandIn, cufile: CuFile, path: str
) -> None:
    handle, calls = gds.gds_handle(block_size=4096, intra_op_parallelism=4, strict=True), cufile.calls("cuFileHandleRegister")
    handle.async_pwrite(driver.tensor(CONTENT), path)
    handle.wait()
    assert cufile.calls("cuFileHandleRegister") == calls + 1
    assert (cufile.files, cufile.calls("closed too early")) == (0, 0)


# Order


@pytest.mark.parametrize("size", [PAGE, 20 << 20])
def test_a_write_sees_what_was_computed_before(gds: ModuleType, driver: StandIn, path: str, size: int) -> None:
    handle, tensor = gds.gds_handle(intra_op_parallelism=2, strict=True), driver.tensor(bytes(size))
    with driver.using(driver.stream()) as stream:
        stream.fill(tensor[-100:], b"\1" * 100, SOON)
        handle.sync_pwrite(tensor, path)
    assert Path(path).read_bytes() == bytes(size - 100) + b"\1" * 100
    assert handle.stats()["bytes_gds"] == size


def test_a_read_is_not_overwritten_by_what_was_computed_before(handle: Any, driver: StandIn, file: str) -> None:
    tensor = driver.tensor(bytes(len(CONTENT)))
    with driver.using(driver.stream()) as stream:
        stream.fill(tensor, bytes(len(CONTENT)), SOON)
        handle.sync_pread(tensor, file)
        assert driver.content(tensor) == CONTENT
    assert handle.stats()["bytes_gds"] == whole_pages(0, len(CONTENT), PAGE)


# Failures


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (errno.EIO, errno.EIO), (errno.EINVAL, errno.EINVAL), (errno.ENOSPC, errno.ENOSPC), (errno.EFAULT, errno.EFAULT),
        (5001, errno.ENODEV), (5008, errno.ENOTSUP), (5011, errno.EIO), (5012, errno.EFAULT), (5016, errno.ENOMEM),
        (5017, errno.EFAULT), (5025, errno.EACCES), (5034, errno.ENOTSUP), (5043, errno.ENOMEM), (5999, errno.EIO),
    ],
)  # fmt: skip
@pytest.mark.parametrize("direction", ["read", "write"])
def test_what_cufile_returns_is_an_oserror_with_its_errno_and_the_file(
    handle: Any, driver: StandIn, cufile: CuFile, file: str, direction: str, result: int, code: int
) -> None:
    tensor = driver.tensor(CONTENT)
    cufile.fail(f"cuFile{direction.title()}", result=result)
    with pytest.raises(OSError, match=f"{direction} of {len(CONTENT)} bytes at offset 0") as caught:
        getattr(handle, f"sync_p{direction}")(tensor, file)
    assert (caught.value.errno, caught.value.filename) == (code, file)
    assert result != 5016 or "cuFile error 5016 (more device memory than can be pinned)" in str(caught.value)
    assert getattr(handle, f"sync_p{direction}")(tensor, file) == 1
    assert Path(file).read_bytes() == driver.content(tensor) == CONTENT


@pytest.mark.parametrize("passing", [errno.EINTR, errno.EAGAIN], ids=errno.errorcode.get)
def test_what_passes_is_tried_again(handle: Any, driver: StandIn, cufile: CuFile, path: str, passing: int) -> None:
    cufile.fail("cuFileWrite", result=passing)
    handle.sync_pwrite(driver.tensor(CONTENT), path)
    assert Path(path).read_bytes() == CONTENT
    assert handle.stats()["retries"] == 1


def test_the_first_failure_is_raised_once_all_have_ended(gds: ModuleType, driver: StandIn, cufile: CuFile, drive: Path) -> None:
    handle = gds.gds_handle(block_size=4096, queue_depth=4, strict=True)
    tensors = [driver.tensor(pattern(50_000, index)) for index in range(6)]
    cufile.fail("cuFileWrite", 20, errno.EIO)
    for index, tensor in enumerate(tensors):
        handle.async_pwrite(tensor, str(drive / str(index)))
    with pytest.raises(OSError, match="write of 50000 bytes") as caught:
        handle.wait()
    assert handle.wait() == 0
    for index in range(6):
        if str(drive / str(index)) != caught.value.filename:
            assert (drive / str(index)).read_bytes() == pattern(50_000, index)
    assert handle.stats()["failed_requests"] == 1


@pytest.mark.parametrize("function", ["cuCtxPushCurrent", "cuEventCreate", "cuEventRecord", "cuStreamCreate"])
def test_whichever_call_of_cuda_fails_the_transfer_ends_and_the_next_succeeds(
    gds: ModuleType, driver: StandIn, path: str, function: str
) -> None:
    driver.may_keep_some = function == "cuCtxPushCurrent"  # of a context that cannot be entered
    tensor, failed = driver.tensor(CONTENT), 0
    for calls in range(12):
        handle = gds.gds_handle(block_size=262144, strict=True)
        driver.fail(function, calls)
        try:
            handle.sync_pwrite(tensor, path)
        except OSError:
            failed += 1
        driver.forget_failures()
        assert handle.sync_pwrite(tensor, path) == 1
        assert Path(path).read_bytes() == CONTENT
    assert failed > 0


def test_a_device_that_fails_before_its_turn_is_said(handle: Any, driver: StandIn, path: str) -> None:
    driver.fail("cuEventSynchronize", result=700)
    with pytest.raises(OSError, match="CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
        handle.sync_pwrite(driver.tensor(CONTENT), path)
    assert caught.value.filename == path


def test_a_read_past_the_end_of_a_file_that_shrank_is_an_error(handle: Any, driver: StandIn, cufile: CuFile, file: str) -> None:
    with driver.using(driver.stream()) as stream:
        tensor = driver.tensor(bytes(len(CONTENT)))
        stream.fill(tensor, b"-", SOON)
        handle.async_pread(tensor, file)
        os.truncate(file, 500_000)
        with pytest.raises(OSError, match=r"no longer has|no progress"):
            handle.wait()


# Files that cannot go by cuFile


def test_a_file_that_cufile_refuses_goes_through_the_host_and_the_reason_is_counted(
    gds: ModuleType, driver: StandIn, cufile: CuFile, path: str
) -> None:
    handle, target = gds.gds_handle(), driver.tensor(bytes(len(CONTENT)))
    cufile.fail("cuFileHandleRegister", result=5008)
    handle.sync_pwrite(driver.tensor(CONTENT), path)
    assert Path(path).read_bytes() == CONTENT
    cufile.fail("cuFileHandleRegister", result=5034)
    handle.sync_pread(target, path)
    assert driver.content(target) == CONTENT
    stats = handle.stats()
    assert stats["bytes_gds"] == 0
    assert stats["bytes_staged"] == 2 * whole_pages(0, len(CONTENT), PAGE)
    reason = "not by GPUDirect Storage, through host memory: cuFileHandleRegister: cuFile error {}"
    assert [(text.partition(" (")[0], count) for text, count in stats["fallbacks"].items()] == [
        (reason.format(5008), 1),
        (reason.format(5034), 1),
    ]
    handle.sync_pread(target, path)
    assert handle.stats()["bytes_gds"] == whole_pages(0, len(CONTENT), PAGE)


@pytest.mark.parametrize(("result", "code"), [(5008, errno.ENOTSUP), (5025, errno.EACCES), (5999, errno.EIO)])
def test_strict_a_file_that_cufile_refuses_is_an_oserror(
    handle: Any, driver: StandIn, cufile: CuFile, path: str, result: int, code: int
) -> None:
    cufile.fail("cuFileHandleRegister", result=result)
    with pytest.raises(OSError, match=f"cuFileHandleRegister: cuFile error {result}") as caught:
        handle.sync_pwrite(driver.tensor(CONTENT), path)
    assert (caught.value.errno, caught.value.filename) == (code, path)
    assert handle.sync_pwrite(driver.tensor(CONTENT), path) == 1


@pytest.mark.root
@pytest.mark.filterwarnings("ignore:transfers of")
def test_a_filesystem_without_direct_io_goes_through_the_host(gds: ModuleType, driver: StandIn, tmpfs: Disk) -> None:
    handle, target = gds.gds_handle(), driver.tensor(bytes(len(CONTENT)))
    handle.sync_pwrite(driver.tensor(CONTENT), str(tmpfs / "file"))
    handle.sync_pread(target, str(tmpfs / "file"))
    assert driver.content(target) == CONTENT
    stats = handle.stats()
    assert (stats["bytes_gds"], stats["bytes_buffered"]) == (0, 2 * len(CONTENT))
    assert stats["fallbacks"]["not by GPUDirect Storage, through host memory: tmpfs has no direct I/O"] == 2
    with pytest.raises(OSError, match="tmpfs has no direct I/O") as caught:
        gds.gds_handle(strict=True).sync_pwrite(target, str(tmpfs / "file"))
    assert (caught.value.errno, caught.value.filename) == (errno.ENOTSUP, str(tmpfs / "file"))


# Machines without


WITHOUT_CUFILE = """
    try:
        gds.gds_handle(strict=True)
    except RuntimeError as error:
        print(error)
    for attempt in range(2):
        handle = gds.gds_handle()
        path = f"{directory}/file{attempt}"
        source, target = driver.tensor(content), driver.tensor(bytes(len(content)))
        assert not handle.pin_device_tensor(source) and not handle.unpin_device_tensor(source)
        assert handle.sync_pwrite(source, path) == 1 and handle.sync_pread(target, path) == 1
        assert driver.content(target) == open(path, "rb").read() == content
        stats = handle.stats()
        assert stats["bytes_gds"] == 0 and stats["backend"] != "gds" and stats["bytes_staged"] > 0
        (reason,) = stats["fallbacks"]
        print(reason.removeprefix("not by GPUDirect Storage, through host memory: "))
"""


def without_cufile(ended: Ended) -> str:
    """The reason, which is the same each time, strict or not."""
    reasons = ended.check().splitlines()
    assert len(reasons) == 3
    assert len(set(reasons)) == 1
    return reasons[0]


@pytest.mark.slow
def test_without_libcufile_everything_goes_through_the_host(program: Program) -> None:
    reason = without_cufile(program(WITHOUT_CUFILE, cufile=""))
    assert reason.startswith("cuFile is not to be had: libcufile.so.0: cannot open shared object file")
    assert reason.endswith("; pip install nvidia-cufile")


def test_a_libcufile_that_is_too_old_is_named_with_what_is_needed(program: Program) -> None:
    reason = without_cufile(program(WITHOUT_CUFILE, before='cufile.call("version", 1070)'))
    assert reason == "cuFile 1.7 is installed and 1.8 is needed: pip install --upgrade nvidia-cufile"


@pytest.mark.slow
@pytest.mark.parametrize("function", ["cuFileGetVersion", "cuFileSetParameterBool"])
def test_a_libcufile_that_lacks_a_function_is_named_with_what_is_needed(program: Program, tmp_path: Path, function: str) -> None:
    library = compile_stand_in("libcufile.so.0", tmp_path, f"-D{function}=renamed")
    reason = without_cufile(program(WITHOUT_CUFILE, cufile=library))
    assert reason == f"libcufile.so.0 lacks {function}: install cuFile 1.8 or later"


@pytest.mark.parametrize(
    ("function", "result", "reason"),
    [
        ("cuFileDriverOpen", 5001, "cuFileDriverOpen: cuFile error 5001 (the nvidia-fs driver is not loaded)"),
        ("cuFileDriverOpen", 5999, "cuFileDriverOpen: cuFile error 5999"),
        ("cuFileSetParameterBool", 5002, "cuFileSetParameterBool: cuFile error 5002"),
    ],
)
def test_a_driver_that_does_not_open_is_said_and_everything_goes_through_the_host(
    program: Program, tmp_path: Path, function: str, result: int, reason: str
) -> None:
    assert without_cufile(program(WITHOUT_CUFILE, before=f"cufile.fail({function!r}, 0, {result})")) == reason
    assert "cuFileDriverClose" not in " ".join(logged(tmp_path))


def test_without_libcuda_tensors_on_the_host_are_served(program: Program) -> None:
    ended = program(
        """
        for call in (lambda: gds.gds_handle(strict=True), gds.version):
            try:
                call()
            except RuntimeError as error:
                print(error)
        handle = gds.gds_handle()
        tensor, path = torch.arange(20_000), f"{directory}/file"
        assert handle.sync_pwrite(tensor, path) == 1 and handle.sync_pread(tensor.clone(), path) == 1
        print(*handle.stats()["fallbacks"])
        """,
        cuda="",
    )
    lines = ended.check().splitlines()
    assert len(lines) == 3
    assert all("CUDA is not to be had: libcuda.so.1" in line and line.endswith("install the NVIDIA driver") for line in lines)


def test_cufile_in_a_place_that_only_the_builder_finds_is_used(program: Program, libraries: tuple[Path, Path]) -> None:
    ended = program("gds.gds_handle(strict=True)\nprint(gds.version())", cufile="", library=libraries[1])
    assert ended.check() == "1.14\n"


# The driver


def test_the_driver_is_opened_once_without_its_own_detours_and_closed_at_exit(program: Program, tmp_path: Path) -> None:
    ended = program(
        """
        handles = [gds.gds_handle(), gds.gds_handle(strict=True)]
        handles.append(gds.gds_handle())
        tensor = driver.tensor(content)
        assert handles[0].pin_device_tensor(tensor)
        for index, handle in enumerate(handles):
            handle.async_pwrite(tensor, f"{directory}/{index}")
        print(gds.version())
        """
    )
    assert ended.check() == "1.14\n"
    assert ended.stderr == ""
    first, *deregistered, last = logged(tmp_path)
    assert first == "cuFileDriverOpen, compatible no, log /dev/null"
    assert deregistered == ["cuFileHandleDeregister"] * 3
    assert last == "cuFileDriverClose with 0 files"
    assert list((tmp_path / "here").iterdir()) == []


def test_importing_and_loading_open_nothing(program: Program, tmp_path: Path) -> None:
    assert program("").check() == ""
    assert logged(tmp_path) == []


def test_a_log_file_that_the_user_named_is_kept(program: Program, tmp_path: Path) -> None:
    program("gds.gds_handle()", before='os.environ["CUFILE_LOGFILE_PATH"] = "/tmp/cufile.log"').check()
    assert logged(tmp_path)[0].endswith("log /tmp/cufile.log")


def test_a_forked_child_leaves_the_driver_to_its_parent(program: Program, tmp_path: Path) -> None:
    ended = program(
        """
        handle = gds.gds_handle(strict=True)
        child = os.fork()
        if child == 0:
            sys.exit(7)  # as any program ends, with all its destructors
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert handle.sync_pwrite(driver.tensor(content), f"{directory}/file") == 1
        """
    )
    ended.check()
    assert [line for line in logged(tmp_path) if "Close" in line] == ["cuFileDriverClose with 0 files"]
    assert logged(tmp_path)[-1] == "cuFileDriverClose with 0 files"


def test_a_process_that_ends_with_transfers_under_way_completes_them(program: Program, tmp_path: Path, drive: Path) -> None:
    ended = program(
        """
        handle = gds.gds_handle(strict=True)
        stream = driver.stream()
        tensor = driver.tensor(bytes(len(content)))
        with driver.using(stream):
            stream.fill(tensor, content, 0.2)
            handle.async_pwrite(tensor, f"{directory}/file")
        """
    )
    ended.check()
    assert (drive / "file").read_bytes() == bytes(range(256)) * 80
    assert logged(tmp_path)[-2:] == ["cuFileHandleDeregister", "cuFileDriverClose with 0 files"]


# The op


def test_settings_come_in_deepspeeds_order_and_with_its_names(gds: ModuleType) -> None:
    for handle in (
        gds.gds_handle(4096, 7, True, True, 2),
        gds.gds_handle(block_size=4096, queue_depth=7, single_submit=True, overlap_events=True, num_threads=2),
    ):
        names = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism", "thread_count")
        assert [getattr(handle, f"get_{name}")() for name in names] == [4096, 7, True, True, 2, 2]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["block_size", "queue_depth", "intra_op_parallelism"])
def test_an_absurd_setting_is_refused_with_its_range_and_value(gds: ModuleType, name: str, strict: bool) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be in \[\d+, \d+\], got 0"):
        gds.gds_handle(**{name: 0}, strict=strict)


def test_pinned_memory_of_either_op_is_known_to_both(gds: ModuleType, op: ModuleType) -> None:
    handles = gds.gds_handle(), op.aio_handle()
    for made, other in (handles, handles[::-1]):
        tensor = made.new_cpu_locked_tensor(5000, torch.empty(0))
        assert made.is_pinned(tensor)
        assert other.is_pinned(tensor[100:])
        assert other.free_cpu_locked_tensor(tensor)
        assert not made.is_pinned(tensor)


def test_pinned_memory_is_forgotten_with_its_tensor_in_both(gds: ModuleType, op: ModuleType) -> None:
    handle = gds.gds_handle()
    tensor = handle.new_cpu_locked_tensor(5000, torch.empty(0, dtype=torch.uint8))
    view = torch.frombuffer((ctypes.c_char * 5000).from_address(tensor.data_ptr()), dtype=torch.uint8)
    assert op.aio_handle().is_pinned(view)
    del tensor
    gc.collect()
    assert not op.aio_handle().is_pinned(view)
    assert not handle.is_pinned(view)


def test_the_stub_describes_what_there_is(gds: ModuleType, op: ModuleType) -> None:
    stub = ast.parse((Path(__file__).resolve().parents[2] / "deepnvme" / "ops" / "gds" / "gds_op.pyi").read_text())
    described = {node.name for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))} | {"source_hash"}
    assert described <= set(dir(gds))
    (handle,) = (node for node in stub.body if isinstance(node, ast.ClassDef))
    methods = {node.name for node in handle.body if isinstance(node, ast.FunctionDef)} - {"__init__"}
    assert set(dir(gds.gds_handle)) - set(dir(op.aio_handle)) == methods
    assert set(dir(op.aio_handle)) <= set(dir(gds.gds_handle))


def test_nothing_of_cuda_is_included_or_linked(gds: ModuleType) -> None:
    builder = GDSBuilder()
    repository = Path(__file__).resolve().parents[2]
    paths = {repository / source for source in builder.sources()} | set((repository / "csrc").rglob("*.h"))
    included = {line.split()[1] for path in paths for line in path.read_text().splitlines() if line.startswith("#include <")}
    assert [name for name in included if name.startswith(("<cu", "<nv", "<driver"))] == []
    assert builder.sources() != AsyncIOBuilder().sources()
    assert not any("cu" in flag for flag in builder.extra_ldflags())
    assert b"libcuda.so.1" in Path(str(gds.__file__)).read_bytes()
