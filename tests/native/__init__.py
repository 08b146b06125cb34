"""The engine compiled with backends for tests (one that fails on command, one that completes at once, simulated drives); and the
kernels of quantisation as they are for a processor of which nothing is known."""

import os
from pathlib import Path

from deepnvme.ops.op_builder import AsyncIOBuilder

HERE = Path(__file__).resolve().parent


class EngineTestingBuilder(AsyncIOBuilder):
    NAME = "engine_testing"

    def sources(self) -> list[str]:
        op_only = {f"csrc/bindings/{name}.cpp" for name in ("async_io", "aio_handle", "checkpoint_binding", "memory_binding")}
        return [*(source for source in super().sources() if source not in op_only), str(HERE / "engine_testing.cpp")]

    def cxx_args(self) -> list[str]:
        return [*super().cxx_args(), "-DDEEPNVME_PLAIN_KERNELS"]

    def include_paths(self) -> list[str]:
        # A relative one is ours, and a change to a header there makes a new build.
        return [*super().include_paths(), os.path.relpath(HERE, self._path("."))]
