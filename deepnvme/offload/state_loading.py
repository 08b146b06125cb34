"""States taken over from another optimizer: all of them, or none."""

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
    """Write the states that torch's load_state_dict has prepared to the drive, one sub-group after the other, beside what is
    there. The body makes them those that count, with Ctrl-C held back. On an exception before its end all is as it was."""
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
    """A tensor that torch's load_state_dict shall not cast: that would copy it, and round master weights."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def opaque(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A hook before load_state_dict that makes its tensors such."""
    states = {
        param: {key: Opaque(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        for param, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def take_over(sub_group: SubGroup, saved: Mapping[torch.Tensor, Mapping[str, Any]], groups: Sequence[dict[str, Any]]) -> Held:
    """What the sub-group's block has to hold for these states of whole parameters; what is small is the sub-group's at once.

    Cast like torch's load_state_dict does: to the parameter's dtype, or to float32 beside master weights.
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
