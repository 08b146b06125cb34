"""Gradients of sub-groups: collected during backward, kept in ``param.grad`` or on the drive, clipped, and read for the step."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from deepnvme._interrupts import defer_interrupts
from deepnvme.cache.block import State
from deepnvme.cache.block_cache import BlockCache, Use
from deepnvme.cache.block_memory import PooledMemory
from deepnvme.memory.growable import GrowableLease
from deepnvme.memory.pool import BufferPool

from .counted_io import CountedIO, StoredBlock, shortage
from .params import distributed_like, local_of
from .sub_group import SubGroup, lay_out

GRADIENTS_IN_FLIGHT = 3
"""Most non-resident sub-groups whose gradients are in memory during backward, being filled or being written.

Gradients of resident sub-groups are not counted. They are never written, so no write error can lose them.
"""

Pieces = Mapping[torch.Tensor, Sequence[tuple[SubGroup, int]]]
"""Maps a parameter to its pieces. A piece is (its sub-group, its index in the sub-group's ``pieces``)."""


def pieces_of(sub_groups: Iterable[SubGroup]) -> dict[torch.Tensor, list[tuple[SubGroup, int]]]:
    """Return the pieces of each parameter of some sub-groups."""
    found: dict[torch.Tensor, list[tuple[SubGroup, int]]] = {}
    for sub_group in sub_groups:
        for index, piece in enumerate(sub_group.pieces):
            found.setdefault(piece.param, []).append((sub_group, index))
    return found


class GradientHooks:
    """Calls a method with each parameter whose gradient backward has just accumulated.

    Calls are serialised by a lock, since backward has one thread for each device. When the method's object has been
    garbage-collected, the hooks do nothing.

    Args:
        arrived: The bound method to call, with the parameter. Only a weak reference to its object is kept.
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
    """The offloaded gradients of one sub-group: in memory while backward adds to them, then on the drive."""

    def __init__(self, sub_group: SubGroup) -> None:
        self.sub_group = sub_group
        self.layout = lay_out([(index, "", piece.of(piece.param)) for index, piece in enumerate(sub_group.pieces)])
        self.block = StoredBlock(f"{sub_group.index}.gradient", self.layout.nbytes)
        self.present: set[int] = set()
        """Indices of the pieces that have a gradient."""
        self.added: set[int] = set()
        """Indices of the pieces that the current backward has added to; emptied once it has added to all pieces."""


class SubGroupGradients:
    """Provides the gradients of sub-groups, from ``param.grad`` or, if they are offloaded, from the drive.

    Offloaded gradients are collected in memory, summed over several backwards, and written when a sub-group has all of them.
    Not thread-safe: GradientHooks serialises calls.

    Args:
        io: Reads and writes gradients.
        pool: The buffer pool that memory is leased from.
    """

    def __init__(self, io: CountedIO, pool: BufferPool) -> None:
        self._io = io
        self._collected: dict[SubGroup, _Collected] = {}
        self._norms: dict[torch.Tensor, torch.Tensor] = {}
        """2-norms of the whole gradients of parameters that are cut into pieces. A second backward drops a parameter's norm."""
        self._scale: torch.Tensor | None = None
        self._memory = PooledMemory(pool, 0, shortage, separate_residents=True)
        self._cache = BlockCache(io, self._memory, retain=False, read_again=False, leased=io.leased)
        self._largest = 0
        """Bytes of the largest gradient block of any sub-group."""
        self._taken: StoredBlock | None = None
        """The gradient block that :meth:`take` has read for its last result, and may have scaled in place; None without one."""
        self._scratch = GrowableLease(pool, io.leased)

    # -- in backward

    def take_in(self, param: torch.Tensor, pieces: Sequence[tuple[SubGroup, int]]) -> None:
        """Move a parameter's gradient from ``param.grad`` to its sub-groups' gradient blocks, and set ``param.grad`` to None.

        A gradient from an earlier backward is added to. Blocks only while memory has to be freed for the gradient, or while an
        earlier gradient is read back.

        Args:
            param: A parameter. Nothing happens if its ``grad`` is None.
            pieces: The parameter's pieces, as (sub-group, index in the sub-group's ``pieces``).

        Raises:
            RuntimeError: If the gradients collected so far were clipped.
            TypeError: For a gradient that is not a strided tensor.
            OSError: If the drive cannot be read or written. On any exception ``param.grad`` stays.
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
        """Add one piece of a gradient to its sub-group's block, and append it to ``taken``; start writing a complete block."""
        gradient = sub_group.pieces[index].gradient
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise TypeError(f"a gradient of layout {gradient.layout} cannot be offloaded: set offload_gradients to False")
        kept = self._collected.get(sub_group)
        if kept is None:
            kept = _Collected(sub_group)
            self._largest = max(self._largest, kept.block.nbytes)
            self._collected[sub_group] = kept
        view = kept.layout.sections[index].of(self._buffer_of(kept))
        with defer_interrupts():  # an interrupt between adding and recording would add the gradient twice
            if index in kept.present:
                view.add_(gradient.to("cpu"))
            else:
                view.copy_(gradient)
            taken.append(gradient)
            kept.present.add(index)
            kept.added.add(index)
        if sub_group.has_all_gradients(kept.added):
            self._complete(kept)

    def flush(self) -> None:
        """Write the gradient blocks that are still in memory, and wait until all are written.

        A sub-group is written even if some of its parameters got no gradient in this backward.

        Raises OSError for a block that could not be written. It stays in memory, and the next call writes it again.
        """
        for kept in self._collected.values():
            if kept.block.users:
                self._complete(kept)
        with self._io.times.waiting:
            self._cache.drain()
            self._cache.raise_failure()
            self._cache.flush([kept.block for kept in self._collected.values() if not kept.sub_group.resident])

    @property
    def any_collected(self) -> bool:
        """Whether any sub-group has offloaded gradients, or memory for them."""
        return any(kept.present or kept.block.users for kept in self._collected.values())

    # -- for a step

    def has(self, sub_group: SubGroup) -> bool:
        """Return whether any piece of the sub-group has a gradient, in ``param.grad`` or in the sub-group's gradient block."""
        return bool(self.pieces_with_gradients(sub_group))

    def pieces_with_gradients(self, sub_group: SubGroup) -> set[int]:
        """Return the indices of the pieces that have a gradient, in ``param.grad`` or in the sub-group's gradient block."""
        in_grad = {index for index, piece in enumerate(sub_group.pieces) if piece.param.grad is not None}
        return in_grad | self._present(sub_group)

    def prepare(self, sub_groups: Sequence[SubGroup]) -> None:
        """Check the gradients of the sub-groups to be stepped, and lease the memory for converting them to float32.

        Errors are raised here, before any sub-group is stepped.

        Raises:
            TypeError: For a gradient that is not strided but would have to be cut.
            OutOfBuffers: If the pool has no memory for the conversion.
        """
        for sub_group in sub_groups:
            for piece in sub_group.pieces:
                piece.check_gradient()
        self._scratch.take(max((each.full_gradient_bytes for each in sub_groups), default=0))

    def expect(self, sub_groups: Iterable[SubGroup]) -> None:
        """Start reading ahead the gradients of the first two of these sub-groups, as far as there is memory."""
        if not self._collected:
            return
        following = itertools.islice(sub_groups, GRADIENTS_IN_FLIGHT - 1)
        ahead = [self._collected[each].block for each in following if self._present(each)]
        self._memory.limit = (GRADIENTS_IN_FLIGHT + 1) * self._largest  # the last one of backward may still be being written
        self._cache.expect(map(Use, ahead))

    def take(self, sub_group: SubGroup) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        """Return the gradients that :meth:`SubGroup.step` needs, and memory for converting gradients to float32.

        Offloaded gradients are read from the drive if necessary, which blocks and may raise OSError, and scaled if :meth:`clip`
        was called. Both results are valid until the next call.

        Returns:
            The offloaded gradients by index of the piece, and the memory for conversion (uint8, one dimension).
        """
        return self._take_collected(sub_group), self._scratch.take(sub_group.full_gradient_bytes)

    # -- for clipping

    def norms(self, params: Sequence[torch.Tensor], norm_type: float) -> list[torch.Tensor | None]:
        """Return the norm of each parameter's offloaded gradient on this rank; None without a gradient.

        Reads all gradients from the drive. Blocks.
        """
        by_param: dict[torch.Tensor, list[torch.Tensor]] = {}
        sub_groups = list(self._collected)
        for number, sub_group in enumerate(sub_groups):
            self.expect(sub_groups[number : number + GRADIENTS_IN_FLIGHT])
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
        """Compute the total norm. :meth:`take` then scales the collected gradients down to ``max_norm``.

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

    def clear(self) -> None:
        """Drop all collected gradients and release their memory. Their space on the drive is kept for the next gradients.

        Blocks until transfers have ended. If Ctrl-C interrupts the wait, all gradients are dropped already, and another call
        releases the remaining memory.
        """
        with defer_interrupts():
            self._taken = None
            self._collected.clear()
            self._norms.clear()
            self._scale = None
        self._cache.clear()

    def release(self) -> None:
        """Drop all collected gradients, and release all memory."""
        self._scratch.release()
        self.clear()

    def _take_collected(self, sub_group: SubGroup) -> dict[int, torch.Tensor]:
        """Return a sub-group's offloaded gradients by index of the piece, read and scaled. Valid until the next call."""
        self._release_taken()
        present = self._present(sub_group)
        if not present:
            return {}
        kept = self._collected[sub_group]
        stays = kept.block.users > 0  # because the sub-group is incomplete, or resident
        if not stays:
            self._taken = kept.block
            with self._io.times.waiting:
                self._cache.acquire([kept.block])
            self._io.record_ended()
        found = {index: kept.layout.sections[index].of(kept.block.content) for index in sorted(present)}
        if self._scale is not None:
            in_place = not stays and kept.block.state is State.CLEAN
            for index, gradient in found.items():
                found[index] = gradient.mul_(self._scale) if in_place else gradient * self._scale
        return found

    def _present(self, sub_group: SubGroup) -> set[int]:
        """Return the indices of the sub-group's pieces that have a gradient in its gradient block."""
        kept = self._collected.get(sub_group)
        return set() if kept is None else kept.present

    def _buffer_of(self, kept: _Collected) -> torch.Tensor:
        """Return the bytes of a sub-group's gradients in memory, reading them back if they were written."""
        block = kept.block
        if not block.users:
            self._memory.limit = GRADIENTS_IN_FLIGHT * self._largest
            self._cache.keep({block: kept.sub_group.resident})
            used = [each for each in self._collected.values() if each.block.users and not each.block.resident]
            if len(used) == GRADIENTS_IN_FLIGHT:
                self._write(used[0])
            if kept.present:
                self._cache.acquire([block])
            else:
                self._cache.create(block)
        return block.content

    def _complete(self, kept: _Collected) -> None:
        """Start writing a sub-group's gradient block: the current backward has added all of its gradients."""
        kept.added.clear()
        self._write(kept)

    def _write(self, kept: _Collected) -> None:
        """Start writing a sub-group's gradient block, and free its memory once written, unless the sub-group is resident.

        Raises OSError if the write cannot be started; the gradients then stay in memory.
        """
        if not kept.sub_group.resident:
            self._cache.release([kept.block], changed=True)
            self._cache.raise_failure()

    def _release_taken(self) -> None:
        """Drop gradients that :meth:`take` may have scaled, so that they are read again; keep those that were never written."""
        with defer_interrupts():  # or it would be scaled once more
            taken, self._taken = self._taken, None
            if taken is not None and taken.users:
                end_use = self._cache.reject if taken.state is State.CLEAN else self._cache.release
                end_use([taken])
