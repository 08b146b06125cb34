"""What CUDA refuses, and what the drive does, is the error of the request that met it: never a hang, never wrong data."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deepnvme

from ..support.memory import page_aligned, pattern
from ..support.patience import PATIENCE
from .stand_in import StandIn

CONTENT = pattern(300_001)
OLD = pattern(300_001, 1)
REASON = r"CUDA_ERROR_OUT_OF_MEMORY \(as the test asked\)"

# What is called for a request: at submission, then on the way.
AT_SUBMISSION = ["cuCtxPushCurrent", "cuEventCreate", "cuEventRecord", "cuEventQuery"]
ON_THE_WAY = ["cuMemHostRegister", "cuStreamCreate", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuEventSynchronize"]


def assert_usable(driver: StandIn, engine: Any, drive: Path) -> None:
    """For the device, and for the host."""
    target = driver.tensor(bytes(len(CONTENT)))
    engine.write(driver.tensor(CONTENT), drive / "later").result(PATIENCE)
    engine.read(target, drive / "later").result(PATIENCE)
    assert driver.content(target) == CONTENT
    engine.write(page_aligned(CONTENT), drive / "later").result(PATIENCE)


def error_of(start: Callable[..., Any], *arguments: object) -> int | None:
    """With which errno the request failed, at submission or later."""
    try:
        start(*arguments).result(PATIENCE)
    except OSError as error:
        return error.errno
    return None


@pytest.mark.parametrize("function", AT_SUBMISSION)
def test_what_cuda_refuses_at_submission_leaves_file_and_tensor_alone(
    driver: StandIn, engine: deepnvme.Engine, drive: Path, function: str
) -> None:
    (drive / "file").write_bytes(OLD[:100])
    tensor = driver.tensor(CONTENT)
    for call in (lambda: engine.write(tensor, drive / "file"), lambda: engine.read(tensor[:100], drive / "file")):
        driver.fail(function)
        with pytest.raises(OSError, match=f"{function}: {REASON}") as caught:
            call()
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(drive / "file"))
    driver.fail(function)
    with pytest.raises(OSError, match=f"write of {len(CONTENT)} bytes at offset 5: {function}: {REASON}"):
        engine.write(tensor, drive / "new", 5)
    assert not (drive / "new").exists()
    assert (drive / "file").read_bytes() == OLD[:100]
    assert driver.content(tensor) == CONTENT
    assert_usable(driver, engine, drive)


@pytest.mark.parametrize("late", [True, False], ids=["to watch the stream", "to wait for copies"])
def test_a_thread_that_cannot_be_started_is_an_error_of_the_request(
    interpreters: Any, libcuda: Path, drive: Path, late: bool
) -> None:
    interpreters.run(f"""
        import errno
        import deepnvme
        from tests.device.stand_in import StandIn
        from tests.support.threads import no_new_threads
        driver = StandIn({str(libcuda)!r})
        torch.cuda.current_stream = driver.current_stream
        engine, tensor, stream = deepnvme.Engine(), driver.tensor(b"x" * 4096), driver.stream()
        engine.write(torch.ones(4096), {str(drive / "other")!r}).result()
        path = {str(drive / "file")!r}
        with driver.using(stream):
            stream.pause({0.3 if late else 0})
            try:
                with no_new_threads():
                    engine.write(tensor, path).result(20)
            except OSError as error:
                assert (error.errno, error.filename) == (errno.EAGAIN, path), error
                assert "write of 4096 bytes at offset 0: " in str(error) and "starting a thread" in str(error), error
            else:
                raise AssertionError("a thread was started")
            engine.write(tensor, path).result(20)
        with open(path, "rb") as file:
            assert file.read() == b"x" * 4096
    """).check()


@pytest.mark.parametrize("function", ON_THE_WAY)
def test_what_cuda_refuses_later_is_of_its_request_alone(driver: StandIn, backend: Any, drive: Path, function: str) -> None:
    direction = "read" if "HtoD" in function else "write"
    (drive / "file").write_bytes(OLD)
    tensor = driver.tensor(CONTENT)
    with deepnvme.Engine(backend=backend, block_size=65536) as engine:
        driver.fail(function)
        refused = getattr(engine, direction)(tensor, drive / "file")
        error = refused.exception(PATIENCE)
        assert isinstance(error, OSError)
        assert (error.errno, error.filename) == (errno.EIO, str(drive / "file"))
        assert f"{direction} of 300001 bytes at offset 0" in str(error)
        assert f"{function}: CUDA_ERROR_OUT_OF_MEMORY (as the test asked)" in str(error)
        assert_usable(driver, engine, drive)
        assert engine.stats().failed_requests == 1
    assert driver.content(tensor)[: 1 << 12] in (CONTENT[: 1 << 12], OLD[: 1 << 12])


@pytest.mark.parametrize("function", ["cuEventRecord", "cuEventSynchronize"])
def test_a_copy_that_cannot_be_waited_for_leaves_the_tensor_alone_once_its_failure_is_told(
    driver: StandIn, engine: deepnvme.Engine, drive: Path, function: str
) -> None:
    (drive / "file").write_bytes(OLD)
    tensor = driver.tensor(bytes(4096))
    driver.delay(0.05)
    driver.fail(function, 1 if function == "cuEventRecord" else 0)  # after the one of the work before it
    with pytest.raises(OSError, match=f"copy of device memory: {function}: {REASON}"):
        engine.read(tensor, drive / "file").result(PATIENCE)
    then = driver.content(tensor)
    time.sleep(0.1)
    assert driver.content(tensor) == then


@pytest.mark.parametrize("function", ["cuEventRecord", "cuEventSynchronize"])
def test_a_copy_that_cannot_be_waited_for_is_over_before_its_memory_serves_again(
    driver: StandIn, drive: Path, function: str
) -> None:
    """One slot of staging: what is copied into it late would be found in the next request's file."""
    contents = [pattern(65536, index) for index in range(4)]
    tensors = [driver.tensor(content) for content in contents]
    driver.delay(0.05)
    with deepnvme.Engine(block_size=65536, queue_depth=1) as engine:
        if function == "cuEventSynchronize":
            driver.fail(function)  # the first call is a copy's: no stream has work to wait for
            futures = [engine.write(tensor, drive / str(index)) for index, tensor in enumerate(tensors)]
        else:
            with driver.using(driver.stream()) as stream:
                stream.pause(0.5)  # nothing is copied before all submissions have recorded their events
                futures = [engine.write(tensor, drive / str(index)) for index, tensor in enumerate(tensors)]
                driver.fail(function)
        assert futures[0].exception(PATIENCE) is not None
        assert [future.result(PATIENCE) for future in futures[1:]] == [65536] * 3
    assert [(drive / str(index)).read_bytes() for index in (1, 2, 3)] == contents[1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "function", [*AT_SUBMISSION, *ON_THE_WAY, "cuCtxGetCurrent", "cuMemcpyHtoDAsync later", "cuMemcpyDtoHAsync later"]
)
def test_whichever_call_is_refused_a_request_is_done_or_fails(driver: StandIn, drive: Path, function: str) -> None:
    """The first, the second, ... of every function, in the middle of requests of several blocks by two workers."""
    driver.may_keep_some = function == "cuCtxPushCurrent"  # of a context that cannot be entered
    for calls in range(8):
        target = driver.tensor(bytes(len(CONTENT)))
        path = drive / str(calls)
        path.write_bytes(bytes(len(CONTENT)))
        with deepnvme.Engine(block_size=16384, queue_depth=4, num_threads=2) as engine:
            driver.fail(function, calls)
            written = error_of(engine.write, driver.tensor(CONTENT), path)
            read = error_of(engine.read, target, path)
            driver.forget_failures()
        assert {written, read} <= {None, errno.EIO}
        if written is None:
            assert path.read_bytes() == CONTENT
        if written is read is None:
            assert driver.content(target) == CONTENT
        with deepnvme.Engine() as engine:
            assert_usable(driver, engine, drive)


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_copy_that_fails_on_the_device_is_noticed(driver: StandIn, backend: Any, drive: Path, direction: str) -> None:
    (drive / "file").write_bytes(OLD)
    tensor = driver.tensor(CONTENT)
    with deepnvme.Engine(backend=backend, block_size=65536) as engine:
        driver.fail("cuMemcpyHtoDAsync later" if direction == "read" else "cuMemcpyDtoHAsync later", 2, 700)
        refused = getattr(engine, direction)(tensor, drive / "file")
        with pytest.raises(OSError, match=r"copy of device memory: cu\w+: CUDA_ERROR_ILLEGAL_ADDRESS \(an illegal memory access"):
            refused.result(PATIENCE)
        engine.write(page_aligned(CONTENT), drive / "host").result(PATIENCE)
    assert (drive / "host").read_bytes() == CONTENT


@pytest.mark.parametrize("direction", ["read", "write"])
def test_the_failure_of_the_work_before_is_an_error_and_nothing_is_moved(
    driver: StandIn, engine: deepnvme.Engine, drive: Path, direction: str
) -> None:
    (drive / "file").write_bytes(OLD)
    tensor = driver.tensor(CONTENT)
    with driver.using(driver.stream()) as stream:
        stream.break_off(0.1)
        refused = getattr(engine, direction)(tensor, drive / "file")
        with pytest.raises(
            OSError, match=f"{direction} of 300001 bytes at offset 0: the work on the device before it: cuEventSynchronize"
        ) as caught:
            refused.result(PATIENCE)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(drive / "file"))
    assert (drive / "file").read_bytes() == OLD
    assert driver.content(tensor) == CONTENT
    assert_usable(driver, engine, drive)


# -- the drive's failures, while device memory is transferred


def round_trip(driver: StandIn, engine: Any, path: Path) -> None:
    target = driver.tensor(bytes(len(CONTENT)), misalignment=1)
    assert engine.write(driver.tensor(CONTENT), path, 777).result(PATIENCE) == len(CONTENT)
    assert path.read_bytes() == bytes(777) + CONTENT
    assert engine.read(target, path, 777).result(PATIENCE) == len(CONTENT)
    assert driver.content(target) == CONTENT
    assert driver.guards_are_intact(target)


@pytest.mark.parametrize("faults", [
    {"short_every": 1, "short_bytes": 4096},
    {"short_every": 2, "short_bytes": 1000},
    {"error_every": 2, "error": errno.EAGAIN},
    {"error_every": 3, "error": errno.EINTR, "refuse_every": 2},
    {"refuse_every": 2, "queue_depth": 2},
    {"short_every": 3, "short_bytes": 512, "error_every": 5, "error": errno.EAGAIN, "refuse_every": 3, "num_threads": 3},
], ids=str)  # fmt: skip
def test_a_drive_that_stumbles_loses_nothing_of_a_device(
    driver: StandIn, faulty: Callable[..., Any], backend: Any, drive: Path, faults: dict[str, int]
) -> None:
    round_trip(driver, faulty(backend, **{"block_size": 16384, **faults}), drive / "file")


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("break_after", [1, 3, 20])
def test_a_broken_backend_fails_every_device_request_and_holds_up_none(
    driver: StandIn, faulty: Callable[..., Any], backend: Any, drive: Path, direction: str, break_after: int
) -> None:
    (drive / "file").write_bytes(bytes(20_000))
    tensors = [driver.tensor(bytes(20_000)) for _ in range(10)]
    driver.delay(0.002)
    engine = faulty(backend, queue_depth=8, break_after=break_after)
    with driver.using(driver.stream()) as stream:
        stream.pause(0.02)
        futures = [getattr(engine, direction)(tensor, drive / "file") for tensor in tensors]
        errors = [future.exception(PATIENCE) for future in futures]
    assert errors[-1] is not None
    assert errors[-1].errno == errno.EBADF
    engine.close()
