"""Which states the optimizer has for a sub-group, and which of them are swapped: found out anew each time it may have changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepnvme._interrupts import defer_interrupts

from . import saved_states
from .saved_states import SavedStates
from .swap_info import OptimizerStateSwapInfo
from .tile_cache import TileCache


class OptimizerStates:
    """``optimizer``: has ``state``. ``folder``: of the swap files."""

    def __init__(self, optimizer: Any, cache: TileCache, folder: str) -> None:
        self._optimizer = optimizer
        self._cache = cache
        self._folder = folder

    def adopt(self, info: OptimizerStateSwapInfo, is_swappable: Callable[[torch.Tensor], bool]) -> None:
        """Have tiles hold what a sub-group's parameter and states are now: what the optimizer made, or put in a state's place, is
        copied, what it dropped goes. Raises OSError and OutOfBuffers, and then has done nothing.

        ``is_swappable``: whether a tensor is large enough.
        """
        state = self._state(info)
        changed = {name: value for name, value in state.items() if not info.is_in_place(name, value)}
        contents = {name: info.copied(value) for name, value in changed.items() if _can_be(value) and is_swappable(value)}
        swapped = {name: info.new_state(name, state[name]) for name in contents}
        try:
            for new in swapped.values():
                self._cache.create(new.tile)
        except BaseException:
            known = info.tiles()
            for new in swapped.values():
                if new.tile not in known:
                    self._cache.discard(new.tile)
            raise
        with defer_interrupts():
            if not info.master.unchanged_place():
                info.master.memory().copy_(info.copied(info.parameter).reshape(-1))
            for name in [name for name in info.states if name not in state or name in changed]:
                old = info.states.pop(name)
                if name not in swapped or swapped[name].tile is not old.tile:
                    self._cache.discard(old.tile)
            for name, new in swapped.items():
                new.memory().copy_(contents[name])
                new.attach()
                info.states[name] = new

    def purge(self, info: OptimizerStateSwapInfo) -> None:
        """Forget those that the optimizer does not have any more as they were swapped out."""
        state = self._state(info)
        for name in [name for name in info.states if not info.is_swapped(name, state.get(name))]:
            self._cache.discard(info.states.pop(name).tile)

    def save(self, info: OptimizerStateSwapInfo) -> None:
        """Have a file of what is in no swap file. Raises OSError."""
        state = self._state(info)
        swapped = {name: (each.shape, each.stride, each.tensor.dtype) for name, each in info.states.items()}
        kept = {name: value for name, value in state.items() if name not in swapped}
        saved_states.save(saved_states.path_of(self._folder, info.param_id), SavedStates(kept, swapped, list(state)))

    def restore(self, info: OptimizerStateSwapInfo) -> None:
        """Have the states of a checkpoint that may have been copied into the folder: which there are, and those not swapped.
        What the file could not have stays as it is."""
        saved = saved_states.load(saved_states.path_of(self._folder, info.param_id))
        if saved is None or not (saved.order or info.parameter in self._optimizer.state):
            return
        state = self._optimizer.state.setdefault(info.parameter, {})
        for name in [name for name in state if name not in saved.order]:
            del state[name]
        for name in saved.order:
            if name in saved.kept:
                state[name] = saved.kept[name]
            elif name in saved.swapped and name not in info.states:
                shape, stride, dtype = saved.swapped[name]
                state[name] = torch.empty(0, dtype=dtype, device="cpu")
                info.states[name] = info.stored_state(name, state[name], shape, stride)
        for name in [name for name in info.states if name not in saved.swapped]:
            self._cache.discard(info.states.pop(name).tile)

    def _state(self, info: OptimizerStateSwapInfo) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state.get(info.parameter, {})
        return state


def _can_be(value: Any) -> bool:
    """Swapped, being an ordinary tensor."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and value.device.type == "cpu"
