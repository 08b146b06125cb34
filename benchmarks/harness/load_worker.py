"""One load in a process that has no memory from earlier loads:
``python -m harness.load_worker SETTINGS REQUESTS REPLIES``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from harness import checkpoints
from harness.checkpoints import library
from harness.serving import serve
from harness.workloads import ContenderFailed


class LoadWorker:
    """Imports a library, and has it save and load a tiny state, so that the load that is measured is only a load."""

    def __init__(self, *, name: str, path: str, width: int, layers: int, vocabulary: int) -> None:
        self._library = library(name)
        self._path = Path(path)
        self._shape = width, layers, vocabulary
        tiny = {"tiny": torch.zeros(1)}
        rehearsal = self._path.with_name(f"{self._path.name}.rehearsal")
        self._library.save(tiny, rehearsal)
        self._library.load(rehearsal, tiny)
        checkpoints.remove(rehearsal)

    def describe(self) -> dict[str, Any]:
        return {"torch": torch.__version__}

    def load(self) -> dict[str, float]:
        """Seconds until every page of the state is in memory. Raises ContenderFailed if it is not the state that was saved."""
        shapes = checkpoints.transformer(*self._shape, device="meta")
        begun = time.perf_counter()
        found = self._library.load(self._path, shapes)
        checkpoints.touch(found)
        seconds = time.perf_counter() - begun
        state = checkpoints.transformer(*self._shape)
        wrong = [key for key, tensor in state.items() if not torch.equal(found[key], tensor)]
        if wrong or len(found) != len(state):
            raise ContenderFailed(f"{len(wrong)} of {len(state)} tensors came back differently, {wrong[:1]} first")
        return {"seconds": seconds}


def main() -> None:
    settings, request_fd, reply_fd = sys.argv[1:]
    serve(lambda: LoadWorker(**json.loads(settings)), ("load",), int(request_fd), int(reply_fd))


if __name__ == "__main__":
    main()
