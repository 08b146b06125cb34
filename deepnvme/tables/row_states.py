"""Finds out which states an optimizer keeps for each row, by running it on a parameter of three rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .layout import State
from .table import Table

OptimizerFactory = Callable[..., torch.optim.Optimizer]
"""A class of optimizers, or a ``functools.partial`` of one: called with a list of parameters."""

_ROWS = 3
_REMEDY = (
    "rows on the drive are trained by optimizers that take sparse gradients and change only the rows in them:"
    " torch.optim.SGD without momentum and weight decay, torch.optim.Adagrad without weight decay, torch.optim.SparseAdam,"
    " or deepnvme.tables.RowWiseAdagrad"
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
        ValueError: If the optimizer cannot train single rows: it takes no sparse gradients, changes rows without gradients, or
            turns rows into NaN where their gradient is 0.
    """
    name = optimizer_name(optimizer)
    parameter = torch.nn.Parameter(torch.ones(_ROWS, embedding_dim, dtype=dtype))
    tried = optimizer([parameter])
    before = copied({key: value for key, value in tried.state[parameter].items() if not _is_per_row(value)})
    state = tried.state[parameter]
    try:
        # Optimizers such as SparseAdam make their states in the first step. The last row has no gradient in it: its states are
        # what all rows begin with.
        _step(tried, parameter, 0, 0.0)
        if parameter.isnan().any():
            raise ValueError(
                f"{name} makes NaN of rows in {dtype} where their gradient is 0, in memory too, as it divides by an eps that is 0"
                f" in this dtype: give a larger one, optimizer=functools.partial(torch.optim.{name}, eps=1e-4)"
            )
        initial = {key: value[-1].clone() for key, value in state.items() if _is_per_row(value)}
        # A step with gradients for other rows must leave the last row and its states as they are: it would not be read.
        for row in (0, 1):
            untouched = {key: value[2:].clone() for key, value in state.items() if _is_per_row(value)}
            _step(tried, parameter, row, 1.0)
            if not all(torch.equal(state[key][2:], value) for key, value in untouched.items()):
                raise ValueError(f"{name} changes the states of rows that have no gradient: {_REMEDY}")
        if not torch.equal(parameter[2:], torch.ones_like(parameter[2:])):
            raise ValueError(f"{name} changes rows that have no gradient: {_REMEDY}")
        # Row 0 had a gradient before, and has none now: momentum would change it nevertheless.
        first = parameter[0].clone()
        _step(tried, parameter, 1, 1.0)
        if not torch.equal(parameter[0], first):
            raise ValueError(f"{name} changes rows that have no gradient: {_REMEDY}")
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name} cannot train rows on the drive ({error}): {_REMEDY}") from error
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    if any(value.is_sparse or (value.dim() and not _is_per_row(value)) for value in tensors):
        raise ValueError(f"{name} has states that do not belong to single rows: {_REMEDY}")
    rows = {}
    for key, value in initial.items():
        if value.numel() and not bool((value == value.flatten()[0]).all()):
            raise ValueError(f"the state {key!r} of {name} does not begin with one value: {_REMEDY}")
        rows[key] = State(value.dtype, tuple(value.shape), float(value.flatten()[0]) if value.numel() else 0.0)
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


def _step(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, row: int, gradient: float) -> None:
    values = torch.full((1, parameter.shape[1]), gradient, dtype=parameter.dtype)
    parameter.grad = torch.sparse_coo_tensor(torch.tensor([[row]]), values, parameter.shape, check_invariants=False)
    optimizer.step()


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
