"""Track which states the optimizer has for a sub-group, and which of them are swapped; both may change in each step."""

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
    """Keeps the swapped states of sub-groups in accordance with ``optimizer.state``.

    Args:
        optimizer: A torch optimizer; ``state`` is used.
        cache: Where tensors are in memory and on their way to files.
        folder: The folder of the swap files.
    """

    def __init__(self, optimizer: Any, cache: TileCache, folder: str) -> None:
        self._optimizer = optimizer
        self._cache = cache
        self._folder = folder

    def adopt(self, info: OptimizerStateSwapInfo, is_swappable: Callable[[torch.Tensor], bool]) -> None:
        """Update a sub-group's tiles to the current tensors of its parameter and states, before these are taken out of memory.

        Tensors that the optimizer has created or replaced are copied into tiles. Tiles of states that it has removed are dropped.

        Args:
            info: The sub-group, which is swapped in.
            is_swappable: Whether a tensor is large enough to be swapped.

        Raises:
            OSError: From an earlier write. Nothing is changed then.
            OutOfBuffers: If there is not enough memory. Nothing is changed then.
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
        """Drop swapped states that the optimizer has removed or replaced since they were swapped out."""
        state = self._state(info)
        for name in [name for name in info.states if not info.is_swapped(name, state.get(name))]:
            self._cache.discard(info.states.pop(name).tile)

    def save(self, info: OptimizerStateSwapInfo) -> None:
        """Write a file with the sub-group's states that are not swapped, and a list of all its states. Raises OSError."""
        state = self._state(info)
        swapped = {name: (each.shape, each.stride, each.tensor.dtype) for name, each in info.states.items()}
        kept = {name: value for name, value in state.items() if name not in swapped}
        saved_states.save(saved_states.path_of(self._folder, info.param_id), SavedStates(kept, swapped, list(state)))

    def restore(self, info: OptimizerStateSwapInfo) -> None:
        """Read the file of :meth:`save`, which may be of another checkpoint now, and set the optimizer's states accordingly.

        This sets which states there are, and the values of those that are not swapped. States whose values a file could not have
        stay as they are. Does nothing without a file. Raises OSError.
        """
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
    """Return whether a value is a dense CPU tensor, the only kind that can be swapped."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and value.device.type == "cpu"
