"""Activation checkpointing of modules whose inputs are saved on a drive."""

from __future__ import annotations

import contextlib
import copy
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from deepnvme.drives.profiles import AnyPath

from .saving import save_on_disk


def checkpoint_on_disk(module: nn.Module, path: AnyPath | Iterable[AnyPath] | save_on_disk, **options: Any) -> nn.Module:
    """Checkpoint a module's activations: save only its inputs, on a drive, and compute the rest again in the backward.

    >>> for block in model.blocks:
    ...     deepnvme.offload.checkpoint_on_disk(block, "/mnt/nvme/activations", memory_budget=1 << 30)

    If gradients are enabled, the module's ``forward`` then runs by
    ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`` under :class:`save_on_disk`. When it is computed again, random
    numbers, as of dropout, are the same, and buffers, such as the statistics of a BatchNorm, are not changed a second time.

    Args:
        module: Changed in place: it gets a ``forward`` of its own. Its parameters keep their names. If this function has changed
            the module before, only the directories and options are replaced.
        path: One or several directories; or a :class:`save_on_disk`, which several modules may share.
        **options: Options of :class:`save_on_disk`, if ``path`` is not one already.

    Returns:
        The module.

    Raises:
        TypeError: If options are given along with a :class:`save_on_disk`.
    """
    if isinstance(path, save_on_disk) and options:
        raise TypeError(f"a save_on_disk has its options already: {', '.join(options)} cannot be given with it")
    saver = path if isinstance(path, save_on_disk) else save_on_disk(path, **options)
    _checkpoint(module, saver)
    return module


def recompute_on_backward(module: nn.Module) -> None:
    """Checkpoint a module's activations: save only its inputs, by the hooks in force, and compute the rest again."""
    _checkpoint(module, None)


def keep_for_backward(module: nn.Module) -> None:
    """Undo :func:`recompute_on_backward` or :func:`checkpoint_on_disk`: restore the module's earlier ``forward``."""
    checkpointed: CheckpointedForward = vars(module)["forward"]
    checkpointed.remove()


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether :func:`checkpoint_on_disk` or :func:`recompute_on_backward` has changed the module."""
    return isinstance(vars(module).get("forward"), CheckpointedForward)


def _checkpoint(module: nn.Module, saver: save_on_disk | None) -> None:
    before = vars(module).get("forward")
    own = before.own if isinstance(before, CheckpointedForward) else before
    module.forward = CheckpointedForward(module, own, saver)


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
        own: The ``forward`` that the module had as its attribute; None for that of its class.
    """

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None) -> None:
        self.own = own
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


class CheckpointedForward(ReplacedForward):
    """The ``forward`` of a module, run under ``torch.utils.checkpoint``.

    An object and not a function, so that a deep copy of the module gets one for its own weights.

    Args:
        module: The module. Not kept alive.
        own: The ``forward`` that was set as the module's attribute before; None if the module used that of its class.
        saver: Saves the module's inputs; None if they are saved by the hooks in force, like other saved tensors.
    """

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None, saver: save_on_disk | None) -> None:
        super().__init__(module, own)
        self._saver = saver
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

        with contextlib.nullcontext() if self._saver is None else self._saver:
            return checkpoint(compute, *leaves, use_reentrant=False)

    def call_before_recomputing(self, function: Callable[[], None] | None) -> None:
        """Set a function to call in a backward before the forward is computed again. The module's hooks are not called then."""
        self._before_recomputing = function

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointedForward:
        return CheckpointedForward(copy.deepcopy(self.module, memo), copy.deepcopy(self.own, memo), self._saver)

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointedForward, (self.module, self.own, self._saver)
