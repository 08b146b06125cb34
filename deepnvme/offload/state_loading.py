"""Load states from a ``state_dict``: all of them, or none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from deepnvme._interrupts import defer_interrupts

from .io_stats import IOStats
from .partition import local_of
from .pipeline import SubGroupPipeline
from .sub_group import MASTER, Held, SubGroup


@contextlib.contextmanager
def loaded(state: Mapping[str, Any], sub_groups: Sequence[SubGroup], sweep: SubGroupPipeline, traffic: IOStats) -> Iterator[None]:
    """Write new states to the drive, one sub-group at a time, without overwriting the current ones.

    The ``with`` body makes the new states the current ones; interrupts are deferred during it. On an exception before its end,
    sub-groups are as they were.

    Args:
        state: What torch's ``load_state_dict`` passes to ``__setstate__``: "state" by parameter, and "param_groups".
        sub_groups: The sub-groups to load.
        sweep: Writes the blocks.
        traffic: Does not count the writes for a step.
    """
    sweep.abandon()
    undo = [sub_group.remember() for sub_group in sub_groups]
    done = False
    try:
        with traffic.aside():
            for sub_group in sub_groups:
                held = take_over(sub_group, state["state"], state["param_groups"])
                sub_group.layout = None
                if held:
                    sweep.write_now(sub_group, held)
                else:
                    sub_group.current = None
        with defer_interrupts():
            yield
            done = True
    except BaseException:
        if not done:
            for forget in undo:
                forget()
        raise
    finally:
        sweep.abandon()


class Opaque:
    """Wraps a tensor so that torch's ``load_state_dict`` does not cast it, which would copy it and round master weights."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def opaque(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state_dict whose tensors are wrapped in :class:`Opaque`; a ``load_state_dict`` pre-hook."""
    states = {
        param: {key: Opaque(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        for param, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def take_over(sub_group: SubGroup, saved: Mapping[torch.Tensor, Mapping[str, Any]], groups: Sequence[dict[str, Any]]) -> Held:
    """Return the tensors that a sub-group's block has to hold for loaded states, and set its ``small`` values.

    Values are cast as torch's ``load_state_dict`` does: to the parameter's dtype, or to float32 if it has a master weight.

    Args:
        sub_group: Its ``small`` is replaced at once.
        saved: For each parameter, its whole state.
        groups: The parameter groups that belong to these states.
    """
    held: Held = []
    for index, piece in enumerate(sub_group.pieces):
        values = {key: value.value if isinstance(value, Opaque) else value for key, value in saved.get(piece.param, {}).items()}
        master = values.pop(MASTER, None)
        dtype = torch.float32 if sub_group.masters[index] else piece.param.dtype
        if sub_group.masters[index]:
            held.append((index, MASTER, piece.of(piece.param if master is None else master).to("cpu", dtype)))
        small: dict[str, Any] = {}
        for key, value in values.items():
            if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
                small[key] = value
                continue
            if key == "step":
                fused = groups[piece.group].get("fused") or groups[piece.group].get("capturable")
                value = value.to(torch.float32) if fused else value
            elif piece.param.is_floating_point():
                value = value.to(dtype)
            if value.numel() <= 1:
                small[key] = local_of(value).detach().to("cpu", copy=True)
            else:
                held.append((index, key, (local_of(value) if piece.whole else piece.of(value)).to("cpu")))
        sub_group.small[index] = small
    return held
