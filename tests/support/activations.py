"""A small training whose activations are on the drive, its gradients without one, and what is still held after it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepnvme.offload import save_on_disk
from deepnvme.offload.activations.store import ActivationStore

from .patience import until
from .training import same_bits

KIB = 1 << 10
LAYERS = 6
SAVED = 2 * LAYERS
"""Storages that one forward saves: what each layer and each activation function computes, and not the batch or the weights."""


class Training:
    """Layers whose activations take ``nbytes`` each, of which about three fit into the memory budget.

    ``paths``: for :class:`save_on_disk`, as ``options`` are.
    """

    def __init__(self, paths: Any, nbytes: int = 16 * KIB, **options: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = [module for _ in range(LAYERS) for module in (nn.Linear(128, 128), nn.GELU())]
        self.model = nn.Sequential(*layers, nn.Flatten())
        self.params = list(self.model.parameters())
        self.batch = torch.randn(nbytes // 512, 128, generator=torch.Generator().manual_seed(1))
        self.activations = save_on_disk(paths, **{"memory_budget": 3 * nbytes, "min_bytes": 1, **options})
        self.output = self.model(self.batch)
        self.expected = self.gradients(self.output)
        self.output = self.output.detach()

    def forward(self) -> torch.Tensor:
        """Under save_on_disk."""
        with self.activations:
            output: torch.Tensor = self.model(self.batch)
        return output

    def gradients(self, output: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(output, self.params, torch.ones_like(output), **options)

    def step(self) -> None:
        """A forward and a backward. Raises AssertionError unless the gradients are the same bits as without a drive."""
        self.check(self.gradients(self.forward()))

    def check(self, gradients: tuple[torch.Tensor, ...]) -> None:
        for index, (one, other) in enumerate(zip(gradients, self.expected, strict=True)):
            assert same_bits(one, other), f"the gradient of parameter {index} differs"

    def check_nothing_is_held(self) -> None:
        """Of any graph: no memory, no name in the store."""
        gc.collect()
        until(lambda: not held_by(self.activations), "that nothing is held")  # transfers of what was dropped end by themselves


def hooks_are_set() -> bool:
    """Whether tensors that autograd saves in this thread are packed by hooks."""
    output: Any = torch.ones(1, requires_grad=True).exp()
    try:
        output.grad_fn._raw_saved_result.register_hooks(lambda tensor: tensor, lambda tensor: tensor)
    except RuntimeError:  # it has some
        return True
    return False


def held_by(activations: save_on_disk) -> dict[str, Any]:
    """What the store of activations holds, by kind; empty if it is nothing."""
    store = activations._shared_store()
    with store._lock:
        store._free()  # which the next call would do
    return {kind: what for kind, what in _holdings(store).items() if what}


def _holdings(store: ActivationStore) -> dict[str, Any]:
    return {
        "bytes in memory": store._cache.used,
        "blocks in memory": len(store._cache._held),
        "names in the store": store._store.names(),
        "storages known": len(store._known),
        "live": store._live,
        "bytes that may be written": store._unwritten_bytes,
        "dropped": len(store._dropped) + len(store._ending),
    }


def files_below(path: Path) -> list[str]:
    """Names of all files and directories there."""
    return sorted(str(each.relative_to(path)) for each in path.rglob("*"))


@contextlib.contextmanager
def training_in(paths: Any, **options: Any) -> Iterator[Training]:
    """Closed at the end. Arguments: those of :class:`Training`."""
    training = Training(paths, **options)
    with contextlib.closing(training.activations):
        yield training
