"""ZeRO stage 3's optimizer states on a drive: sub-group after sub-group in memory for its part of the step."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from deepnvme._interrupts import defer_interrupts
from deepnvme.engine import Engine
from deepnvme.memory.pool import BufferPool, buffer_pool

from .aio_config import (
    AIO_ALIGNED_BYTES,
    AIO_BLOCK_SIZE,
    AIO_INTRA_OP_PARALLELISM,
    AIO_QUEUE_DEPTH,
    AIO_SINGLE_SUBMIT,
    min_swappable_bytes,
    numel_alignment,
    round_up,
)
from .environment import Timers, describe, rank
from .fp16_partitions import PartitionInfo, read_partitions
from .optimizer_states import OptimizerStates
from .residency import Footprint, plan
from .swap_info import OptimizerStateSwapInfo
from .tile import Tile
from .tile_cache import TileCache, TransferEngine

_logger = logging.getLogger(__name__)

SWAP_OUT_GRADIENT_TIMER = "swap_out_gradient"
SWAP_INIT_TIMER = "swap_init_write"


class OptimizerSwapper:
    """What both of DeepSpeed's optimizer swappers do.

    A parameter is a sub-group's flat partition of master weights, with a ``ds_id`` (str) that names its files; it and the states
    that the optimizer has for it are empty except between :meth:`swap_in_optimizer_state` and :meth:`swap_out_optimizer_state`.
    States come to be swapped when they are first seen by the latter, if they are large enough, in whatever shape and dtype.

    ``swap_config``: has ``buffer_count``. That many buffers of ``largest_numel`` elements are the memory it keeps to; more is
    taken, as far as ``pool`` allows, only where the sub-group at hand does not fit, and OutOfBuffers says what to set if even
    that is not enough. What of it a step does not need to pass through holds a fixed set of sub-groups, whose files are
    outdated until :attr:`swap_folder` is asked for, :meth:`flush` is called, or the swapper ends.
    ``aio_config``: the ``aio`` block, with all keys. ``base_folder``: files go to its ``optimizer/rank<N>``. ``optimizer``: its
    step uses up the gradients of the parameters that it steps; until then they wait, whatever is swapped in and out meanwhile.
    ``device``: not looked at, as the optimizer runs on the CPU. ``timers``: DeepSpeed's, or None. ``engine`` and ``pool``: one of
    its own, and the process's, by default.

    Errors are OSError, with the path. Nothing is lost by one: the call that raised it can be repeated. A write that failed is
    raised by the call after, before that does anything; its data stay in memory and are written again.

    Contract: DeepSpeed 0.19, ``runtime/swap_tensor/optimizer_utils.py``. Different: what has not arrived of a gradient since the
    last step is taken from :attr:`last_gradients`, else it is zero. DeepSpeed's swapper takes the last step's gradient if it is
    large enough to be swapped; a smaller one is undefined or None, also after states were set before the step.
    Not thread-safe.
    """

    SWAP_IN_TIMER = "swap_in_state"
    SWAP_OUT_TIMER = "swap_out_state"

    @staticmethod
    def parameter_id(param: Any) -> Any:
        """What names a parameter's files."""
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
        timers: Callable[[str], Any] | None,
        *,
        engine: TransferEngine | None = None,
        pool: BufferPool | None = None,
    ) -> None:
        self.swap_config = swap_config
        self.aio_config = aio_config
        self.optimizer = optimizer
        self.dtype = dtype
        self.timers = timers
        self.last_gradients: Callable[[torch.Tensor], Iterable[tuple[int, torch.Tensor]]] = lambda parameter: ()
        """Given a sub-group's flat parameter, returns the latest gradients of its parts, used by a step or not: (offset in
        elements, flat tensor)."""
        self.swap_params_info: dict[Any, OptimizerStateSwapInfo] = {}
        self.swap_element_size = dtype.itemsize
        self.min_aio_bytes = min_swappable_bytes(aio_config)
        self.aligned_bytes = AIO_ALIGNED_BYTES * int(aio_config[AIO_INTRA_OP_PARALLELISM])
        self.numel_alignment = numel_alignment(aio_config, self.swap_element_size)
        self.largest_numel = round_up(largest_numel, self.numel_alignment)
        self._folder = os.path.join(base_folder, "optimizer", f"rank{rank()}")
        os.makedirs(self._folder, exist_ok=True)
        self._timers = Timers(timers)
        self._cache = TileCache(
            engine or _engine(aio_config),
            pool or buffer_pool(),
            limit=swap_config.buffer_count * self.largest_numel * self.swap_element_size,
        )
        self._states = OptimizerStates(optimizer, self._cache, self._folder)
        self._order: list[OptimizerStateSwapInfo] = []  # as a step takes them
        self._gradient_bytes = 0  # of the gradients that wait in memory
        self._to_restore: set[Any] = set()  # parameters whose files may be another checkpoint's by now
        step_hook = optimizer.register_step_post_hook(functools.partial(_note_step, weakref.ref(self)))
        weakref.finalize(self, step_hook.remove).atexit = False
        self._end = weakref.finalize(self, _write_back, self._cache, self._order, self._folder, os.getpid())
        self._end.atexit = False  # that would be after the engine's
        atexit.register(self._end)
        describe(self, exclude=("last_gradients", "optimizer", "swap_params_info", "timers"))

    @property
    def swap_folder(self) -> str:
        """The folder of the files, which are up to date when this returns, and read again after.

        DeepSpeed asks for it to copy the folder into a checkpoint, or a checkpoint into the folder. Raises OSError.
        """
        self.flush()
        for info in self._order:
            self._states.save(info)
        self._cache.forget_memory()
        self._to_restore = set(self.swap_params_info)
        return self._folder

    @property
    def timer_names(self) -> set[str]:
        """Of the timers used since :meth:`init_timers`."""
        return self._timers.names

    def flush(self) -> None:
        """Write what in the files is outdated, all but a sub-group that is swapped in. Raises OSError; then call it again."""
        for info in self._order:
            if not info.active:  # after a Ctrl-C it may be half in
                self._cache.release([*info.tiles(), info.gradient], changed=False, complete=False)
        self._cache.flush([tile for info in self._order for tile in info.tiles()])

    # Parameters

    def initialize_parameters(self, parameters: Sequence[torch.Tensor], src_tensors: Sequence[torch.Tensor]) -> None:
        """Take charge of parameters, with the values of ``src_tensors``, of any dtype. The order is that of a step."""
        with self._timers.measure(SWAP_INIT_TIMER):
            self._take_charge(
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
        """Take charge of parameters, each made up of partitions of low-precision ones: (tensor, elements, path or None).

        A partition without a path is in its tensor. ``fp16_pinned_buffers``: of their dtype, any sizes, used while this runs.
        """
        if not len(fp32_parameters) == len(fp16_partitions_info) == len(fp16_num_elems):
            raise ValueError(
                f"one list of partitions and one length for each parameter, got {len(fp16_partitions_info)} and "
                f"{len(fp16_num_elems)} for {len(fp32_parameters)}"
            )
        self._take_charge(
            fp32_parameters,
            fp16_num_elems,
            lambda number, target: read_partitions(self._cache.engine, fp16_partitions_info[number], fp16_pinned_buffers, target),
        )

    def is_swappable_tensor(self, tensor: torch.Tensor | None = None, numel: int | None = None) -> bool:
        """Whether a tensor, or one of ``numel`` elements, is large enough to be swapped, and not marked ``swappable = False``."""
        if tensor is not None:
            if not getattr(tensor, "swappable", True):
                return False
            numel = tensor.numel()
        if numel is None:
            raise ValueError("is_swappable_tensor needs a tensor or a number of elements, got neither")
        return self.min_aio_bytes <= numel * self.swap_element_size

    def purge_state(self) -> None:
        """Forget the states, which the optimizer has been given anew, and gradients; not the master weights.

        A state that the optimizer still has as it was swapped out stays: its values are nowhere else.
        """
        for info in self._order:
            self._states.purge(info)
            self._consume_gradient(info)
        self._to_restore.clear()

    # Gradients

    def swap_out_gradients(
        self, parameter: torch.Tensor, gradient_offsets: Sequence[int], gradient_tensors: Sequence[torch.Tensor]
    ) -> None:
        """Take parts of a parameter's gradient, at these offsets (elements). Copied when this returns.

        They wait for the step in memory as far as there is room, those needed last in the file. Nothing for an unknown parameter.
        """
        info = self.swap_params_info.get(self.parameter_id(parameter))
        if info is None:
            return
        with self._timers.measure(SWAP_OUT_GRADIENT_TIMER):
            self._cache.poll()
            tile = info.gradient
            self._cache.settle(tile)
            in_file = tile.lease is None and tile.stored
            if not in_file:
                self._cache.create(tile)
            try:
                for offset, tensor in zip(gradient_offsets, gradient_tensors, strict=True):
                    flat = tensor.detach().reshape(-1)
                    if in_file:
                        content = flat.to("cpu", info.dtype())
                        self._cache.overwrite(tile, content, offset * content.element_size())
                    else:
                        info.gradient_memory()[offset : offset + flat.numel()].copy_(flat)
                    info.gradient_ranges[offset] = max(flat.numel(), info.gradient_ranges.get(offset, 0))
            finally:
                if not info.active:
                    self._cache.release([tile], changed=False, complete=info.gradient_complete())

    def keep_last_gradients(self, parameter: torch.Tensor) -> None:
        """Take what :attr:`last_gradients` has for what has not come since the last step, as if it came now: for who is about to
        change it. Blocks and raises as :meth:`swap_out_gradients`. Nothing for an unknown parameter."""
        info = self.swap_params_info.get(self.parameter_id(parameter))
        last = [] if info is None else self._last_gradients(info)
        if last:
            offsets, gradients = zip(*last, strict=True)
            self.swap_out_gradients(parameter, offsets, gradients)

    def flush_gradients(self) -> None:
        """Have every gradient that does not wait in memory on its way to its file."""
        for info in self._order:
            if not info.gradient.resident:
                self._cache.send(info.gradient)

    # Steps

    def swap_in_optimizer_state(self, parameter: torch.Tensor, async_parameter: torch.Tensor | None = None) -> None:
        """Give a parameter and its states their values, and ``parameter.grad`` what has arrived of it since the last step; what
        has not is taken from :attr:`last_gradients`, or else zero.

        ``async_parameter``: the next one, which is then read in the meantime, with those after it. Nothing for an unknown
        parameter; one that is in already is left as it is.
        """
        info = self.swap_params_info.get(self.parameter_id(parameter))
        if info is None or info.active:
            return
        with self._timers.measure(self.SWAP_IN_TIMER):
            if info.turn <= self._cache.memory.turn:
                self._decide_what_stays()
            self._cache.memory.turn = info.turn
            if info.param_id in self._to_restore:
                self._states.restore(info)
                self._to_restore.discard(info.param_id)
            self._cache.acquire(info.tiles() + [info.gradient] * info.has_gradients())
            if not info.has_gradients():
                self._cache.create(info.gradient)
            self._fill_gaps(info)
            with defer_interrupts():
                info.attach()
            self._read_ahead(info, async_parameter)

    def swap_out_optimizer_state(self, parameter: torch.Tensor, async_swap: bool = False) -> None:
        """Take the values of a parameter and its states, which are empty then.

        If the optimizer has stepped the parameter since it was swapped in, the gradient is used up and forgotten. Otherwise it
        waits for the step as it came: see :meth:`writeback_optimizer_state_and_gradients` for one that was changed.

        ``async_swap`` makes no difference: writing always goes on while this returns. Nothing for an unknown parameter. Raises
        RuntimeError for one that is not swapped in.
        """
        info = self._swapped_in(parameter)
        if info is None:
            return
        with self._timers.measure(self.SWAP_OUT_TIMER):
            self._states.adopt(info, self.is_swappable_tensor)
            self._let_go(info, write_opt_state=True, write_gradients=False)

    def writeback_optimizer_state_and_gradients(
        self, parameter: torch.Tensor, write_opt_state: bool, write_gradients: bool
    ) -> None:
        """Like :meth:`swap_out_optimizer_state`, before a step: the gradient, where it was changed, is kept for that.

        What is not to be written is left as it was in the file, where it is there and not in memory already.
        """
        info = self._swapped_in(parameter)
        if info is None:
            return
        if write_opt_state:
            self._states.adopt(info, self.is_swappable_tensor)
        self._let_go(info, write_opt_state, write_gradients)

    def release_swap_buffers(self, parameter: torch.Tensor) -> None:
        """Empty a parameter and its states without writing them. Nothing for one that is not swapped in."""
        info = self.swap_params_info.get(self.parameter_id(parameter))
        if info is not None and info.active:
            self._let_go(info, write_opt_state=False, write_gradients=False)

    # Hooks

    def init_timers(self) -> None:
        self._timers.names.clear()

    def log_timers(self) -> None:
        """Log the timers, and forget gradients that no step has used.

        Stage 3 calls this at the end of each step, also of one that it skips because gradients overflowed.
        """
        for info in self._order:
            if info.has_gradients() and not info.active:
                self._consume_gradient(info)
        self._timers.log()

    def pre_backward(self) -> None:
        self.init_timers()
        self._cache.poll()

    def post_backward(self) -> None:
        pass

    # Parts of the above

    def _take_charge(
        self, parameters: Sequence[torch.Tensor], numels: Sequence[int], fill: Callable[[int, torch.Tensor], object]
    ) -> None:
        """Of all of the parameters or, after an error, of none. ``fill``: gives the one with this number its values, flat."""
        known = len(self._order)
        try:
            for number, (parameter, numel) in enumerate(zip(parameters, numels, strict=True)):
                info = self._register(parameter, numel)
                self._cache.create(info.master.tile)
                fill(number, info.master.memory())
                self._cache.release([info.master.tile], changed=True)
        except BaseException:
            for info in self._order[known:]:
                self._cache.discard(info.master.tile)
                del self.swap_params_info[self.parameter_id(info.parameter)]
            del self._order[known:]
            self._cache.memory.turns = max(known, 1)
            raise

    def _register(self, parameter: torch.Tensor, numel: int) -> OptimizerStateSwapInfo:
        key = self.parameter_id(parameter)
        if key in self.swap_params_info:
            raise ValueError(f"parameter {key!r} was initialized before: initialize each one once")
        info = OptimizerStateSwapInfo(parameter, numel, self._folder, self.aligned_bytes, turn=len(self._order))
        self.swap_params_info[key] = info
        self._order.append(info)
        self._cache.memory.turns = len(self._order)
        self._cache.memory.turn = info.turn
        return info

    def _swapped_in(self, parameter: torch.Tensor) -> OptimizerStateSwapInfo | None:
        info = self.swap_params_info.get(self.parameter_id(parameter))
        if info is not None and not info.active:
            raise RuntimeError(f"parameter {info.param_id!r} is not swapped in: call swap_in_optimizer_state before")
        return info

    def _let_go(self, info: OptimizerStateSwapInfo, write_opt_state: bool, write_gradients: bool) -> None:
        gradient = info.parameter.grad
        write_gradients = write_gradients and gradient is not None
        if write_gradients and gradient is not None:
            memory = info.gradient_memory()
            if gradient.data_ptr() != memory.data_ptr():
                memory.copy_(gradient.detach().reshape(-1))
        with defer_interrupts():
            used_up = info.stepped and write_opt_state
            info.detach()
            if used_up:
                info.gradient_ranges.clear()
            elif write_gradients:
                info.gradient_ranges = {0: info.numel()}  # also where none had come, and one was set
            self._cache.release(info.tiles(), changed=write_opt_state)
            if info.has_gradients():
                self._cache.release([info.gradient], changed=write_gradients)
            else:
                self._consume_gradient(info)

    def _fill_gaps(self, info: OptimizerStateSwapInfo) -> None:
        """Fill what has not arrived of a gradient from last_gradients, or else with zeros. Only parts that are missing as a
        whole are taken from there."""
        last = self._last_gradients(info)
        for offset, length in info.gradient_gaps():
            info.gradient_memory()[offset : offset + length].zero_()
        for start, gradient in last:
            info.gradient_memory()[start : start + gradient.numel()].copy_(gradient.detach().reshape(-1))

    def _last_gradients(self, info: OptimizerStateSwapInfo) -> list[tuple[int, torch.Tensor]]:
        """Those that nothing has come for."""
        gaps = list(info.gradient_gaps())
        return [
            (start, gradient)
            for start, gradient in (self.last_gradients(info.parameter) if gaps else ())
            if any(offset <= start and start + gradient.numel() <= offset + length for offset, length in gaps)
        ]

    def _consume_gradient(self, info: OptimizerStateSwapInfo) -> None:
        info.gradient_ranges.clear()
        self._cache.discard(info.gradient)

    def _decide_what_stays(self) -> None:
        """At the beginning of a step, as what there is may have changed during the last one."""
        groups = [Footprint(tuple(tile.nbytes for tile in info.tiles()), info.gradient.nbytes) for info in self._order]
        decided = plan(groups, self._cache.memory.limit)
        for info, count, keep in zip(self._order, decided.resident_states, decided.kept_gradients, strict=True):
            for index, tile in enumerate(info.tiles()):
                self._cache.keep(tile, index < count)
            self._cache.keep(info.gradient, keep)
        self._gradient_bytes = decided.gradient_bytes

    def _read_ahead(self, info: OptimizerStateSwapInfo, following: torch.Tensor | None) -> None:
        """What comes after ``info``; after the last one the first of the next step, in room that its gradients will not need."""
        limit = self._cache.memory.limit
        ahead: list[tuple[Tile, int]] = []
        if following is not None:
            first = self.swap_params_info.get(self.parameter_id(following))
            after = self._order[info.turn + 1 :]
            for other in ([first] if first is not None and first not in after else []) + after:
                ahead += [(tile, limit) for tile in [*other.tiles(), other.gradient]]
        if following is not None or info is self._order[-1]:
            for other in self._order[: info.turn]:
                if not all(tile.resident for tile in other.tiles()):
                    ahead += [(tile, limit - self._gradient_bytes) for tile in other.tiles()]
                    break
        self._cache.read_ahead(ahead)


def _note_step(swapper: weakref.ref[OptimizerSwapper], optimizer: torch.optim.Optimizer, *_: object) -> None:
    """After each step of the optimizer: what of its parameters is swapped in has had its gradient used."""
    alive = swapper()
    if alive is None:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            info = alive.swap_params_info.get(getattr(parameter, "ds_id", None))
            if info is not None and info.active:
                info.stepped = True


def _engine(aio_config: Mapping[str, Any]) -> Engine:
    return Engine(
        block_size=aio_config[AIO_BLOCK_SIZE],
        queue_depth=aio_config[AIO_QUEUE_DEPTH],
        num_threads=aio_config[AIO_INTRA_OP_PARALLELISM],
        single_submit=aio_config[AIO_SINGLE_SUBMIT],
    )


def _write_back(cache: TileCache, order: Iterable[OptimizerStateSwapInfo], folder: str, process: int) -> None:
    """When a swapper or the program ends: DeepSpeed's files have every value, so these are to as well.

    Ctrl-C during a finalizer ends it silently; files not written by then keep an earlier step's values. Nobody reads those:
    :attr:`OptimizerSwapper.swap_folder` writes all of them first. No memory leaks.
    """
    if os.getpid() != process or not os.path.isdir(folder):  # they are the parent's, or were not wanted
        return
    if cache.helping():  # garbage is collected anywhere
        threading.Thread(target=_write_back, args=(cache, order, folder, process), name="deepnvme-write-back").start()
        return
    try:
        cache.flush([tile for info in order for tile in info.tiles()])
    except OSError as error:
        _logger.error("optimizer states of the last step could not be written: %s", error)
