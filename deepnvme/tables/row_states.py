"""The optimizers that train rows, and the states that they keep for each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .layout import State
from .table import Table


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


OptimizerFactory = Callable[..., torch.optim.Optimizer]
"""A class of optimizers, or a ``functools.partial`` of one: called with a list of parameters."""

_ROWS = 3
_SUPPORTED = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam, RowWiseAdagrad)
_REMEDY = (
    "rows on the drive are trained by torch.optim.SGD without momentum and weight decay, torch.optim.Adagrad without weight"
    " decay, torch.optim.SparseAdam, or deepnvme.tables.RowWiseAdagrad"
)


@dataclass(frozen=True)
class OptimizerStates:
    """The states that an optimizer keeps for a table."""

    rows: Mapping[str, State]
    """States that each row has: dtype, shape and initial value, by name."""
    table: Mapping[str, Any]
    """States of the whole table before the first step, such as the number of steps; empty if the first step makes them."""
    names: tuple[str, ...]
    """Names of all states, in the optimizer's order."""

    @property
    def all_by_row(self) -> bool:
        """Whether all states belong to single rows, and none to the whole table."""
        return set(self.names) == set(self.rows)


def optimizer_name(optimizer: OptimizerFactory) -> str:
    """Return the name of an optimizer's class."""
    inner = getattr(optimizer, "func", optimizer)
    return str(getattr(inner, "__name__", inner))


def states_of(optimizer: OptimizerFactory, dtype: torch.dtype, embedding_dim: int) -> OptimizerStates:
    """Return the states that an optimizer keeps for a table of rows of ``embedding_dim`` elements.

    Raises:
        ValueError: If the optimizer cannot train single rows, or turns rows into NaN where their gradient is 0.
    """
    parameter = torch.nn.Parameter(torch.ones(_ROWS, embedding_dim, dtype=dtype))
    tried = optimizer([parameter])
    name = optimizer_name(optimizer)
    if type(tried) not in _SUPPORTED or any(tried.defaults.get(each) for each in ("momentum", "weight_decay")):
        raise ValueError(f"{name} cannot train rows on the drive: {_REMEDY}")
    state = tried.state[parameter]
    before = copied({key: value for key, value in state.items() if not _is_per_row(value)})
    # SparseAdam makes its states in the first step. The last row has no gradient in it: its states are what all rows begin with.
    values = torch.zeros(1, embedding_dim, dtype=dtype)
    parameter.grad = torch.sparse_coo_tensor(torch.tensor([[0]]), values, parameter.shape, check_invariants=False)
    tried.step()
    if parameter.isnan().any():
        raise ValueError(
            f"{name} makes NaN of rows in {dtype} where their gradient is 0, in memory too, as it divides by an eps that is 0"
            f" in this dtype: give a larger one, optimizer=functools.partial(torch.optim.{name}, eps=1e-4)"
        )
    rows = {
        key: State(value.dtype, tuple(value.shape[1:]), float(value[-1].flatten()[0]))
        for key, value in state.items() if _is_per_row(value)
    }  # fmt: skip
    return OptimizerStates(rows, before, tuple(state))


def check_states(table: Table, optimizer: OptimizerFactory) -> OptimizerStates:
    """Return the states that an optimizer keeps for a table. Raises ValueError if the table stores other states."""
    states = states_of(optimizer, table.dtype, table.row_shape[0])
    wanted = {name: (state.dtype, tuple(state.shape)) for name, state in states.rows.items()}
    if table.states != wanted:
        raise ValueError(
            f"{table} was made for an optimizer with the states {table.states or 'none'}, and {optimizer_name(optimizer)} has"
            f" {wanted or 'none'}: make the table with optimizer={optimizer_name(optimizer)}"
        )
    return states


def _is_per_row(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_sparse and value.dim() > 0 and value.shape[0] == _ROWS


def copied(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of states: an optimizer may change the originals in place."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in states.items()}
