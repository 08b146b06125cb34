"""Finds the line of the user's program that called this package, for warnings and for messages about where an object was made."""

from __future__ import annotations

import sys
from types import FrameType

_NOT_THE_USERS = frozenset(("accelerate", "contextlib", "deepnvme", "deepspeed", "functools", "torch", "transformers"))
"""Top-level modules whose frames are not the user's: this package, and modules between the package and the user's code."""


def caller() -> str:
    """Return file and line of the innermost call that is not of this package: "train.py:12"."""
    frame, _ = _user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def stack_level() -> int:
    """Return the ``stacklevel`` for ``warnings.warn`` in the calling function, so that the warning names the user's line."""
    return _user_frame()[1]


def _user_frame() -> tuple[FrameType, int]:
    """Return the innermost frame of the user's code, and its distance from the caller of this module's public function."""
    frame, level = sys._getframe(2), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    return frame, level
