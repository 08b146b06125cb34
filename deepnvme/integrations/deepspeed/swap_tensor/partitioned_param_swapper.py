"""Keep ZeRO stage 3's parameter partitions on a drive: read before a layer is gathered, dropped or written after it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch

from deepnvme.memory.pool import OutOfBuffers

from .aio_config import AIO_KEYS, SwapSizes
from .environment import claim_folder, rank


class PartitionedParamStatus(Enum):
    """Where a parameter's partition is: the values of ``param.ds_tensor.status``.

    A member equals the member of the same name of DeepSpeed's enumeration, on either side of a comparison, because some parts
    of a program may use DeepSpeed's class and others this class.
    """

    AVAILABLE = 1
    """The partition is in memory."""
    NOT_AVAILABLE = 2
    """The partition is in its file only."""
    INFLIGHT = 3
    """The partition is being read."""

    def __eq__(self, other: object) -> bool:
        same_kind = isinstance(other, Enum) and type(other).__name__ == type(self).__name__
        return same_kind and other.name == self.name if isinstance(other, Enum) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)  # as enum.Enum does, so that equal members of both classes have equal hashes


AVAILABLE, NOT_AVAILABLE, INFLIGHT = PartitionedParamStatus


class AsyncPartitionedParameterSwapper(SwapSizes):
    """Reads and writes the partitions of parameters through pinned buffers. Each partition has a file. Not thread-safe.

    A parameter has a ``ds_id`` and a ``ds_tensor``, its flat partition, which has ``ds_numel`` and ``status``. ``ds_tensor`` is
    a scalar placeholder while the partition is not in memory. Methods are called by DeepSpeed's ``zero.Init``, its prefetching
    and stage 3's optimizer.

    When all buffers are in use, OutOfBuffers says what to set.

    Errors are OSError with the path, and leave the partitions as they were before: a partition that could not be written stays
    in its buffer, and a partition that could not be read is not available. The call can be repeated.

    The folder ``zero_stage_3/<dtype>params/rank<N>`` in ``nvme_path`` is emptied when the swapper is created. If another swapper
    uses it, this one has ``rank<N>-job-2``, ...

    Contract: DeepSpeed 0.19, ``runtime/swap_tensor/partitioned_param_swapper.py``.

    Args:
        ds_config: Has ``zero_config.offload_param``, with ``nvme_path``, ``buffer_count`` and ``buffer_size`` (elements), and
            ``aio_config``, the ``aio`` block with all keys.
        model_dtype: Dtype of the partitions.
    """

    def __init__(self, ds_config: Any, model_dtype: torch.dtype) -> None:
        super().__init__(ds_config.aio_config, model_dtype)
        self.swap_config = ds_config.zero_config.offload_param
        self.use_gds = bool(self.aio_config["use_gds"])
        self.elements_per_buffer = int(self.swap_config.buffer_size)
        self.aligned_elements_per_buffer = self._aligned(self.elements_per_buffer)
        self.param_buffer_count = int(self.swap_config.buffer_count)
        folder = os.path.join(self.swap_config.nvme_path, "zero_stage_3", f"{str(model_dtype).split('.')[1]}params")
        self.swap_folder = claim_folder(self, os.path.join(folder, f"rank{rank()}"))
        shutil.rmtree(self.swap_folder, ignore_errors=True)
        os.makedirs(self.swap_folder, exist_ok=True)
        self.aio_read_handle, self.aio_write_handle = self._handle(), self._handle()
        self.buffers = self._pinned(self.aligned_elements_per_buffer * self.param_buffer_count)

        self.id_to_path: dict[Any, str] = {}
        self.param_id_to_numel: dict[Any, int] = {}
        self.param_id_to_buffer_id: dict[Any, int] = {}
        self.param_id_to_swap_buffer: dict[Any, torch.Tensor] = {}
        self.available_buffer_ids = list(range(self.param_buffer_count))
        self.reserved_buffer_ids: list[int] = []
        self._clear_inflight()
        self.partitioned_swap_buffer: torch.Tensor | None = None
        self.invalid_buffer = torch.tensor(1, device="cpu").half()

    def available_swap_in_buffers(self) -> int:
        """Return how many of the configured buffers are free. Called by DeepSpeed's prefetching."""
        return len(self.available_buffer_ids)

    def swappable_tensor(self, param: Any = None, numel: int | None = None) -> bool:
        """Return whether a partition is large enough to be swapped. Called by DeepSpeed's ``_partition_param``.

        Args:
            param: A parameter, or None if ``numel`` is given.
            numel: Elements of a partition, or None if ``param`` is given.

        Raises:
            ValueError: If both or neither are given.
        """
        if (param is None) == (numel is None):
            raise ValueError("swappable_tensor takes a parameter or a number of elements, and not both")
        return self._large_enough(int(param.ds_tensor.ds_numel if numel is None else numel))

    def get_path(self, param: Any, must_exist: bool = False) -> str:
        """Return the path of the file of a parameter's partition.

        With ``must_exist``, raises ValueError if this swapper has neither returned the path nor used the file before.
        """
        if must_exist and param.ds_id not in self.id_to_path:
            raise ValueError(f"parameter {param.ds_id} has no swap file: swap it out first")
        return self.id_to_path.setdefault(param.ds_id, os.path.join(self.swap_folder, f"{param.ds_id}_param.tensor.swp"))

    # Reading

    def swap_in(
        self, params: Sequence[Any], async_op: bool = True, swap_in_buffers: Sequence[torch.Tensor] | None = None
    ) -> None:
        """Read partitions into buffers. Called by DeepSpeed before it gathers a layer, and to prefetch.

        Args:
            params: Parameters whose partitions are not available. A parameter that is given twice is read once.
            async_op: Whether to return once the reads are started; :meth:`synchronize_reads` waits for them. If False, blocks.
            swap_in_buffers: A buffer for each parameter; by default buffers of this swapper.

        Raises:
            ValueError: If a partition is available or being read already.
            OutOfBuffers: If no buffer is free.
            OSError: From reading. No partition that was being read is available then.
        """
        if swap_in_buffers is None:
            params = list({param.ds_id: param for param in params}.values())  # DeepSpeed's prefetching may pass duplicates
        here = [param.ds_id for param in params if param.ds_tensor.status != NOT_AVAILABLE]
        if here:
            raise ValueError(f"parameters {here} are available or being read already")
        for param in params:
            self.param_id_to_numel.setdefault(param.ds_id, int(param.ds_tensor.ds_numel))
        if swap_in_buffers is None:
            swap_in_buffers = self._buffers_for(params)
        paths = [self.get_path(param) for param in params]
        for param, buffer in zip(params, swap_in_buffers, strict=True):
            param.ds_tensor.status = INFLIGHT
            self.inflight_params.append(param)
            self.inflight_swap_in_buffers.append(buffer)
        try:
            for buffer, path in zip(swap_in_buffers, paths, strict=True):
                self.aio_read_handle.async_pread(buffer, path)
        except BaseException:
            self._give_up_reading()
            raise
        if not async_op:
            self.synchronize_reads()

    def synchronize_reads(self) -> None:
        """Wait for all reads in flight, and make their partitions available. Called by DeepSpeed before it gathers a layer.

        Raises OSError if a read failed. None of the partitions is available then.
        """
        if not self.inflight_params:
            return
        try:
            self.aio_read_handle.wait()
        except OSError:
            self._give_up_reading()
            raise
        for param, buffer in zip(self.inflight_params, self.inflight_swap_in_buffers, strict=True):
            param.ds_tensor.data = buffer.narrow(0, 0, self.param_id_to_numel[param.ds_id])
            param.ds_tensor.status = AVAILABLE
        self._clear_inflight()

    def swap_into_buffer(self, param: Any, dest_buffer: torch.Tensor) -> None:
        """Read a partition into the caller's tensor. Called by DeepSpeed's ``_move_to_flat_buffer``. Blocks.

        Args:
            param: A parameter whose partition is not available.
            dest_buffer: A tensor with as many elements as the partition. If it is pinned and its size is aligned, the file is
                read into it directly, without a copy.

        Raises:
            OSError: From reading.
        """
        direct = self.aio_read_handle.is_pinned(dest_buffer) and dest_buffer.numel() % self.numel_alignment == 0
        self.swap_in([param], async_op=False, swap_in_buffers=[dest_buffer] if direct else None)
        if not direct:
            dest_buffer.detach().copy_(param.ds_tensor.data.view(dest_buffer.shape))
            self.remove_partition_and_release_buffers([param])

    # Writing

    def get_buffer(self, param: Any, numel: int) -> torch.Tensor:
        """Return a buffer for a new partition, to be filled and swapped out. Called by DeepSpeed's ``_partition_param``.

        Args:
            param: The parameter.
            numel: Elements of its partition.

        Raises:
            ValueError: If the partition is larger than ``buffer_size``.
            OutOfBuffers: If no buffer is free.
        """
        if numel > self.elements_per_buffer:
            raise ValueError(
                f"the partition of parameter {param.ds_id} has {numel} elements, a buffer {self.elements_per_buffer}: "
                f"set offload_param.buffer_size to at least {numel}"
            )
        self.param_id_to_numel[param.ds_id] = int(numel)
        return self._buffer_for(param).narrow(0, 0, int(numel))

    def swap_out_and_release(self, params: Sequence[Any]) -> None:
        """Write partitions from their buffers to their files, and free the buffers. Called by DeepSpeed's ``_partition_param``.

        Blocks.

        Args:
            params: Parameters whose partitions have buffers of this swapper.

        Raises:
            ValueError: If a parameter has no buffer.
            OSError: From writing. The partitions keep their buffers: the call can be repeated.
        """
        missing = [param.ds_id for param in params if param.ds_id not in self.param_id_to_swap_buffer]
        if missing:
            raise ValueError(f"parameters {missing} have no swap buffer: get_buffer or swap_in first")
        for param in params:
            self.param_id_to_numel[param.ds_id] = int(param.ds_tensor.ds_numel)
        self._write([(self.param_id_to_swap_buffer[param.ds_id], self.get_path(param)) for param in params])
        self.remove_partition_and_release_buffers(params)

    def remove_partition_and_release_buffers(self, params: Sequence[Any]) -> None:
        """Drop partitions from memory without writing them, and free their buffers. Called by DeepSpeed after a layer.

        If one of the partitions is being read, waits for the read first, and raises its OSError.
        """
        if any(param.ds_tensor.status == INFLIGHT for param in params):
            self.synchronize_reads()
        self._end_interrupted_writes()
        for param in params:
            param.ds_tensor.data = self.invalid_buffer.data
            param.ds_tensor.status = NOT_AVAILABLE
            self._release_buffer(param.ds_id)

    # Partitions with new values after an optimizer step

    def reserve_partitioned_swap_space(self, partition_num_elems: Sequence[int]) -> None:
        """Pin a buffer in which :meth:`swap_out_partitioned_params` converts partitions. Called by DeepSpeed's stage 3.

        Args:
            partition_num_elems: Elements of each partition of the largest sub-group.
        """
        total = sum(self._aligned(int(numel)) for numel in partition_num_elems)
        example = torch.empty(0, dtype=self.dtype, device="cpu")
        self.partitioned_swap_buffer = self.aio_write_handle.new_cpu_locked_tensor(total, example).zero_()

    def swap_out_partitioned_params(self, dst_fp16_params: Sequence[Any], src_fp32_params: Sequence[torch.Tensor]) -> None:
        """Write new values of partitions, converted to this swapper's dtype, to their files. Blocks.

        Called by DeepSpeed after an optimizer step. The partitions are not in memory afterwards; reads in flight are discarded,
        because their values are out of date.

        Args:
            dst_fp16_params: The parameters.
            src_fp32_params: The new values of their partitions, of any dtype.

        Raises:
            ValueError: Before :meth:`reserve_partitioned_swap_space`, for a parameter that was never swapped out, or for a
                partition that is larger than the reserved buffer.
            OSError: From writing.
        """
        buffer = self.partitioned_swap_buffer
        if buffer is None:
            raise ValueError("there is no room to convert parameters in: call reserve_partitioned_swap_space first")
        paths = [self.get_path(param, must_exist=True) for param in dst_fp16_params]
        # Partitions that were read ahead of the step are out of date. They must not become available either: stage 3 copies new
        # values of an available partition to its memory, and nothing would write them to the file.
        if self.inflight_params:
            self._give_up_reading()
        self.remove_partition_and_release_buffers(dst_fp16_params)
        filled: list[tuple[torch.Tensor, str]] = []
        taken = 0
        for source, path in zip(src_fp32_params, paths, strict=True):
            aligned = self._aligned(source.numel())
            if aligned > buffer.numel():
                raise ValueError(f"a partition of {source.numel()} elements does not fit into the {buffer.numel()} reserved")
            if taken + aligned > buffer.numel():
                self._write(filled)
                filled, taken = [], 0
            part = buffer.narrow(0, taken, aligned)
            part[: source.numel()].copy_(source.detach().reshape(-1))
            filled.append((part, path))
            taken += aligned
        self._write(filled)

    def reserve_available_buffers(self) -> list[torch.Tensor]:
        """Return all free buffers, for the caller's use until :meth:`release_reserved_buffers`. Called by DeepSpeed's stage 3."""
        self.reserved_buffer_ids += self.available_buffer_ids
        buffers = [self._buffer(buffer_id) for buffer_id in self.available_buffer_ids]
        self.available_buffer_ids = []
        return buffers

    def release_reserved_buffers(self) -> None:
        """Free the buffers of :meth:`reserve_available_buffers`."""
        self.available_buffer_ids += self.reserved_buffer_ids
        self.reserved_buffer_ids = []

    # Private helpers

    def _handle(self) -> Any:
        """Return a new handle with the settings of the ``aio`` block."""
        from deepnvme.ops.op_builder import AsyncIOBuilder, GDSBuilder

        arguments = {key: self.aio_config[key] for key in AIO_KEYS if key != "use_gds"}
        if self.use_gds:
            return GDSBuilder().load(verbose=False).gds_handle(**arguments)
        return AsyncIOBuilder().load(verbose=False).aio_handle(**arguments)

    def _pinned(self, numel: int) -> torch.Tensor:
        """Allocate pinned memory of ``numel`` elements for the buffers; on the GPU with GPUDirect Storage."""
        if not self.use_gds:
            example = torch.empty(0, dtype=self.dtype, device="cpu")
            pinned: torch.Tensor = self.aio_read_handle.new_cpu_locked_tensor(numel, example)
            return pinned
        buffers = torch.empty(numel, dtype=self.dtype, device="cuda", requires_grad=False)
        self.aio_read_handle.pin_device_tensor(buffers)
        return buffers

    def _buffer(self, buffer_id: int) -> torch.Tensor:
        """Return the configured buffer with this index."""
        return self.buffers.narrow(0, buffer_id * self.aligned_elements_per_buffer, self.aligned_elements_per_buffer)

    def _buffers_for(self, params: Sequence[Any]) -> list[torch.Tensor]:
        """Return a buffer for each partition. After an exception all buffers are free again."""
        buffers: dict[Any, torch.Tensor] = {}
        try:
            for param in params:
                if param.ds_id in self.param_id_to_swap_buffer:
                    raise ValueError(f"parameter {param.ds_id} has a swap buffer already")
                buffers[param.ds_id] = self._buffer_for(param)
        except BaseException:
            for key in buffers:
                self._release_buffer(key)
            raise
        return list(buffers.values())

    def _buffer_for(self, param: Any) -> torch.Tensor:
        """Return a free buffer for a partition."""
        key, aligned = param.ds_id, self._aligned(self.param_id_to_numel[param.ds_id])
        if aligned > self.aligned_elements_per_buffer or not self.available_buffer_ids:
            raise OutOfBuffers(
                f"parameter {key} needs a swap buffer of {aligned} elements: none of the {self.param_buffer_count} of "
                f"{self.elements_per_buffer} is free or large enough, with {len(self.inflight_params)} parameters being read; "
                "set offload_param.buffer_count or buffer_size larger"
            )
        self.param_id_to_buffer_id[key] = self.available_buffer_ids.pop()
        self.param_id_to_swap_buffer[key] = self._buffer(self.param_id_to_buffer_id[key]).narrow(0, 0, aligned)
        return self.param_id_to_swap_buffer[key]

    def _release_buffer(self, key: Any) -> None:
        """Free the buffer of the parameter with this ``ds_id``. Does nothing if the parameter has no buffer."""
        self.param_id_to_swap_buffer.pop(key, None)
        if key in self.param_id_to_buffer_id:
            self.available_buffer_ids.append(self.param_id_to_buffer_id.pop(key))

    def _write(self, filled: Sequence[tuple[torch.Tensor, str]]) -> None:
        """Write buffers to their files. Blocks. Raises OSError, once no write is in flight."""
        self._end_interrupted_writes()
        try:
            for buffer, path in filled:
                self.aio_write_handle.async_pwrite(buffer, path)
        finally:
            self.aio_write_handle.wait()

    def _end_interrupted_writes(self) -> None:
        """Wait for writes that an interrupted call has left in flight. Their errors are ignored: that call has failed already."""
        with contextlib.suppress(OSError):
            self.aio_write_handle.wait()

    def _give_up_reading(self) -> None:
        """Discard all reads in flight. Called after an error, when it is unknown which of them failed."""
        with contextlib.suppress(OSError):  # after an error, the caller is raising the first one already
            self.aio_read_handle.wait()
        for param in self.inflight_params:
            param.ds_tensor.status = NOT_AVAILABLE
            self._release_buffer(param.ds_id)
        self._clear_inflight()

    def _clear_inflight(self) -> None:
        """Clear the records of partitions and buffers that are being read. Does not wait, and frees no buffer."""
        self.inflight_params: list[Any] = []
        self.inflight_swap_in_buffers: list[torch.Tensor] = []
