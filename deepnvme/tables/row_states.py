"""Finds out which states an optimizer keeps for each row, by running it on a parameter of a few rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .layout import State
from .row_wise_adagrad import RowWiseAdagrad
from .table import Table

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


def as_number(value: Any) -> int | float:
    """Return a state of the whole table as a number, which JSON can hold. Raises ValueError if it is no number."""
    number = value.item() if isinstance(value, torch.Tensor) else value
    if not isinstance(number, int | float):
        raise ValueError(f"a state of a table must be a number, got {value!r}")
    return number
