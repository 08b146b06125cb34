"""The gradients that a sub-group is stepped with: the parameters' own, or those on the drive, in the precision of its weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .block import dense_strides
from .ring import Room

if TYPE_CHECKING:
    import torch

    from .buffers import BufferPool
    from .gradients import OffloadedGradients
    from .sub_group import Gradients, SubGroup


class StepGradients:
    """``offloaded``: what gradients on the drive are taken from, or None if there are none."""

    def __init__(self, pool: BufferPool, offloaded: OffloadedGradients | None) -> None:
        self._offloaded = offloaded
        self._scratch = Room(pool)

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
        self._scratch.take(max(map(_full_bytes, sub_groups), default=0))

    def expect(self, sub_groups: Sequence[SubGroup]) -> None:
        """Read ahead from the drive for those that are next."""
        if self._offloaded is not None:
            self._offloaded.expect(sub_groups)

    def fetch(self, sub_group: SubGroup) -> None:
        """Have them in memory."""
        if self._offloaded is not None:
            self._offloaded.fetch(sub_group)

    def of(self, sub_group: SubGroup) -> Gradients:
        """By piece, valid until the next are asked for: float32 where there are master weights."""
        import torch

        found: list[torch.Tensor | None] = []
        offloaded = self._offloaded.take(sub_group) if self._offloaded is not None else {}
        for index, piece in enumerate(sub_group.pieces):
            gradient = offloaded.get(index)
            found.append(piece.gradient if gradient is None else gradient)
        full = [index for index, gradient in enumerate(found) if gradient is not None and sub_group.masters[index]]
        end = 0
        scratch = self._scratch.take(_full_bytes(sub_group))
        for index in full:
            gradient = found[index]
            assert gradient is not None
            if gradient.layout is not torch.strided:
                found[index] = gradient.to("cpu", torch.float32)
                continue
            flat = scratch[end : end + 4 * gradient.numel()].view(torch.float32)
            found[index] = flat.as_strided(gradient.shape, dense_strides(gradient)).copy_(gradient)
            end += _aligned(4 * gradient.numel())
        return found

    def release(self) -> None:
        """Give memory back."""
        self._scratch.release()


def _full_bytes(sub_group: SubGroup) -> int:
    return sum(_aligned(4 * piece.numel) for piece, master in zip(sub_group.pieces, sub_group.masters, strict=True) if master)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
