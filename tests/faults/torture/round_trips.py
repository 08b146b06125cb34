"""What the package does, once each, with all that is read compared: the engine, DeepSpeed's handle, a store, checkpoints, an
optimizer, a training, a streamed model, tables. For machines on which something is missing.
"""

from __future__ import annotations

import copy
import errno
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import deepnvme
import deepnvme.safetensors
from deepnvme.checkpoint import verify
from deepnvme.ops.op_builder import AsyncIOBuilder

from . import Torn, Wrong
from .ways import Committing, CommittingRows, Saving


class RoundTrips:
    """``allowed``: error numbers with which an operation may refuse here, naming a file; what was there before is to be whole."""

    def __init__(self, directory: Path, allowed: tuple[int, ...] = (), elements: int = 300_000) -> None:
        self.directory = directory
        self.allowed = allowed
        self.refused: list[str] = []
        self._tensor = torch.arange(elements, dtype=torch.float32)

    def run(self) -> None:
        """All of them. Raises Wrong or Torn, or an error that is not allowed."""
        for operation in (self.engine, self.handle, self.checkpoints, self.optimizer, self.training, self.weights):
            self._try(operation)
        for way in (Committing, CommittingRows):
            self._try(functools.partial(self.saves, way))

    def _try(self, operation: Callable[[], object]) -> bool:
        try:
            operation()
            return True
        except OSError as error:
            if error.errno not in self.allowed:
                raise
            if not error.filename:
                raise Wrong(f"{operation}: an error that names no file: {error!r}") from error
            self.refused.append(f"{operation}: {errno.errorcode[error.errno]}")
            return False

    def engine(self) -> None:
        back = torch.empty_like(self._tensor)
        with deepnvme.Engine(block_size=64 << 10) as engine:
            pinned = engine.empty_pinned(self._tensor.numel())
            for offset in (0, 7):
                engine.write(self._tensor, self.directory / "file", offset).result()
                for out in (back, pinned):
                    out.zero_()
                    engine.read(out, self.directory / "file", offset).result()
                    _same(out, self._tensor, "the engine")

    def handle(self) -> None:
        handle = AsyncIOBuilder().load().aio_handle()
        back = torch.empty_like(self._tensor)
        path = str(self.directory / "handle")
        handle.async_pwrite(self._tensor, path)
        handle.wait()
        handle.sync_pread(back, path)
        _same(back, self._tensor, "the handle")
        with open(path, "wb") as file:
            handle.async_pwrite(self._tensor[7:], file.fileno())
            handle.wait()
        handle.sync_pread(back[7:], path)
        _same(back[7:], self._tensor[7:], "the handle")

    def saves(self, way: type[Saving]) -> None:
        """Commits of a store and of tables."""
        (directory := self.directory / way.__name__).mkdir()
        saving = way(directory)
        for value in range(3):
            saving.save(value)
            if saving.load() != value:
                raise Wrong(f"{way.__name__} gives another value")

    def checkpoints(self) -> None:
        """Each replaces an older one, which stays where it cannot be."""
        path, large = self.directory / "checkpoint.pt", self.directory / "checkpoint.safetensors"
        old = {"tensor": self._tensor[:1000], "step": 1}
        new = {"tensor": torch.cat([self._tensor] * 3), "step": 2}
        if not self._try(lambda: deepnvme.save(old, path)):
            return
        replaced = self._try(lambda: deepnvme.save(new, path))
        found = deepnvme.load(path)
        expected = new if replaced else old
        if found["step"] != expected["step"] or not torch.equal(found["tensor"], expected["tensor"]):
            raise Torn(f"the checkpoint is neither the {'new' if replaced else 'old'} one nor whole")
        _same(torch.load(path)["tensor"], expected["tensor"], "torch")
        verify(path)
        if self._try(lambda: deepnvme.safetensors.save_file({"tensor": self._tensor}, large)):
            _same(deepnvme.safetensors.load_file(large)["tensor"], self._tensor, "safetensors")
        left = [entry.name for entry in self.directory.iterdir() if "checkpoint" in entry.name and entry not in (path, large)]
        if left:
            raise Wrong(f"a save has left {left}")

    def optimizer(self) -> None:
        def parameters() -> list[torch.nn.Parameter]:
            return [torch.nn.Parameter(self._tensor[:50_000].clone()), torch.nn.Parameter(self._tensor[:7].clone())]

        in_memory, offloaded = parameters(), parameters()
        expected = torch.optim.AdamW(in_memory, lr=1e-2)
        optimizer = deepnvme.OffloadedOptimizer(
            offloaded, torch.optim.AdamW, path=self.directory / "states", sub_group_size=4096, lr=1e-2
        )
        try:
            for step in range(3):
                for mine, theirs in zip(in_memory, offloaded, strict=True):
                    mine.grad = torch.full_like(mine, step + 0.5)
                    theirs.grad = mine.grad.clone()
                expected.step()
                optimizer.step()
            for mine, theirs in zip(in_memory, offloaded, strict=True):
                _same(theirs.detach(), mine.detach(), "the optimizer")
        finally:
            optimizer.close()

    def training(self) -> None:
        """Three steps, with activations on the drive."""
        from deepnvme.offload import OffloadedTraining

        model = _Model()
        mine = copy.deepcopy(model)
        expected = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batch = torch.linspace(-1, 1, 4096 * 100).reshape(4096, 100)
        options: dict[str, Any] = {"memory_budget": 0, "activations": "nvme", "activation_budget": 0}
        with OffloadedTraining(mine, torch.optim.AdamW, path=self.directory / "training", lr=1e-2, **options) as training:
            for _ in range(3):
                training.step(batch)
                expected.zero_grad()
                model(batch).backward()
                expected.step()
            for name, values in training.state_dict()["model"].items():
                _same(values, model.state_dict()[name], "the training")

    def weights(self) -> None:
        """Those of a model that is then streamed."""
        from deepnvme.streaming import WeightStore, stream

        model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 7))
        expected = model(self._tensor[:300]).detach()
        checkpoint = self.directory / "model.pt"
        deepnvme.save(model.state_dict(), checkpoint)
        with WeightStore.build(checkpoint, self.directory / "weights", model=model) as store:
            store.verify()
            with stream(model, store, memory_budget=0), torch.no_grad():
                _same(model(self._tensor[:300]), expected, "the streamed model")


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(100, 100) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def _same(found: torch.Tensor, expected: torch.Tensor, whose: str) -> None:
    if not torch.equal(found, expected):
        raise Wrong(f"{whose} gives other values")
