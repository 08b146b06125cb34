"""The gradients that sub-groups are stepped with: noticed in backward, kept in ``param.grad`` or on the drive, and clipped."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from deepnvme._interrupts import defer_interrupts
from deepnvme.memory.growable import GrowableLease
from deepnvme.memory.pool import BufferPool, Lease
from deepnvme.store.futures import StoreFuture

from .io_stats import IOStats
from .params import distributed_like, local_of
from .sub_group import SubGroup, lay_out

OPEN = 3
"""How many sub-groups' gradients are in memory at a time: those that backward is filling, and those being written.

Resident sub-groups are not counted. Their gradients stay in memory too, so that the drive cannot lose any part of them."""

Pieces = Mapping[torch.Tensor, Sequence[tuple[SubGroup, int]]]
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
        """Remove all hooks from the parameters."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _call(self, param: torch.Tensor) -> None:
        arrived = self._arrived()
        if arrived is not None:
            with self._lock:
                arrived(param)


class _Collected:
    """The gradients of one sub-group: in memory from the first that arrives until all have arrived, then on the drive."""

    def __init__(self, sub_group: SubGroup) -> None:
        self.sub_group = sub_group
        self.layout = lay_out([(index, "", piece.of(piece.param)) for index, piece in enumerate(sub_group.pieces)])
        self.lease: Lease | None = None
        self.present: set[int] = set()
        """Indices of the pieces that have a gradient."""
        self.added: set[int] = set()
        """Indices of the pieces whose gradient the current backward has added; none once it has added all."""
        self.written: StoreFuture[int] | None = None

    @property
    def block(self) -> torch.Tensor:
        """The bytes of the gradients, which are in memory."""
        assert self.lease is not None
        return self.lease.buffer[: self.layout.nbytes]

    def came_to_memory(self, lease: Lease) -> None:
        """Record that this memory has the gradients."""
        self.lease, self.written = lease, None

    def left_memory(self, written: StoreFuture[int]) -> None:
        """Record that the gradients are being written; their memory is released when that has ended."""
        self.written = written
        lease, self.lease = self.lease, None
        assert lease is not None
        lease.release(after=written)


class SubGroupGradients:
    """Provides the gradients of sub-groups, from ``param.grad`` or, if they are offloaded, from the drive.

    Offloaded gradients are collected in memory, summed over several backwards, and written once a sub-group has all of them. Not
    thread-safe: GradientHooks serialises calls.

    Args:
        traffic: Reads and writes gradients.
        pool: Where memory is leased.
    """

    def __init__(self, traffic: IOStats, pool: BufferPool) -> None:
        self._traffic, self._pool = traffic, pool
        self._arrived: dict[SubGroup, set[int]] = {}
        self._collected: dict[SubGroup, _Collected] = {}
        self._norms: dict[torch.Tensor, torch.Tensor] = {}
        """Norms of gradients that are cut into several pieces, kept only while a single backward contributed to them."""
        self._scale: torch.Tensor | None = None
        self._ahead: dict[SubGroup, tuple[Lease, StoreFuture[torch.Tensor]]] = {}
        """Gradients that are being read, or were read and are not yet used."""
        self._taken: Lease | None = None
        self._scratch = GrowableLease(pool)
        self._leaving: deque[StoreFuture[int]] = deque()
        self.lost = False
        """Whether a gradient could not be written, and is neither in memory nor on the drive."""

    # -- in backward

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
        first = not any(
            index in self._collected[sub_group].present for sub_group, index in pieces if sub_group in self._collected
        )
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
        gradient = sub_group.pieces[index].gradient
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise TypeError(f"a gradient of layout {gradient.layout} cannot be offloaded: set offload_gradients to False")
        kept = self._collected.get(sub_group) or _Collected(sub_group)
        view = kept.layout.sections[index].of(self._in_memory(kept))
        with defer_interrupts():  # an interrupt between adding and recording would add the gradient twice
            if index in kept.present:
                view.add_(gradient.to("cpu"))
            else:
                view.copy_(gradient)
            taken.append(gradient)
            kept.present.add(index)
            kept.added.add(index)
            self._collected[sub_group] = kept
        if sub_group.has_all_gradients(kept.added):
            self._complete(kept)

    def flush(self) -> None:
        """Write the gradients that are still in memory, and wait until all are written. Raises OSError.

        Sub-groups of which some parameters got no gradient in this backward count as complete from here on.
        """
        for kept in self._collected.values():
            if kept.lease is not None:
                self._complete(kept)
        with self._traffic.times.waiting:
            for kept in self._collected.values():
                self._until_written(kept)

    @property
    def any_collected(self) -> bool:
        """Whether any gradient was collected and not dropped yet."""
        return bool(self._collected)

    def note_arrival(self, pieces: Sequence[tuple[SubGroup, int]]) -> list[SubGroup]:
        """Record, with ``step_in_backward``, that the gradient of a parameter with these pieces has arrived.

        Returns:
            The sub-groups that now have the gradients of all parameters that need one.

        Raises:
            RuntimeError: If it arrived before in this step, in an earlier backward.
        """
        complete = []
        for sub_group, index in pieces:
            arrived = self._arrived.setdefault(sub_group, set())
            if index in arrived:
                raise RuntimeError("step_in_backward takes one backward for each step(): this is a second one")
            arrived.add(index)
            if sub_group.has_all_gradients(arrived):
                complete.append(sub_group)
        return complete

    @property
    def any_arrived(self) -> bool:
        """Whether :meth:`note_arrival` was called since the last step."""
        return bool(self._arrived)

    def forget_arrivals(self) -> None:
        """Begin a new step: no gradient has arrived for it."""
        self._arrived.clear()

    # -- for a step

    def has(self, sub_group: SubGroup) -> bool:
        """Return whether any piece of the sub-group has a gradient, in ``param.grad`` or collected."""
        return sub_group in self._collected or any(piece.param.grad is not None for piece in sub_group.pieces)

    def prepare(self, sub_groups: Sequence[SubGroup]) -> None:
        """Check the gradients of the sub-groups to be stepped, and lease the memory to convert them to float32.

        So errors come before any sub-group is stepped: TypeError for a gradient that cannot be cut, OutOfBuffers.
        """
        for sub_group in sub_groups:
            for piece in sub_group.pieces:
                piece.check_gradient()
        self._scratch.take(max((each.full_gradient_bytes for each in sub_groups), default=0))

    def expect(self, sub_groups: Iterable[SubGroup]) -> None:
        """Start reading the gradients of the sub-groups to be stepped next, in order, until memory for them runs out."""
        for sub_group in sub_groups:
            kept = self._collected.get(sub_group)
            if kept is None or kept.lease is not None or sub_group in self._ahead:
                continue
            lease = self._pool.try_lease(max(kept.layout.nbytes, 1)) if len(self._ahead) < OPEN - 1 else None
            if lease is None:
                return
            self._read(kept, lease)

    def take(self, sub_group: SubGroup) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        """Return what :meth:`SubGroup.step` needs: collected gradients by index of the piece, and memory to convert gradients in.

        Collected gradients are clipped if :meth:`clip` was called. They are read from the drive if they are there; blocks until
        they are, and raises OSError. All is valid until the next call.
        """
        return self._take_collected(sub_group), self._scratch.take(sub_group.full_gradient_bytes)

    # -- for clipping

    def norms(self, params: Sequence[torch.Tensor], norm_type: float) -> list[torch.Tensor | None]:
        """Return the norm of each parameter's gradient on this rank, or None without a gradient. Reads all gradients."""
        by_param: dict[torch.Tensor, list[torch.Tensor]] = {}
        sub_groups = list(self._collected)
        for number, sub_group in enumerate(sub_groups):
            self.expect(sub_groups[number : number + OPEN])
            for index, gradient in self._take_collected(sub_group).items():
                piece = sub_group.pieces[index]
                whole = piece.whole or gradient.dtype == torch.float64
                norm = torch.linalg.vector_norm(gradient, norm_type, dtype=None if whole else torch.float32)
                by_param.setdefault(piece.param, []).append(norm)
        self._release_taken()
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
        """Compute the total norm, and have :meth:`take` scale collected gradients down to ``max_norm``.

        Args:
            norms: Norms of the parameters' gradients, in the parameters' order, over all ranks; None without a gradient.
            max_norm: The total norm to scale down to.
            norm_type: The order of the norm.

        Returns:
            The total norm before clipping.
        """
        found = [norm for norm in norms if norm is not None]
        total = torch.linalg.vector_norm(torch.stack(found), norm_type) if found else torch.tensor(0.0, device="cpu")
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        self._scale = scale if self._scale is None else self._scale * scale
        return total

    # -- memory

    @property
    def leased_bytes(self) -> int:
        """Bytes of memory that are leased for gradients."""
        leases = [kept.lease for kept in self._collected.values()] + [lease for lease, _ in self._ahead.values()] + [self._taken]
        return self._scratch.nbytes + sum(lease.nbytes for lease in leases if lease is not None)

    def clear(self) -> None:
        """Drop all collected gradients and release their memory. Their space on the drive is kept for the next gradients.

        Blocks until transfers have ended.
        """
        self.rest()
        for kept in list(self._collected.values()):
            if kept.written is not None:
                kept.written.exception()  # an error no longer matters: the gradient is dropped
            self._collected.pop(kept.sub_group, None)
            if kept.lease is not None:
                kept.lease.release()
        self._norms.clear()
        self._scale = None
        self.lost = False

    def rest(self) -> None:
        """Release the memory of gradients that were read or read ahead; they are read again when needed."""
        self._release_taken()
        while self._ahead:
            _, (lease, reading) = self._ahead.popitem()
            reading.exception()  # wait; an error no longer matters, because the gradient will be read again
            lease.release()

    def release(self) -> None:
        """Drop all collected gradients, and release all memory."""
        self._scratch.release()
        self.clear()

    def _take_collected(self, sub_group: SubGroup) -> dict[int, torch.Tensor]:
        self._release_taken()
        kept = self._collected.get(sub_group)
        if kept is None:
            return {}
        lease = kept.lease
        if lease is None:
            with self._traffic.times.waiting:
                if sub_group not in self._ahead:
                    self._read(kept, self._pool.lease(max(kept.layout.nbytes, 1)))
                self._ahead[sub_group][1].result()
            self._traffic.look()
            lease = self._taken = self._ahead.pop(sub_group)[0]  # may be scaled below, so the next take has to read it again
        found = {index: kept.layout.sections[index].of(lease.buffer) for index in sorted(kept.present)}
        if self._scale is not None:
            for index, gradient in found.items():  # those in memory stay, because the sub-group is incomplete, or resident
                found[index] = gradient.mul_(self._scale) if kept.lease is None else gradient * self._scale
        return found

    def _in_memory(self, kept: _Collected) -> torch.Tensor:
        """Return the bytes of a sub-group's gradients in memory, reading them back if they were written."""
        if kept.lease is None:
            self._make_room()
            lease = self._pool.lease(max(kept.layout.nbytes, 1))
            if kept.written is not None:
                self._until_written(kept)
                self._traffic.get(_name(kept.sub_group), lease.buffer[: kept.layout.nbytes]).result()
            kept.came_to_memory(lease)
        return kept.block

    def _complete(self, kept: _Collected) -> None:
        """Write gradients to which the current backward adds no more. What is added from here on is another backward's."""
        kept.added.clear()
        self._write(kept)

    def _make_room(self) -> None:
        """Wait for writes, or start one, until another sub-group's gradients may be in memory."""
        while True:
            open_now = [each for each in self._collected.values() if each.lease is not None and not each.sub_group.in_memory]
            if len(open_now) + len(self._leaving) < OPEN:
                return
            if self._leaving:
                self._leaving.popleft().exception()  # only wait: an error is raised where the gradients are needed
            else:
                self._write(open_now[0])

    def _read(self, kept: _Collected, lease: Lease) -> None:
        self._until_written(kept)
        self._ahead[kept.sub_group] = lease, self._traffic.get(_name(kept.sub_group), lease.buffer[: kept.layout.nbytes])

    def _write(self, kept: _Collected) -> None:
        """Begin to write a sub-group's gradients and to free their memory, unless it is resident."""
        if not kept.sub_group.in_memory:
            written = self._traffic.put(_name(kept.sub_group), kept.block)
            kept.left_memory(written)
            self._leaving.append(written)

    def _until_written(self, kept: _Collected) -> None:
        if kept.written is None:
            return
        try:
            kept.written.result()
        except OSError as error:
            if not self.lost:
                error.strerror = f"{error.strerror}; a gradient is lost with it: call zero_grad() and run backward again"
            self.lost = True
            raise

    def _release_taken(self) -> None:
        taken, self._taken = self._taken, None
        if taken is not None:
            taken.release()


def _name(sub_group: SubGroup) -> str:
    return f"{sub_group.index}.gradient"
