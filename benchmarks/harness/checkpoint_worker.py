"""A checkpoint in a process of its own, so that its memory can be seen:
``python -m harness.checkpoint_worker SETTINGS REQUESTS REPLIES``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import deepnvme
from deepnvme.memory.pool import BufferPool
from harness import checkpoints
from harness.meter import measure
from harness.serving import serve


class CheckpointWorker:
    def __init__(self, *, width: int, layers: int, vocabulary: int, directory: str) -> None:
        self._state = checkpoints.transformer(width, layers, vocabulary)
        self._path = Path(directory) / "memory.pt"
        # Code and allocator arenas that come with the first use of anything are not the checkpoint's.
        deepnvme.save({"tiny": torch.zeros(1)}, self._path)
        deepnvme.load(self._path)
        deepnvme.async_save({"tiny": torch.zeros(1)}, self._path).result()

    def describe(self) -> dict[str, Any]:
        return {"torch": torch.__version__, "bytes": checkpoints.nbytes_of(self._state)}

    def save(self) -> dict[str, float | int | None]:
        """Bytes by which saving exceeds what the state takes."""
        return {"growth": measure(lambda: deepnvme.save(self._state, self._path))["peak_growth"]}

    def async_save(self, *, budget: int) -> dict[str, float | int | None]:
        pool = BufferPool(budget)
        return {"growth": measure(lambda: deepnvme.async_save(self._state, self._path, pool=pool).result())["peak_growth"]}


def main() -> None:
    settings, request_fd, reply_fd = sys.argv[1:]
    serve(lambda: CheckpointWorker(**json.loads(settings)), ("save", "async_save"), int(request_fd), int(reply_fd))


if __name__ == "__main__":
    main()
