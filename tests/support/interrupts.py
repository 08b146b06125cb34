"""Ctrl-C where a test wants it."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import deepnvme
from deepnvme.cache.block_cache import BlockCache

from .engines import transfers_are

_PACKAGE = Path(deepnvme.__file__).parent


@contextlib.contextmanager
def lost_in_finalizers() -> Iterator[None]:
    """A Ctrl-C that comes in a finalizer, or in a callback of the garbage collector, is lost: Python only reports it."""
    report = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            report(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = report


class ctrl_c_every:
    """Ctrl-C every so many seconds, heard where the package's code runs in the main thread. ``count``: how often it was heard.

    A test's own lines are spared, so that each KeyboardInterrupt comes out of the call that the test has made.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._press)
        self.count = 0

    def __enter__(self) -> ctrl_c_every:
        self._before = signal.signal(signal.SIGINT, self._hear)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        signal.signal(signal.SIGINT, self._before)

    def _press(self) -> None:
        while not self._ended.wait(self._seconds):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        while frame is not None and not frame.f_code.co_filename.startswith(str(_PACKAGE)):
            frame = frame.f_back
        if frame is not None:
            self.count += 1
            raise KeyboardInterrupt


class LateTransfer:
    """The future of a transfer that ends when somebody waits for it."""

    def __init__(self, future: Any) -> None:
        self._future = future
        self._waited = False

    def done(self) -> bool:
        return self._waited

    def exception(self, timeout: float | None = None) -> Any:
        self._waited = True
        return self._future.exception()

    def result(self, timeout: float | None = None) -> Any:
        self._waited = True
        return self._future.result()


@contextlib.contextmanager
def ctrl_c_in_a_wait_for(operation: str) -> Iterator[None]:
    """Ctrl-C in the first wait of a block cache for such a transfer, a "read" or a "write", none of which ends before."""
    of_cache, pressed = BlockCache._is_write, False

    def late(name: str, sound: Any) -> Any:
        return lambda *arguments: LateTransfer(sound(*arguments))

    def is_write(cache: BlockCache, wait: Any) -> bool:
        nonlocal pressed
        writes = of_cache(cache, wait)
        if writes == (operation == "write") and not pressed:
            pressed = True
            signal.raise_signal(signal.SIGINT)  # is heard when the change ends, before the wait
        return writes

    with transfers_are(late), mock.patch.object(BlockCache, "_is_write", is_write):
        yield
    assert pressed
