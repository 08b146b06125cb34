"""SIGKILL at a moment drawn by lot, while a child saves, builds or commits again and again.

What is there then is what the child had said was saved, or the next, whole; and what it left behind goes with the next.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import torch

from .. import Leaked, Torn, Wrong
from ..ways import WAYS, Saving

SHORT = 4
SECONDS = 120
_FORKS = multiprocessing.get_context("forkserver")  # of a process that has torch imported and nothing else: in some milliseconds
_FORKS.set_forkserver_preload([__name__])


class Child:
    """A process that saves one value after the other until it is killed, at the end of ``with`` at the latest."""

    last = -1
    """That it has said to be saved, as far as was listened to."""

    def __init__(self, way: type[Saving], *directories: Path, durable: bool = False) -> None:
        self._what = way.__name__
        self._told, tells = _FORKS.Pipe(duplex=False)
        self._process = _FORKS.Process(target=_go_on, args=(way, directories, durable, tells))
        self._process.start()
        tells.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._told.close()

    def listen(self, count: int) -> None:
        """Until it has said so many more. Raises Wrong if it ends."""
        for _ in range(count):
            try:
                self._hear(self._told.recv())
            except EOFError:
                self._process.join()
                raise Wrong(f"{self._what} ended by itself, with {self._process.exitcode}") from None

    def stop(self, by: signal.Signals) -> None:
        """Send it SIGKILL or SIGSTOP, and listen to what it has said before. Raises Wrong if it had ended."""
        assert self._process.pid is not None
        os.kill(self._process.pid, by)
        if by == signal.SIGKILL:
            self._process.join()
        with contextlib.suppress(EOFError):
            while self._told.poll():
                self._hear(self._told.recv())

    def _hear(self, said: int | str) -> None:
        if isinstance(said, str):
            raise Wrong(f"{self._what} ended by itself: {said}")
        self.last = said


def _go_on(way: type[Saving], directories: Sequence[Path], durable: bool, tells: Connection) -> None:
    """Save one value after the other, and say so, until killed."""
    torch.set_num_threads(1)
    value = 0
    try:
        saving = way(*directories, durable=durable)
        while True:
            saving.save(value)
            tells.send(value)  # in one piece: it is killed before or after
            value += 1
    except BaseException:
        tells.send(traceback.format_exc())


def attack(random: Random, directory: Path) -> None:
    way = random.choice(WAYS)
    directories = [directory / f"drive{number}" for number in range(random.randint(1, way.most_drives))]
    for each in directories:
        each.mkdir()
    with Child(way, *directories, durable=random.random() < 0.3) as child:
        child.listen(2)
        time.sleep(random.random() * random.choice([0.02, 0.2, 1.0]))
        child.stop(signal.SIGKILL)
        last = child.last
    check(way(*directories), last, way.__name__)


def check(way: Saving, last: int, what: str) -> None:
    """That the last value that is known to be saved is there, or the next; and nothing of this after another. Raises Torn, Wrong
    or Leaked."""
    try:
        found = way.load()
        if found not in (last, last + 1):
            raise Wrong(f"{found} is there")
        way.save(found + 1)
        if way.load() != found + 1:
            raise Wrong(f"the next left {way.load()}")
        if way.leftovers():
            raise Leaked(f"there are {way.leftovers()} after the next")
    except Exception as error:
        kind = type(error) if isinstance(error, Torn | Wrong | Leaked) else Wrong
        text = str(error) if kind is not Wrong else "".join(traceback.format_exception(error))
        raise kind(f"{what}, after {last} was saved: {text}") from error
