"""Ctrl-C at any point where CPython looks for signals."""

from __future__ import annotations

import _thread
import dis
import functools
import signal
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, TypeVar

import torch

import deepnvme

from ...support.interrupts import lost_in_finalizers

World = TypeVar("World")

_TESTS = str(Path(__file__).resolve().parents[2])
_CALLS = frozenset(
    dis.opmap[name]
    for name in ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "CALL_FUNCTION", "CALL_FUNCTION_KW", "CALL_METHOD")
    if name in dis.opmap
)
_JUMPS_BACK = frozenset(dis.opmap[name] for name in ("JUMP_BACKWARD", "JUMP_ABSOLUTE") if name in dis.opmap)
_RESUME = dis.opmap.get("RESUME")


class Interruption:
    """Sends this process SIGINT at the n-th point, of the code run in the ``with`` block by this, the main, thread.

    The points are those where the interpreter looks for signals: a function or generator begins or goes on, a call has
    returned, a loop begins again. It is as a real signal, so that code which has another handler meanwhile is not interrupted.
    Code of the tests is left out, and so is what ``skip`` names: prefixes of paths of source files.

    With ``number`` 0 the points are only counted. ``by``: other signals, at once, whose handlers raise something.
    """

    def __init__(self, number: int, skip: tuple[str, ...] = (), by: tuple[signal.Signals, ...] = (signal.SIGINT,)) -> None:
        self._number, self._signals = number, by
        self._skip = (_TESTS, "<frozen importlib", *skip)
        self._lost = lost_in_finalizers()
        self._before: dict[FrameType, int] = {}  # the offset of the instruction executed last
        self._traced = self._trace  # CPython 3.11 only borrows it, and a finalizer in the midst of an event may end the tracing
        self.passed = 0
        self.where = ""
        """The point at which the signal was sent; empty if the block ended first."""

    def __enter__(self) -> Interruption:
        self._lost.__enter__()
        sys.settrace(self._traced)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._lost.__exit__(None, None, None)
        self._before.clear()

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_filename.startswith(self._skip):
            return None
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            # A generator that is thrown an exception is not at its RESUME, and looks for no signal.
            if frame.f_lasti < 0 or _RESUME is None or code.co_code[frame.f_lasti] == _RESUME:
                self._point(frame)
        elif event == "opcode":
            before, now = self._before.get(frame), frame.f_lasti
            if code.co_code[now] in _JUMPS_BACK or (before is not None and _is_after_call(code, before, now)):
                self._point(frame)
            self._before[frame] = now
        elif event in ("return", "exception"):  # after a call that raised, the interpreter does not look for signals
            self._before.pop(frame, None)
        return self._trace

    def _point(self, frame: FrameType) -> None:
        self.passed += 1
        if self.passed == self._number:
            sys.settrace(None)
            self._before.clear()
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
            list(map(_thread.interrupt_main, self._signals))  # at once: CPython looks for them after that


def _is_after_call(code: CodeType, before: int, now: int) -> bool:
    """Whether what is raised here is as good as raised in a call that has just returned, where the interpreter looks for signals.

    It is not where the call is the last instruction of a block: ``return f()`` in a ``with`` would end without ``__exit__``.
    """
    return code.co_code[before] in _CALLS and _handler(code, before) == _handler(code, now)


@functools.cache
def _handlers(code: CodeType) -> list[tuple[int, int, int]]:
    """First offset, end and handler of each block; none before Python 3.11, whose blocks are made by instructions."""
    return [(entry.start, entry.end, entry.target) for entry in getattr(dis.Bytecode(code), "exception_entries", ())]


def _handler(code: CodeType, offset: int) -> int | None:
    return next((handler for start, end, handler in _handlers(code) if start <= offset < end), None)


def all_but(*modules: ModuleType) -> tuple[str, ...]:
    """What to ``skip`` for points in these modules of the package alone."""
    kept = {module.__file__ for module in modules}
    own = (str(path) for path in Path(deepnvme.__file__).parent.rglob("*.py"))
    libraries = sysconfig.get_paths()
    others = ("<frozen", libraries["stdlib"], libraries["purelib"], str(Path(torch.__file__).parent))
    return (*(path for path in own if path not in kept), *others)


def interrupted(number: int, operation: Callable[[], object], skip: tuple[str, ...] = ()) -> Interruption:
    """Run ``operation`` with Ctrl-C at its n-th point. KeyboardInterrupt ends here; other exceptions go on."""
    interruption = Interruption(number, skip)
    try:
        with interruption:
            operation()
    except KeyboardInterrupt:
        if not interruption.where:
            raise  # it is somebody's who wants the tests to end
    return interruption
