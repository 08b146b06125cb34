"""Ops and stand-ins are compiled before a test's clock starts: at a load of 20 on two cores that takes ten minutes."""

from __future__ import annotations

import contextlib
import functools

from deepnvme.ops.op_builder import OpBuilder


@functools.cache
def compile_first(builder: type[OpBuilder]) -> None:
    """Have the op loaded by now. Tried once: the fixture that needs it says why it cannot be had."""
    with contextlib.suppress(Exception):
        builder().load()
