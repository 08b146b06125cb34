"""Provide the gradients that a sub-group is stepped with, from ``param.grad`` or the drive, in the dtype of its weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .block_layout import dense_strides
from .slots import GrowableLease
from .sub_group import padded_gradient

if TYPE_CHECKING:
    import torch

    from deepnvme.memory.pool import BufferPool

    from .gradients import OffloadedGradients
    from .sub_group import Gradients, SubGroup


class StepGradients:
    """Provides the gradients for stepping a sub-group.

    Args:
        pool: Where memory for float32 gradients is leased.
        offloaded: The gradients on the drive; None if gradients are not offloaded.
    """

    def __init__(self, pool: BufferPool, offloaded: OffloadedGradients | None) -> None:
        self._offloaded = offloaded
        self._scratch = GrowableLease(pool)

    def has(self, sub_group: SubGroup) -> bool:
        """Return whether any piece of the sub-group has a gradient, in memory or on the drive."""
        if self._offloaded is not None and self._offloaded.has(sub_group):
            return True
        return any(piece.param.grad is not None for piece in sub_group.pieces)

    def prepare(self, sub_groups: Iterable[SubGroup]) -> None:
        """Check the gradients of the sub-groups to be stepped, and lease the memory for them.

        So errors come before any sub-group is stepped: TypeError for a gradient that cannot be cut, OutOfBuffers.
        """
        for sub_group in sub_groups:
            for piece in sub_group.pieces:
                piece.check_gradient()
        self._scratch.take(max((each.full_gradient_bytes for each in sub_groups), default=0))

    def expect(self, sub_groups: Sequence[SubGroup]) -> None:
        """Start reading the gradients of the sub-groups to be stepped next from the drive, if they are there."""
        if self._offloaded is not None:
            self._offloaded.expect(sub_groups)

    def fetch(self, sub_group: SubGroup) -> None:
        """Read a sub-group's gradients into memory if they are on the drive, and wait for them. Raises OSError."""
        if self._offloaded is not None:
            self._offloaded.fetch(sub_group)

    def of(self, sub_group: SubGroup) -> Gradients:
        """Return a function that gives the gradients of a sub-group's pieces, for :meth:`SubGroup.step`.

        Gradients of pieces with master weights are converted to float32. They are valid until the function is called again or
        another sub-group's gradients are read.
        """
        offloaded = self._offloaded.take(sub_group) if self._offloaded is not None else {}

        def portion(indices: Sequence[int]) -> list[torch.Tensor | None]:
            scratch = self._scratch.take(sub_group.full_gradient_bytes)
            found = []
            end = 0
            for index in indices:
                piece = sub_group.pieces[index]
                gradient = offloaded.get(index)
                gradient = piece.gradient if gradient is None else gradient
                if gradient is not None and sub_group.masters[index]:
                    gradient = _in_full(gradient, scratch[end:])
                    end += padded_gradient(piece)
                found.append(gradient)
            return found

        return portion

    def release(self) -> None:
        """Release the memory for float32 gradients."""
        self._scratch.release()


def _in_full(gradient: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Return a gradient in float32: a strided one at the start of ``scratch`` (bytes), another in new CPU memory."""
    import torch

    if gradient.layout is not torch.strided:
        return gradient.to("cpu", torch.float32)
    flat = scratch[: 4 * gradient.numel()].view(torch.float32)
    return flat.as_strided(gradient.shape, dense_strides(gradient)).copy_(gradient)
