"""What an offloaded optimizer must equal: the plain one in memory, with masters in float32 where parameters are of less."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class InMemory:
    """``optimizer_class`` over float32 copies of the low-precision ones among ``parameters``, and over the others themselves."""

    def __init__(self, parameters: Iterable[torch.Tensor], optimizer_class: type[torch.optim.Optimizer], **options: Any) -> None:
        self._parameters = list(parameters)
        self._stepped = [
            parameter if parameter.dtype == torch.float32 else torch.nn.Parameter(parameter.detach().float())
            for parameter in self._parameters
        ]
        self._optimizer = optimizer_class(self._stepped, **options)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, stepped in zip(self._parameters, self._stepped, strict=True):
            if stepped is not parameter:
                assert parameter.grad is not None
                stepped.grad = parameter.grad.float()
        self._optimizer.step()
        for parameter, stepped in zip(self._parameters, self._stepped, strict=True):
            if stepped is not parameter:
                parameter.copy_(stepped)
                stepped.grad = None

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
