"""Copies of a module's buffers, to undo what a forward changes in them."""

from __future__ import annotations

import torch
from torch import nn


class BufferCopies:
    """Brings back the buffers of a module, such as the statistics of a BatchNorm, as they were before a forward.

    All are copied, since version counters do not tell of all changes: those of a BatchNorm do not.

    Args:
        module: The module, with all modules in it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._copies: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []  # module, name, buffer, copy

    def take(self) -> None:
        """Copy all buffers of the module and its submodules, for :meth:`put_back`. Replaces earlier copies."""
        self._copies = [
            (module, name, buffer, buffer.detach().clone())
            for module in self._module.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def put_back(self) -> None:
        """Give the buffers the content that they had at the last :meth:`take`, unless :meth:`forget` was called since."""
        for module, name, buffer, copy in self._copies:
            buffer.data.copy_(copy)  # without a new version: a backward that has saved the buffer need not raise
            module._buffers[name] = buffer

    def forget(self) -> None:
        """Drop the copies: the content of the buffers stays."""
        self._copies.clear()
