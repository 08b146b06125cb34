"""The gradients of parameters that several tiles have in common: each tile's by itself, on the drive until they are summed."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .parameter_block import ParameterBlock, absent_like
from .parameter_uses import ScheduledBlocks
from .trained_block import BlockGradients


class _Key(NamedTuple):
    """What gradients are summed for: one parameter in one micro-batch."""

    thread: int
    """Runs the micro-batch."""
    param: nn.Parameter


class _Sum(NamedTuple):
    """Gradients of one parameter, on the drive."""

    stand_in: nn.Parameter
    """Has the sum in ``grad`` while it is in memory."""
    gradients: BlockGradients


class TiedGradients:
    """Sums the gradients of a parameter that several tiles share, as of a head tied to an embedding, on the drive.

    Autograd would keep the head's gradient in memory until the embedding's arrives: for all tiles together that is as large as
    the table, once for each micro-batch. So each tile computes with a stand-in for the parameter, whose gradient arrives in its
    own backward.

    Args:
        modules: Modules and their blocks. Several may have the same block.
        schedule: Has blocks in memory.
        used: Called with each block of which a module's backward has ended.
        arrived: Called with each parameter whose gradient of a micro-batch is complete, in ``grad``.
    """

    def __init__(
        self,
        modules: Mapping[nn.Module, ParameterBlock],
        schedule: ScheduledBlocks,
        used: Callable[[ParameterBlock], None],
        arrived: Callable[[nn.Parameter], None],
    ) -> None:
        self._schedule, self._used, self._arrived = schedule, used, arrived
        tied_params = tied_parameters(modules)
        self._block_of: dict[nn.Parameter, ParameterBlock] = {}
        self._replaced: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._wanted: Counter[_Key] = Counter()  # gradients that have not arrived
        self._sums: dict[_Key, _Sum] = {}
        self._free: dict[nn.Parameter, list[_Sum]] = {}
        self._count = 0
        self._handles: list[RemovableHandle] = []
        for module, block in modules.items():
            own = set(block.params)
            named = module.named_parameters(recurse=False)
            tied = {name: param for name, param in named if param in own and param in tied_params}
            if tied:
                self._block_of.update(dict.fromkeys(tied.values(), block))
                self._handles.append(module.register_forward_pre_hook(functools.partial(self._begin, tied)))
                self._handles.append(module.register_forward_hook(self._end, always_call=True))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def __contains__(self, block: ParameterBlock) -> bool:
        """Return whether a block has such parameters."""
        return block in self._block_of.values()

    def is_waiting_for(self, block: ParameterBlock) -> bool:
        """Return whether gradients of such parameters of a block have not arrived."""
        return any(self._block_of[key.param] is block for key in self._wanted)

    def reset(self) -> None:
        """Forget all gradients. Waits for a transfer of theirs."""
        for module in list(self._replaced):
            self._put_back(module)
        self._wanted.clear()
        for key in list(self._sums):
            self._drop(key)

    @torch.no_grad()
    def end_backward(self) -> None:
        """Deliver sums that are still incomplete: the loss does not depend on the other tiles."""
        self._wanted.clear()
        for key in list(self._sums):
            self._deliver(key, None)

    # -- forward

    def _begin(self, tied: Mapping[str, nn.Parameter], module: nn.Module, *_: object) -> None:
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() >= 0:
            return
        self._replaced[module] = dict(tied)
        for name, param in tied.items():
            key = _Key(threading.get_ident(), param)
            stand_in = nn.Parameter(param.data)
            hook = functools.partial(self._gradient_arrived, key)
            stand_in.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._wanted[key] += 1
            module._parameters[name] = stand_in

    def _end(self, module: nn.Module, *_: object) -> None:
        if module in self._replaced:
            self._put_back(module)

    def _put_back(self, module: nn.Module) -> None:
        for name, param in self._replaced[module].items():
            stand_in = module._parameters[name]
            module._parameters[name] = param
            if stand_in is not None and stand_in is not param:
                stand_in.data = absent_like(param)  # autograd keeps it, and not the block's memory
        del self._replaced[module]

    # -- backward

    @torch.no_grad()
    def _gradient_arrived(self, key: _Key, stand_in: nn.Parameter) -> None:
        gradient = stand_in.grad
        if gradient is None or key not in self._wanted:  # of a step that was undone
            return
        stand_in.grad = None
        self._used(self._block_of[key.param])
        self._wanted[key] -= 1
        if self._wanted[key]:
            self._add(key, gradient)
        else:
            del self._wanted[key]
            self._deliver(key, gradient)

    def _add(self, key: _Key, gradient: torch.Tensor) -> None:
        if key not in self._sums:
            free = self._free.setdefault(key.param, [])
            self._sums[key] = free.pop() if free else self._new_sum(key.param)
        stand_in, gradients = self._sums[key]
        stand_in.grad = gradient
        gradients.store()

    def _new_sum(self, param: nn.Parameter) -> _Sum:
        self._count += 1
        stand_in = nn.Parameter(absent_like(param))
        return _Sum(stand_in, BlockGradients(f"{self._count}.tied", [stand_in], self._schedule))

    def _deliver(self, key: _Key, newest: torch.Tensor | None) -> None:
        if key in self._sums:
            stand_in, gradients = self._sums[key]
            gradients.load()
            assert stand_in.grad is not None
            newest = stand_in.grad.clone() if newest is None else newest.add_(stand_in.grad)
            self._drop(key)
        if newest is None:
            return
        if key.param.grad is None:
            key.param.grad = newest
        else:
            key.param.grad.add_(newest)
        self._arrived(key.param)

    def _drop(self, key: _Key) -> None:
        dropped = self._sums.pop(key)
        dropped.gradients.drop()
        self._free.setdefault(key.param, []).append(dropped)


def tied_parameters(tiles: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return the trained parameters that several tiles have."""
    users = Counter(param for tile in tiles for param in tile.parameters(recurse=False) if param.requires_grad)
    return {param for param, count in users.items() if count > 1}
