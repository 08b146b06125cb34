"""save_on_disk where something goes wrong: the gradients are right or there is an error, and the next step works.

Ctrl-C is in test_interrupts.py; faults at random, and longer, in tests/faults/torture.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.offload import save_on_disk

from ...support.activations import SAVED, Training, files_below, held_by, hooks_are_set, training_in
from ...support.disks import MIB, Disk
from ...support.engines import failing
from ...support.interpreters import REPOSITORY, Interpreters
from ...support.patience import PATIENCE


@pytest.fixture
def training(drive: Path) -> Iterator[Training]:
    with training_in(drive / "activations") as made:
        yield made
    assert files_below(drive) == []


# Writing fails.


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "later"])
def test_whichever_write_fails_the_step_says_so_or_is_right_and_the_next_one_writes_again(
    training: Training, at_once: bool
) -> None:
    raised = 0
    for number in itertools.count():
        with failing("write", number, at_once=at_once) as engine:
            said = error_of(training.step)
        if not engine.failed:
            assert said is None
            break
        if said is not None:  # not if it failed in the backward, where nobody needed its memory
            raised += 1
            assert said[:2] == (errno.EIO, "drive")
            assert "activations cannot be written" in said[2] or "cannot be brought back from the drive" in said[2]
        training.check_nothing_is_held()
        training.step()
        assert training.activations.report().bytes_read > 0
    assert number > SAVED // 2
    assert raised > 3


@pytest.mark.root
def test_a_full_drive_is_named_and_is_used_again_when_there_is_room(small_disk: Disk) -> None:
    with training_in(small_disk / "activations", nbytes=4 * MIB) as training:
        for _ in range(2):
            said = error_of(training.step)
            assert said is not None
            assert said[0] == errno.ENOSPC
            assert str(small_disk / "activations") in said[1]
            training.check_nothing_is_held()
        training.batch = training.batch[: len(training.batch) // 4]
        training.expected = training.gradients(training.model(training.batch))
        training.step()
        assert training.activations.report().bytes_written > 0
    assert files_below(small_disk.path) == ["lost+found"]


def test_a_directory_that_cannot_be_made_is_an_error_of_entering_and_no_hook_stays(drive: Path) -> None:
    activations = save_on_disk(drive / "file" / "below")
    (drive / "file").touch()  # since it was made
    for _ in range(2):
        with pytest.raises(NotADirectoryError) as caught, activations:
            pass
        assert str(caught.value.filename).startswith(str(drive / "file"))
        assert not hooks_are_set()


# Reading fails.


def error_of(call: Any) -> tuple[int | None, str, str] | None:
    """Errno, filename and text of the OSError that a call raises. Not the error itself, whose traceback has the graph."""
    try:
        call()
    except OSError as error:
        return error.errno, error.filename, str(error)
    return None


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "later"])
def test_whichever_read_fails_the_backward_says_which_tensor_and_the_next_step_works(training: Training, at_once: bool) -> None:
    for number in itertools.count():
        output = training.forward()
        with failing("read", number, 1 << 30, at_once=at_once) as engine:
            said = error_of(lambda output=output: training.check(training.gradients(output)))
        del output
        training.check_nothing_is_held()
        if said is None:
            assert not engine.failed
            break
        assert said[:2] == (errno.EIO, "drive")
        assert f"the float32 tensor of shape {tuple(training.batch.shape)} that autograd has saved cannot" in said[2]
        training.step()
    assert number > 3


def test_one_error_of_reading_ahead_is_no_error_of_the_backward(training: Training) -> None:
    """It is read once more when it is needed."""
    for number in range(1, 4):  # 0 is needed at once
        output = training.forward()
        with failing("read", number) as engine:
            training.check(training.gradients(output))
        assert engine.failed


def data_files(directory: Path) -> list[Path]:
    return [each for each in directory.rglob("*.data") if each.stat().st_size]


def test_a_file_that_is_truncated_is_named_by_the_backward(training: Training, drive: Path) -> None:
    training.step()
    output = training.forward()
    (data,) = data_files(drive)
    os.truncate(data, 0)
    with pytest.raises(OSError, match="cannot be brought back") as caught:
        training.gradients(output)
    assert caught.value.filename == str(data)
    assert caught.value.errno is not None
    del output, caught  # whose traceback has the graph too
    training.check_nothing_is_held()
    training.step()


# Exceptions, no backward, close.


class Raises(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise FloatingPointError("of a layer")


@pytest.mark.parametrize("place", [0, 7])
def test_an_exception_in_the_forward_leaves_nothing(training: Training, place: int) -> None:
    sound = training.model
    training.model = torch.nn.Sequential(*sound[:place], Raises(), *sound[place:])
    for _ in range(3):
        with pytest.raises(FloatingPointError) as caught:
            training.forward()
        assert not hooks_are_set()
        del caught
        training.check_nothing_is_held()
    training.model = sound
    training.step()


def test_forwards_without_a_backward_are_freed_with_their_graphs(training: Training, drive: Path) -> None:
    training.step()
    size = sum(each.stat().st_size for each in data_files(drive))
    for _ in range(5):
        output = training.forward()
        assert held_by(training.activations)
        del output
        training.check_nothing_is_held()
    assert sum(each.stat().st_size for each in data_files(drive)) == size
    kept = [training.forward() for _ in range(3)]
    training.activations.close()
    assert files_below(drive) == []
    del kept


def test_after_close_a_graph_that_is_left_is_an_error_of_its_backward(training: Training, drive: Path) -> None:
    output = training.forward()
    training.activations.close()
    assert files_below(drive) == []
    assert training.activations.report().bytes_written == 0
    with pytest.raises(RuntimeError, match=r"float32 tensor of shape .* that autograd has saved is gone: its directory was"):
        training.gradients(output)
    training.step()
    del output
    training.check_nothing_is_held()


def test_close_within_the_context_ends_saving_and_the_next_context_saves_again(training: Training) -> None:
    with training.activations:
        first = training.model[:4](training.batch)
        training.activations.close()
        with pytest.raises(RuntimeError, match="cannot be saved: their directory was closed"):
            training.model[4:](first)
    assert not hooks_are_set()
    training.step()


# Threads.


def in_threads(*calls: Any) -> None:
    """Call each in a thread of its own, and raise what the first of them raises."""
    raised: list[BaseException] = []

    def run(call: Any) -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a thread hangs"
    if raised:
        raise raised[0]


@pytest.mark.parametrize("shared", [True, False])
def test_two_models_in_two_threads(drive: Path, shared: bool) -> None:
    trainings = [Training(drive / "a"), Training(drive / ("a" if shared else "b"))]

    def train(training: Training) -> None:
        for _ in range(15):
            training.step()
            training.forward()  # and no backward

    in_threads(*(lambda each=each: train(each) for each in trainings))
    for training in trainings:
        training.check_nothing_is_held()
        training.activations.close()


def test_backward_in_another_thread_than_the_forward(training: Training) -> None:
    for _ in range(5):
        output = training.forward()
        in_threads(lambda output=output: training.check(training.gradients(output)))
        del output
        training.check_nothing_is_held()
    outputs: list[torch.Tensor] = []
    in_threads(lambda: outputs.append(training.forward()))
    training.check(training.gradients(outputs.pop()))
    training.check_nothing_is_held()


def test_a_graph_dropped_by_another_thread_in_the_midst_of_a_forward_is_freed(training: Training) -> None:
    outputs = [training.forward() for _ in range(8)]
    in_threads(lambda: [training.step() for _ in range(10)], outputs.clear)
    training.check_nothing_is_held()


# Processes.

PROGRAM = f"""
import faulthandler, gc, os, sys, signal, threading, time, torch
sys.path.insert(0, {str(REPOSITORY)!r})
torch.set_num_threads(1)
from tests.support.activations import Training
"""


def ended_silently(interpreters: Interpreters, program: str, returncode: int = 0, wanted: str = "") -> None:
    ended = interpreters.run(PROGRAM + program)
    assert (ended.returncode, ended.stderr.strip()) == (returncode, wanted)


MOMENTS = {
    "with an open context and a live graph": "training.activations.__enter__()\noutput = training.model(training.batch)",
    "with a live graph": "output = training.forward()",
    "in a cycle": "class Node: pass\nnode = Node()\nnode.itself, node.output = node, training.forward()",
    "in the midst of writes": "training = Training(path, nbytes=1 << 22)\noutput = training.forward()",
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interpreter_ends_without_a_word_and_leaves_no_files(interpreters: Interpreters, drive: Path, moment: str) -> None:
    program = f"path = {str(drive)!r}\ntraining = Training(path)\n{MOMENTS[moment]}\n"
    ended_silently(interpreters, program)
    assert files_below(drive) == []


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["with a live graph", "in the midst of writes"])
def test_what_a_killed_process_leaves_is_removed_by_the_next_that_uses_the_path(
    interpreters: Interpreters, drive: Path, moment: str
) -> None:
    program = f"path = {str(drive)!r}\ntraining = Training(path)\n{MOMENTS[moment]}\nos.kill(os.getpid(), signal.SIGKILL)\n"
    assert interpreters.run(PROGRAM + program).returncode == -signal.SIGKILL
    assert data_files(drive)
    with training_in(drive) as training:
        training.step()
        assert len(data_files(drive)) == 1
    assert files_below(drive) == []


@pytest.mark.slow
def test_a_forked_child_is_told_and_its_parent_goes_on(interpreters: Interpreters, drive: Path) -> None:
    interpreters.run(
        PROGRAM
        + f"""
        training = Training({str(drive)!r})
        def in_child(call, wanted):
            pid = os.fork()
            if pid == 0:
                faulthandler.dump_traceback_later(10, exit=True)
                try:
                    call()
                except RuntimeError as error:
                    os._exit(0 if wanted in str(error) else print(error, flush=True) or 1)
                os._exit(0 if wanted is None else 2)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        refused = "the parent process's: a forked child cannot save or use them"
        output = training.forward()
        with training.activations:
            half = training.model[:5](training.batch)
            in_child(lambda: training.model[5:](half), refused)
            in_child(lambda: training.gradients(output), refused)
            whole = training.model[5:](half)
        files = sorted(os.listdir({str(drive)!r}))
        def drops():
            global output, whole, half
            del output, whole, half
            gc.collect()
            training.activations.close()
        in_child(drops, None)
        pid = os.fork()
        if pid == 0:
            sys.exit(0)  # with what runs at exit
        assert os.waitpid(pid, 0)[1] == 0
        in_child(lambda: (training.step(), training.activations.close()), None)  # with a store of its own
        assert sorted(os.listdir({str(drive)!r})) == files
        training.check(training.gradients(output))
        training.check(training.gradients(whole))
        del output, whole, half
        training.check_nothing_is_held()
        training.step()
        """.replace("\n        ", "\n")
    ).check()
    assert [each for each in data_files(drive) if "activations-0" in str(each)] == []
