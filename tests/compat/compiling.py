"""Compiles the ops that the tests against DeepSpeed use, so that no test's time runs meanwhile.

    python -m tests.compat.compiling

For the interpreter that has DeepSpeed. What is compiled already is only loaded.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import deepspeed.ops.op_builder as theirs
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder

from deepnvme.ops.op_builder import AsyncIOBuilder

_BUILDERS = (CPUAdamBuilder, theirs.AsyncIOBuilder, ShareMemCommBuilder, theirs.PinMemoryBuilder, AsyncIOBuilder)


def _compile(number: int) -> str:
    """Compile one op. Returns its name."""
    _BUILDERS[number]().load(verbose=False)
    return str(_BUILDERS[number].NAME)


if __name__ == "__main__":
    # Two ops at a time: most have one or two files that take a minute each, and keep one core busy.
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for name in pool.map(_compile, range(len(_BUILDERS))):
            print("compiled:", name, flush=True)
