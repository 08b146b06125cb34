"""A small model whose weights are streamed, and its store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepnvme.streaming import WeightStore

from . import Wrong

BLOCKS = 5
BLOCK_BYTES = 8192
"""Of memory, for the weights of one."""


def model() -> nn.Module:
    """Always the same; its blocks are "0" to "4"."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Linear(32, 32) for _ in range(BLOCKS))).eval()


def built(path: Path) -> WeightStore:
    return WeightStore.build(model(), path, blocks=[str(block) for block in range(BLOCKS)])


def output(streamed: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = streamed(torch.linspace(-1, 1, 64).view(2, 32))
        return result


def check_output(streamed: nn.Module, wanted: torch.Tensor) -> None:
    if not torch.equal(output(streamed), wanted):
        raise Wrong("the model's output is not that of its weights")


def in_another_thread(call: Callable[[], Any]) -> None:
    """A lock that was left taken in this one makes it wait for ever."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
