"""Any torch optimizer with its states, and the weights in full precision, on a drive."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.optim import Optimizer

from deepnvme.memory.pool import BufferPool, buffer_pool
from deepnvme.store.tensor_store import TensorStore

from .distributed import own_directories
from .planner import SubGroupPlanner
from .residency import ResidencyPolicy
from .state_loading import opaque
from .step import StepRunner
from .step_report import StepReport
from .sub_group import SubGroup


class OffloadedOptimizer(Optimizer):
    """``optimizer_class(params, **optimizer_kwargs)`` with the same results, bit for bit, and its states on a drive.

    >>> optimizer = deepnvme.OffloadedOptimizer(
    ...     model.parameters(), torch.optim.AdamW, nvme_path="/mnt/nvme/states", lr=1e-3, fused=True
    ... )

    ``optimizer_class``: any that steps each parameter by itself. ``fused=True``, where the class knows it, is several times
    as fast.
    ``nvme_path``: a directory, or several to be striped over; this process's alone while the optimizer is open. With
    ``torch.distributed`` each rank takes a directory of its own in it. Twice the bytes of the states are taken there, so that
    a step that fails leaves the one before, and are reserved at once.
    ``dram_budget``: bytes of states that stay in memory, beside three sub-groups that are under way: their states and master
    weights; where there are none of these copies of their parameters during a step; and with ``offload_gradients`` four
    sub-groups' gradients. Their first step, and what a checkpoint is made of, goes to the drive all the same.
    ``master_weights``: keep float32 weights of bfloat16 and float16 parameters with the states, and step these. Parameters on
    CUDA devices need it: their states are stepped on the CPU.
    ``sub_group_size``: elements that are read, stepped and written at once. Larger parameters are cut where the optimizer works
    element by element (those of torch that do, on float32 and float64), otherwise the largest parameter is the least that is
    held.
    ``offload_gradients``: gradients go to the drive during backward, and come back for the step; ``param.grad`` is None after
    backward, and :meth:`clip_grad_norm_` clips them. ``step_in_backward``: a sub-group is stepped as soon as its gradients are
    complete, and they are freed; :meth:`step` ends the step. One backward for a step then, and no clipping.
    ``checksum``: states are verified when they are read, and when a state_dict is made. ``verbose``: print a line for each step.
    ``pool``: to lease memory from, instead of the process's.

    A parameter that was changed by others since the last step (``load_state_dict`` of the model, but not through ``.data``, which
    nothing tells) is taken as the new master weight.

    Raises ValueError for what cannot be offloaded, what ``optimizer_class`` raises for what it does not take, StoreLocked for a
    directory in use, OutOfBuffers if the ring does not fit into what others leave of the buffer pool's budget, and OSError from
    the drive: ENOSPC if it has no room for the states.

    An exception out of :meth:`step`, also of Ctrl-C or from a handler of SIGTERM, SIGHUP, SIGQUIT, SIGALRM, SIGUSR1, SIGUSR2 or
    SIGXCPU, leaves parameters and states as they were before it, or as they are after it, and says which; :attr:`steps` does
    too. Where the drive fails in bringing them back as well, the error says that, nothing is lost, and the next call does it
    first, or raises OSError again. With one exception, which says so and leaves
    :meth:`load_state_dict` to be called: what ``dram_budget`` keeps in memory is stepped last, after all that the drive could
    fail in. If then the optimizer's own code raises, when it has stepped others in the same step, and these before, what it has
    changed in memory is lost: a second copy would take as much memory again, or as many bytes written in each step as were kept
    from the drive.

    These handlers wait while a step is made final or taken back, with no bound of its own: as long as a drive that hangs, and
    with DTensors as the collective in which the ranks agree, which ends by its ``timeout`` if a rank does not come.
    A rank that left it would not know whether the others make the step that it has agreed to.

    A forked child can only leave the optimizer alone.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        *,
        nvme_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, float],
        dram_budget: int = 0,
        master_weights: bool = False,
        sub_group_size: int = 1 << 22,
        offload_gradients: bool = False,
        step_in_backward: bool = False,
        checksum: bool = False,
        verbose: bool = False,
        pool: BufferPool | None = None,
        **optimizer_kwargs: Any,
    ) -> None:
        if "closure" in _required(optimizer_class.step):
            raise ValueError(
                f"{optimizer_class.__name__} evaluates the loss several times a step, over all parameters at once: it cannot be"
                " offloaded; choose an optimizer that steps each parameter by itself"
            )
        if dram_budget < 0:
            raise ValueError(f"dram_budget must not be negative, got {dram_budget}")
        if sub_group_size < 1:
            raise ValueError(f"sub_group_size must be positive, got {sub_group_size}")
        if offload_gradients and step_in_backward:
            raise ValueError("step_in_backward frees gradients at once: offload_gradients has nothing to do then; choose one")
        self._plan = SubGroupPlanner(optimizer_class, optimizer_kwargs, master_weights, sub_group_size)
        self._places = ResidencyPolicy(self._plan, dram_budget, offload_gradients)
        self._pool = buffer_pool() if pool is None else pool
        self._checksum, self._step_in_backward = checksum, step_in_backward
        super().__init__(params, self._plan.defaults())
        first = self._plan.sub_groups_of(self.param_groups, 0, 0)
        self._places.check_memory(first, self._pool, self._pool.in_use)
        try:
            self._store = TensorStore(own_directories(nvme_path), checksum=checksum)
            self._stepping = StepRunner(
                self,
                self._store,
                self._pool,
                self._places,
                offload_gradients=offload_gradients,
                in_backward=step_in_backward,
                verbose=verbose,
            )
            self.state = self._stepping.states  # type: ignore[assignment]
            self._loading = self.register_load_state_dict_pre_hook(opaque)
            self._stepping.add(first)
        except BaseException:
            self.close()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient. Blocks until the states are written.

        Returns what ``closure`` returns, if one is given; it is called once, before. On any exception parameters and states are
        brought back to the step before, and gradients stay, to try again; only with ``step_in_backward`` they go.

        Where parameters are DTensors, all ranks that share them have to call it. None makes a step that another could not make:
        RuntimeError.
        """
        return self._stepping.step(closure)

    @property
    def steps(self) -> int:
        """Steps made since the optimizer was made. After an exception out of ``step``: whether that was made. Only one that comes
        when all is done, Ctrl-C say, leaves it made."""
        return self._stepping.steps

    def report(self) -> StepReport:
        """Of the last step. Raises RuntimeError before the first."""
        return self._stepping.reports.last

    def measure_limits(self, nbytes: int = 256 << 20) -> tuple[float, float]:
        """Bytes/s that the drive reads and writes for this optimizer's store, over ``nbytes`` bytes or some more each way; kept
        for :meth:`report`. Takes some tenths of a second. Raises ValueError for no bytes, and OSError from the drive."""
        self._stepping.standing.check_usable()
        largest = max(each.numel for each in self._sub_groups)
        return self._stepping.reports.measure_limits(self._pool, 4 * largest, nbytes)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """``torch.nn.utils.clip_grad_norm_`` over all parameters, also where their gradients are on the drive. Returns the norm.
        Where parameters are DTensors, all ranks that share them have to call it."""
        if self._step_in_backward:
            raise RuntimeError("step_in_backward uses gradients before their norm is known: to clip, set it to False")
        params = list(dict.fromkeys(param for group in self.param_groups for param in group["params"]))
        if self._stepping.offloaded is None:
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        return self._stepping.clip(self._stepping.offloaded, params, max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As any optimizer's; gradients on the drive are dropped, and what backward has stepped since the last step is taken
        back. Raises OSError if that fails."""
        self._stepping.zero_grad()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As any optimizer's. Raises like the constructor, and adds nothing then."""
        if not hasattr(self, "_stepping"):  # torch's constructor
            super().add_param_group(param_group)
            return
        self._stepping.check_between_steps()
        groups = len(self.param_groups)
        more: list[SubGroup] | None = None
        try:
            super().add_param_group(param_group)
            more = self._plan.sub_groups_of(self.param_groups[groups:], groups, len(self._sub_groups))
            self._places.check_memory([*self._sub_groups, *more], self._pool, 0)
            self._stepping.add(more)
        except BaseException:
            if more is None or any(each not in self._sub_groups for each in more):
                del self.param_groups[groups:]
            raise

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer in memory has it, with ``master_weight`` in a parameter's state if there is one. Tensors are mapped
        from the drive: no memory is taken. They stay as they are when the optimizer goes on, or is closed; each keeps its room on
        the drive for as long as it lives. A drive that fails to read a page ends the process with SIGBUS when
        that is touched; ``checksum`` reads all before, and raises OSError."""
        self._stepping.standing.check_usable()
        self._stepping.check_between_steps()
        if self._checksum:
            self.state.verify()  # type: ignore[attr-defined]
        return super().state_dict()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What GradScaler.step asks an optimizer first."""
        if self._stepping.offloaded is not None or self._step_in_backward:
            option = "step_in_backward" if self._step_in_backward else "offload_gradients"
            raise RuntimeError(f"a GradScaler needs the gradients after backward, and {option} takes them away: set it to False")
        return False

    def close(self) -> None:
        """Give the memory back and remove the files. Idempotent. Save ``state_dict()`` before.

        What backward has stepped without a :meth:`step`, or a step that could not be undone, is undone first. Raises OSError if
        that fails, and is open still: call it again, or :meth:`load_state_dict` before.
        """
        if hasattr(self, "_stepping"):
            self._stepping.close()
        if hasattr(self, "_store"):
            self._store.close()

    def __enter__(self) -> OffloadedOptimizer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except OSError as failed:
            if error is None:
                raise
            if hasattr(error, "add_note"):
                error.add_note(f"close() failed: {failed}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an OffloadedOptimizer owns files and cannot be copied or pickled; use state_dict()")

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the states of another optimizer of this class, offloaded or not. One sub-group at a time is copied.

        Where there are master weights, ``master_weight`` of a parameter's state, or else the parameter, is taken.
        On any exception all stays as it was. After a step that could not be undone this makes the optimizer usable again;
        where the drive fails still, a RuntimeWarning says how many parameters are as the failed step left them: load the
        model too.
        """
        self._stepping.standing.check_open()
        self._stepping.check_before_loading()
        self._loading.remove()
        self._loading = self.register_load_state_dict_pre_hook(opaque)  # after those of the user
        super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._stepping.load(state)
        self.defaults.setdefault("differentiable", False)  # as torch does here

    @property
    def _sub_groups(self) -> list[SubGroup]:
        return self._stepping.sub_groups


def _required(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.default is parameter.empty]
