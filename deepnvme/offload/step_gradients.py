"""The gradients that a sub-group is stepped with: the parameters' own, or those on the drive, in the precision of its weights."""

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
    """``offloaded``: what gradients on the drive are taken from, or None if there are none."""

    def __init__(self, pool: BufferPool, offloaded: OffloadedGradients | None) -> None:
        self._offloaded = offloaded
        self._scratch = GrowableLease(pool)

    def has(self, sub_group: SubGroup) -> bool:
        """Whether any of its pieces has one."""
        if self._offloaded is not None and self._offloaded.has(sub_group):
            return True
        return any(piece.param.grad is not None for piece in sub_group.pieces)

    def prepare(self, sub_groups: Iterable[SubGroup]) -> None:
        """See to it that the gradients of these can be had: raises what would be raised later, when some have been stepped."""
        for sub_group in sub_groups:
            for piece in sub_group.pieces:
                piece.check_gradient()
        self._scratch.take(max((each.full_gradient_bytes for each in sub_groups), default=0))

    def expect(self, sub_groups: Sequence[SubGroup]) -> None:
        """Read ahead from the drive for those that are next."""
        if self._offloaded is not None:
            self._offloaded.expect(sub_groups)

    def fetch(self, sub_group: SubGroup) -> None:
        """Have them in memory."""
        if self._offloaded is not None:
            self._offloaded.fetch(sub_group)

    def of(self, sub_group: SubGroup) -> Gradients:
        """Valid until those of another are asked for: float32 where there are master weights."""
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
        """Give memory back."""
        self._scratch.release()


def _in_full(gradient: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """In float32, at the start of ``scratch``."""
    import torch

    if gradient.layout is not torch.strided:
        return gradient.to("cpu", torch.float32)
    flat = scratch[: 4 * gradient.numel()].view(torch.float32)
    return flat.as_strided(gradient.shape, dense_strides(gradient)).copy_(gradient)
