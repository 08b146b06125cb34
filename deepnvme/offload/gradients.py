"""Offload gradients: write them to the drive during backward, and read them back for the step."""

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
"""How many sub-groups' gradients are in memory at a time: those that backward is filling, and those being written.

Resident sub-groups are not counted. Their gradients stay in memory too, so that the drive cannot lose any part of them."""


class _Gradients:
    """The gradients of one sub-group: in memory from the first that arrives until all have arrived, then on the drive."""

    def __init__(self, sub_group: SubGroup, layout: BlockLayout) -> None:
        self.sub_group, self.layout = sub_group, layout
        self.lease: Lease | None = None
        self.present: set[int] = set()
        """Indices of the pieces that have a gradient."""
        self.added: set[int] = set()
        """Indices of the pieces whose gradient the current backward has added."""
        self.complete = False
        """Whether the current backward has added all gradients of the sub-group."""
        self.written: StoreFuture[int] | None = None


class OffloadedGradients:
    """Collects the gradients of each sub-group in memory and writes them to the drive once they are complete.

    Gradients of several backwards are summed. True while there is any gradient. Not thread-safe: GradientHooks serialises calls.
    """

    def __init__(self, traffic: IOStats, pool: BufferPool) -> None:
        self._traffic, self._pool = traffic, pool
        self._of: dict[SubGroup, _Gradients] = {}
        self._norms: dict[torch.Tensor, torch.Tensor] = {}
        """Norms of gradients that are cut into several pieces, kept only while a single backward contributed to them."""
        self._scale: torch.Tensor | None = None
        self._ahead: dict[SubGroup, tuple[Lease, StoreFuture[torch.Tensor]]] = {}
        """Gradients that are being read ahead."""
        self._fetched: tuple[SubGroup, Lease] | None = None
        self._taken: Lease | None = None
        self._leaving: deque[StoreFuture[int]] = deque()
        self.lost = False
        """Whether a gradient could not be written, and is neither in memory nor on the drive."""

    def take_in(self, param: torch.Tensor, pieces: Sequence[tuple[SubGroup, int]]) -> None:
        """Move a parameter's gradient here, adding it to an earlier one, and set ``param.grad`` to None.

        Blocks only while memory for it has to be freed or an earlier gradient has to be read back.

        Args:
            param: A parameter. Nothing happens if its ``grad`` is None.
            pieces: Its pieces, as (sub-group, index in the sub-group's ``pieces``).

        Raises:
            RuntimeError: If the gradients collected so far were clipped.
            TypeError: For a gradient that is not a strided tensor.
            OSError: From the drive. On any exception ``param.grad`` stays.
        """
        import torch

        gradient = param.grad
        if gradient is None:  # another hook has removed it
            return
        if self._scale is not None:
            raise RuntimeError(
                "the gradients kept so far were clipped, and others have come: call zero_grad() and run backward again, and clip"
                " after the last backward of a step"
            )
        if len(pieces) > 1 and gradient.layout is torch.strided and not local_of(gradient).is_contiguous():
            # Now each piece is a view of the gradient. Otherwise each access to a piece would make its own contiguous copy.
            gradient = param.grad = distributed_like(gradient, local_of(gradient).contiguous())
        first = not any(index in self._of[sub_group].present for sub_group, index in pieces if sub_group in self._of)
        self._norms.pop(param, None)
        if first and len(pieces) > 1:  # from the whole gradient: combining the norms of its pieces would round differently
            self._norms[param] = torch.linalg.vector_norm(local_of(gradient)).cpu()
        taken: list[torch.Tensor] = []
        try:
            for sub_group, index in pieces:
                self._add_piece(sub_group, index, taken)
        except BaseException:
            for part in taken:
                part.zero_()  # this part was added already, and param.grad will be added once more
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
        with defer_interrupts():  # an interrupt between adding and recording would add the gradient twice
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
        """Write the gradients that are still in memory, and wait until all are written. Raises OSError.

        Sub-groups of which some parameters got no gradient in this backward count as complete from here on.
        """
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
        """Return whether any piece of the sub-group has a gradient here."""
        return sub_group in self._of

    def expect(self, sub_groups: Iterable[SubGroup]) -> None:
        """Start reading the gradients of the sub-groups to be stepped next, in order, until memory for them runs out."""
        for sub_group in sub_groups:
            kept = self._of.get(sub_group)
            if kept is None or kept.lease is not None or sub_group in self._ahead:
                continue
            lease = self._pool.try_lease(max(kept.layout.nbytes, 1)) if len(self._ahead) < OPEN - 1 else None
            if lease is None:
                return
            self._read(kept, lease)

    def fetch(self, sub_group: SubGroup) -> None:
        """Read the gradients of one sub-group into memory and wait for them. Raises OSError."""
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
        """Return a sub-group's gradients by index of the piece, clipped if :meth:`clip` was called. Reads them if necessary.

        The tensors are valid until the next call of :meth:`fetch` or :meth:`take`.
        """
        kept = self._of.get(sub_group)
        if kept is None:
            return {}
        if kept.lease is not None:  # the sub-group is incomplete, or resident
            buffer = kept.lease.buffer
        else:
            self.fetch(sub_group)
            assert self._fetched is not None
            # No longer "fetched": it may be scaled in place below, so the next take has to read it again.
            (_, self._taken), self._fetched = self._fetched, None
            buffer = self._taken.buffer
        found = {index: kept.layout.sections[index].of(buffer) for index in sorted(kept.present)}
        if self._scale is not None:
            for index, gradient in found.items():
                found[index] = gradient.mul_(self._scale) if kept.lease is None else gradient * self._scale
        return found

    def norms(self, params: Sequence[torch.Tensor], norm_type: float) -> list[torch.Tensor | None]:
        """Return the norm of each parameter's gradient on this rank, or None without a gradient. Reads all gradients."""
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
        """Compute the total norm, and have :meth:`take` scale gradients down to ``max_norm``.

        Args:
            norms: Norms of the parameters' gradients, in the parameters' order, over all ranks; None without a gradient.
            max_norm: The total norm to scale down to.
            norm_type: The order of the norm.

        Returns:
            The total norm before clipping.
        """
        import torch

        found = [norm for norm in norms if norm is not None]
        total = torch.linalg.vector_norm(torch.stack(found), norm_type) if found else torch.tensor(0.0, device="cpu")
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        self._scale = scale if self._scale is None else self._scale * scale
        return total

    def clear(self) -> None:
        """Drop all gradients and release their memory. Their space on the drive is kept for the next gradients.

        Blocks until transfers have ended.
        """
        self.rest()
        for kept in list(self._of.values()):
            if kept.written is not None:
                kept.written.exception()  # an error no longer matters: the gradient is dropped
            self._of.pop(kept.sub_group, None)
            if kept.lease is not None:
                kept.lease.release()
        self._norms.clear()
        self._scale = None
        self.lost = False

    def rest(self) -> None:
        """Release the memory of gradients that were read or read ahead; they are read again when needed."""
        self._give_back()
        while self._ahead:
            _, (lease, reading) = self._ahead.popitem()
            reading.exception()  # wait; an error no longer matters, because the gradient will be read again
            lease.release()

    def _in_memory(self, kept: _Gradients) -> torch.Tensor:
        """Return the bytes of a sub-group's gradients in memory, reading them back if they were written."""
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
        """Wait for writes, or start one, until another sub-group's gradients may be in memory."""
        while True:
            open_now = [each for each in self._of.values() if each.lease is not None and not each.sub_group.in_memory]
            if len(open_now) + len(self._leaving) < OPEN:
                return
            if self._leaving:
                self._leaving.popleft().exception()  # only wait: an error is raised where the gradients are needed
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
