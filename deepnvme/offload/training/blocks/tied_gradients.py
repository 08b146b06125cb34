"""Gradients of parameters that several tiles share: each tile's gradient is added to a sum on the drive."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .blocks_on_drive import BlocksOnDrive
from .parameter_block import ParameterBlock, absent_like
from .trained_block import BlockGradients


class _MicroBatchParam(NamedTuple):
    """Key of one parameter in one micro-batch, for which the gradients of all tiles are summed."""

    thread: int
    """The identifier of the thread that runs the micro-batch."""
    param: nn.Parameter


class _StoredSum(NamedTuple):
    """The sum on the drive of those gradients of a parameter that have arrived."""

    stand_in: nn.Parameter
    """A parameter without memory, whose ``grad`` is the sum while it is in memory."""
    gradients: BlockGradients


class TiedGradients:
    """Sums the gradients of a parameter that several tiles share, as of a head tied to an embedding, on the drive.

    Autograd would keep the head's gradient in memory until the embedding's arrives: for all tiles together that is as large as
    the table, once for each micro-batch. So each tile computes with a stand-in for the parameter, whose gradient arrives in its
    own backward.

    Args:
        modules: Modules and their blocks. Several may have the same block.
        drive: Has blocks in memory.
        backward_ended: Called with each block of which a module's backward has ended.
        gradient_complete: Called with each parameter whose gradient of a micro-batch is complete, in ``grad``.
    """

    def __init__(
        self,
        modules: Mapping[nn.Module, ParameterBlock],
        drive: BlocksOnDrive,
        backward_ended: Callable[[ParameterBlock], None],
        gradient_complete: Callable[[nn.Parameter], None],
    ) -> None:
        self._drive, self._backward_ended, self._gradient_complete = drive, backward_ended, gradient_complete
        tied_params = tied_parameters(modules)
        self._block_of: dict[nn.Parameter, ParameterBlock] = {}
        self._replaced_params: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._missing: Counter[_MicroBatchParam] = Counter()  # gradients that have not arrived
        self._sums: dict[_MicroBatchParam, _StoredSum] = {}
        self._unused: dict[nn.Parameter, list[_StoredSum]] = {}  # their places are taken again
        self._sums_made = 0
        self._handles: list[RemovableHandle] = []
        for module, block in modules.items():
            own = set(block.params)
            named = module.named_parameters(recurse=False)
            tied = {name: param for name, param in named if param in own and param in tied_params}
            if tied:
                self._block_of.update(dict.fromkeys(tied.values(), block))
                self._handles.append(module.register_forward_pre_hook(functools.partial(self._use_stand_ins, tied)))
                self._handles.append(module.register_forward_hook(self._forward_ended, always_call=True))

    def remove(self) -> None:
        """Remove the forward hooks from the modules that share parameters."""
        for handle in self._handles:
            handle.remove()

    def __contains__(self, block: ParameterBlock) -> bool:
        """Return whether a block has parameters that several tiles share."""
        return block in self._block_of.values()

    def is_waiting_for(self, block: ParameterBlock) -> bool:
        """Return whether some tile's gradient of a shared parameter in this block is still missing."""
        return any(self._block_of[key.param] is block for key in self._missing)

    def reset(self) -> None:
        """Drop all gradients, and give the modules their parameters back. Blocks while a sum is written or read."""
        for module in list(self._replaced_params):
            self._restore_params(module)
        self._missing.clear()
        for key in list(self._sums):
            self._release_sum(key)

    @torch.no_grad()
    def end_backward(self) -> None:
        """Deliver the sums that are still incomplete: the loss does not depend on the tiles whose gradients are missing."""
        self._missing.clear()
        for key in list(self._sums):
            self._deliver(key, None)

    # -- forward

    def _use_stand_ins(self, tied: Mapping[str, nn.Parameter], module: nn.Module, *_: object) -> None:
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() >= 0:
            return
        self._replaced_params[module] = dict(tied)
        for name, param in tied.items():
            key = _MicroBatchParam(threading.get_ident(), param)
            stand_in = nn.Parameter(param.data)
            hook = functools.partial(self._stand_in_has_gradient, key)
            stand_in.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._missing[key] += 1
            module._parameters[name] = stand_in

    def _forward_ended(self, module: nn.Module, *_: object) -> None:
        if module in self._replaced_params:
            self._restore_params(module)

    def _restore_params(self, module: nn.Module) -> None:
        for name, param in self._replaced_params[module].items():
            stand_in = module._parameters[name]
            module._parameters[name] = param
            if stand_in is not None and stand_in is not param:
                stand_in.data = absent_like(param)  # autograd keeps it, and not the block's memory
        del self._replaced_params[module]

    # -- backward

    @torch.no_grad()
    def _stand_in_has_gradient(self, key: _MicroBatchParam, stand_in: nn.Parameter) -> None:
        gradient = stand_in.grad
        if gradient is None or key not in self._missing:  # of a step that was undone
            return
        stand_in.grad = None
        self._backward_ended(self._block_of[key.param])
        self._missing[key] -= 1
        if self._missing[key]:
            self._add_to_sum(key, gradient)
        else:
            del self._missing[key]
            self._deliver(key, gradient)

    def _add_to_sum(self, key: _MicroBatchParam, gradient: torch.Tensor) -> None:
        if key not in self._sums:
            unused = self._unused.setdefault(key.param, [])
            self._sums[key] = unused.pop() if unused else self._new_sum(key.param)
        stand_in, gradients = self._sums[key]
        stand_in.grad = gradient
        gradients.store()

    def _new_sum(self, param: nn.Parameter) -> _StoredSum:
        self._sums_made += 1
        stand_in = nn.Parameter(absent_like(param))
        return _StoredSum(stand_in, BlockGradients(f"{self._sums_made}.tied", [stand_in], self._drive))

    def _deliver(self, key: _MicroBatchParam, newest: torch.Tensor | None) -> None:
        if key in self._sums:
            stand_in, gradients = self._sums[key]
            gradients.load()
            assert stand_in.grad is not None
            newest = stand_in.grad.clone() if newest is None else newest.add_(stand_in.grad)
            self._release_sum(key)
        if newest is None:
            return
        if key.param.grad is None:
            key.param.grad = newest
        else:
            key.param.grad.add_(newest)
        self._gradient_complete(key.param)

    def _release_sum(self, key: _MicroBatchParam) -> None:
        released = self._sums.pop(key)
        released.gradients.drop()
        self._unused.setdefault(key.param, []).append(released)


def tied_parameters(tiles: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return the trained parameters that more than one of the tiles has."""
    users = Counter(param for tile in tiles for param in tile.parameters(recurse=False) if param.requires_grad)
    return {param for param, count in users.items() if count > 1}
