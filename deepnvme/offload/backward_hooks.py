"""What an optimizer does with gradients while backward makes them."""

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
"""Parameter -> its pieces, each as the sub-group that has it and its place in that."""


class GradientHooks:
    """Calls ``arrived``, a method, with each parameter whose gradient is there, for as long as its object lives; one at a time,
    though each device has a thread of its own in backward."""

    def __init__(self, arrived: Callable[[torch.Tensor], None]) -> None:
        self._arrived = weakref.WeakMethod(arrived)  # parameters, which have the hooks, outlive optimizers
        self._handles: dict[torch.Tensor, RemovableHandle] = {}
        self._lock = threading.RLock()

    def add(self, params: Iterable[torch.Tensor]) -> None:
        """For those that need gradients and have no hook yet."""
        for param in params:
            if param not in self._handles and param.requires_grad:
                handle: RemovableHandle = param.register_post_accumulate_grad_hook(self._call)  # type: ignore[no-untyped-call]
                self._handles[param] = handle

    def remove(self) -> None:
        """All of them."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _call(self, param: torch.Tensor) -> None:
        arrived = self._arrived()
        if arrived is not None:
            with self._lock:
                arrived(param)


class GradientTracker:
    """Which sub-groups have all their gradients, and which were stepped for that before ``step()``."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._arrived: dict[SubGroup, set[int]] = {}
        self.stepped: list[SubGroup] = []
        self.stepped_before: list[SubGroup] = []
        """By the step before, in its order."""

    def __bool__(self) -> bool:
        return bool(self._arrived)

    def add(self, param: torch.Tensor) -> list[SubGroup]:
        """Note a gradient, and return the sub-groups that it completes. RuntimeError for one that was noted."""
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
        """Of parameters that have been stepped whole, this sub-group's piece being the last."""
        for piece in sub_group.pieces:
            if all(each in self.stepped for each, _ in self._pieces[piece.param]):
                piece.param.grad = None

    def clear(self) -> None:
        """Begin anew: the step was undone."""
        self._arrived.clear()
        self.stepped = []

    def commit(self) -> None:
        """Begin anew: it was made."""
        self.stepped_before = self.stepped
        self.clear()
