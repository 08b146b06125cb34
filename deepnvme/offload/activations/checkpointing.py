"""Activation checkpointing of modules, whose inputs are saved by the hooks in force."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint


def recompute_on_backward(module: nn.Module) -> None:
    """Checkpoint a module's activations: save only its inputs, by the hooks in force, and compute the rest again.

    If gradients are enabled, the module's ``forward`` runs by ``torch.utils.checkpoint`` with ``use_reentrant=False``. When it is
    computed again, random numbers, as of dropout, are the same, and buffers, such as the statistics of a BatchNorm, are not
    changed a second time.
    """
    module.forward = CheckpointedForward(module)


def keep_for_backward(module: nn.Module) -> None:
    """Undo :func:`recompute_on_backward`: restore the module's earlier ``forward``."""
    checkpointed: CheckpointedForward = vars(module)["forward"]
    checkpointed.remove()


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether :func:`recompute_on_backward` has changed the module."""
    return isinstance(vars(module).get("forward"), CheckpointedForward)


def copy_buffers(module: nn.Module) -> Callable[[], None]:
    """Copy the buffers of a module, such as the statistics of a BatchNorm, and of all modules in it, before a forward.

    All are copied, since version counters do not tell of all changes: those of a BatchNorm do not.

    Returns:
        A function that gives the buffers their content back.
    """
    copies = [
        (each, name, buffer, buffer.detach().clone())
        for each in module.modules()
        for name, buffer in each._buffers.items()
        if buffer is not None
    ]

    def put_back() -> None:
        """Give the buffers the content that they had when they were copied."""
        for each, name, buffer, content in copies:
            buffer.data.copy_(content)  # without a new version: a backward that has saved the buffer need not raise
            each._buffers[name] = buffer

    return put_back


class ReplacedForward:
    """Has the place of a module's ``forward``.

    Args:
        module: The module. Not kept alive.
    """

    def __init__(self, module: nn.Module) -> None:
        self.own: Callable[..., Any] | None = vars(module).get("forward")
        """The ``forward`` that the module had as its attribute; None for that of its class."""
        self._module = weakref.ref(module)

    @property
    def module(self) -> nn.Module:
        """The module whose ``forward`` attribute this object replaces."""
        module = self._module()
        assert module is not None
        return module

    def original(self) -> Callable[..., Any]:
        """Return the forward that the module had."""
        if self.own is not None:
            return self.own
        forward: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        return forward

    def remove(self) -> None:
        """Give the module back the forward that it had, if the module is still there."""
        module = self._module()
        if module is not None:
            vars(module).pop("forward")
            if self.own is not None:
                module.forward = self.own

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a model that an OffloadedTraining trains cannot be copied or pickled: use the training's state_dict()")


class CheckpointedForward(ReplacedForward):
    """The ``forward`` of a module, run under ``torch.utils.checkpoint``.

    Args:
        module: The module. Not kept alive.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._before_recomputing: Callable[[], None] | None = None
        self.__signature__ = inspect.signature(self.original())  # transformers' Trainer chooses a dataset's columns by it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.original()
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # torch's checkpoint saves only tensors that are arguments themselves, and takes some keywords for its own.
        leaves, spec = tree_flatten((args, kwargs))

        def compute(*leaves: Any) -> Any:
            """Run the forward. If it is computed again, call ``_before_recomputing`` first, and restore the buffers after."""
            args, kwargs = tree_unflatten(leaves, spec)
            if torch._C._current_graph_task_id() < 0:
                return forward(*args, **kwargs)
            if self._before_recomputing is not None:
                self._before_recomputing()
            put_buffers_back = copy_buffers(self.module)
            try:
                return forward(*args, **kwargs)
            finally:
                put_buffers_back()  # what a forward changes in them was changed by the first one

        return checkpoint(compute, *leaves, use_reentrant=False)

    def call_before_recomputing(self, function: Callable[[], None] | None) -> None:
        """Set a function to call in a backward before the forward is computed again. The module's hooks are not called then."""
        self._before_recomputing = function
