"""Adagrad with one accumulator for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator per row: the sum of the mean squares of the row's gradients.

    The same as FBGEMM's EXACT_ROWWISE_ADAGRAD: ``sum += mean(gradient ** 2)``, then
    ``row -= lr * gradient / (sqrt(sum) + eps)``. Takes sparse gradients, as ``nn.Embedding(sparse=True)`` has them, and dense
    ones. The sum is float32; float64 for float64 rows.

    Args:
        params: Parameters, whose first dimension is the row.
        lr: Learning rate.
        eps: Added to the denominator.
        initial_accumulator_value: Initial value of the sums.
    """

    def __init__(self, params: Any, lr: float = 1e-2, eps: float = 1e-8, initial_accumulator_value: float = 0.0) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("initial_accumulator_value", initial_accumulator_value)):
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        super().__init__(params, {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change the rows that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._change(parameter, parameter.grad, group)
        return loss

    def _change(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        if not state:
            initial = float(group["initial_accumulator_value"])
            state["sum"] = torch.full(parameter.shape[:1], initial, dtype=dtype, device=parameter.device)
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
        else:
            rows, values = torch.arange(len(parameter), device=parameter.device), gradient
        wide = values.to(dtype)
        sums = state["sum"].index_select(0, rows) + wide.square().flatten(1).mean(1)
        state["sum"].index_copy_(0, rows, sums)
        scale = (float(group["lr"]) / (sums.sqrt() + group["eps"])).view(-1, *[1] * (values.dim() - 1))
        changed = parameter.index_select(0, rows).to(dtype) - scale * wide
        parameter.index_copy_(0, rows, changed.to(parameter.dtype))
