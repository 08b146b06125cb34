"""Gradients that leave memory during backward and come back for the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .block import Layout, lay_out
from .sub_groups import local_of

if TYPE_CHECKING:
    import torch

    from deepnvme.engine import Future

    from .buffers import BufferPool, Lease
    from .store import TensorStore
    from .sub_group import SubGroup

OPEN = 3
"""Sub-groups whose gradients are in memory at a time: as many as backward fills at once, and those being written. Those of a
sub-group that stays in memory are not counted, and stay too: nothing of it can then be lost by the drive."""


class _Gradients:
    """Of one sub-group: in memory from the first that arrives until all have, then on the drive."""

    def __init__(self, sub_group: SubGroup, layout: Layout) -> None:
        self.sub_group, self.layout = sub_group, layout
        self.lease: Lease | None = None
        self.present: set[int] = set()
        """Pieces that have one."""
        self.added: set[int] = set()
        """Those of the backward that is running."""
        self.complete = False
        """Whether that backward has given all."""
        self.written: Future | None = None


class OffloadedGradients:
    """Gathers the gradients of each sub-group, writes them when they are complete, and adds to those of an earlier backward."""

    def __init__(self, store: TensorStore, pool: BufferPool) -> None:
        self._store, self._pool = store, pool
        self._of: dict[SubGroup, _Gradients] = {}
        self._norms: dict[torch.Tensor, torch.Tensor] = {}
        """Of gradients in several pieces, as long as one backward has made them."""
        self._scale: torch.Tensor | None = None
        self._taken: Lease | None = None
        self._leaving: deque[Future] = deque()

    def add(self, param: torch.Tensor, pieces: Sequence[tuple[SubGroup, int]]) -> None:
        """Take over a parameter's gradient: a copy, or the sum with what was there. Raises OSError from the drive."""
        import torch

        gradient = param.grad
        if gradient is None:  # another hook has taken it
            return
        if self._scale is not None:
            raise RuntimeError("the gradients kept so far were clipped: step() before the next backward, or clip after it")
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

    def _add_piece(self, sub_group: SubGroup, index: int, taken: list[torch.Tensor]) -> None:
        import torch

        gradient = sub_group.pieces[index].gradient
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise TypeError(f"a gradient of layout {gradient.layout} cannot be offloaded: set offload_gradients to False")
        kept = self._of.get(sub_group)
        if kept is None:
            kept = self._of[sub_group] = _Gradients(
                sub_group, lay_out([(number, "", each.of(each.param)) for number, each in enumerate(sub_group.pieces)])
            )
        view = kept.layout.sections[index].of(self._in_memory(kept))
        if index in kept.present:
            view.add_(gradient.to("cpu"))
        else:
            view.copy_(gradient)
        taken.append(gradient)
        kept.present.add(index)
        kept.added.add(index)
        if len(kept.added) == sum(each.param.requires_grad for each in sub_group.pieces):
            kept.complete = True
            self._write(kept)

    def flush(self) -> None:
        """Write what is complete only because the rest got no gradient in this backward. Returns when all is written."""
        for kept in self._of.values():
            if kept.lease is not None:
                kept.complete = True
                self._write(kept)
        for kept in self._of.values():
            if kept.written is not None:
                kept.written.result()

    def has(self, sub_group: SubGroup) -> bool:
        """Whether any piece has a gradient here."""
        return sub_group in self._of

    def take(self, sub_group: SubGroup) -> dict[int, torch.Tensor]:
        """The gradients by piece, clipped if they are to be, valid until the next are taken."""
        self._give_back()
        kept = self._of.get(sub_group)
        if kept is None:
            return {}
        if kept.lease is not None:  # incomplete, or of a sub-group in memory
            buffer = kept.lease.buffer
        else:
            self._taken = self._pool.lease(max(kept.layout.nbytes, 1))
            buffer = self._taken.buffer[: kept.layout.nbytes]
            self._store.get(_name(sub_group), buffer).result()
        found = {index: kept.layout.sections[index].of(buffer) for index in sorted(kept.present)}
        if self._scale is not None:
            for index, gradient in found.items():
                found[index] = gradient.mul_(self._scale) if kept.lease is None else gradient * self._scale
        return found

    def clip(self, params: Sequence[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """The norm of all gradients, summed in the order of ``params``; they are scaled to ``max_norm`` when they are taken."""
        import torch

        by_param: dict[torch.Tensor, list[torch.Tensor]] = {}
        for sub_group in self._of:
            for index, gradient in self.take(sub_group).items():
                piece = sub_group.pieces[index]
                whole = piece.whole or gradient.dtype == torch.float64
                norm = torch.linalg.vector_norm(gradient, norm_type, dtype=None if whole else torch.float32)
                by_param.setdefault(piece.param, []).append(norm)
        norms = []
        for param in params:
            parts = by_param.get(param)
            if parts is None:
                continue
            norm = parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts), norm_type).to(param.dtype)
            if norm_type == 2.0 and self._scale is None:
                norm = self._norms.get(param, norm)
            norms.append(_over_ranks(param, norm, norm_type))
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.tensor(0.0)
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        self._scale = scale if self._scale is None else self._scale * scale
        return total

    def clear(self) -> None:
        """Forget all gradients. Those on the drive keep their place there, for the next."""
        self._give_back()
        for kept in self._of.values():
            if kept.lease is not None:
                kept.lease.release()
        self._of.clear()
        self._norms.clear()
        self._scale = None

    def _in_memory(self, kept: _Gradients) -> torch.Tensor:
        if kept.lease is None:
            self._make_room()
            lease = self._pool.lease(max(kept.layout.nbytes, 1))
            if kept.written is not None:
                kept.written.result()
                self._store.get(_name(kept.sub_group), lease.buffer[: kept.layout.nbytes]).result()
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

    def _write(self, kept: _Gradients) -> None:
        if kept.sub_group.in_memory:
            return
        assert kept.lease is not None
        kept.written = self._store.put(_name(kept.sub_group), kept.lease.buffer[: kept.layout.nbytes])
        kept.lease.release(after=kept.written)
        kept.lease = None
        self._leaving.append(kept.written)

    def _give_back(self) -> None:
        if self._taken is not None:
            self._taken.release()
            self._taken = None


def _name(sub_group: SubGroup) -> str:
    return f"{sub_group.index}.gradient"


def _over_ranks(param: torch.Tensor, norm: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm of a DTensor's gradient from that of the shard here."""
    import torch
    import torch.distributed as dist

    if local_of(param) is param:
        return norm
    power = (norm.clone() if norm_type == float("inf") else norm**norm_type).to(param.device)  # where its ranks can meet
    for dimension, placement in enumerate(param.placements):  # type: ignore[attr-defined]
        if not placement.is_shard():
            continue
        group = param.device_mesh.get_group(dimension)  # type: ignore[attr-defined]
        dist.all_reduce(power, dist.ReduceOp.MAX if norm_type == float("inf") else dist.ReduceOp.SUM, group=group)
    power = power.cpu()
    return power if norm_type == float("inf") else torch.pow(power, 1 / norm_type)
