"""An optimizer that wraps any torch optimizer and keeps its states and float32 master weights on a drive."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from deepnvme._former_names import check_optimizer_options, former_names
from deepnvme.drives.mounts import warn_of_memory
from deepnvme.drives.profiles import AnyPath
from deepnvme.files.directory_lock import DirectoryOwner
from deepnvme.memory.budget import MemoryBudget, budget_bytes, is_automatic
from deepnvme.memory.pool import buffer_pool
from deepnvme.offload.options import OptimizerOptions
from deepnvme.states.partition import SubGroupPlanner
from deepnvme.states.report import StepReport
from deepnvme.states.residency import ResidencyPolicy
from deepnvme.states.state_dict import opaque
from deepnvme.states.step import OptimizerStep
from deepnvme.states.sub_group import SubGroup
from deepnvme.store.tensor_store import TensorStore
from deepnvme.store.volumes import Directory
from deepnvme.telemetry.callers import stack_level
from deepnvme.telemetry.descriptions import path_list, printable, representation, size_for_people
from deepnvme.telemetry.drive_wear import WriteEstimate

_logger = logging.getLogger(__name__)


class OffloadedOptimizer(Optimizer):
    """``optimizer_class(params, **optimizer_kwargs)`` with its states on a drive. Results are the same, bit for bit.

    >>> optimizer = deepnvme.OffloadedOptimizer(
    ...     model.parameters(), torch.optim.AdamW, path="/mnt/nvme/states", lr=1e-3, fused=True
    ... )

    The parameters are divided into sub-groups. A step reads the states of one sub-group from the drive, steps it on the CPU and
    writes its states back, while the states of the next sub-group are read.

    With ``master_weights``, if other code has changed a parameter since the last step, the next step copies the new value into
    the master weight. Loading a model's ``state_dict`` is noticed; changes through ``.data`` are not, because torch does not
    count them.

    **Errors.** A step is never undone. If it fails, the sub-groups that were stepped stay stepped, and the exception says how
    many are left; the next :meth:`step` finishes them, with the gradients that are still there. Until then :meth:`state_dict`,
    :meth:`zero_grad` and further backwards raise RuntimeError. :meth:`load_state_dict` abandons such a step. If the optimizer's
    own code raises, the parameters of that sub-group may be partly stepped, as with any torch optimizer.

    **Signals.** Ctrl-C, and exceptions from signal handlers, are raised while the step waits for the drive. The step is then
    unfinished, as after an error.

    **Processes.** A forked child cannot use the optimizer.

    **Again on the same path.** If the same thread makes a second optimizer on a path in use, as when a notebook cell runs again,
    the first one is closed. The methods of the first then raise RuntimeError naming where the second was made. A UserWarning is
    given if no :meth:`state_dict` has the newest steps. If the path is in use by an optimizer of another running thread or of
    another process, the second one raises StoreLocked. An unreferenced optimizer is garbage-collected, which frees its directory.

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        optimizer_class: Any optimizer that updates each parameter independently of the others. ``fused=True``, if the class has
            it, is several times as fast.
        path: One directory, or several to stripe over. A leading "~" is the home directory. Locked while the optimizer is open.
            With ``torch.distributed``, each rank makes and locks its own directory in them. Twice the bytes of the states are
            reserved there at once.
        memory_budget: Bytes of states that stay in memory, and of their gradients with ``offload_gradients``; or "8GB", or
            "25%" of the available memory, or "auto" for half of that, though no more than the pool has room for.
            :meth:`state_dict` first writes resident states to the drive. Further memory is needed for three sub-groups in flight
            (one read, one stepped, one written): their states and master weights; and with ``offload_gradients`` the gradients of
            four sub-groups.
        master_weights: Keep float32 weights of bfloat16 and float16 parameters with the states, and step these weights.
            Required for parameters on CUDA devices, float32 ones too, because the step runs on the CPU.
        offload_gradients: Write gradients to the drive during backward and read them back for the step. ``param.grad`` is None
            after backward; :meth:`clip_grad_norm_` clips the gradients on the drive.
        advanced: Rarely used options: ``aio_config``, ``checksum``, ``pool`` and ``sub_group_size``. Each may also be given as a
            keyword argument of this class.
        **optimizer_kwargs: Passed to ``optimizer_class``.

    Raises:
        ValueError: If an argument is out of range, or a parameter or the optimizer cannot be offloaded.
        TypeError: If an argument has a wrong type, or is unknown, such as a misspelt one.
        StoreLocked: If a directory is in use; the message names the owner.
        OutOfBuffers: If the sub-groups in flight and the resident ones do not fit into the part of the buffer pool's budget that
            others have not leased.
        OSError: If the drive cannot be read or written; ENOSPC if it has no room for the states.

    Also raises the exceptions of ``optimizer_class`` for its arguments.
    """

    @former_names(OptimizerOptions, nvme_path="path", dram_budget="memory_budget", config="aio_config")
    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        *,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        memory_budget: MemoryBudget = 0,
        master_weights: bool = False,
        offload_gradients: bool = False,
        advanced: OptimizerOptions | None = None,
        **optimizer_kwargs: Any,
    ) -> None:
        budget = budget_bytes(memory_budget, "memory_budget")
        advanced = advanced or OptimizerOptions()
        size = advanced.sub_group_size
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            raise TypeError(f"optimizer_class must be a torch optimizer's class, as torch.optim.AdamW, got {optimizer_class!r}")
        check_optimizer_options(OffloadedOptimizer.__init__, optimizer_kwargs, optimizer_class)
        if not isinstance(size, int):
            raise TypeError(f"sub_group_size must be a whole number of elements, got {size!r}")
        closure = inspect.signature(optimizer_class.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ValueError(
                f"{optimizer_class.__name__} evaluates the loss several times a step, over all parameters at once: it cannot be"
                " offloaded; choose an optimizer that steps each parameter by itself"
            )
        if size < 1:
            raise ValueError(f"sub_group_size must be positive, got {size}")
        self._planner = SubGroupPlanner(optimizer_class, optimizer_kwargs, master_weights, size)
        self._residency = ResidencyPolicy(self._planner, budget, offload_gradients)
        self._pool = buffer_pool() if advanced.pool is None else advanced.pool
        self._checksum, self._offload_gradients = advanced.checksum, offload_gradients
        super().__init__(params, self._planner.defaults())
        first = self._planner.sub_groups_of(self.param_groups, 0, 0)
        if is_automatic(memory_budget):
            self._residency.limit_budget(first, self._pool.budget)
        self._residency.check_memory(first, self._pool, 0)
        self._saved_steps = 0
        """Value of ``steps`` at the last state_dict() or load_state_dict()."""
        self._warned = False
        owner = DirectoryOwner("OffloadedOptimizer", close_for_successor=weakref.WeakMethod(self._close_for_successor))
        try:
            directories = _own_directories(path)
            warn_of_memory(map(Path, directories))
            self._store = TensorStore(directories, checksum=advanced.checksum, aio_config=advanced.aio_config, owner=owner)
            # Only now: an optimizer that was there before may have had memory until here.
            if is_automatic(memory_budget):
                self._residency.limit_budget(first, self._pool.budget - self._pool.in_use)
            self._residency.check_memory(first, self._pool, self._pool.in_use)
            self._step = OptimizerStep(self, self._store, self._pool, self._residency, offload_gradients=offload_gradients)
            self.state = self._step.states  # type: ignore[assignment]
            self._loading = self.register_load_state_dict_pre_hook(opaque)
            self._step.add(first)
            _logger.info("%s with its states in %s %s", optimizer_class.__name__, printable(path), self.estimate_writes())
        except BaseException as error:
            owner.failures.append(f"{type(error).__name__}: {error}")
            self.close()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient. Blocks until the states are written.

        After an exception the step may be unfinished; the exception says so. The next call finishes the step: it steps the
        remaining sub-groups, and does not call ``closure`` again.

        If parameters are DTensors, all ranks that share them must call this, also to finish a step. If one rank fails, all raise.

        The first step in which no parameter has a gradient warns with UserWarning.

        Args:
            closure: Called once, with gradients enabled, before the step.

        Returns:
            What ``closure`` returns, or None without one.

        Raises:
            RuntimeError: If another rank has failed. Also after :meth:`close`, or in a forked child.
            OSError: If the drive cannot be read or written. With ``offload_gradients`` also an error of the preceding backward.
        """
        returned = self._step.step(closure)
        if self._sub_groups and self.report().sub_groups == 0 and not self._warned:
            self._warned = True
            warnings.warn(
                "no parameter of this OffloadedOptimizer has a gradient, so step() has changed nothing: was the model replaced by"
                " another one, whose parameters the optimizer does not have, or backward() not called?",
                stacklevel=stack_level(),
            )
        return returned

    @property
    def steps(self) -> int:
        """Steps completed by this object; :meth:`load_state_dict` does not change it. An unfinished step does not count."""
        return self._step.steps

    def report(self) -> StepReport:
        """Return timings and bytes moved of the last step. Raises RuntimeError before the first step."""
        last: StepReport = self._step.io.last
        return last

    def estimate_writes(self) -> WriteEstimate:
        """Return how many bytes each step writes to the drive: an estimate before the first step, the actual sizes afterwards.

        >>> estimate = optimizer.estimate_writes()
        >>> estimate.terabytes_per_day(seconds_per_step=3.5), estimate.years(seconds_per_step=3.5, rated_terabytes=1200)

        Assumes gradients for all parameters, and leaves checkpoints out. The constructor logs the estimate at level INFO.
        ``report().terabytes_per_day`` has the measured rate.
        """
        return self._residency.estimate_writes(self._sub_groups)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of all parameters like ``torch.nn.utils.clip_grad_norm_``, also those on the drive.

        If parameters are DTensors, all ranks that share them have to call this.

        Returns:
            The total norm of the gradients before clipping.

        Raises:
            RuntimeError: If a step is unfinished, or after :meth:`close`.
            OSError: If the drive cannot be read or written, with ``offload_gradients``.
        """
        self._step.check_idle()
        params = list(dict.fromkeys(param for group in self.param_groups for param in group["params"]))
        if self._offload_gradients:
            return self._step.clip(params, max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, those on the drive too. Raises RuntimeError if a step is unfinished."""
        self._step.zero_grad()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as with any torch optimizer.

        Raises what the constructor raises, and RuntimeError if a step is unfinished. Nothing is added then.
        """
        if not hasattr(self, "_step"):  # called by torch's constructor
            super().add_param_group(param_group)
            return
        self._step.check_idle()
        groups = len(self.param_groups)
        more: list[SubGroup] | None = None
        try:
            super().add_param_group(param_group)
            more = self._planner.sub_groups_of(self.param_groups[groups:], groups, len(self._sub_groups))
            others = max(0, self._pool.in_use - self._step.io.leased.now * 9 // 8)  # leases may take up to an eighth more
            self._residency.check_memory([*self._sub_groups, *more], self._pool, others)
            self._step.add(more)
        except BaseException:
            if more is None or any(each not in self._sub_groups for each in more):
                del self.param_groups[groups:]
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the ``state_dict`` that ``optimizer_class`` itself would return, with tensors mapped from the drive.

        A parameter's state has the additional key ``master_weight`` if there is a master weight. Tensors are memory-mapped, so
        they take no memory. They keep their values when further steps are made or the optimizer is closed, and occupy space on
        the drive for as long as they live.

        If the drive fails to read a page of a mapped tensor, touching that page ends the process with SIGBUS. With ``checksum``
        all states are read here first, which raises OSError instead.

        Raises:
            RuntimeError: If a step is unfinished.
            OSError: If the drive cannot be read or written; with ``checksum`` if states are damaged.
        """
        self._step.check_idle()
        if self._checksum:
            self.state.verify()  # type: ignore[attr-defined]
        state = super().state_dict()
        self._saved_steps = self.steps
        return state

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tell ``torch.amp.GradScaler`` that this optimizer does not scale gradients itself.

        ``GradScaler.step`` reads this attribute first, so it is where an unsupported combination is reported.
        """
        if self._offload_gradients:
            raise RuntimeError(
                "a GradScaler needs the gradients after backward, and offload_gradients takes them away: set it to False"
            )
        return False

    def close(self) -> None:
        """Release the memory and remove the files. Idempotent. Save :meth:`state_dict` first.

        Parameters stay as they are, also those that an unfinished step has stepped.
        """
        if hasattr(self, "_step"):
            self._step.close()
        if hasattr(self, "_store"):
            self._store.close()

    def _close_for_successor(self, other: DirectoryOwner, directory: Path) -> None:
        """Close this optimizer, since another one is made on one of its directories.

        Warns with UserWarning if steps are lost. Raises RuntimeError while a method runs.
        """
        if not hasattr(self, "_step"):
            raise RuntimeError("it is being made")
        self._step.guard.check_unused()
        if self.steps != self._saved_steps:
            warnings.warn(
                f"another OffloadedOptimizer is made on '{directory}': the one before is closed, and the states of its"
                f" {self.steps} steps are removed. state_dict() keeps them; another path keeps both optimizers",
                stacklevel=stack_level(),
            )
        self._step.close(functools.partial(_closed_for, other, directory))
        self._store.close()

    def __enter__(self) -> OffloadedOptimizer:
        self._step.guard.check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return the wrapped class, directories, budget, steps, state, and the parameter groups as torch shows them."""
        head = representation(
            self,
            lambda: f"of {self._planner.optimizer_class.__name__}",
            lambda: f"in {path_list(self._store.directories)}",
            lambda: f"memory_budget={size_for_people(self._residency.memory_budget)}",
            lambda: f"{len(self._sub_groups)} sub-groups",
            lambda: f"{self.steps} steps made",
            lambda: self._step.guard.state(),
        )
        groups = super().__repr__().partition("\n")[2] if "param_groups" in self.__dict__ else ""
        return f"{head} (\n{groups}" if groups else head

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an OffloadedOptimizer owns files and cannot be copied or pickled; use state_dict()")

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of another optimizer of the same class, offloaded or not.

        One sub-group is copied at a time. A master weight is loaded from ``master_weight`` in a parameter's state, or from the
        parameter if that key is missing. On any exception nothing is changed.

        An unfinished step is abandoned. A RuntimeWarning then says how many parameters still have values from that step: load the
        model's state_dict too, before or after this call.

        Raises OSError if the drive cannot be read or written, and what torch raises for a state_dict that does not fit.
        """
        self._step.guard.check_open()
        self._loading.remove()
        self._loading = self.register_load_state_dict_pre_hook(opaque)  # registered again to run after the user's hooks
        super().load_state_dict(state_dict)
        self._saved_steps = self.steps

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._step.load(state)
        self.defaults.setdefault("differentiable", False)  # as torch.optim.Optimizer.__setstate__ does

    @property
    def _sub_groups(self) -> list[SubGroup]:
        return self._step.sub_groups


def _closed_for(other: DirectoryOwner, directory: Path) -> str:
    """Return the RuntimeError message of an optimizer that was closed because another one was made on its directory."""
    if other.failures:
        return (
            f"this OffloadedOptimizer was closed for another one on '{directory}' at {other.made_at}, which could not be made"
            f" ({other.failures[0]}): make it again, and load the states that were saved"
        )
    said = f"another one was made on '{directory}' at {other.made_at}: use that one, or give each its own path"
    return f"this OffloadedOptimizer was closed: {said}"


def _own_directories(path: AnyPath | Iterable[AnyPath]) -> list[Directory]:
    """Return the directories to use; with several ranks, a subdirectory ``rank<N>`` of each for this rank.

    Args:
        path: One directory, or several.

    Raises:
        TypeError: If a directory is not a path.
        ValueError: If a path is empty.
    """
    many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    own = f"rank{dist.get_rank()}" if many else ""
    if isinstance(path, str | bytes | os.PathLike):
        path = [path]
    if not isinstance(path, Iterable) or isinstance(path, Mapping):
        raise TypeError(f"path must be a directory, or several, got {path!r}")
    found: list[Directory] = []
    for each in path:
        if not isinstance(each, str | bytes | os.PathLike):
            raise TypeError(f"path must be a directory, or several, got {each!r} in it")
        if not os.fspath(each):
            raise ValueError(f'path must not be empty, got {each!r}: write "." for the current directory')
        found.append(Path(os.path.expanduser(os.fsdecode(each))) / own)
    return found
