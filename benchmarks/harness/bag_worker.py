"""The process in which an EmbeddingBag is trained: ``python -m harness.bag_worker REQUESTS REPLIES``."""

from __future__ import annotations

import mmap
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
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
        self,
        *,
        how: str,
        path: str,
        rows: int,
        width: int,
        touched: int,
        bag: int,
        memory_budget: int,
        seed: int,
        tables: int,
    ) -> dict[str, Any]:
        """Make the bag and its optimizer. ``touched``: rows of a step; ``bag``: of each bag.

        With ``tables`` there is a collection of so many tables, which share the rows.
        """
        forget_peak()
        self._before = peak()
        self._how, self._directory = how, Path(path)
        self._shape = rows, width, touched, bag
        self._mappings: list[mmap.mmap] = []
        self._generator = torch.Generator().manual_seed(seed)
        self._tables = [f"table{number}" for number in range(tables)]
        if tables:
            self._make_collection(rows // tables, width, bag, memory_budget)
            return {}
        if how == "mapped files":
            weight = self._mapped("weight", rows, width)
            _fill(weight)
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

    def _make_collection(self, rows: int, width: int, bag: int, memory_budget: int) -> None:
        if self._how == "mapped files":
            self._bag = torch.nn.ModuleDict()
            for name in self._tables:
                weight = self._mapped(f"{name}.weight", rows, width)
                _fill(weight)
                self._bag[name] = torch.nn.EmbeddingBag(rows, width, mode="sum", sparse=True, _weight=weight)
            self._optimizer = torch.optim.SparseAdam(self._bag.parameters(), lr=1e-3)
            for name in self._tables:
                states = {each: self._mapped(f"{name}.{each}", rows, width) for each in ("exp_avg", "exp_avg_sq")}
                self._optimizer.state[self._bag[name].weight].update(step=0, **states)
            return
        from deepnvme.integrations.torchrec import EmbeddingBagCollectionOnDisk
        from deepnvme.tables import RowOptimizer

        configs = [
            SimpleNamespace(
                name=name, num_embeddings=rows, embedding_dim=width, feature_names=[name], pooling="sum", init_fn=_Filling()
            )
            for name in self._tables
        ]
        self._bag = EmbeddingBagCollectionOnDisk(
            configs, path=self._directory, optimizer=torch.optim.SparseAdam, memory_budget=memory_budget
        )
        self._optimizer = RowOptimizer(self._bag, lr=1e-3)

    def _pooled(self, ids: torch.Tensor, bag: int) -> torch.Tensor:
        """Return the forward's result."""
        if not self._tables:
            return self._bag(ids.view(-1, bag))  # type: ignore[no-any-return]
        given = {
            name: each % (self._shape[0] // len(self._tables))
            for name, each in zip(self._tables, ids.chunk(len(self._tables)), strict=True)
        }
        if self._how == "mapped files":
            return torch.cat([self._bag[name](each.view(-1, bag)) for name, each in given.items()], dim=1)
        return self._bag(KeyedJaggedTensor(given, bag)).values  # type: ignore[no-any-return]

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
                loss = self._pooled(ids, bag).square().mean()
                loss.backward()
                self._optimizer.step()
                self._optimizer.zero_grad()

        return {**measure(run), "loss": loss.item()}

    def growth(self) -> dict[str, Any]:
        """How far memory has grown since the start."""
        return {"growth": peak() - self._before}


class _Filling:
    """Fills the rows of a table with the values of ``_fill``, some at a time."""

    def __init__(self) -> None:
        self._at = 0

    def __call__(self, rows: torch.Tensor) -> None:
        rows.copy_(_values(self._at, self._at + len(rows), rows.shape[1]))
        self._at += len(rows)


def _fill(weight: torch.Tensor) -> None:
    for begin in range(0, len(weight), 1 << 16):
        part = weight[begin : begin + (1 << 16)]
        part.copy_(_values(begin, begin + len(part), weight.shape[1]))


class KeyedTensor(SimpleNamespace):
    """TorchRec's class of results, which is not needed for the comparison."""


class KeyedJaggedTensor:
    """TorchRec's class of features, with bags of equally many ids."""

    def __init__(self, ids: dict[str, torch.Tensor], bag: int) -> None:
        self._ids, self._bag = ids, bag

    def inverse_indices_or_none(self) -> None:
        return None

    def to_dict(self) -> dict[str, Any]:
        return {
            name: SimpleNamespace(values=partial(_same, ids), offsets=partial(torch.arange, 0, len(ids) + 1, self._bag))
            for name, ids in self._ids.items()
        }


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _values(begin: int, end: int, width: int) -> torch.Tensor:
    """Values of rows that are alike for all contenders, whichever way they are made."""
    numbers = torch.arange(begin * width, end * width, dtype=torch.float32).view(end - begin, width)
    return torch.sin_(numbers)


if __name__ == "__main__":
    serve(Worker, ("start", "unmap_pages", "step", "growth"), int(sys.argv[1]), int(sys.argv[2]))
