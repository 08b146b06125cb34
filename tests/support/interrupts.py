"""Ctrl-C where a test wants it."""

from __future__ import annotations

import contextlib
import linecache
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import deepnvme

_PACKAGE = Path(deepnvme.__file__).parent
_PARTS = ("memory", "transfer", "store", "offload", "integrations/deepspeed/swap_tensor", "integrations/tensornvme")
INTERRUPTED = tuple(str(_PACKAGE / part) for part in _PARTS)


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


class interrupt_at:
    """Ctrl-C where the package's code for memory, stores and swapping, or TensorNVMe's classes, begins a line for the n-th time.
    Lines of ``with`` are left out: there is such a moment between the end of the block and its being left, in which the
    interpreter never is interrupted."""

    def __init__(self, number: int) -> None:
        self._left = number
        self._lost = lost_in_finalizers()
        self._traced = self._trace  # CPython 3.11 only borrows it, and a finalizer in the midst of an event may end the tracing
        self.passed = 0

    def __enter__(self) -> interrupt_at:
        self._lost.__enter__()
        sys.settrace(self._traced)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._lost.__exit__(None, None, None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(INTERRUPTED):
            return None
        if event == "line" and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            self.passed += 1
            if self.passed == self._left:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._trace
