"""Hooks that run when backward completes a parameter's gradient, and a record of which gradients have arrived."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from .sub_group import SubGroup

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

Pieces = Mapping["torch.Tensor", Sequence[tuple[SubGroup, int]]]
"""Maps a parameter to its pieces. A piece is (its sub-group, its index in the sub-group's ``pieces``)."""


class GradientHooks:
    """Calls a method with each parameter whose gradient backward has just accumulated.

    Calls are serialised by a lock, since backward has one thread for each device. They end when the method's object is dropped.

    Args:
        arrived: A bound method. Only a weak reference to its object is kept.
    """

    def __init__(self, arrived: Callable[[torch.Tensor], None]) -> None:
        self._arrived = weakref.WeakMethod(arrived)  # parameters hold the hooks, and may outlive the optimizer
        self._handles: dict[torch.Tensor, RemovableHandle] = {}
        self._lock = threading.RLock()

    def add(self, params: Iterable[torch.Tensor]) -> None:
        """Add a hook to each parameter that has ``requires_grad`` and no hook of this object yet."""
        for param in params:
            if param not in self._handles and param.requires_grad:
                handle: RemovableHandle = param.register_post_accumulate_grad_hook(self._call)  # type: ignore[no-untyped-call]
                self._handles[param] = handle

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _call(self, param: torch.Tensor) -> None:
        arrived = self._arrived()
        if arrived is not None:
            with self._lock:
                arrived(param)


class GradientTracker:
    """With ``step_in_backward``: records which gradients have arrived, and which sub-groups were stepped in backward.

    True while any gradient has arrived since the last step.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._arrived: dict[SubGroup, set[int]] = {}
        self.stepped: list[SubGroup] = []
        self.stepped_before: list[SubGroup] = []
        """Sub-groups that were stepped in backward by the previous step, in the order they were stepped."""

    def __bool__(self) -> bool:
        return bool(self._arrived)

    def add(self, param: torch.Tensor) -> list[SubGroup]:
        """Record that a parameter's gradient has arrived.

        Returns:
            The sub-groups that now have the gradients of all parameters that need one.

        Raises:
            RuntimeError: If the parameter's gradient arrived before in this step, in an earlier backward.
        """
        complete = []
        for sub_group, index in self._pieces[param]:
            arrived = self._arrived.setdefault(sub_group, set())
            if index in arrived:
                raise RuntimeError("step_in_backward takes one backward for each step(): this is a second one")
            arrived.add(index)
            if len(arrived) == sum(piece.param.requires_grad for piece in sub_group.pieces):
                complete.append(sub_group)
        return complete

    def free_gradients(self, sub_group: SubGroup) -> None:
        """Set ``grad`` to None on this sub-group's parameters, except those with a piece in a sub-group not stepped yet."""
        for piece in sub_group.pieces:
            if all(each in self.stepped for each, _ in self._pieces[piece.param]):
                piece.param.grad = None

    def clear(self) -> None:
        """Forget all gradients and stepped sub-groups, because the step was undone."""
        self._arrived.clear()
        self.stepped = []

    def commit(self) -> None:
        """Start a new step, because this one was completed. Its order is kept in ``stepped_before``."""
        self.stepped_before = self.stepped
        self.clear()
