"""gds_handle between the drive and the memory of a GPU that is not there: NVIDIA's libraries are stand-ins."""

from __future__ import annotations

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

from ..support.examples import examples
from ..support.interpreters import Ended, Interpreters
from ..support.memory import EXCHANGES, pattern
from ..support.transfers import lengths
from .gds_fixtures import CuFile, cached_stand_in, load_op
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


def test_memory_registered_twice_is_refused_and_stays_registered(handle: Any, driver: StandIn, cufile: CuFile) -> None:
    tensor = driver.tensor(CONTENT)
    assert handle.pin_device_tensor(tensor)
    with pytest.raises(FileExistsError, match="registered already") as caught:
        handle.pin_device_tensor(tensor)
    assert caught.value.errno == errno.EEXIST
    assert cufile.tensors == 1
    assert handle.unpin_device_tensor(tensor)
    assert not handle.unpin_device_tensor(tensor)


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


# Files


# Order


@pytest.mark.parametrize("size", [PAGE, 20 << 20])
def test_a_write_sees_what_was_computed_before(gds: ModuleType, driver: StandIn, path: str, size: int) -> None:
    handle, tensor = gds.gds_handle(intra_op_parallelism=2, strict=True), driver.tensor(bytes(size))
    with driver.using(driver.stream()) as stream:
        stream.fill(tensor[-100:], b"\1" * 100, SOON)
        handle.sync_pwrite(tensor, path)
    assert Path(path).read_bytes() == bytes(size - 100) + b"\1" * 100
    assert handle.stats()["bytes_gds"] == size


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


def test_pinned_memory_of_either_op_is_known_to_both(gds: ModuleType, op: ModuleType) -> None:
    handles = gds.gds_handle(), op.aio_handle()
    for made, other in (handles, handles[::-1]):
        tensor = made.new_cpu_locked_tensor(5000, torch.empty(0))
        assert made.is_pinned(tensor)
        assert other.is_pinned(tensor[100:])
        assert other.free_cpu_locked_tensor(tensor)
        assert not made.is_pinned(tensor)
