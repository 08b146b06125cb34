"""Keep ZeRO stage 3's optimizer states on a drive, and bring each sub-group into memory for its part of the step."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from deepnvme.cache.block import Block
from deepnvme.cache.block_cache import Use
from deepnvme.engine import Engine
from deepnvme.memory.pool import BufferPool, buffer_pool
from deepnvme.transfer.gather import Transfers

from .aio_config import SwapSizes, engine_of
from .environment import claim_folder, rank
from .resident_tensors import choose_resident_tensors
from .swap_info import OptimizerStateSwapInfo
from .tile_cache import TileCache

_logger = logging.getLogger(__name__)

PartitionInfo = tuple[torch.Tensor, int, str | None]
"""A partition: (tensor, number of elements, path). Its values are in the file at the path or, if the path is None, in the tensor.

With a path, the tensor is DeepSpeed's placeholder, whose dtype may differ from the dtype of the values in the file.
"""


class OptimizerSwapper(SwapSizes):
    """Swaps the master weights, optimizer states and gradients of ZeRO stage 3's sub-groups between memory and files.

    Base of both of DeepSpeed's optimizer swapper classes. Its methods are called by DeepSpeed's
    ``DeepSpeedZeroOptimizer_Stage3``. Not thread-safe.

    A "parameter" is a sub-group's flat partition of master weights, with an attribute ``ds_id`` (str) that names its files. The
    parameter and its optimizer states are empty except between :meth:`swap_in_optimizer_state` and
    :meth:`swap_out_optimizer_state`. The latter also swaps new states of the optimizer, of any shape and dtype, if they are large
    enough.

    A stored gradient is kept until a step of ``optimizer`` has used it, even if its sub-group is swapped in and out meanwhile.

    **Memory.** The swapper keeps within ``buffer_count`` buffers of ``largest_numel`` elements. Only if the current sub-group
    does not fit does it lease more from ``pool``; if that is not enough either, OutOfBuffers says what to set. Memory that a
    step does not need for swapping keeps a fixed set of sub-groups resident. Their files are out of date until
    :attr:`swap_folder` is read, :meth:`flush` is called, or the swapper ends.

    **Errors** are OSError with the path. No data is lost: a call that raised an error can be repeated. The error of a write in
    the background is raised by the next call, before that call changes anything; the data stays in memory and is written again.

    Contract: DeepSpeed 0.19, ``runtime/swap_tensor/optimizer_utils.py``. One difference: parts of a gradient that were not stored
    since the last step are copied from :attr:`last_gradients`, or else are zero. DeepSpeed's swapper uses the last step's
    gradient if it is large enough to be swapped; a smaller one is undefined or None, also after states were set before the step.

    Args:
        swap_config: DeepSpeed's ``offload_optimizer`` configuration; ``buffer_count`` is used.
        aio_config: The ``aio`` block, with all keys: see :data:`AIO_DEFAULT_DICT`.
        base_folder: Files go to ``optimizer/rank<N>`` in this folder; if another swapper uses that, to ``rank<N>-job-2``, ...
        optimizer: The torch optimizer that steps the parameters.
        largest_numel: Elements of the largest sub-group.
        device: Ignored: the optimizer runs on the CPU.
        dtype: Dtype of the master weights.
        timers: Ignored: nothing is measured by DeepSpeed's timers.
        engine: Reads and writes the files; by default an engine with the ``aio`` block's settings.
        pool: Buffer pool to lease memory from; by default the process's pool.
    """

    @staticmethod
    def parameter_id(param: Any) -> Any:
        """Return the ``ds_id`` of a parameter, which names its files."""
        return param.ds_id

    def __init__(
        self,
        swap_config: Any,
        aio_config: Mapping[str, Any],
        base_folder: str | os.PathLike[str],
        optimizer: torch.optim.Optimizer,
        largest_numel: int,
        device: Any,
        dtype: torch.dtype,
        timers: object,
        *,
        engine: Engine | None = None,
        pool: BufferPool | None = None,
    ) -> None:
        super().__init__(aio_config, dtype)
        self.swap_config = swap_config
        self.optimizer = optimizer
        self.last_gradients: Callable[[torch.Tensor], Iterable[tuple[int, torch.Tensor]]] = lambda parameter: ()
        """Returns the latest gradients of a sub-group's parts, given its flat parameter, as (offset in elements, flat tensor).

        They are used for parts of the gradient that were not stored since the last step. A step may have used them before.
        """
        self.swap_params_info: dict[Any, OptimizerStateSwapInfo] = {}
        """The sub-groups, in the order of a step, by the ``ds_id`` of their parameters."""
        self.largest_numel = self._aligned(largest_numel)
        self._folder = claim_folder(self, os.path.join(base_folder, "optimizer", f"rank{rank()}"))
        self._cache = TileCache(
            engine or engine_of(aio_config),
            pool or buffer_pool(),
            limit=swap_config.buffer_count * self.largest_numel * self.swap_element_size,
        )
        step_hook = optimizer.register_step_post_hook(functools.partial(_mark_gradients_used, weakref.ref(self)))
        weakref.finalize(self, step_hook.remove).atexit = False
        self._end = weakref.finalize(self, _write_back, self._cache, self.swap_params_info, self._folder, os.getpid())
        self._end.atexit = False  # it would run after the engine's finalizer; atexit below runs it before
        atexit.register(self._end)

    @property
    def swap_folder(self) -> str:
        """Folder of the swap files. Reading this attribute brings the files up to date, and later steps read all of them again.

        Read by DeepSpeed's ``save_checkpoint`` and ``load_checkpoint``, which copy the folder into a checkpoint and back.
        Blocks while files are written. Raises OSError.
        """
        self.flush()
        for info in self._order:
            info.save(self._state(info))
        self._cache.drop_clean()
        return self._folder

    def flush(self) -> None:
        """Write all values that are newer in memory than in their files, except for a sub-group that is swapped in. Blocks.

        Raises OSError. No data is lost then: call it again.
        """
        for info in self._order:
            if not info.active:  # an interrupted swap_in may have left memory in use
                self._cache.release([*info.tiles(), info.gradient], write=False)
        self._cache.flush([tile for info in self._order for tile in info.tiles()])

    # Parameters

    def initialize_parameters(self, parameters: Sequence[torch.Tensor], src_tensors: Sequence[torch.Tensor]) -> None:
        """Start to swap parameters. Called by DeepSpeed's ``_create_fp32_partitions``.

        Args:
            parameters: Parameters that were not initialized before, in the order of a step. Their data is not touched.
            src_tensors: Initial values of the parameters, of any shape and dtype.

        Raises:
            ValueError: If a parameter was initialized before.
            OSError: From writing.
        """
        self._add_parameters(
            parameters,
            [source.numel() for source in src_tensors],
            lambda number, target: target.copy_(src_tensors[number].detach().reshape(-1)),
        )

    def initialize_from_swapped_fp16_params(
        self,
        fp16_partitions_info: Sequence[Sequence[PartitionInfo]],
        fp16_num_elems: Sequence[int],
        fp16_pinned_buffers: Sequence[torch.Tensor],
        fp32_parameters: Sequence[torch.Tensor],
    ) -> None:
        """Start to swap parameters whose initial values are low-precision partitions, some of them in files.

        Called by DeepSpeed's ``_create_fp32_partitions``. Blocks.

        Args:
            fp16_partitions_info: For each parameter its partitions, as (tensor, elements, path). The values are in the file at
                the path, or in the tensor if the path is None.
            fp16_num_elems: The number of elements of each parameter.
            fp16_pinned_buffers: Buffers whose dtype is that of the files; not used otherwise.
            fp32_parameters: Parameters that were not initialized before, in the order of a step. Their data is not touched.

        Raises:
            ValueError: If the lists differ in length, or a parameter was initialized before.
            OSError: From reading or writing.
        """
        if not len(fp32_parameters) == len(fp16_partitions_info) == len(fp16_num_elems):
            raise ValueError(
                f"one list of partitions and one length for each parameter, got {len(fp16_partitions_info)} and "
                f"{len(fp16_num_elems)} for {len(fp32_parameters)}"
            )
        self._add_parameters(
            fp32_parameters,
            fp16_num_elems,
            lambda number, target: read_partitions(self._cache.engine, fp16_partitions_info[number], fp16_pinned_buffers, target),
        )

    def is_swappable_tensor(self, tensor: torch.Tensor | None = None, numel: int | None = None) -> bool:
        """Return whether a tensor is large enough to be swapped. Called by DeepSpeed's ``_swappable_optimizer_subgroup``.

        Args:
            tensor: A tensor. It is never swappable if it has an attribute ``swappable = False``.
            numel: A number of elements, if ``tensor`` is None.

        Raises:
            ValueError: If both are None.
        """
        if tensor is not None:
            if not getattr(tensor, "swappable", True):
                return False
            numel = tensor.numel()
        if numel is None:
            raise ValueError("is_swappable_tensor needs a tensor or a number of elements, got neither")
        return self._large_enough(numel)

    def purge_state(self) -> None:
        """Drop swapped states and all gradients, because other states were loaded into the optimizer. Master weights stay.

        Called by DeepSpeed after ``optimizer.load_state_dict``. A state is kept if its tensor is still the one that was swapped
        out: no other copy of its values exists.
        """
        for info in self._order:
            info.purge(self._state(info))

    # Gradients

    def swap_out_gradients(
        self, parameter: torch.Tensor, gradient_offsets: Sequence[int], gradient_tensors: Sequence[torch.Tensor]
    ) -> None:
        """Store parts of a parameter's gradient until the step. Called by DeepSpeed during backward.

        They stay in memory while there is room; gradients that a step needs last are written to their files. A part replaces an
        earlier part at the same offset. Does nothing for an unknown parameter.

        Args:
            parameter: The sub-group's parameter.
            gradient_offsets: Where each part begins, in elements.
            gradient_tensors: The parts, of any shape and dtype. They may be changed after this returns.

        Raises:
            OSError: From this or an earlier write.
        """
        info = self.swap_params_info.get(self.parameter_id(parameter))
        if info is not None:
            info.add_gradients(gradient_offsets, gradient_tensors)

    def keep_last_gradients(self, parameter: torch.Tensor) -> None:
        """Store, from :attr:`last_gradients`, the parts of a gradient that were not stored since the last step.

        Called before DeepSpeed overwrites the tensors of ``last_gradients``. Blocks and raises like :meth:`swap_out_gradients`.
        Does nothing for an unknown parameter.
        """
        info = self.swap_params_info.get(self.parameter_id(parameter))
        last = [] if info is None else self._last_gradients(info)
        if last:
            offsets, gradients = zip(*last, strict=True)
            self.swap_out_gradients(parameter, offsets, gradients)

    # Steps

    def swap_in_optimizer_state(self, parameter: torch.Tensor, async_parameter: torch.Tensor | None = None) -> None:
        """Bring a parameter, its states and its gradient into memory. Called by DeepSpeed before it steps a sub-group. Blocks.

        ``parameter.grad`` gets the parts of the gradient that were stored since the last step. Its other parts are copied from
        :attr:`last_gradients`, or else are zero. Does nothing for a parameter that is unknown or swapped in already.

        Args:
            parameter: The parameter of the sub-group that will be stepped.
            async_parameter: The parameter of the next sub-group. If given, reading it and the sub-groups after it is started,
                too.

        Raises:
            OSError: From reading, or from an earlier write.
            OutOfBuffers: If there is not enough memory.
        """
        info = self.swap_params_info.get(self.parameter_id(parameter))
        if info is None or info.active:
            return
        if info.index <= self._cache.current:
            self._choose_residents()
        self._cache.set_current(info.index, len(self.swap_params_info))
        info.restore(self.optimizer.state)
        info.swap_in(self._last_gradients(info))
        self._read_ahead(info, async_parameter)

    def swap_out_optimizer_state(self, parameter: torch.Tensor, async_swap: bool = False) -> None:
        """Swap a parameter and its states out of memory. Called by DeepSpeed after it has stepped a sub-group.

        The tensors are empty afterwards. Their values are written in the background, or stay in memory if the sub-group is
        resident. If the optimizer has stepped the parameter since it was swapped in, its gradient is dropped. Otherwise the
        gradient is kept for the step as it was stored; to keep changes to it, call
        :meth:`writeback_optimizer_state_and_gradients` instead.

        Does nothing for an unknown parameter.

        Args:
            parameter: The parameter of the sub-group that was stepped.
            async_swap: Ignored: writing always continues after this returns.

        Raises:
            RuntimeError: If the parameter is not swapped in.
            OSError: From an earlier write.
            OutOfBuffers: If there is not enough memory for new states.
        """
        self.writeback_optimizer_state_and_gradients(parameter, write_opt_state=True, write_gradients=False)

    def writeback_optimizer_state_and_gradients(
        self, parameter: torch.Tensor, write_opt_state: bool, write_gradients: bool
    ) -> None:
        """Swap a parameter, its states and its gradient out of memory. The arguments select which changes are kept.

        Like :meth:`swap_out_optimizer_state`, but for tensors that were changed before a step. Called by DeepSpeed's
        ``_writeback_swap_state``. Changes that are not selected are not written: the tensors keep the values of their files, or
        newer values that were in memory before.

        Args:
            parameter: The parameter of the sub-group.
            write_opt_state: Whether to keep changes to the master weights and states.
            write_gradients: Whether to keep changes to the gradient for the next step.

        Raises:
            RuntimeError: If the parameter is not swapped in.
            OSError: From an earlier write.
            OutOfBuffers: If there is not enough memory for new states.
        """
        info = self.swap_params_info.get(self.parameter_id(parameter))
        if info is None:
            return
        if not info.active:
            raise RuntimeError(f"parameter {info.param_id!r} is not swapped in: call swap_in_optimizer_state before")
        if write_opt_state:  # states that the optimizer has created are swapped, too
            state = self._state(info)
            info.adopt(state, [name for name, value in state.items() if _is_dense(value) and self.is_swappable_tensor(value)])
        info.swap_out(write_opt_state, write_gradients)

    def release_swap_buffers(self, parameter: torch.Tensor) -> None:
        """Swap a parameter and its states out without writing changes. Called by DeepSpeed's ``_release_swap_buffers``.

        Does nothing for a parameter that is not swapped in.
        """
        info = self.swap_params_info.get(self.parameter_id(parameter))
        if info is not None and info.active:
            info.swap_out(write_opt_state=False, write_gradients=False)

    # Hooks

    def init_timers(self) -> None:
        """Do nothing. Called by DeepSpeed's ``initialize_optimizer_states``."""

    def log_timers(self) -> None:
        """Drop gradients that no step has used.

        Called by DeepSpeed at the end of each step, and when it skips a step because gradients have overflowed.
        """
        for info in self._order:
            if info.has_gradients() and not info.active:
                info.drop_gradient()

    def pre_backward(self) -> None:
        """Complete finished transfers. Never blocks. Called by DeepSpeed's ``backward_prologue``."""
        self._cache.poll()

    def post_backward(self) -> None:
        """Do nothing. Called by DeepSpeed's ``backward_epilogue``."""

    # Private helpers

    @property
    def _order(self) -> list[OptimizerStateSwapInfo]:
        """The sub-groups in the order of a step."""
        return list(self.swap_params_info.values())

    def _add_parameters(
        self, parameters: Sequence[torch.Tensor], numels: Sequence[int], fill: Callable[[int, torch.Tensor], object]
    ) -> None:
        """Start to swap parameters.

        ``fill`` is called with a parameter's index and a flat tensor, and writes the parameter's initial values into it.
        """
        for number, (parameter, numel) in enumerate(zip(parameters, numels, strict=True)):
            key = self.parameter_id(parameter)
            if key in self.swap_params_info:
                raise ValueError(f"parameter {key!r} was initialized before: initialize each one once")
            index = len(self.swap_params_info)
            info = OptimizerStateSwapInfo(parameter, numel, self._cache, self._folder, self.aligned_bytes, index)
            self._cache.set_current(index, index + 1)
            info.initialize(functools.partial(fill, number))
            self.swap_params_info[key] = info

    def _state(self, info: OptimizerStateSwapInfo) -> dict[str, Any]:
        """Return the optimizer's states of a sub-group's parameter, by name; none before its first step."""
        state: dict[str, Any] = self.optimizer.state.get(info.parameter, {})
        return state

    def _last_gradients(self, info: OptimizerStateSwapInfo) -> list[tuple[int, torch.Tensor]]:
        """Return, from :attr:`last_gradients`, (offset, gradient) of the parts that were not stored since the last step."""
        gaps = list(info.gradient_gaps())
        return [
            (start, gradient)
            for start, gradient in (self.last_gradients(info.parameter) if gaps else ())
            if any(offset <= start and start + gradient.numel() <= offset + length for offset, length in gaps)
        ]

    def _choose_residents(self) -> None:
        """Choose the resident sub-groups when a step begins, since sizes may have changed in the previous step."""
        states = [info.tiles() for info in self._order]
        gradients = [info.gradient for info in self._order]
        sizes = [[tile.nbytes for tile in group] for group in states]
        staying, waiting = choose_resident_tensors(sizes, [tile.nbytes for tile in gradients], self._cache.memory.limit)
        resident: dict[Block, bool] = {tile: number < staying for number, tile in enumerate(chain.from_iterable(states))}
        self._cache.keep(resident | {tile: number < waiting for number, tile in enumerate(gradients)})

    def _read_ahead(self, info: OptimizerStateSwapInfo, following: torch.Tensor | None) -> None:
        """Read ahead the sub-groups after ``info``, if ``following`` is given.

        Also read ahead the next step's first sub-group that is not resident, if ``following`` is given or ``info`` is the last
        sub-group. It only uses memory that the gradients of the next backward do not need.
        """
        limit, order = self._cache.memory.limit, self._order
        ahead: list[Use] = []
        if following is not None:
            first = self.swap_params_info.get(self.parameter_id(following))
            after = order[info.index + 1 :]
            for other in ([first] if first is not None and first not in after else []) + after:
                ahead += [Use(tile, limit) for tile in [*other.tiles(), other.gradient]]
        if following is not None or info is order[-1]:
            waiting = sum(other.gradient.nbytes for other in order if other.gradient.resident)
            for other in order[: info.index]:
                if not all(tile.resident for tile in other.tiles()):
                    ahead += [Use(tile, limit - waiting) for tile in other.tiles()]
                    break
        self._cache.expect(ahead)


class PartitionedOptimizerSwapper(OptimizerSwapper):
    """Optimizer swapper that DeepSpeed uses without ``pipeline_read`` and ``pipeline_write``.

    Reading and writing overlap the step here, too, if buffers are free. Compared with DeepSpeed's class, only the time of a
    step differs.

    Contract: DeepSpeed 0.19, ``runtime/swap_tensor/partitioned_optimizer_swapper.py``.
    """


class PipelinedOptimizerSwapper(OptimizerSwapper):
    """Optimizer swapper that DeepSpeed uses with ``pipeline_read`` or ``pipeline_write``.

    Reading and writing both overlap the step, whichever option is set.

    Contract: DeepSpeed 0.19, ``runtime/swap_tensor/pipelined_optimizer_swapper.py``.
    """


def read_partitions(
    engine: Engine, partitions: Sequence[PartitionInfo], buffers: Sequence[torch.Tensor], target: torch.Tensor
) -> None:
    """Fill a flat tensor with partitions, one after the other, converted to the tensor's dtype. Blocks.

    Each file is read into the end of its part of ``target`` and converted there, since its values take no more bytes than the
    part.

    Args:
        engine: Reads the files.
        partitions: Partitions in order.
        buffers: Tensors whose dtype is that of the files; not used otherwise. If empty, each partition's tensor has the dtype.
        target: One-dimensional tensor. Elements of its dtype are at least as large as those of the partitions.

    Raises:
        ValueError: If ``target`` does not have as many elements as all partitions together.
        OSError: From reading. The content of ``target`` is undefined then.
    """
    numels = [numel for _, numel, _ in partitions]
    if sum(numels) != target.numel():
        raise ValueError(f"the partitions have {sum(numels)} elements in all, the parameter {target.numel()}")
    paths, places = [], []
    for (tensor, numel, path), part in zip(partitions, torch.split(target, numels), strict=True):
        if path is None:
            part.copy_(tensor.detach().reshape(-1))
        else:
            paths.append(path)
            places.append((part.view((buffers[0] if buffers else tensor).dtype)[-numel:], part))
    reading = Transfers()
    try:
        reading.add(map(engine.read, [values for values, _ in places], paths))
        for values, part in places:
            reading.end_first()
            part.copy_(values.clone())  # a copy, because the two overlap
    finally:
        reading.exception()  # after an error: wait, because the caller may reuse the memory


def _is_dense(value: Any) -> bool:
    """Return whether a value is a dense CPU tensor, the only kind that can be swapped."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and value.device.type == "cpu"


def _mark_gradients_used(swapper: weakref.ref[OptimizerSwapper], optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Mark the gradients of swapped-in parameters as used. Called after each step of the optimizer."""
    alive = swapper()
    if alive is None:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            info = alive.swap_params_info.get(getattr(parameter, "ds_id", None))
            if info is not None:
                info.mark_stepped()


def _write_back(cache: TileCache, sub_groups: Mapping[Any, OptimizerStateSwapInfo], folder: str, process: int) -> None:
    """Write all values that are newer in memory than in their files, when a swapper or the program ends.

    DeepSpeed's own files are complete at that point, so these must be as well. Ctrl-C during a finalizer ends it silently.
    Files that were not written by then keep an earlier step's values, but no code reads them:
    :attr:`OptimizerSwapper.swap_folder` writes all files first. No memory leaks in that case.
    """
    if os.getpid() != process or not os.path.isdir(folder):  # a forked child: files are the parent's; or the folder was removed
        return
    if cache.helping():  # garbage collection may run this finalizer in the helper thread, which may hold the cache's lock
        threading.Thread(target=_write_back, args=(cache, sub_groups, folder, process), name="deepnvme-write-back").start()
        return
    try:
        cache.flush([tile for info in sub_groups.values() for tile in info.tiles()])
    except OSError as error:
        _logger.error("optimizer states of the last step could not be written: %s", error)
