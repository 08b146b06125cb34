"""Activation checkpointing of modules whose inputs are saved on a drive."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .activations import save_on_disk

if TYPE_CHECKING:
    from deepnvme.profiles import AnyPath


def checkpoint_on_disk(module: nn.Module, path: AnyPath | Iterable[AnyPath] | save_on_disk, **options: Any) -> nn.Module:
    """Have a module save only its inputs for the backward, on a drive, and compute the rest again: activation checkpointing.

    >>> for block in model.blocks:
    ...     deepnvme.offload.checkpoint_on_disk(block, "/mnt/nvme/activations", memory_budget=1 << 30)

    The module's ``forward`` then runs by ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`` under
    :class:`save_on_disk`, if gradients are enabled. Random numbers, as of dropout, are the same when it is computed again.

    Args:
        module: Changed in place: it gets a ``forward`` of its own. Its parameters keep their names. If it was changed by this
            function before, only the directories and options are replaced.
        path: Directories; or a :class:`save_on_disk`, which several modules may share.
        **options: Those of :class:`save_on_disk`, if a path is given.

    Returns:
        The module.

    Raises:
        TypeError: If options are given along with a :class:`save_on_disk`.
    """
    if isinstance(path, save_on_disk) and options:
        raise TypeError(f"a save_on_disk has its options already: {', '.join(options)} cannot be given with it")
    saver = path if isinstance(path, save_on_disk) else save_on_disk(path, **options)
    before = vars(module).get("forward")
    own = before.own if isinstance(before, _CheckpointedForward) else before
    module.forward = _CheckpointedForward(module, own, saver)
    return module


class _CheckpointedForward:
    """The ``forward`` of a module, checkpointed. An object, not a function: a copy of the module gets one for its own weights.

    Args:
        module: The module.
        own: The ``forward`` that the module had as its attribute; None for that of its class.
        saver: Where the inputs go.
    """

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None, saver: save_on_disk) -> None:
        self.own = own
        self._module, self._saver = module, saver
        functools.update_wrapper(self, type(module).forward.__get__(module) if own is None else own, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compute = type(self._module).forward.__get__(self._module) if self.own is None else self.own
        if not torch.is_grad_enabled():
            return compute(*args, **kwargs)
        with self._saver:
            return checkpoint(compute, *args, use_reentrant=False, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _CheckpointedForward:
        return _CheckpointedForward(copy.deepcopy(self._module, memo), copy.deepcopy(self.own, memo), self._saver)

    def __reduce__(self) -> tuple[Any, ...]:
        return _CheckpointedForward, (self._module, self.own, self._saver)
