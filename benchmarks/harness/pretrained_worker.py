"""One load of a model by transformers, in a process that has no memory from earlier loads:
``python -m harness.pretrained_worker SETTINGS REQUESTS REPLIES``."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import deepnvme.integrations.safetensors as integration
from harness import checkpoints, llama
from harness.serving import serve


class PretrainedWorker:
    """Imports transformers, and has it save and load a tiny model, so that the load that is measured is only a load."""

    def __init__(self, *, directory: str, enabled: bool) -> None:
        self._directory, self._enabled = Path(directory), enabled
        rehearsal = self._directory.with_name(f"{self._directory.name}.rehearsal")
        llama.save(llama.Shape(128, 1, 100), rehearsal)
        self._load(rehearsal)
        checkpoints.remove(rehearsal)

    def describe(self) -> dict[str, Any]:
        return {"torch": torch.__version__}

    def load(self) -> dict[str, float]:
        """Seconds until every page of the model is in memory, and the sum of its weights' bits."""
        begun = time.perf_counter()
        state = self._load(self._directory)
        checkpoints.touch(state)
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "bits": sum(int(tensor.view(torch.int16).sum()) for tensor in state.values())}

    def _load(self, directory: Path) -> dict[str, torch.Tensor]:
        from transformers import AutoModelForCausalLM

        with integration.enabled() if self._enabled else contextlib.nullcontext():
            return dict(AutoModelForCausalLM.from_pretrained(directory, dtype="auto").state_dict())


def main() -> None:
    settings, request_fd, reply_fd = sys.argv[1:]
    serve(lambda: PretrainedWorker(**json.loads(settings)), ("load",), int(request_fd), int(reply_fd))


if __name__ == "__main__":
    main()
