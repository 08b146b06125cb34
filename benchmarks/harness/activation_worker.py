"""Steps with activations in memory and on the drive: ``python -m harness.activation_worker SETTINGS REQUESTS REPLIES``.

A process of its own, so that its memory can be seen, and so that its allocator can be told to keep what was freed.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu

import deepnvme
from harness import activation_models
from harness.activation_models import ChainShape, GPTShape, SavedBytes
from harness.meter import measure
from harness.serving import serve
from harness.torch_save_hooks import TorchSaveHooks

IN_MEMORY = "in memory"
OFFLOADED = "save_on_disk"
OFFLOADED_WITH_ROOM = "save_on_disk, budget for all"
ON_CPU = "save_on_cpu"
ON_CPU_COPIED = "save_on_cpu, copying"
TORCH_SAVE = "torch.save, to the drive"
TORCH_SAVE_CACHED = "torch.save, to the page cache"

MIN_BYTES = 1 << 20
"""The default of save_on_disk. The hook with torch.save leaves smaller tensors in memory as well."""
_BUFFERS = 8
"""Pinned tensors from which the drive's limits are measured."""


class ActivationWorker:
    """A model whose steps are a forward and a backward.

    Args:
        shape: Fields of a GPTShape or a ChainShape.
        directory: Where the files are made.
        memory_budget: Bytes, of save_on_disk.
        tiny: A shape of the same kind. A step with it loads all code, before memory is measured.
    """

    def __init__(self, *, shape: dict[str, Any], directory: str, memory_budget: int, tiny: dict[str, Any]) -> None:
        self._shape, self._tiny = _shape(shape), _shape(tiny)
        self._directory = Path(directory)
        self._memory_budget = memory_budget
        self._model, self._input = activation_models.make(self._shape)
        self._offloaders: dict[str, deepnvme.save_on_disk] = {}
        self._expected: list[torch.Tensor] | None = None
        self._limits: _DriveLimits | None = None

    def describe(self) -> dict[str, Any]:
        return {"torch": torch.__version__, "threads": torch.get_num_threads()}

    def saved_bytes(self) -> dict[str, int]:
        """Count what a step saves, and make that step: gradients have memory then, and the heap has room."""
        counted = SavedBytes(self._model, MIN_BYTES)
        with counted:
            loss = self._model(self._input).square().mean()
        loss.backward()
        return {"saved_bytes": counted.nbytes}

    def step(self, *, way: str) -> dict[str, Any]:
        """A forward and a backward. Whether loss and gradients differ from those of the first turn is found out afterwards."""
        self._clear_gradients()
        context = self._context(way)
        begun, cpu_begun = time.perf_counter(), time.process_time()
        with context:
            loss = self._model(self._input).square().mean()
        forward = time.perf_counter() - begun
        loss.backward()
        seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu_begun
        taken: dict[str, Any] = {"seconds": seconds, "forward": forward, "cpu_seconds": cpu_seconds}
        taken["differs"] = self._differs(loss.detach())
        if way in self._offloaders:
            # "seconds" of the report is of the same step, by the offloader's own clock.
            taken |= {name: value for name, value in asdict(self._offloaders[way].report()).items() if name != "seconds"}
        return taken

    def limits(self, *, nbytes: int, count: int) -> dict[str, float]:
        """Bytes that the drive writes and reads in a second: ``count`` tensors of ``nbytes``, all written, then all read."""
        if self._limits is None:
            self._limits = _DriveLimits(self._directory, nbytes, count)
        return self._limits.measure()

    def peak(self, *, way: str, steps: int) -> dict[str, Any]:
        """Bytes of resident memory by which some steps exceed the model, its input and its gradients."""
        tiny, given = activation_models.make(self._tiny)
        with contextlib.ExitStack() as stack:
            # Code, threads and arenas that come with the first use of anything are not the activations'.
            if way == OFFLOADED:
                small = stack.enter_context(contextlib.closing(deepnvme.save_on_disk(self._directory / "tiny", memory_budget=0)))
                stack.enter_context(small)
            loss = tiny(given).square().mean()
        loss.backward()
        for tensor in [*self._model.parameters(), *([self._input] if self._input.requires_grad else [])]:
            tensor.grad = torch.zeros_like(tensor)
        peak_bytes = 0

        def some_steps() -> None:
            nonlocal peak_bytes
            for _ in range(steps):
                with self._context(way):
                    loss = self._model(self._input).square().mean()
                loss.backward()
                if way in self._offloaders:
                    peak_bytes = max(peak_bytes, self._offloaders[way].report().peak_bytes)

        return {"growth": measure(some_steps)["peak_growth"], "peak_bytes": peak_bytes or None}

    def close(self) -> dict[str, Any]:
        """Remove all files."""
        for offloader in self._offloaders.values():
            offloader.close()
        self._offloaders.clear()
        if self._limits is not None:
            self._limits.close()
        return {}

    def _context(self, way: str) -> contextlib.AbstractContextManager[Any]:
        """What the forward runs in."""
        if way == IN_MEMORY:
            return contextlib.nullcontext()
        if way in (ON_CPU, ON_CPU_COPIED):
            return save_on_cpu(pin_memory=way == ON_CPU_COPIED)
        if way in (TORCH_SAVE, TORCH_SAVE_CACHED):
            return TorchSaveHooks(self._model, self._directory, MIN_BYTES, drive=way == TORCH_SAVE)
        if way not in self._offloaders:
            budget = self._memory_budget if way == OFFLOADED else 1 << 40
            path = self._directory / way.replace(" ", "_")
            self._offloaders[way] = deepnvme.save_on_disk(path, memory_budget=budget, min_bytes=MIN_BYTES)
        return self._offloaders[way]

    def _clear_gradients(self) -> None:
        for tensor in (*self._model.parameters(), self._input):
            if tensor.grad is not None:
                tensor.grad.zero_()

    def _differs(self, loss: torch.Tensor) -> int:
        """Whether loss or gradients are others than in the first step, bit by bit; 1 or 0."""
        found = [loss, *(tensor.grad for tensor in (*self._model.parameters(), self._input) if tensor.grad is not None)]
        if self._expected is None:
            self._expected = [tensor.clone() for tensor in found]
        return int(any(not torch.equal(one, other) for one, other in zip(found, self._expected, strict=True)))


class _DriveLimits:
    """A file of tensors that are written and read by an engine with the settings that save_on_disk has in that directory.

    Memory is pinned and aligned, all requests are made at once, and the file is overwritten, as it is from the second step on.
    """

    def __init__(self, directory: Path, nbytes: int, count: int) -> None:
        self._engine = deepnvme.engine_for(directory)
        self._path = directory / "limits"
        self._buffers = [self._engine.empty_pinned(nbytes, torch.uint8).fill_(number) for number in range(min(count, _BUFFERS))]
        self._places = [(self._buffers[number % len(self._buffers)], number * nbytes) for number in range(count)]
        self._run(self._engine.write, self._places)  # allocates the file

    def measure(self) -> dict[str, float]:
        writing = self._run(self._engine.write, self._places)
        reading = self._run(self._engine.read, self._places[::-1])  # in the order of a backward
        total = sum(buffer.nbytes for buffer, _ in self._places)
        return {"seconds": writing + reading, "write": total / writing, "read": total / reading}

    def close(self) -> None:
        self._engine.close()
        self._path.unlink()

    def _run(self, transfer: Any, places: list[tuple[torch.Tensor, int]]) -> float:
        begun = time.perf_counter()
        for future in [transfer(buffer, self._path, offset) for buffer, offset in places]:
            future.result()
        return time.perf_counter() - begun


def _shape(fields: dict[str, Any]) -> GPTShape | ChainShape:
    return GPTShape(**fields) if "width" in fields else ChainShape(**fields)


def main() -> None:
    settings, request_fd, reply_fd = sys.argv[1:]
    methods = ("saved_bytes", "step", "limits", "peak", "close")
    serve(lambda: ActivationWorker(**json.loads(settings)), methods, int(request_fd), int(reply_fd))


if __name__ == "__main__":
    main()
