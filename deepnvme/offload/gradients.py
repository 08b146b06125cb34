"""Gradients that leave memory during backward and come back for the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from deepnvme._interrupts import defer_interrupts

from .block_layout import BlockLayout, lay_out
from .partition import distributed_like, local_of

if TYPE_CHECKING:
    import torch

    from deepnvme.memory.pool import BufferPool, Lease
    from deepnvme.store.futures import StoreFuture

    from .io_stats import IOStats
    from .sub_group import SubGroup

OPEN = 3
"""Sub-groups whose gradients are in memory at a time: as many as backward fills at once, and those being written. Those of a
sub-group that stays in memory are not counted, and stay too: nothing of it can then be lost by the drive."""


class _Gradients:
    """Of one sub-group: in memory from the first that arrives until all have, then on the drive."""

    def __init__(self, sub_group: SubGroup, layout: BlockLayout) -> None:
        self.sub_group, self.layout = sub_group, layout
        self.lease: Lease | None = None
        self.present: set[int] = set()
        """Pieces that have one."""
        self.added: set[int] = set()
        """Those of the backward that is running."""
        self.complete = False
        """Whether that backward has given all."""
        self.written: StoreFuture[int] | None = None


class OffloadedGradients:
    """Gathers the gradients of each sub-group, writes them when they are complete, and adds to those of an earlier backward."""

    def __init__(self, traffic: IOStats, pool: BufferPool) -> None:
        self._traffic, self._pool = traffic, pool
        self._of: dict[SubGroup, _Gradients] = {}
        self._norms: dict[torch.Tensor, torch.Tensor] = {}
        """Of gradients in several pieces, as long as one backward has made them."""
        self._scale: torch.Tensor | None = None
        self._ahead: dict[SubGroup, tuple[Lease, StoreFuture[torch.Tensor]]] = {}
        """Those on their way back."""
        self._fetched: tuple[SubGroup, Lease] | None = None
        self._taken: Lease | None = None
        self._leaving: deque[StoreFuture[int]] = deque()
        self.lost = False
        """Whether one could not be written, and is nowhere now."""

    def take_in(self, param: torch.Tensor, pieces: Sequence[tuple[SubGroup, int]]) -> None:
        """Have a parameter's gradient here instead: it, or the sum with what was there. Raises OSError from the drive, and leaves
        it to the parameter then."""
        import torch

        gradient = param.grad
        if gradient is None:  # another hook has taken it
            return
        if self._scale is not None:
            raise RuntimeError(
                "the gradients kept so far were clipped, and others have come: call zero_grad() and run backward again, and clip"
                " after the last backward of a step"
            )
        if len(pieces) > 1 and gradient.layout is torch.strided and not local_of(gradient).is_contiguous():
            # Its pieces are then parts of it, and not of a copy that would be another one each time.
            gradient = param.grad = distributed_like(gradient, local_of(gradient).contiguous())
        first = not any(index in self._of[sub_group].present for sub_group, index in pieces if sub_group in self._of)
        self._norms.pop(param, None)
        if first and len(pieces) > 1:  # of the whole, which rounds otherwise than from the norms of its pieces
            self._norms[param] = torch.linalg.vector_norm(local_of(gradient)).cpu()
        taken: list[torch.Tensor] = []
        try:
            for sub_group, index in pieces:
                self._add_piece(sub_group, index, taken)
        except BaseException:
            for part in taken:
                part.zero_()  # it stays where it is and will be added once more
            self._norms.pop(param, None)
            raise
        param.grad = None

    def _add_piece(self, sub_group: SubGroup, index: int, taken: list[torch.Tensor]) -> None:
        import torch

        gradient = sub_group.pieces[index].gradient
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise TypeError(f"a gradient of layout {gradient.layout} cannot be offloaded: set offload_gradients to False")
        kept = self._of.get(sub_group)
        if kept is None:
            kept = _Gradients(
                sub_group, lay_out([(number, "", each.of(each.param)) for number, each in enumerate(sub_group.pieces)])
            )
        view = kept.layout.sections[index].of(self._in_memory(kept))
        with defer_interrupts():  # what is added here is not to be added once more
            if index in kept.present:
                view.add_(gradient.to("cpu"))
            else:
                view.copy_(gradient)
            taken.append(gradient)
            kept.present.add(index)
            kept.added.add(index)
            self._of[sub_group] = kept
        if len(kept.added) == sum(each.param.requires_grad for each in sub_group.pieces):
            kept.complete = True
            self._write(kept)

    def flush(self) -> None:
        """Write what is complete only because the rest got no gradient in this backward. Returns when all is written."""
        for kept in self._of.values():
            if kept.lease is not None:
                kept.complete = True
                self._write(kept)
        with self._traffic.spending("waiting"):
            for kept in self._of.values():
                self._until_written(kept)

    def __bool__(self) -> bool:
        return bool(self._of)

    def has(self, sub_group: SubGroup) -> bool:
        """Whether any piece has a gradient here."""
        return sub_group in self._of

    def expect(self, sub_groups: Iterable[SubGroup]) -> None:
        """Read ahead the gradients of those that are next, as far as there is memory for them."""
        for sub_group in sub_groups:
            kept = self._of.get(sub_group)
            if kept is None or kept.lease is not None or sub_group in self._ahead:
                continue
            lease = self._pool.try_lease(max(kept.layout.nbytes, 1)) if len(self._ahead) < OPEN - 1 else None
            if lease is None:
                return
            self._read(kept, lease)

    def fetch(self, sub_group: SubGroup) -> None:
        """Have the gradients of this one in memory. Raises OSError."""
        if self._fetched is not None and self._fetched[0] is sub_group:
            return
        self._give_back()
        kept = self._of.get(sub_group)
        if kept is None or kept.lease is not None:
            return
        with self._traffic.spending("waiting"):
            if sub_group not in self._ahead:
                self._read(kept, self._pool.lease(max(kept.layout.nbytes, 1)))
            lease, reading = self._ahead.pop(sub_group)
            self._fetched = sub_group, lease
            try:
                reading.result()
            except BaseException:
                self._give_back()
                raise
        self._traffic.look()

    def take(self, sub_group: SubGroup) -> dict[int, torch.Tensor]:
        """The gradients by piece, clipped if they are to be, valid until the next are fetched or taken."""
        kept = self._of.get(sub_group)
        if kept is None:
            return {}
        if kept.lease is not None:  # incomplete, or of a sub-group in memory
            buffer = kept.lease.buffer
        else:
            self.fetch(sub_group)
            assert self._fetched is not None
            (_, self._taken), self._fetched = self._fetched, None  # which may be scaled below: to be read again
            buffer = self._taken.buffer
        found = {index: kept.layout.sections[index].of(buffer) for index in sorted(kept.present)}
        if self._scale is not None:
            for index, gradient in found.items():
                found[index] = gradient.mul_(self._scale) if kept.lease is None else gradient * self._scale
        return found

    def norms(self, params: Sequence[torch.Tensor], norm_type: float) -> list[torch.Tensor | None]:
        """Of what is here of the gradient of each. Reads all of them."""
        import torch

        by_param: dict[torch.Tensor, list[torch.Tensor]] = {}
        sub_groups = list(self._of)
        for number, sub_group in enumerate(sub_groups):
            self.expect(sub_groups[number : number + OPEN])
            for index, gradient in self.take(sub_group).items():
                piece = sub_group.pieces[index]
                whole = piece.whole or gradient.dtype == torch.float64
                norm = torch.linalg.vector_norm(gradient, norm_type, dtype=None if whole else torch.float32)
                by_param.setdefault(piece.param, []).append(norm)
        self._give_back()
        norms: list[torch.Tensor | None] = []
        for param in params:
            parts = by_param.get(param)
            norm = None
            if parts is not None:
                norm = parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts), norm_type).to(param.dtype)
                if norm_type == 2.0 and self._scale is None:
                    norm = self._norms.get(param, norm)
            norms.append(norm)
        return norms

    def clip(self, norms: Sequence[torch.Tensor | None], max_norm: float, norm_type: float) -> torch.Tensor:
        """The norm of all from those of each, in this order; gradients are scaled to ``max_norm`` when they are taken."""
        import torch

        found = [norm for norm in norms if norm is not None]
        total = torch.linalg.vector_norm(torch.stack(found), norm_type) if found else torch.tensor(0.0, device="cpu")
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        self._scale = scale if self._scale is None else self._scale * scale
        return total

    def clear(self) -> None:
        """Forget all gradients. Those on the drive keep their place there, for the next."""
        self.rest()
        for kept in list(self._of.values()):
            if kept.written is not None:
                kept.written.exception()  # which concerns nobody any more
            self._of.pop(kept.sub_group, None)
            if kept.lease is not None:
                kept.lease.release()
        self._norms.clear()
        self._scale = None
        self.lost = False

    def rest(self) -> None:
        """Give back the memory of those that were read, or read ahead. They are read again when they are wanted."""
        self._give_back()
        while self._ahead:
            _, (lease, reading) = self._ahead.popitem()
            reading.exception()  # it will be read again
            lease.release()

    def _in_memory(self, kept: _Gradients) -> torch.Tensor:
        if kept.lease is None:
            self._make_room()
            lease = self._pool.lease(max(kept.layout.nbytes, 1))
            if kept.written is not None:
                self._until_written(kept)
                self._traffic.get(_name(kept.sub_group), lease.buffer[: kept.layout.nbytes]).result()
            kept.lease, kept.written = lease, None
            if kept.complete:
                kept.complete = False
                kept.added.clear()
        return kept.lease.buffer[: kept.layout.nbytes]

    def _make_room(self) -> None:
        while True:
            open_now = [each for each in self._of.values() if each.lease is not None and not each.sub_group.in_memory]
            if len(open_now) + len(self._leaving) < OPEN:
                return
            if self._leaving:
                self._leaving.popleft().exception()  # which is raised where the gradients are needed
            else:
                self._write(open_now[0])

    def _read(self, kept: _Gradients, lease: Lease) -> None:
        self._until_written(kept)
        self._ahead[kept.sub_group] = lease, self._traffic.get(_name(kept.sub_group), lease.buffer[: kept.layout.nbytes])

    def _write(self, kept: _Gradients) -> None:
        if kept.sub_group.in_memory:
            return
        assert kept.lease is not None
        kept.written = self._traffic.put(_name(kept.sub_group), kept.lease.buffer[: kept.layout.nbytes])
        lease, kept.lease = kept.lease, None
        lease.release(after=kept.written)
        self._leaving.append(kept.written)

    def _until_written(self, kept: _Gradients) -> None:
        if kept.written is None:
            return
        try:
            kept.written.result()
        except OSError as error:
            if not self.lost:
                error.strerror = f"{error.strerror}; a gradient is lost with it: call zero_grad() and run backward again"
            self.lost = True
            raise

    def _give_back(self) -> None:
        taken, self._taken = self._taken, None
        fetched, self._fetched = self._fetched, None
        for lease in (taken, fetched[1] if fetched is not None else None):
            if lease is not None:
                lease.release()


def _name(sub_group: SubGroup) -> str:
    return f"{sub_group.index}.gradient"
