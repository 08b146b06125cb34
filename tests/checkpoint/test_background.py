"""Saves in the background: what is saved is what was there, failures are told, and nobody is left waiting."""

from __future__ import annotations

import errno
import multiprocessing
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme.checkpoint import background, publication
from deepnvme.checkpoint.formats.file_image import FileImage
from deepnvme.safetensors import load_file, save_file
from deepnvme.swap import BufferPool, Lease, OutOfBuffers
from deepnvme.transfer.gather import CHUNK

from ..support.disks import Disk
from ..support.engines import transfers_through
from ..support.patience import PATIENCE

State = dict[str, torch.Tensor]
LAYER = CHUNK // 4


@pytest.fixture
def pool() -> BufferPool:
    """With memory for two states."""
    return BufferPool(10 * CHUNK)


@pytest.fixture(autouse=True)
def all_ended() -> Iterator[None]:
    """No test leaves a save under way, or one for another to raise."""
    yield
    for thread in threading.enumerate():
        if thread.name == "deepnvme-saves":  # which ends when there is nothing left to save
            thread.join(PATIENCE)
            assert not thread.is_alive()
    background.raise_unseen()


def test_a_group_is_refused_with_what_there_is_for_it(drive: Path) -> None:
    with pytest.raises(ValueError, match="leave out asynchronous, or use NVMeWriter"):
        deepnvme.CheckpointManager(drive).save(1, [1], asynchronous=True, group=object())  # type: ignore[call-overload]
    assert list(drive.iterdir()) == []


@pytest.fixture
def held(faulty: Callable[..., Any], gate: Any) -> Any:
    """The gate that holds what is written, from the start."""
    with transfers_through(faulty("threads", gate=gate)):
        yield gate
        gate.release()


def state(value: int = 0) -> State:
    """Of four chunks and a bit."""
    return {f"layer.{index}": torch.full((LAYER,), value + index, dtype=torch.uint8) for index in range(17)}


def assert_saved(path: Path, expected: State) -> None:
    found = torch.load(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [entry.name for entry in path.parent.iterdir() if entry.name.startswith(".")] == []


# -- failures ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_pickled_is_an_error_at_once(drive: Path) -> None:
    with pytest.raises(AttributeError, match="local"):
        deepnvme.async_save({"a": torch.ones(3), "f": lambda: None}, drive / "a.pt")
    assert list(drive.iterdir()) == []


def test_a_failure_is_the_futures(drive: Path, pool: BufferPool) -> None:
    future = deepnvme.async_save(state(), drive / "missing" / "a.pt", pool=pool)
    with pytest.raises(FileNotFoundError) as caught:
        future.result(PATIENCE)
    assert caught.value.filename == str(drive / "missing" / "a.pt")
    assert future.exception() is caught.value
    assert future.done()
    assert pool.in_use == 0
    deepnvme.async_save(state(), drive / "a.pt", pool=pool).result(PATIENCE)  # who has seen it is not told again


@pytest.mark.parametrize("save", [deepnvme.save, deepnvme.async_save])
def test_one_that_nobody_looked_at_is_raised_by_the_next_save(drive: Path, save: Callable[..., Any]) -> None:
    background.wait_for_saves(deepnvme.async_save(state(), drive / "missing" / "a.pt").path)
    with pytest.raises(FileNotFoundError) as caught:
        save(state(), drive / "b.pt")
    assert caught.value.filename == str(drive / "missing" / "a.pt")
    assert list(drive.iterdir()) == []
    done = save(state(), drive / "b.pt")
    assert done is None or done.result(PATIENCE)
    assert_saved(drive / "b.pt", state())


def test_safetensors_are_saved_after_what_was_saved_before(drive: Path) -> None:
    """The failed ones are raised, and those to the same path are waited for: they would replace the file later."""
    weights = {"a": torch.ones(3)}
    background.wait_for_saves(deepnvme.async_save([1], drive / "missing" / "a.pt").path)
    with pytest.raises(FileNotFoundError, match=r"missing/a\.pt"):
        save_file(weights, drive / "model.safetensors")
    assert not (drive / "model.safetensors").exists()
    earlier = deepnvme.async_save(state(1), drive / "model.safetensors")
    save_file(weights, drive / "model.safetensors")
    assert earlier.done()
    assert torch.equal(load_file(drive / "model.safetensors")["a"], weights["a"])


FAILS = """
import atexit, sys
atexit.register(print, "registered first")
import deepnvme
atexit.register(print, "registered last")
deepnvme.async_save([1], {drive!r} + "/seen/a.pt").exception()
deepnvme.async_save([1], {drive!r} + "/unseen/a.pt")
"""


@pytest.mark.parametrize(("end", "status"), [("", 1), ("sys.exit(0)", 1), ("sys.exit(3)", 3)])
def test_a_failed_save_that_nobody_asked_about_fails_the_process(drive: Path, interpreters: Any, end: str, status: int) -> None:
    """All exit handlers run."""
    ended = interpreters.run(FAILS.format(drive=str(drive)) + end)
    assert ended.stderr == (
        f"deepnvme: '{drive}/unseen/a.pt' was not saved, and nobody called result(): "
        f"FileNotFoundError: [Errno 2] No such file or directory: '{drive}/unseen/a.pt'\n"
    )
    assert ended.stdout == "registered last\nregistered first\n"
    assert ended.returncode == status


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_failed_save_fails_a_child_of_multiprocessing(drive: Path, method: str, capfd: pytest.CaptureFixture[str]) -> None:
    child = multiprocessing.get_context(method).Process(target=deepnvme.async_save, args=([1], drive / "unseen" / "a.pt"))
    child.start()
    child.join()
    assert child.exitcode == 1
    assert f"deepnvme: '{drive}/unseen/a.pt' was not saved, and nobody called result()" in capfd.readouterr().err


def test_a_failed_save_does_not_hide_the_exception_that_ends_the_process(drive: Path, interpreters: Any) -> None:
    ended = interpreters.run(FAILS.format(drive=str(drive)) + "raise ValueError('the reason')")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-2] == "ValueError: the reason"
    assert "/unseen/a.pt' was not saved" in ended.stderr.splitlines()[-1]


def test_a_failed_save_of_a_manager_fails_the_process(drive: Path, interpreters: Any) -> None:
    ended = interpreters.run(f"""
import deepnvme, shutil
manager = deepnvme.CheckpointManager({str(drive)!r} + "/run")
shutil.rmtree(manager.directory)
manager.save(7, [1], asynchronous=True)
""")
    assert ended.stderr.startswith(f"deepnvme: '{drive}/run/step-00000007.pt' was not saved")
    assert ended.returncode == 1


@pytest.mark.parametrize("saves", ["", "deepnvme.async_save([1], path)", "deepnvme.async_save([1], path + '/b').exception()"])
def test_a_process_without_unseen_errors_succeeds(drive: Path, interpreters: Any, saves: str) -> None:
    ended = interpreters.run(f"import deepnvme\npath = {str(drive)!r} + '/a.pt'\n{saves}")
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.root
def test_a_full_disk_leaves_nothing_behind(small_disk: Disk, pool: BufferPool) -> None:
    large = {"a": torch.zeros(small_disk.bytes_free() + 1, dtype=torch.uint8)}
    future = deepnvme.async_save(large, small_disk / "a.pt", pool=pool)
    error = future.exception(PATIENCE)
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOSPC
    assert pool.in_use == 0
    assert sorted(entry.name for entry in small_disk.path.iterdir()) == ["lost+found"]


def test_a_drive_that_fails_leaves_the_old_file(drive: Path, pool: BufferPool, faulty: Callable[..., Any]) -> None:
    deepnvme.save(state(1), drive / "a.pt")
    with transfers_through(faulty("threads", error_every=50, error=errno.EIO)):
        error = deepnvme.async_save(state(2), drive / "a.pt", pool=pool).exception(PATIENCE)
    assert isinstance(error, OSError)
    assert error.errno == errno.EIO
    assert pool.in_use == 0
    assert_saved(drive / "a.pt", state(1))


def test_a_failure_does_not_keep_the_state(drive: Path) -> None:
    tensor = torch.ones(LAYER)
    storage = weakref.ref(tensor.untyped_storage())
    future = deepnvme.async_save([tensor], drive / "missing" / "a.pt")
    assert future.exception(PATIENCE) is not None
    del tensor
    kept = storage() is not None
    assert not kept


@pytest.mark.parametrize("chunk", [0, 1])
def test_ctrl_c_while_it_is_copied_leaves_nothing_behind(
    drive: Path, pool: BufferPool, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    copy, copied = FileImage.copy, []

    def interrupted(self: FileImage, begin: int, end: int, into: torch.Tensor) -> None:
        copied.append(begin)
        if len(copied) > chunk:
            raise KeyboardInterrupt
        copy(self, begin, end, into)

    with monkeypatch.context() as now:
        now.setattr(FileImage, "copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            deepnvme.async_save(state(), drive / "a.pt", pool=pool)
    assert len(copied) == chunk + 1
    assert list(drive.iterdir()) == []
    assert pool.in_use == 0
    deepnvme.async_save(state(), drive / "a.pt", pool=pool).result(PATIENCE)


def test_a_budget_too_small_for_a_chunk_is_an_error_at_once(drive: Path) -> None:
    with pytest.raises(OutOfBuffers, match="set a budget of at least"):
        deepnvme.async_save(state(), drive / "a.pt", pool=BufferPool(CHUNK - 1))
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize("left", [0, CHUNK - 4096])
def test_memory_that_its_caller_holds_is_not_waited_for(drive: Path, pool: BufferPool, left: int) -> None:
    with pool.lease(pool.budget - left), pytest.raises(OutOfBuffers, match="all leased by this thread"):
        deepnvme.async_save(state(), drive / "a.pt", pool=pool)
    assert list(drive.iterdir()) == []
    deepnvme.async_save(state(), drive / "a.pt", pool=pool).result(PATIENCE)


def test_memory_that_another_thread_holds_is_waited_for(drive: Path, pool: BufferPool) -> None:
    leases: list[Lease] = []
    held, back = threading.Event(), threading.Event()

    def hold() -> None:
        leases.append(pool.lease(pool.budget))
        held.set()
        back.wait(PATIENCE)
        leases.pop().release()

    other = threading.Thread(target=hold)
    other.start()
    held.wait(PATIENCE)
    threading.Timer(0.1, back.set).start()
    deepnvme.async_save(state(), drive / "a.pt", pool=pool).result(PATIENCE)
    other.join()
    assert_saved(drive / "a.pt", state())


# -- what is saved -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("obj", [{}, [1, "a"], torch.arange(10), state(), [torch.empty(0), torch.ones(()), torch.ones(3, 3).t()]])
def test_the_file_is_that_of_save(drive: Path, obj: object) -> None:
    for checksum in (None, False, True):
        deepnvme.save(obj, drive / "expected.pt", checksum=checksum)
        future = deepnvme.async_save(obj, drive / "found.pt", checksum=checksum)
        assert future.result(PATIENCE) == future.nbytes
        assert (drive / "found.pt").read_bytes() == (drive / "expected.pt").read_bytes()


def test_tensors_may_change_when_it_returns(drive: Path, pool: BufferPool, held: Any) -> None:
    tensors = state(1)
    future = deepnvme.async_save(tensors, drive / "a.pt", pool=pool)
    for tensor in tensors.values():
        tensor.zero_()
    held.release()
    future.result(PATIENCE)
    assert_saved(drive / "a.pt", state(1))
    report = deepnvme.checkpoint.verify(drive / "a.pt")
    assert (report.ok, report.checked_nbytes) == (True, report.nbytes)


@pytest.mark.parametrize("budget", [CHUNK, 2 * CHUNK])
def test_tensors_may_change_when_it_returns_even_if_the_pool_has_memory_for_a_part(drive: Path, budget: int) -> None:
    tensors, pool = state(1), BufferPool(budget)
    future = deepnvme.async_save(tensors, drive / "a.pt", pool=pool)
    for tensor in tensors.values():
        tensor.zero_()
    future.result(PATIENCE)
    assert_saved(drive / "a.pt", state(1))
    assert pool.in_use == 0
    assert pool.allocated <= budget


def test_writing_begins_while_the_rest_is_copied(
    drive: Path, pool: BufferPool, faulty: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, copy = faulty("threads"), FileImage.copy
    monkeypatch.setattr(publication, "shared_engine", lambda path, config: engine)

    def patient(self: FileImage, begin: int, end: int, into: torch.Tensor) -> None:
        while begin and not engine.stats()["bytes_written"]:
            assert threading.main_thread() is threading.current_thread()
        copy(self, begin, end, into)

    monkeypatch.setattr(FileImage, "copy", patient)
    deepnvme.async_save(state(), drive / "a.pt", pool=pool).result(PATIENCE)


# -- several -----------------------------------------------------------------------------------------------------------


def test_at_most_so_many_are_in_flight(drive: Path, pool: BufferPool, held: Any) -> None:
    futures = [deepnvme.async_save([step], drive / f"{step}.pt", pool=pool) for step in range(2)]
    with pytest.raises(TimeoutError, match=r"0\.pt' is not saved after 0 s"):
        futures[0].result(0)
    third: list[deepnvme.SaveFuture] = []
    caller = threading.Thread(target=lambda: third.append(deepnvme.async_save([2], drive / "2.pt", pool=pool)))
    caller.start()
    caller.join(0.05)
    assert caller.is_alive()
    held.release()
    caller.join(PATIENCE)
    for future in (*futures, *third):
        future.result(PATIENCE)
    assert [torch.load(drive / f"{step}.pt") for step in range(3)] == [[0], [1], [2]]


@pytest.mark.parametrize("last", [deepnvme.save, deepnvme.async_save])
def test_the_last_call_has_the_last_word_on_a_path(drive: Path, pool: BufferPool, last: Callable[..., Any]) -> None:
    (drive / "link").symlink_to("a.pt")
    for value in range(3):
        future = deepnvme.async_save(state(value), drive / "a.pt", pool=pool)
    done = last(state(3), drive / "link")
    assert future.done() or done is not None
    assert done is None or done.result(PATIENCE)
    assert_saved(drive / "a.pt", state(3))


@pytest.mark.parametrize("budget", [CHUNK, 10 * CHUNK])
def test_threads_may_save_at_the_same_time(drive: Path, budget: int) -> None:
    pool = BufferPool(budget)

    def work(seed: int) -> None:
        for _ in range(5):
            future = deepnvme.async_save(state(seed), drive / f"{seed}.pt", pool=pool)
            assert future.result(PATIENCE) == future.nbytes

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(3):
        assert_saved(drive / f"{seed}.pt", state(seed))
    assert pool.in_use == 0


# -- ends and forks ----------------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys, torch, deepnvme
from deepnvme.swap import BufferPool
path = {path!r}
large = [torch.full((8 << 20,), 7, dtype=torch.uint8) for _ in range(4)]
"""


@pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", 3), ("raise ValueError", 1)])
def test_the_exit_waits_for_saves(drive: Path, interpreters: Any, end: str, status: int) -> None:
    path = drive / "a.pt"
    program = PROGRAM.format(path=str(path)) + f"deepnvme.async_save(large, path, pool=BufferPool(16 << 20))\n{end}"
    assert interpreters.run(program).returncode == status
    assert all(bool((tensor == 7).all()) for tensor in torch.load(path))


def test_a_forked_child_has_none_of_them_and_may_save_itself(drive: Path, interpreters: Any) -> None:
    program = (
        PROGRAM.format(path=str(drive / "a.pt"))
        + """
future = deepnvme.async_save(large, path)
failed = deepnvme.async_save([1], path + "/missing")
child = os.fork()
if child == 0:
    for call in (future.done, future.result, future.exception):
        try:
            call()
            os._exit(1)
        except RuntimeError as error:
            assert "is the parent process's" in str(error)
    deepnvme.async_save([2], path + "2").result()
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
future.result()
failed.exception()
"""
    )
    ended = interpreters.run(program)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert torch.load(drive / "a.pt2") == [2]
    assert len(torch.load(drive / "a.pt")) == 4
