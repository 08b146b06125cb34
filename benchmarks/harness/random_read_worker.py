"""The process in which engines gather random records: ``python -m harness.random_read_worker REQUESTS REPLIES``."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections import deque
from typing import Any

import torch

import deepnvme
from harness import pattern
from harness.meter import measure
from harness.serving import serve

RECORD = 4096


class Worker:
    """One thread that calls ``Engine.gather``; an engine for each set of options, made on first use."""

    def __init__(self) -> None:
        self._engine = functools.cache(lambda options: deepnvme.Engine(**dict(options)))

    def describe(self) -> dict[str, Any]:
        engine = self._engine(())
        return {"backend": engine.backend, "queue_depth": engine.queue_depth, "num_threads": engine.num_threads}

    def check(self, *, path: str, count: int, seed: int) -> dict[str, Any]:
        """Read some records, and compare them with the pattern that the file holds."""
        (ids,), (out,) = self._ids(path, 1, count), self._outs(1, count)
        self._engine(()).gather(path, ids, out).result()
        for index, row in zip(ids.tolist(), out, strict=True):
            ((_, expected),) = pattern.chunks(seed, index * RECORD, RECORD)
            if row.numpy().tobytes() != expected:
                raise ValueError(f"record {index} is not what the file holds there")
        return {}

    def gather(self, *, path: str, seconds: float, batch: int, in_flight: int, options: dict[str, int]) -> dict[str, Any]:
        """Gather batches of random records for some time, several batches at a time, until the last is there."""
        engine = self._engine(tuple(options.items()))
        ids, outs = self._ids(path, 4 * in_flight, batch), self._outs(in_flight, batch)
        batches = 0

        def read() -> None:
            nonlocal batches
            under_way: deque[deepnvme.Future] = deque()
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                if len(under_way) == in_flight:
                    under_way.popleft().result()
                under_way.append(engine.gather(file, ids[batches % len(ids)], outs[batches % in_flight]))
                batches += 1
            for future in under_way:
                future.result()

        with engine.open(path) as file:
            measured = measure(read)
        return {"reads": batches * batch, **measured}

    def _ids(self, path: str, batches: int, count: int) -> torch.Tensor:
        return torch.randint(os.path.getsize(path) // RECORD, (batches, count))

    @functools.cache  # noqa: B019, the process has one worker
    def _outs(self, batches: int, count: int) -> list[torch.Tensor]:
        return [self._engine(()).empty_pinned((count, RECORD), torch.uint8) for _ in range(batches)]


if __name__ == "__main__":
    serve(Worker, ("check", "gather"), int(sys.argv[1]), int(sys.argv[2]))
