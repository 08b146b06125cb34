"""Compiles the ops that the tests against DeepSpeed use, so that no test's time runs meanwhile.

    python -m tests.compat.compiling

For the interpreter that has DeepSpeed. What is compiled already is only loaded.
"""

from __future__ import annotations

import deepspeed.ops.op_builder as theirs
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder

from deepnvme.ops.op_builder import AsyncIOBuilder

if __name__ == "__main__":
    for builder in (AsyncIOBuilder, theirs.AsyncIOBuilder, theirs.PinMemoryBuilder, CPUAdamBuilder, ShareMemCommBuilder):
        builder().load(verbose=False)
        print("compiled:", builder.NAME, flush=True)
