"""AdamW in memory or with its states on the drive: ``python -m harness.optimizer_worker SETTINGS REQUESTS REPLIES``.

bfloat16 parameters with masters in float32, or float32 parameters without; torch's fused kernel. A process of its own, so that
its memory can be seen.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch

from deepnvme import OffloadedOptimizer
from harness.in_memory import InMemory
from harness.layers import Layers, loss_of
from harness.meter import measure
from harness.serving import serve

_OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}
_STEPS_TO_SETTLE = 2  # the first makes the states and their files


class OptimizerWorker:
    """``sub_group``: elements; 0 for the optimizer in memory. ``peak``: what will be asked for is memory, not time."""

    def __init__(
        self, *, width: int, layers: int, masters: bool, sub_group: int, memory_budget: int, directory: str, peak: bool = False
    ) -> None:
        dtype = torch.bfloat16 if masters else torch.float32
        self._model = Layers(width, layers, dtype)
        loss_of(self._model, width, dtype).backward()
        self._masters = masters
        self._sub_group, self._memory_budget, self._directory = sub_group, memory_budget, directory
        self._optimizer: InMemory | OffloadedOptimizer | None = None
        if not peak:
            self._optimizer = self._make()
            for _ in range(_STEPS_TO_SETTLE):
                self._optimizer.step()

    def describe(self) -> dict[str, Any]:
        return {"torch": torch.__version__, "elements": sum(each.numel() for each in self._model.parameters())}

    def prepare(self) -> dict[str, float]:
        """Nothing: gradients stay as they are, and which they are takes no time."""
        return {}

    def step(self) -> dict[str, float]:
        assert self._optimizer is not None
        begun = time.perf_counter()
        self._optimizer.step()
        seconds = time.perf_counter() - begun
        if isinstance(self._optimizer, InMemory):
            return {"seconds": seconds}
        report = self._optimizer.report()
        return {
            "seconds": seconds,
            "bytes_read": report.bytes_read,
            "bytes_written": report.bytes_written,
            "computing": report.computing,
            "waiting": report.waiting,
        }

    def peak(self, *, steps: int) -> dict[str, float | int | None]:
        """Bytes by which making the optimizer and a few steps exceed what parameters and gradients take."""
        # Code and allocator arenas that come with the first use of anything are not the optimizer's.
        with tempfile.TemporaryDirectory(dir=self._directory) as directory:
            tiny = torch.nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
            tiny.grad = torch.zeros_like(tiny)
            with OffloadedOptimizer([tiny], torch.optim.AdamW, path=directory, master_weights=True, **_OPTIONS) as optimizer:
                optimizer.step()
                optimizer.step()

        def begin() -> None:
            self._optimizer = self._make()
            for _ in range(steps):
                self._optimizer.step()

        return {"growth": measure(begin)["peak_growth"]}

    def _make(self) -> InMemory | OffloadedOptimizer:
        """The optimizer: in memory, or offloaded if there is a size of sub-groups."""
        if not self._sub_group:
            return InMemory(self._model.parameters(), torch.optim.AdamW, **_OPTIONS)
        return OffloadedOptimizer(
            self._model.parameters(),
            torch.optim.AdamW,
            path=self._directory,
            memory_budget=self._memory_budget,
            master_weights=self._masters,
            sub_group_size=self._sub_group,
            **_OPTIONS,
        )


def main() -> None:
    settings, request_fd, reply_fd = sys.argv[1:]
    serve(lambda: OptimizerWorker(**json.loads(settings)), ("prepare", "step", "peak"), int(request_fd), int(reply_fd))


if __name__ == "__main__":
    main()
