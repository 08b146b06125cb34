"""A test that must be alone is, and is not kept waiting by ever more others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .support import machine as machines
from .support.patience import PATIENCE

Enter = Callable[[bool], threading.Event]


@pytest.fixture
def enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Enter, threading.Event]]:
    """Sends another in, which stays until the second event; the first is set once it is in."""
    for name in ("_DOOR", "_ROOM"):  # this test is in the real one
        (tmp_path / name).touch()
        monkeypatch.setattr(machines, name, tmp_path / name)
    leave, threads = threading.Event(), []

    def enter(alone: bool) -> threading.Event:
        entered = threading.Event()

        def visit() -> None:
            with machines.machine(alone):
                entered.set()
                leave.wait()

        threads.append(threading.Thread(target=visit))
        threads[-1].start()
        return entered

    yield enter, leave
    leave.set()
    for thread in threads:
        thread.join()


def test_others_are_in_together_and_who_is_alone_waits_for_them_to_leave(enter: tuple[Enter, threading.Event]) -> None:
    send, leave = enter
    assert send(False).wait(PATIENCE)
    assert send(False).wait(PATIENCE)
    alone = send(True)
    assert not alone.wait(0.1)
    late = send(False)  # which may not overtake
    assert not late.wait(0.1)
    leave.set()
    assert alone.wait(PATIENCE)
    assert late.wait(PATIENCE)
