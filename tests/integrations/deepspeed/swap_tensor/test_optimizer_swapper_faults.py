"""Transfers that fail: nothing is lost, and the call that raised can be repeated."""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import pickle
import shutil
import struct
import threading
import tracemalloc
import weakref
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from deepnvme.integrations.deepspeed.swap_tensor.swap_info import SavedStates

from ....support.disks import MIB, loop_disk
from ....support.interpreters import Interpreters
from ....support.interrupts import ctrl_c_every
from ....support.patience import PATIENCE
from .stage3 import GROUPS, NUMEL, FlakyEngine, Training


@pytest.fixture
def engine() -> FlakyEngine:
    return FlakyEngine()


@pytest.mark.slow
@pytest.mark.parametrize(("buffer_count", "at_once"), [(4, False), (12, True)], ids=["later", "at-once"])
@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("part", ["exp_avg-4_5", "gradient", ""])
def test_a_step_whose_calls_are_repeated_ends_as_if_nothing_had_happened(
    drive: Path, engine: FlakyEngine, kind: str, part: str, buffer_count: int, at_once: bool
) -> None:
    training = Training(drive, buffer_count=buffer_count, engine=engine)
    training.train(2)
    training.backward()
    engine.fail(kind, part, times=2, at_once=at_once)
    errors = training.step(retry=True)
    assert all(error.errno == errno.EIO and part in error.filename for error in errors)
    assert engine.heal() or errors or kind == "read"  # what could not be read ahead is read again in silence
    training.swapper.flush()  # which writes again what the end of the step could not
    training.assert_same_as_in_memory()
    training.train(1)
    training.assert_same_as_in_memory()


def test_a_read_that_fails_whenever_it_is_tried_is_raised_with_its_path(drive: Path, engine: FlakyEngine) -> None:
    training = Training(drive, buffer_count=4, engine=engine)
    training.train(1)
    training.backward()
    engine.fail("read", "exp_avg-6_7", times=1000)
    with pytest.raises(OSError, match="injected") as caught:
        training.step()
    assert caught.value.errno == errno.EIO
    assert caught.value.filename.endswith("/optimizer/rank0/exp_avg-6_7.tensor.swp")
    parameter, copy = training.parameters[3], training.copies[3]
    assert parameter.numel() == 0
    engine.heal()
    training.swapper.swap_in_optimizer_state(parameter)
    assert torch.equal(parameter, copy)  # not yet stepped
    assert torch.equal(parameter.grad, copy.grad)


def test_a_write_that_fails_is_raised_by_the_next_swap_in_before_that_does_anything(drive: Path, engine: FlakyEngine) -> None:
    training = Training(drive, buffer_count=4, engine=engine)
    training.train(1)
    training.backward()
    engine.fail("write", "exp_avg-0_1", at_once=True)
    first, second = training.parameters[:2]
    training.swapper.swap_in_optimizer_state(first)
    training.optimizer.param_groups[0]["params"] = [first]
    training.optimizer.step()
    training.swapper.swap_out_optimizer_state(first)
    with pytest.raises(OSError, match="injected"):
        training.swapper.swap_in_optimizer_state(second)
    assert second.numel() == 0
    training.swapper.swap_in_optimizer_state(second)
    assert torch.equal(second, training.copies[1])


def test_what_cannot_be_written_is_raised_by_flush_until_it_can(drive: Path, engine: FlakyEngine) -> None:
    training = Training(drive, buffer_count=64, engine=engine)
    training.train(2)
    engine.fail("write", "exp_avg_sq-2_3", times=3)
    for _ in range(3):
        with pytest.raises(OSError, match="injected"):
            _ = training.swapper.swap_folder
    _ = training.swapper.swap_folder
    training.assert_same_as_in_memory()


@pytest.mark.parametrize("buffer_count", [2, 12])
def test_gradients_survive_a_failed_write(drive: Path, engine: FlakyEngine, buffer_count: int) -> None:
    training = Training(drive, buffer_count=buffer_count, engine=engine)
    training.train(1)
    engine.fail("write", "gradient", times=2)
    for number in reversed(range(GROUPS)):
        gradient = training.random(NUMEL)
        training.copies[number].grad = gradient.clone()
        for _ in range(4):
            try:
                training.swapper.swap_out_gradients(training.parameters[number], [0], [gradient])
                break
            except OSError:
                continue
    training.step(retry=True)
    training.assert_same_as_in_memory()


def backward_and_step(training: Training) -> None:
    training.backward()
    training.step()


@pytest.mark.root
def test_a_full_disk_is_named_and_training_goes_on_when_there_is_room(drive: Path) -> None:
    with loop_disk(drive, "ext4", 24 * MIB) as disk:
        ballast = disk / "ballast"
        training = Training(disk.path / "swap", buffer_count=4)
        ballast.write_bytes(bytes(disk.bytes_free() - 3 * MIB))
        with pytest.raises(OSError, match=r"No space|bytes free") as caught:
            backward_and_step(training)
        assert caught.value.errno == errno.ENOSPC
        assert str(disk.path) in str(caught.value.filename)
        del training, caught  # or the swapper's lock stays open
        gc.collect()


def test_a_file_that_is_too_short_is_named(drive: Path) -> None:
    training = Training(drive, buffer_count=4)
    training.train(1)
    folder = Path(training.swapper.swap_folder)
    (folder / "exp_avg-0_1.tensor.swp").write_bytes(b"short")
    with pytest.raises(OSError, match=r"should have \d+ bytes: .* has 5 bytes: '.*/exp_avg-0_1\.tensor\.swp'"):
        training.swapper.swap_in_optimizer_state(training.parameters[0])


def test_a_damaged_list_of_states_is_named(drive: Path) -> None:
    training = Training(drive)
    training.train(1)
    (Path(training.swapper.swap_folder) / "0_1.states.pt").write_bytes(b"damaged")
    with pytest.raises(OSError, match=r"is damaged, .*/0_1\.states\.pt'"):
        training.swapper.swap_in_optimizer_state(training.parameters[0])


def deflated(path: Path) -> None:
    """1 MB that would take 1 GB."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x04" + pickle.BINBYTES8 + struct.pack("<Q", 1 << 30) + bytes(1 << 30) + b".")
        archive.writestr("a/version", b"3")


def nested(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + b"]" * (1 << 20) + b".")
        archive.writestr("a/version", b"3")


STATES = {"kept": {}, "swapped": {"s": ([1], (1,), "float32")}, "order": ["s"]}
FOREIGN: dict[str, Callable[[Path], object]] = {
    "deflated": deflated,
    "nested": nested,
    "older format": lambda path: torch.save(STATES, path, _use_new_zipfile_serialization=False),
    "no dtype": lambda path: torch.save({**STATES, "swapped": {"s": ([1], (1,), "nn")}}, path),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", FOREIGN)
def test_states_of_somebody_else_are_refused_within_limits(tmp_path: Path, how: str) -> None:
    path = tmp_path / "0_1.states.pt"
    FOREIGN[how](path)
    tracemalloc.start()
    try:
        with pytest.raises(OSError, match="is damaged, or not of this package") as caught:
            SavedStates.load(str(path))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))


def test_the_folder_removed_under_it_is_an_error_that_names_it(drive: Path) -> None:
    training = Training(drive, buffer_count=4)
    training.train(1)
    shutil.rmtree(drive / "optimizer")
    with pytest.raises(FileNotFoundError) as caught:
        training.step()
    assert "optimizer/rank0" in str(caught.value.filename)


def test_storms_of_ctrl_c_leave_calls_that_can_be_repeated(drive: Path) -> None:
    training = Training(drive, buffer_count=5, numels=(300_001,) * 3)
    training.train(2)
    interrupted = 0

    def insist(call: Callable[..., None], parameter: torch.Tensor, *arguments: Any, ended: Callable[[], bool]) -> None:
        nonlocal interrupted
        with contextlib.suppress(KeyboardInterrupt), ctrl_c_every(0.001 * (1 + interrupted % 3)):
            return call(parameter, *arguments)
        interrupted += 1
        if not ended():
            call(parameter, *arguments)

    for _ in range(8):
        training.backward()
        for number, parameter in enumerate(training.parameters):
            swapper, following = training.swapper, (*training.parameters, None)[number + 1]
            insist(swapper.swap_in_optimizer_state, parameter, following, ended=lambda: False)
            training.step_one(number)
            insist(swapper.swap_out_optimizer_state, parameter, ended=lambda parameter=parameter: parameter.numel() == 0)
        with contextlib.suppress(KeyboardInterrupt), ctrl_c_every(0.001):
            training.swapper.flush()
    assert interrupted > 0
    training.assert_same_as_in_memory()


def test_a_swapper_that_is_collected_by_its_own_helper_writes_what_is_to_be_written(drive: Path, engine: FlakyEngine) -> None:
    """Garbage is collected in the midst of anything, also where the helper holds the lock."""
    with mock.patch("atexit.register", wraps=atexit.register) as register:
        training = Training(drive, buffer_count=5, engine=engine)
    (end,) = [call.args[0] for call in register.call_args_list if isinstance(call.args[0], weakref.finalize)]
    training.train(2)
    training.backward()
    read = engine.read

    def collecting(*arguments: Any) -> Any:
        if threading.current_thread().name == "deepnvme-read-ahead":
            engine.read = read  # type: ignore[method-assign]
            end()
        return read(*arguments)

    engine.read = collecting  # type: ignore[method-assign]
    training.step()
    for thread in threading.enumerate():
        if thread.name.startswith("deepnvme-"):
            thread.join(PATIENCE)
            assert not thread.is_alive()
    assert not end.alive
    training.assert_same_as_in_memory()


@pytest.mark.slow
def test_a_forked_child_that_ends_leaves_the_files_alone(drive: Path, interpreters: Interpreters) -> None:
    program = f"""
    import os, sys
    from pathlib import Path
    from tests.integrations.deepspeed.swap_tensor.stage3 import Training
    training = Training(Path({str(drive)!r}), buffer_count=64)
    training.train(2)
    child = os.fork()
    if child == 0:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    training.assert_same_as_in_memory()
    """
    ended = interpreters.run(program)
    ended.check()
    assert ended.stderr == ""
