"""Pinned buffers that are filled with tensors one after another, each of which is written to a file of its own.

Contract: DeepSpeed 0.19, ``runtime/swap_tensor/utils.py`` and ``async_swapper.py``. Where DeepSpeed asserts, this module raises.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepnvme._interrupts import defer_interrupts
from deepnvme.memory.alignment import padded
from deepnvme.memory.growable import lease_more
from deepnvme.memory.pool import Lease, buffer_pool

from .environment import Timers, describe

Parts = tuple[torch.Tensor, torch.Tensor]
"""A tensor's part of a buffer, and the elements in it that count."""

ASYNC_SWAPPER_WAIT_TIMER = "async_swap_gradient_wait"


def swap_in_tensors(swap_handle: Any, tensor_buffers: Iterable[torch.Tensor], swap_paths: Iterable[str]) -> None:
    """Start reading each file into its buffer. ``swap_handle.wait()`` waits for all reads, and raises their errors.

    Args:
        swap_handle: An ``aio_handle`` or ``gds_handle``.
        tensor_buffers: Contiguous tensors, not to be touched until the wait.
        swap_paths: A path for each of them; ValueError if there are more or fewer.
    """
    _start("async_pread", swap_handle, list(tensor_buffers), list(swap_paths))


def swap_out_tensors(swap_handle: Any, tensor_buffers: Iterable[torch.Tensor], swap_paths: Iterable[str]) -> None:
    """Start writing each buffer to its file. ``swap_handle.wait()`` waits for all writes, and raises their errors.

    Args:
        swap_handle: An ``aio_handle`` or ``gds_handle``.
        tensor_buffers: Contiguous tensors, not to be touched until the wait.
        swap_paths: A path for each of them; ValueError if there are more or fewer.
    """
    _start("async_pwrite", swap_handle, list(tensor_buffers), list(swap_paths))


def _start(method: str, handle: Any, tensors: list[torch.Tensor], paths: list[Any], offsets: Sequence[int] | None = None) -> None:
    """Start a transfer for each tensor, by one call if the handle is one of this package's."""
    many = getattr(type(handle), f"{method}_many", None)  # of its own: a wrapper may replace only `method`
    if many is not None:
        many(handle, tensors, paths, offsets)
        return
    for tensor, path, offset in zip(tensors, paths, offsets or [0] * len(tensors), strict=True):
        getattr(handle, method)(tensor, path, offset)


def get_sized_buffer(buffer: torch.Tensor, num_elems: int) -> torch.Tensor:
    """Return a view of the first ``num_elems`` elements of a one-dimensional buffer. Raises ValueError if it has fewer."""
    if num_elems > buffer.numel():
        raise ValueError(f"{num_elems} elements are wanted of a buffer of {buffer.numel()}: make the buffer larger")
    return buffer.narrow(0, 0, num_elems)


def get_sized_buffers(buffer_list: Iterable[torch.Tensor], num_elems_list: Iterable[int]) -> list[torch.Tensor]:
    """Return views of the first elements of buffers, as many as ``num_elems_list`` gives for each.

    Stops at the end of the shorter list. Raises ValueError if a buffer has fewer elements.
    """
    return [get_sized_buffer(buffer, num_elems) for buffer, num_elems in zip(buffer_list, num_elems_list, strict=False)]


@dataclass(frozen=True)
class _Allocation:
    """A tensor's part of a buffer, and the path and offset (bytes) in a file that it is written to."""

    offset: int
    """Elements from the buffer's start."""
    swap_tensor: torch.Tensor
    compute_tensor: torch.Tensor
    path: str | None
    file_offset: int


class SwapBuffer:
    """One pinned buffer, filled with tensors from its start.

    A tensor has a "swap tensor", the aligned part of the buffer that is written, and a "compute tensor", the elements in it that
    count. Both are views of the buffer.

    Args:
        buffer: A tensor of one dimension and any dtype.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.reset()

    def reset(self) -> None:
        """Make the whole buffer free again."""
        self.offset = 0
        self.num_elem = 0
        self._allocations: list[_Allocation] = []

    def insert_tensor(self, tensor: torch.Tensor, swap_path: str | None, aligned_numel: int, file_offset: int = 0) -> Parts:
        """Copy a tensor of any shape into the buffer; return its swap tensor and its compute tensor.

        Arguments and errors are those of :meth:`allocate_tensor`.
        """
        swap_tensor, compute_tensor = self.allocate_tensor(swap_path, tensor.numel(), aligned_numel, file_offset)
        compute_tensor.detach().copy_(tensor.detach().reshape(-1))
        return swap_tensor, compute_tensor

    def allocate_tensor(self, swap_path: str | None, numel: int, aligned_numel: int, file_offset: int = 0) -> Parts:
        """Reserve the next part of the buffer for a tensor.

        Args:
            swap_path: The file that it is to be written to, or read from.
            numel: Elements of the tensor.
            aligned_numel: Elements to write, at least ``numel``.
            file_offset: Bytes from the start of the file.

        Returns:
            The swap tensor, of ``aligned_numel`` elements, and the compute tensor, its first ``numel`` elements.

        Raises:
            ValueError: If the buffer has no room for ``aligned_numel`` more elements.
        """
        if not self.has_space(aligned_numel):
            raise ValueError(
                f"{aligned_numel} elements are wanted of a buffer of {self.buffer.numel()}, of which {self.offset} are taken: "
                "ask has_space first, or reset it"
            )
        swap_tensor = self.buffer.narrow(0, self.offset, aligned_numel)
        allocation = _Allocation(self.offset, swap_tensor, swap_tensor.narrow(0, 0, numel), swap_path, file_offset)
        self._allocations.append(allocation)
        self.offset += aligned_numel
        self.num_elem += numel
        return allocation.swap_tensor, allocation.compute_tensor

    def has_space(self, numel: int) -> bool:
        """Return whether ``numel`` more elements fit."""
        return self.offset + numel <= self.buffer.numel()

    def start_writing(self, aio_handle: Any) -> None:
        """Start writing each tensor to its file.

        If this raises OSError for a tensor, some of the others may have been written.
        """
        offsets = [allocation.file_offset for allocation in self._allocations]
        _start("async_pwrite", aio_handle, self.get_swap_tensors(), self.get_swap_paths(), offsets)

    def get_swap_tensors(self) -> list[torch.Tensor]:
        """Return the swap tensors, in the order they were added."""
        return [allocation.swap_tensor for allocation in self._allocations]

    def get_swap_paths(self) -> list[str | None]:
        """Return the paths of the tensors, in the order they were added."""
        return [allocation.path for allocation in self._allocations]

    def get_compute_tensors(self) -> list[torch.Tensor]:
        """Return the compute tensors, in the order they were added."""
        return [allocation.compute_tensor for allocation in self._allocations]

    def get_num_elem(self) -> int:
        """Return the number of elements in the buffer, without padding."""
        return self.num_elem

    def get_swap_tensor(self, offset: int) -> torch.Tensor | None:
        """Return the swap tensor at ``offset`` elements from the buffer's start; None if no tensor begins there."""
        allocation = self._at(offset)
        return None if allocation is None else allocation.swap_tensor

    def get_compute_tensor(self, offset: int) -> torch.Tensor | None:
        """Return the compute tensor at ``offset`` elements from the buffer's start; None if no tensor begins there."""
        allocation = self._at(offset)
        return None if allocation is None else allocation.compute_tensor

    def get_swap_path(self, offset: int) -> str | None:
        """Return the path of the tensor at ``offset`` elements from the buffer's start; None if no tensor begins there."""
        allocation = self._at(offset)
        return None if allocation is None else allocation.path

    def _at(self, offset: int) -> _Allocation | None:
        """Return the last allocation that begins at ``offset``: earlier ones there have no elements."""
        return next((allocation for allocation in reversed(self._allocations) if allocation.offset == offset), None)


class SwapBufferPool:
    """Several pinned buffers, filled one after the other.

    Args:
        buffers: One-dimensional tensors.
        aio_handle: The handle that has pinned them.

    Raises:
        ValueError: If there are no buffers, or one of them is not pinned.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], aio_handle: Any) -> None:
        pageable = sum(not aio_handle.is_pinned(buffer) for buffer in buffers)
        if pageable or not buffers:
            raise ValueError(f"{pageable} of {len(buffers)} buffers are not pinned: make them with new_cpu_locked_tensor")
        self.buffers = [SwapBuffer(buffer) for buffer in buffers]
        self.current_index = 0

    def reset(self) -> None:
        """Make all buffers free again, and fill the first one next."""
        self.current_index = 0
        for buffer in self.buffers:
            buffer.reset()

    def allocate_tensor(self, numel: int, swap_path: str | None, aligned_numel: int) -> Parts | tuple[None, None]:
        """Reserve a part of the current buffer, or of the next one with room: see :meth:`SwapBuffer.allocate_tensor`.

        Returns (None, None) if no buffer has room.
        """
        if not self.has_space(aligned_numel):
            return None, None
        return self.buffers[self.current_index].allocate_tensor(swap_path, numel, aligned_numel)

    def insert_tensor(
        self, tensor: torch.Tensor, swap_path: str | None, aligned_numel: int, file_offset: int = 0
    ) -> Parts | tuple[None, None]:
        """Copy a tensor into the current buffer, or the next one with room: see :meth:`SwapBuffer.insert_tensor`.

        Returns (None, None) if no buffer has room.
        """
        if not self.has_space(aligned_numel):
            return None, None
        return self.buffers[self.current_index].insert_tensor(tensor, swap_path, aligned_numel, file_offset)

    def has_space(self, numel: int) -> bool:
        """Make the first buffer with room for ``numel`` elements, from the current one on, the current one.

        Returns whether there is one.
        """
        for index in range(self.current_index, len(self.buffers)):
            if self.buffers[index].has_space(numel):
                self.current_index = index
                return True
        return False

    def get_swap_tensors(self) -> list[torch.Tensor]:
        """Return the swap tensors of all buffers, in the order they were added."""
        return [tensor for buffer in self._used() for tensor in buffer.get_swap_tensors()]

    def get_swap_paths(self) -> list[str | None]:
        """Return the paths of the tensors of all buffers, in the order they were added."""
        return [path for buffer in self._used() for path in buffer.get_swap_paths()]

    def get_compute_tensors(self) -> list[torch.Tensor]:
        """Return the compute tensors of all buffers, in the order they were added."""
        return [tensor for buffer in self._used() for tensor in buffer.get_compute_tensors()]

    def swap_out(self, aio_handle: Any, async_op: bool = False) -> None:
        """Write every tensor to its file. Blocks, unless ``async_op`` is set: then ``aio_handle.wait()`` waits.

        Raises ValueError if a tensor has no path, and OSError.
        """
        self._transfer(swap_out_tensors, aio_handle, async_op)

    def swap_in(self, aio_handle: Any, async_op: bool = False) -> None:
        """Read every tensor from its file. Blocks, unless ``async_op`` is set: then ``aio_handle.wait()`` waits.

        Raises ValueError if a tensor has no path, and OSError.
        """
        self._transfer(swap_in_tensors, aio_handle, async_op)

    def _transfer(self, start: Callable[[Any, list[torch.Tensor], list[str]], None], aio_handle: Any, async_op: bool) -> None:
        """Start reading or writing every tensor with ``start``, and wait unless ``async_op`` is set."""
        paths = [path for path in self.get_swap_paths() if path is not None]
        if len(paths) < len(self.get_swap_paths()):
            raise ValueError("tensors that were given no path cannot be swapped: allocate or insert them with one")
        start(aio_handle, self.get_swap_tensors(), paths)
        if not async_op:
            aio_handle.wait()

    def _used(self) -> list[SwapBuffer]:
        """Return the buffers that have tensors, or are filled next."""
        return self.buffers[: self.current_index + 1]


class AsyncTensorSwapper:
    """Copies tensors into pinned buffers, and writes each buffer in the background once it is full. Not thread-safe.

    Tensors that could not be written stay in their buffers. The method that waits for the write raises OSError with the path, and
    the next call writes them again.

    One difference from DeepSpeed's class: a tensor larger than any buffer is written in parts, where that refuses it.

    Args:
        aio_handle: Not to be used otherwise from :meth:`add_buffers` to :meth:`release_buffers`.
        numel_alignment: File lengths are rounded up to a multiple of this many elements.
        timers: DeepSpeed's timers, or None.
    """

    def __init__(self, aio_handle: Any, numel_alignment: int, timers: Callable[[str], Any] | None) -> None:
        self.aio_handle = aio_handle
        self.numel_alignment = numel_alignment
        self.timers = timers
        self.dtype: torch.dtype | None = None
        self.max_numel = 0
        self.num_elements_swapped = 0
        self._timers = Timers(timers)
        self._pool: SwapBufferPool | None = None
        self._sent = 0  # how many of the pool's buffers, from the first one on, are being written

    def has_buffers(self) -> bool:
        """Return whether the swapper has buffers."""
        return self._pool is not None

    def add_buffers(self, buffer_list: Sequence[torch.Tensor]) -> None:
        """Lend the swapper buffers, until :meth:`release_buffers`.

        Args:
            buffer_list: One-dimensional tensors of one dtype, pinned by the handle. At least one must have ``numel_alignment``
                elements.

        Raises:
            ValueError: For other buffers, or if the swapper has buffers already.
        """
        if self._pool is not None:
            raise ValueError(f"the swapper has {len(self._pool.buffers)} buffers already: release_buffers first")
        dtypes = {buffer.dtype for buffer in buffer_list}
        if len(dtypes) != 1 or not all(self.aio_handle.is_pinned(buffer) for buffer in buffer_list):
            raise ValueError(f"buffers must be pinned by the handle and of one dtype, got {len(buffer_list)} of {dtypes}")
        largest = max(buffer.numel() for buffer in buffer_list)
        if largest < self.numel_alignment:
            raise ValueError(f"a buffer must have at least numel_alignment = {self.numel_alignment} elements, got {largest}")
        self.dtype = dtypes.pop()
        self.max_numel = largest
        self._pool = SwapBufferPool(buffer_list, self.aio_handle)
        self._timers.names.clear()

    def get_timer_names(self) -> list[str]:
        """Return the names of the timers used since :meth:`add_buffers`."""
        return list(self._timers.names)

    def release_buffers(self) -> list[torch.Tensor]:
        """Wait until everything is written, and return the buffers. Blocks.

        Raises OSError, and keeps the buffers: call it again.
        """
        if self._pool is None:
            return []
        self._write_all(self._pool)
        buffers = [buffer.buffer for buffer in self._pool.buffers]
        self._pool = self.dtype = None
        self.num_elements_swapped = 0
        return buffers

    def swap_out_tensors(self, tensor_list: Iterable[torch.Tensor], path_list: Iterable[str]) -> None:
        """Write each tensor to its file in the background, converted to the buffers' dtype.

        The tensors are copied and may be changed when this returns. Blocks only while all buffers are being written.

        Args:
            tensor_list: Tensors of any shape and dtype.
            path_list: A path for each of them.

        Raises:
            ValueError: If the swapper has no buffers.
            OSError: If a write has failed, of these tensors or earlier ones. The tensors before the one at which it was raised
                were taken and are not lost; that one and those after it were not taken.
        """
        pool = self._pool
        if pool is None:
            raise ValueError("the swapper has no buffers: add_buffers first")
        most = self.max_numel // self.numel_alignment * self.numel_alignment
        for tensor, path in zip(tensor_list, path_list, strict=True):
            flat = tensor.detach().reshape(-1)
            for start in range(0, max(flat.numel(), 1), most):
                part = flat[start : start + most]
                aligned = padded(part.numel(), self.numel_alignment)
                if not pool.has_space(aligned):
                    self._write_all(pool)  # after that any part fits into the largest buffer
                self._send(pool, pool.current_index)
                pool.insert_tensor(part, path, aligned, file_offset=start * pool.buffers[0].buffer.element_size())

    def _send(self, pool: SwapBufferPool, count: int) -> None:
        """Start writing the first ``count`` buffers except those that are being written; some of them again after an error."""
        while self._sent < count:
            self._sent += 1
            try:
                pool.buffers[self._sent - 1].start_writing(self.aio_handle)
            except BaseException:
                with contextlib.suppress(OSError):
                    self.aio_handle.wait()
                self._sent = 0
                raise

    def _write_all(self, pool: SwapBufferPool) -> None:
        """Write all buffers, wait for that, and make them free."""
        used = pool.buffers[: pool.current_index + 1]
        try:
            self._send(pool, len(used))
            with self._timers.measure(ASYNC_SWAPPER_WAIT_TIMER):
                self.aio_handle.wait()
        except BaseException:
            self._sent = 0  # all are written again, because the handle does not say which of them failed
            raise
        with defer_interrupts():  # or a buffer would be written again later, over newer values
            self.num_elements_swapped += sum(buffer.get_num_elem() for buffer in used)
            pool.reset()
            self._sent = 0


class SwapBufferManager:
    """Hands out pinned buffers of equal size: its own, zeroed at first, and leases from the process's pool when these run out.

    Its own buffers are memory of the handle, which knows it as pinned. This package's handles recognise leases as pinned, too.

    Args:
        num_elems: Elements of each buffer.
        count: How many buffers to pin at once.
        dtype: The buffers' dtype.
        aio_handle: Pins the buffers.
    """

    def __init__(self, num_elems: int, count: int, dtype: torch.dtype, aio_handle: Any) -> None:
        self.num_elems = num_elems
        self.count = count
        self.dtype = dtype
        self.aio_handle = aio_handle
        example = torch.zeros(1, dtype=dtype, device="cpu")
        self.all_buffers = [aio_handle.new_cpu_locked_tensor(num_elems, example).zero_() for _ in range(count)]
        self.gigabytes = num_elems * count * example.element_size() / (1 << 30)
        self._free = list(self.all_buffers)
        # By id() of the view handed out: the view, and its memory.
        self._used: dict[int, tuple[torch.Tensor, torch.Tensor | Lease]] = {}
        describe(self, exclude=("all_buffers", "aio_handle"))

    def allocate(self, num_elems: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Hand out ``count`` buffers: views of their first ``num_elems`` elements, with undefined contents.

        May block while other threads have leases.

        Raises:
            ValueError: If ``num_elems`` is larger than a buffer, or ``dtype`` differs.
            OutOfBuffers: If the manager's own buffers are in use, and ``deepnvme.swap.buffer_pool()`` has no room for more.
        """
        if dtype != self.dtype or num_elems > self.num_elems:
            raise ValueError(f"buffers have {self.num_elems} elements of {self.dtype}, got {num_elems} of {dtype}")
        buffers: list[torch.Tensor] = []
        try:
            for _ in range(count):
                memory = self._free.pop() if self._free else self._lease()
                whole = memory.tensor(self.num_elems, self.dtype) if isinstance(memory, Lease) else memory
                part = whole.narrow(0, 0, num_elems)
                self._used[id(part)] = part, memory
                buffers.append(part)
        except BaseException:
            self.free(buffers)
            raise
        return buffers

    def allocate_all(self, num_elems: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Hand out all free buffers or, if there is none, one lease. Otherwise like :meth:`allocate`."""
        return self.allocate(num_elems, max(len(self._free), 1), dtype)

    def free(self, buffers: Iterable[torch.Tensor]) -> None:
        """Return buffers of :meth:`allocate`. Raises ValueError, and returns none, if one of them is not handed out."""
        buffers = list(buffers)
        strangers = sum(id(buffer) not in self._used for buffer in buffers)
        if strangers:
            raise ValueError(f"{strangers} of {len(buffers)} buffers are not allocated: pass what allocate returned, and once")
        for buffer in buffers:
            _, memory = self._used.pop(id(buffer))
            if isinstance(memory, Lease):
                memory.release()
            else:
                self._free.append(memory)

    def _lease(self) -> Lease:
        """Lease one more buffer from the process's pool. May block. Raises OutOfBuffers."""
        held = [memory for _, memory in self._used.values() if isinstance(memory, Lease)]
        shortage = f"all {self.count} swap buffers are in use, set a larger 'buffer_count'"
        return lease_more(buffer_pool(), self.num_elems * self.dtype.itemsize, held, shortage)

    def __del__(self) -> None:
        # DeepSpeed's handle keeps memory locked until it is freed. deque(map()) is one C call: in a Python loop, Ctrl-C would be
        # swallowed, since this is __del__, and leave the rest locked.
        deque(map(self.aio_handle.free_cpu_locked_tensor, getattr(self, "all_buffers", [])), 0)
