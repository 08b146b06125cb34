"""Training in memory, or with everything on the drive: ``python -m harness.training_worker SETTINGS REQUESTS REPLIES``.

Parameters in float32, or in bfloat16 with masters in float32; torch's fused AdamW. A process of its own shows its memory.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from typing import Any

import torch

from deepnvme.offload.training import OffloadedTraining
from harness import training_models
from harness.in_memory import InMemory
from harness.serving import serve
from harness.training_models import STEPS_TO_SETTLE, TrainingShape
from harness.training_usage import PeakMemory, own_memory, return_freed_memory, transferred
from harness.workloads import ContenderFailed

_OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}


class TrainingWorker:
    """A model that is trained.

    Args:
        shape: Fields of a TrainingShape.
        way: "in memory"; "in parts": in memory without most of the states, for models that do not fit with them; "offloaded".
        directory: Where files are made.
        memory_budget: Bytes of blocks in memory, when offloaded.
        activations: As OffloadedTraining has it.
        activation_budget: Bytes of activations in memory; None for what is the default.
        micro_batches: Backwards in a step.
        accumulation: "vertical" or "horizontal"; None for what is the default.
    """

    def __init__(
        self,
        *,
        shape: dict[str, Any],
        way: str,
        directory: str,
        memory_budget: int = 0,
        activations: str = "memory",
        activation_budget: int | None = None,
        micro_batches: int = 1,
        accumulation: str | None = None,
    ) -> None:
        self._shape, self._directory, self._micro_batches = TrainingShape(**shape), directory, micro_batches
        self._training: OffloadedTraining | None = None
        self._optimizer: InMemory | None = None
        self._share_stepped = 1.0
        self._next = 0
        self._before = 0
        self._options: dict[str, Any] = {
            "memory_budget": memory_budget,
            "activations": activations,
            "activation_budget": activation_budget,
            "micro_batches": micro_batches,
        }
        if accumulation is not None:
            self._options["accumulation"] = accumulation
        if way == "offloaded":
            self._train_a_tiny_one()
            return_freed_memory()
            self._before = own_memory()
            self._model = training_models.make(self._shape)
            self._training = self._offloaded(self._model, directory)
            return_freed_memory()
        else:
            self._model = training_models.make(self._shape)
            stepped = list((self._model if way == "in memory" else self._model.layers[0]).parameters())
            self._share_stepped = sum(param.numel() for param in stepped) / self._shape.elements
            self._optimizer = InMemory(stepped, torch.optim.AdamW, **_OPTIONS)
        for _ in range(STEPS_TO_SETTLE):
            self.step()

    def describe(self) -> dict[str, Any]:
        return {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "elements": self._shape.elements,
        }

    def step(self) -> dict[str, Any]:
        """Forward, backward and the optimizer's step; bytes are this process's, as the kernel counts them."""
        tokens = training_models.batch(self._shape, self._next)
        self._next += 1
        read, written = transferred()
        begun, cpu_begun = time.perf_counter(), time.process_time()
        loss = self._step_in_memory(tokens) if self._training is None else self._training.step(tokens)
        assert loss is not None
        seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu_begun
        now = transferred()
        if self._share_stepped < 1:
            seconds += self._optimizer_seconds * (1 / self._share_stepped - 1)
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "bytes_read": now[0] - read,
            "bytes_written": now[1] - written,
            "loss": loss.item().hex(),
        }

    def peak(self, *, steps: int) -> dict[str, int]:
        """Bytes that this process has for itself at most, in some steps, beyond those before it had the model."""
        with PeakMemory() as memory:
            for _ in range(steps):
                self.step()
        return {"growth": memory.highest - self._before}

    def close(self) -> dict[str, Any]:
        """Remove all files."""
        if self._training is not None:
            self._training.close()
        return {}

    def _step_in_memory(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self._optimizer is not None
        total = torch.zeros(())
        for part in tokens.chunk(self._micro_batches):
            loss = self._model(part) / self._micro_batches
            loss.backward()
            total = total + loss.detach()
        begun = time.perf_counter()
        self._optimizer.step()
        self._optimizer_seconds = time.perf_counter() - begun
        for param in self._model.parameters():
            param.grad = None
        return total

    def _offloaded(self, model: training_models.Llama, directory: str) -> OffloadedTraining:
        masters = self._shape.dtype != "float32"
        given = {"blocks": model.blocks, "path": directory, "master_weights": masters, **self._options, **_OPTIONS}
        try:
            return OffloadedTraining(model, torch.optim.AdamW, **given)
        except TypeError as error:
            # Until OffloadedTraining has the argument.
            if "accumulation" in given and "accumulation" in str(error):
                raise ContenderFailed("not run: this OffloadedTraining has no argument accumulation") from error
            raise

    def _train_a_tiny_one(self) -> None:
        """Code, threads and arenas that come with the first use of anything are not the training's."""
        tiny = dataclasses.replace(self._shape, width=64, layers=1, vocabulary=64)
        with (
            tempfile.TemporaryDirectory(dir=self._directory) as directory,
            self._offloaded(training_models.make(tiny), directory) as training,
        ):
            for step in range(2):
                training.step(training_models.batch(tiny, step))


def main() -> None:
    settings, request_fd, reply_fd = sys.argv[1:]
    methods = ("step", "peak", "close")
    serve(lambda: TrainingWorker(**json.loads(settings)), methods, int(request_fd), int(reply_fd))


if __name__ == "__main__":
    main()
