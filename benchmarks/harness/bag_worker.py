"""The process in which an EmbeddingBag is trained: ``python -m harness.bag_worker REQUESTS REPLIES``."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from typing import Any

import torch

from harness.meter import forget_peak, measure, peak
from harness.serving import serve

_STEPS_DRAWN = 64


class Worker:
    """Steps of an EmbeddingBag and SparseAdam: on a table, or on files mapped into memory, which is what torch itself can do."""

    def describe(self) -> dict[str, Any]:
        return {"torch": torch.__version__}

    def start(
        self, *, how: str, path: str, rows: int, width: int, touched: int, bag: int, memory_budget: int, seed: int
    ) -> dict[str, Any]:
        """Make the bag and its optimizer. ``touched``: rows of a step; ``bag``: of each bag."""
        forget_peak()
        self._before = peak()
        self._how, self._directory = how, Path(path)
        self._shape = rows, width, touched, bag
        self._mappings: list[mmap.mmap] = []
        self._generator = torch.Generator().manual_seed(seed)
        if how == "mapped files":
            weight = self._mapped("weight", rows, width)
            for begin in range(0, rows, 1 << 16):
                weight[begin : begin + (1 << 16)] = _values(begin, min(begin + (1 << 16), rows), width)
            self._bag: Any = torch.nn.EmbeddingBag(rows, width, mode="sum", sparse=True, _weight=weight)
            self._optimizer: Any = torch.optim.SparseAdam(self._bag.parameters(), lr=1e-3)
            state = self._optimizer.state[self._bag.weight]
            state.update(step=0, exp_avg=self._mapped("exp_avg", rows, width), exp_avg_sq=self._mapped("exp_avg_sq", rows, width))
            return {}
        from deepnvme.nn import EmbeddingBagOnDisk
        from deepnvme.tables import RowOptimizer

        self._bag = EmbeddingBagOnDisk(
            rows,
            width,
            mode="sum",
            path=path,
            optimizer=torch.optim.SparseAdam,
            values=lambda begin, end: _values(begin, end, width),
            memory_budget=memory_budget,
        )
        self._optimizer = RowOptimizer(self._bag, lr=1e-3)
        return {}

    def _mapped(self, name: str, rows: int, width: int) -> torch.Tensor:
        with open(f"{self._directory}.{name}", "w+b") as file:
            file.truncate(rows * width * torch.float32.itemsize)
            mapping = mmap.mmap(file.fileno(), 0)
        self._mappings.append(mapping)
        return torch.frombuffer(mapping, dtype=torch.float32).view(rows, width)

    def unmap_pages(self) -> dict[str, Any]:
        """Write mapped files back, and have none of their pages mapped: those cannot be dropped from the page cache."""
        for mapping in self._mappings:
            mapping.flush()
            mapping.madvise(mmap.MADV_DONTNEED)
        return {}

    def step(self, *, steps: int = 1) -> dict[str, Any]:
        """Forward, backward and the optimizer's step, with the loss of the last."""
        rows, _, touched, bag = self._shape
        batches = [
            torch.randperm(rows, generator=self._generator)[:touched]
            if rows < 4 * touched
            else torch.randint(rows, (touched,), generator=self._generator)
            for _ in range(steps)
        ]
        loss = torch.zeros(())

        def run() -> None:
            nonlocal loss
            for ids in batches:
                loss = self._bag(ids.view(-1, bag)).square().mean()
                loss.backward()
                self._optimizer.step()
                self._optimizer.zero_grad()

        return {**measure(run), "loss": loss.item()}

    def growth(self) -> dict[str, Any]:
        """How far memory has grown since the start."""
        return {"growth": peak() - self._before}


def _values(begin: int, end: int, width: int) -> torch.Tensor:
    """Values of rows that are alike for all contenders, whichever way they are made."""
    numbers = torch.arange(begin * width, end * width, dtype=torch.float32).view(end - begin, width)
    return torch.sin_(numbers)


if __name__ == "__main__":
    serve(Worker, ("start", "unmap_pages", "step", "growth"), int(sys.argv[1]), int(sys.argv[2]))
