"""Pinned buffers that tensors are copied into one after another, on their way to a file each.

Contract: DeepSpeed 0.19, ``runtime/swap_tensor/utils.py``. Where that asserts, this raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepnvme.memory.growable import lease_more
from deepnvme.memory.pool import Lease, buffer_pool

from .environment import describe

if TYPE_CHECKING:
    import torch


def swap_in_tensors(swap_handle: Any, tensor_buffers: Iterable[torch.Tensor], swap_paths: Iterable[str]) -> None:
    """Start reading each file into its buffer. ``swap_handle.wait()`` waits for all, and raises what came of it."""
    for buffer, path in zip(tensor_buffers, swap_paths, strict=True):
        swap_handle.async_pread(buffer, path, 0)


def swap_out_tensors(swap_handle: Any, tensor_buffers: Iterable[torch.Tensor], swap_paths: Iterable[str]) -> None:
    """Start writing each buffer to its file. ``swap_handle.wait()`` waits for all, and raises what came of it."""
    for buffer, path in zip(tensor_buffers, swap_paths, strict=True):
        swap_handle.async_pwrite(buffer, path, 0)


def get_sized_buffer(buffer: torch.Tensor, num_elems: int) -> torch.Tensor:
    """The first ``num_elems`` elements of a one-dimensional buffer. Raises ValueError if there are not so many."""
    if num_elems > buffer.numel():
        raise ValueError(f"{num_elems} elements are wanted of a buffer of {buffer.numel()}: make the buffer larger")
    return buffer.narrow(0, 0, num_elems)


def get_sized_buffers(buffer_list: Iterable[torch.Tensor], num_elems_list: Iterable[int]) -> list[torch.Tensor]:
    """The first elements of each buffer, as many as the second list says for it; the shorter list counts."""
    return [get_sized_buffer(buffer, num_elems) for buffer, num_elems in zip(buffer_list, num_elems_list, strict=False)]


@dataclass(frozen=True)
class _Place:
    """A tensor's part of a buffer, and where in which file that belongs."""

    offset: int
    """Elements from the buffer's start."""
    swap_tensor: torch.Tensor
    compute_tensor: torch.Tensor
    path: str | None
    file_offset: int


class SwapBuffer:
    """One pinned buffer, filled with tensors from its start on. ``buffer``: one dimension, any dtype."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.reset()

    def reset(self) -> None:
        """Forget what is in it."""
        self.offset = 0
        self.num_elem = 0
        self._places: list[_Place] = []

    def insert_tensor(
        self, tensor: torch.Tensor, swap_path: str | None, aligned_numel: int, file_offset: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy a tensor of any shape in, and return the part that is to be written and the part that holds the tensor."""
        swap_tensor, compute_tensor = self.allocate_tensor(swap_path, tensor.numel(), aligned_numel, file_offset)
        compute_tensor.detach().copy_(tensor.detach().reshape(-1))
        return swap_tensor, compute_tensor

    def allocate_tensor(
        self, swap_path: str | None, numel: int, aligned_numel: int, file_offset: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Set room aside, and return it: ``aligned_numel`` elements to be written, of which the first ``numel`` count.

        ``file_offset``: bytes from the start of the file at ``swap_path``. Raises ValueError where there is no room.
        """
        if not self.has_space(aligned_numel):
            raise ValueError(
                f"{aligned_numel} elements are wanted of a buffer of {self.buffer.numel()}, of which {self.offset} are taken: "
                "ask has_space first, or reset it"
            )
        swap_tensor = self.buffer.narrow(0, self.offset, aligned_numel)
        place = _Place(self.offset, swap_tensor, swap_tensor.narrow(0, 0, numel), swap_path, file_offset)
        self._places.append(place)
        self.offset += aligned_numel
        self.num_elem += numel
        return place.swap_tensor, place.compute_tensor

    def has_space(self, numel: int) -> bool:
        """Whether so many more elements fit."""
        return self.offset + numel <= self.buffer.numel()

    def start_writing(self, aio_handle: Any) -> None:
        """Start writing all that is in it, each tensor to its file. Raises OSError, after which the rest is not under way."""
        for place in self._places:
            aio_handle.async_pwrite(place.swap_tensor, place.path, place.file_offset)

    def get_swap_tensors(self) -> list[torch.Tensor]:
        return [place.swap_tensor for place in self._places]

    def get_swap_paths(self) -> list[str | None]:
        return [place.path for place in self._places]

    def get_compute_tensors(self) -> list[torch.Tensor]:
        return [place.compute_tensor for place in self._places]

    def get_num_elem(self) -> int:
        """Elements in it, without those that only align."""
        return self.num_elem

    def get_swap_tensor(self, offset: int) -> torch.Tensor | None:
        """What is to be written of the tensor at ``offset`` elements."""
        place = self._at(offset)
        return None if place is None else place.swap_tensor

    def get_compute_tensor(self, offset: int) -> torch.Tensor | None:
        place = self._at(offset)
        return None if place is None else place.compute_tensor

    def get_swap_path(self, offset: int) -> str | None:
        place = self._at(offset)
        return None if place is None else place.path

    def _at(self, offset: int) -> _Place | None:
        """The last, where those before are of no elements."""
        return next((place for place in reversed(self._places) if place.offset == offset), None)


class SwapBufferPool:
    """Several pinned buffers, filled one after the other. ValueError if one of them is not pinned."""

    def __init__(self, buffers: Sequence[torch.Tensor], aio_handle: Any) -> None:
        pageable = sum(not aio_handle.is_pinned(buffer) for buffer in buffers)
        if pageable or not buffers:
            raise ValueError(f"{pageable} of {len(buffers)} buffers are not pinned: make them with new_cpu_locked_tensor")
        self.buffers = [SwapBuffer(buffer) for buffer in buffers]
        self.current_index = 0

    def reset(self) -> None:
        """Forget what is in them."""
        self.current_index = 0
        for buffer in self.buffers:
            buffer.reset()

    def allocate_tensor(
        self, numel: int, swap_path: str | None, aligned_numel: int
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """As :meth:`SwapBuffer.allocate_tensor`, in the current buffer or the next that has room; (None, None) if none has."""
        if not self.has_space(aligned_numel):
            return None, None
        return self.buffers[self.current_index].allocate_tensor(swap_path, numel, aligned_numel)

    def insert_tensor(
        self, tensor: torch.Tensor, swap_path: str | None, aligned_numel: int
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """As :meth:`SwapBuffer.insert_tensor`, in the current buffer or the next that has room; (None, None) if none has."""
        if not self.has_space(aligned_numel):
            return None, None
        return self.buffers[self.current_index].insert_tensor(tensor, swap_path, aligned_numel)

    def has_space(self, numel: int) -> bool:
        """Whether so many elements fit into one of the buffers from the current one on, which becomes the current one."""
        for index in range(self.current_index, len(self.buffers)):
            if self.buffers[index].has_space(numel):
                self.current_index = index
                return True
        return False

    def get_swap_tensors(self) -> list[torch.Tensor]:
        return [tensor for buffer in self._used() for tensor in buffer.get_swap_tensors()]

    def get_swap_paths(self) -> list[str | None]:
        return [path for buffer in self._used() for path in buffer.get_swap_paths()]

    def get_compute_tensors(self) -> list[torch.Tensor]:
        return [tensor for buffer in self._used() for tensor in buffer.get_compute_tensors()]

    def swap_out(self, aio_handle: Any, async_op: bool = False) -> None:
        """Write every tensor to its file; with ``async_op`` start to. Raises OSError, and ValueError for one without a path."""
        swap_out_tensors(aio_handle, self.get_swap_tensors(), self._paths())
        if not async_op:
            aio_handle.wait()

    def swap_in(self, aio_handle: Any, async_op: bool = False) -> None:
        """Read every tensor from its file; with ``async_op`` start to. Raises OSError, and ValueError for one without a path."""
        swap_in_tensors(aio_handle, self.get_swap_tensors(), self._paths())
        if not async_op:
            aio_handle.wait()

    def _paths(self) -> list[str]:
        paths = [path for path in self.get_swap_paths() if path is not None]
        if len(paths) < len(self.get_swap_paths()):
            raise ValueError("tensors that were given no path cannot be swapped: allocate or insert them with one")
        return paths

    def _used(self) -> list[SwapBuffer]:
        return self.buffers[: self.current_index + 1]


class SwapBufferManager:
    """``count`` pinned buffers of ``num_elems`` elements each, zeroed; more are leased from the process's pool when they run out.

    The memory is the handle's, which counts it as pinned; leases are recognised as such by the handles of this package.
    """

    def __init__(self, num_elems: int, count: int, dtype: torch.dtype, aio_handle: Any) -> None:
        import torch

        self.num_elems = num_elems
        self.count = count
        self.dtype = dtype
        self.aio_handle = aio_handle
        example = torch.zeros(1, dtype=dtype, device="cpu")
        self.all_buffers = [aio_handle.new_cpu_locked_tensor(num_elems, example).zero_() for _ in range(count)]
        self.gigabytes = num_elems * count * example.element_size() / (1 << 30)
        self._free = list(self.all_buffers)
        self._used: dict[int, tuple[torch.Tensor, torch.Tensor | Lease]] = {}  # by id: the part handed out, and its memory
        describe(self, exclude=("all_buffers", "aio_handle"))

    def allocate(self, num_elems: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """``count`` buffers' first ``num_elems`` elements, contents undefined. Beyond the manager's own they are leases.

        Raises ValueError for more elements than a buffer has or for another dtype, and OutOfBuffers where the budget of
        ``deepnvme.swap.buffer_pool()`` has no room for more.
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
        """All that are free, or one more where none is."""
        return self.allocate(num_elems, max(len(self._free), 1), dtype)

    def free(self, buffers: Iterable[torch.Tensor]) -> None:
        """Give back what :meth:`allocate` returned. Raises ValueError for anything else, giving none back."""
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
        held = [memory for _, memory in self._used.values() if isinstance(memory, Lease)]
        shortage = f"all {self.count} swap buffers are in use, set a larger 'buffer_count'"
        return lease_more(buffer_pool(), self.num_elems * self.dtype.itemsize, held, shortage)

    def __del__(self) -> None:
        # DeepSpeed's handle keeps page-locked memory until it is freed. All in one C call: Ctrl-C in a loop here would be
        # swallowed and leave the rest locked.
        deque(map(self.aio_handle.free_cpu_locked_tensor, getattr(self, "all_buffers", [])), 0)
