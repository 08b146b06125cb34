"""Write tensors to files in the background, above all gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .aio_config import round_up
from .environment import Timers
from .swap_buffers import SwapBuffer

if TYPE_CHECKING:
    import torch

ASYNC_SWAPPER_WAIT_TIMER = "async_swap_gradient_wait"


class AsyncTensorSwapper:
    """Copies tensors into pinned buffers, and writes each buffer in the background once it is full. Not thread-safe.

    Tensors that could not be written stay in their buffers. The method that waits for the write raises OSError with the path, and
    the next call writes them again.

    Contract: DeepSpeed 0.19, ``runtime/swap_tensor/async_swapper.py``. One difference: a tensor larger than any buffer is written
    in parts, where DeepSpeed's class refuses it.

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
        self._buffers: list[SwapBuffer] = []
        self._free: list[SwapBuffer] = []  # the largest is the last, and used first: any part of a tensor fits into it
        self._filled: list[SwapBuffer] = []  # to be written, or being written; the last one may have room left
        self._sent = 0  # how many of these are being written

    def has_buffers(self) -> bool:
        """Return whether the swapper has buffers."""
        return bool(self._buffers)

    def add_buffers(self, buffer_list: Sequence[torch.Tensor]) -> None:
        """Lend the swapper buffers, until :meth:`release_buffers`.

        Args:
            buffer_list: One-dimensional tensors of one dtype, pinned by the handle. At least one must have ``numel_alignment``
                elements.

        Raises:
            ValueError: For other buffers, or if the swapper has buffers already.
        """
        if self._buffers:
            raise ValueError(f"the swapper has {len(self._buffers)} buffers already: release_buffers first")
        dtypes = {buffer.dtype for buffer in buffer_list}
        if len(dtypes) != 1 or not all(self.aio_handle.is_pinned(buffer) for buffer in buffer_list):
            raise ValueError(f"buffers must be pinned by the handle and of one dtype, got {len(buffer_list)} of {dtypes}")
        largest = max(buffer.numel() for buffer in buffer_list)
        if largest < self.numel_alignment:
            raise ValueError(f"a buffer must have at least numel_alignment = {self.numel_alignment} elements, got {largest}")
        self.dtype = dtypes.pop()
        self.max_numel = largest
        self._buffers = [SwapBuffer(buffer) for buffer in buffer_list]
        self._free = sorted(self._buffers, key=_size)
        self._timers.names.clear()

    def get_timer_names(self) -> list[str]:
        """Return the names of the timers used since :meth:`add_buffers`."""
        return list(self._timers.names)

    def release_buffers(self) -> list[torch.Tensor]:
        """Wait until everything is written, and return the buffers. Blocks.

        Raises OSError, and keeps the buffers: call it again.
        """
        self._write_all()
        buffers = [buffer.buffer for buffer in self._buffers]
        self._buffers, self._free = [], []
        self.num_elements_swapped = 0
        self.dtype = None
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
        for tensor, path in zip(tensor_list, path_list, strict=True):
            self._swap_out(tensor, path)

    def _swap_out(self, tensor: torch.Tensor, path: str) -> None:
        if not self._buffers:
            raise ValueError("the swapper has no buffers: add_buffers first")
        flat = tensor.detach().reshape(-1)
        most = self.max_numel // self.numel_alignment * self.numel_alignment
        for start in range(0, max(flat.numel(), 1), most):
            part = flat[start : start + most]
            aligned = round_up(part.numel(), self.numel_alignment)
            buffer = self._with_room(aligned)
            buffer.insert_tensor(part, path, aligned, file_offset=start * buffer.buffer.element_size())

    def _with_room(self, numel: int) -> SwapBuffer:
        """Return a buffer into which ``numel`` elements fit: the one that was filled last, or else a free one. May block."""
        if self._sent == len(self._filled) or not self._filled[-1].has_space(numel):
            self._send()
            if not self._free or not self._free[-1].has_space(numel):
                self._write_all()
            self._filled.append(self._free.pop())
        return self._filled[-1]

    def _send(self) -> None:
        """Start writing the buffers that are not being written, some of them again after an error."""
        while self._sent < len(self._filled):
            self._sent += 1
            try:
                self._filled[self._sent - 1].start_writing(self.aio_handle)
            except BaseException:
                with contextlib.suppress(OSError):
                    self.aio_handle.wait()
                self._sent = 0  # all are written again, because the handle does not say which of them failed
                raise

    def _write_all(self) -> None:
        """Write all buffers, wait for that, and make them free."""
        self._send()
        with self._timers.measure(ASYNC_SWAPPER_WAIT_TIMER):
            try:
                self.aio_handle.wait()
            except BaseException:
                self._sent = 0
                raise
        for buffer in self._filled:
            self.num_elements_swapped += buffer.get_num_elem()
            buffer.reset()
        self._free = sorted(self._free + self._filled, key=_size)
        self._filled, self._sent = [], 0


def _size(buffer: SwapBuffer) -> int:
    return buffer.buffer.numel()
