"""Copies of a model's buffers, to undo what a forward changes in them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn


class _Copy(NamedTuple):
    buffer: torch.Tensor
    version: int
    """Of the buffer when it was copied: an operation that changes it in place increments it."""
    content: torch.Tensor


class BufferCopies:
    """Brings back the buffers of a model, such as the statistics of a BatchNorm, after a failed step.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies: dict[tuple[nn.Module, str], _Copy] = {}

    def take(self) -> None:
        """Copy all buffers. Those that have not changed since the last call are not copied again."""
        self._copies = {
            (module, name): self._copy(self._copies.get((module, name)), buffer)
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }

    def _copy(self, before: _Copy | None, buffer: torch.Tensor) -> _Copy:
        if before is not None and before.buffer is buffer and before.version == buffer._version:
            return before
        return _Copy(buffer, buffer._version, buffer.detach().clone())

    def put_back(self) -> None:
        """Give the buffers that have changed since :meth:`take` the content that they had."""
        for (module, name), copy in self._copies.items():
            now = module._buffers.get(name)
            if now is not copy.buffer or now._version != copy.version:
                with torch.no_grad():
                    copy.buffer.copy_(copy.content)
                module._buffers[name] = copy.buffer
                self._copies[module, name] = copy._replace(version=copy.buffer._version)
