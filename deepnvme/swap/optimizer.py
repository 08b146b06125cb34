"""Any torch optimizer with its states, and the weights in full precision, on a drive."""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .block import PAGE, dense_strides
from .buffers import BufferPool, OutOfBuffers, buffer_pool
from .gradients import OPEN, OffloadedGradients
from .interrupts import held_back
from .memory import give_back_heap
from .states import States, opaque, spill, take_over
from .step_report import StepReport
from .store import TensorStore
from .sub_group import NOT_OPTIONS, Gradients, Held, SubGroup
from .sub_groups import Piece, local_of, partition
from .sweep import Room, Sweep

RING = 3
"""Sub-groups under way: one being read, one stepped, one written."""

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
"""Optimizers to which a run of a parameter's elements is as good as a whole parameter."""

LOW_PRECISION = (torch.bfloat16, torch.float16)


class OffloadedOptimizer(Optimizer):
    """``optimizer_class(params, **optimizer_kwargs)`` with the same results, bit for bit, and its states on a drive.

    >>> optimizer = deepnvme.OffloadedOptimizer(
    ...     model.parameters(), torch.optim.AdamW, nvme_path="/mnt/nvme/states", lr=1e-3, fused=True
    ... )

    ``optimizer_class``: any that steps each parameter by itself. ``fused=True``, where the class knows it, is several times
    as fast.
    ``nvme_path``: a directory, or several to be striped over; this process's alone while the optimizer is open. With
    ``torch.distributed`` each rank takes a directory of its own in it. Twice the bytes of the states are taken there, so that
    a step that fails leaves the one before.
    ``dram_budget``: bytes of states that stay in memory, beside the three sub-groups that are under way.
    ``master_weights``: keep float32 weights of bfloat16 and float16 parameters with the states, and step these. Parameters on
    CUDA devices need it: their states are stepped on the CPU.
    ``sub_group_size``: elements that are read, stepped and written at once. Larger parameters are cut where the optimizer works
    element by element (those of torch that do, on float32 and float64), otherwise the largest parameter is the least that is
    held.
    ``offload_gradients``: gradients go to the drive during backward, and come back for the step; ``param.grad`` is None after
    backward, and :meth:`clip_grad_norm_` clips them. ``step_in_backward``: a sub-group is stepped as soon as its gradients are
    complete, and they are freed; :meth:`step` ends the step. One backward for a step then, and no clipping.
    ``checksum``: states are verified when they are read, and when a state_dict is made. ``verbose``: print a line for each step.

    A parameter that was changed by others since the last step (``load_state_dict`` of the model, but not through ``.data``, which
    nothing tells) is taken as the new master weight.

    Raises ValueError for what cannot be offloaded, StoreLocked for a directory in use, OutOfBuffers if the ring does not fit
    into the buffer pool's budget, and OSError from the drive. An exception out of :meth:`step`, Ctrl-C included, leaves
    parameters and states as they were before it, or as they are after it, and says which; :attr:`steps` does too. A forked child
    can only leave the optimizer alone.
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
        self._class, self._options = optimizer_class, optimizer_kwargs
        self._master_weights, self._sub_group_size = master_weights, sub_group_size
        self._sub_groups: list[SubGroup] = []
        self._pieces: dict[torch.Tensor, list[tuple[SubGroup, int]]] = {}
        self._states_an_element: list[float] = []
        self._pool = buffer_pool() if pool is None else pool
        self._dram_budget, self._verbose = dram_budget, verbose
        self._checksum = checksum
        self._step_in_backward, self._offload_gradients = step_in_backward, offload_gradients
        super().__init__(params, self._defaults())
        self._add_sub_groups(self.param_groups, 0)
        self._store = TensorStore(_own(nvme_path), checksum=checksum)
        self.state = States(self._pieces, self._store)  # type: ignore[assignment]
        self._sweep = Sweep(self._store, self._pool, RING)
        self._scratch = Room(self._pool)
        self._gradients = OffloadedGradients(self._store, self._pool) if offload_gradients else None
        self._versions: dict[torch.Tensor, tuple[int, int]] = {}
        self._arrived: dict[SubGroup, set[int]] = {}
        self._early: list[SubGroup] = []
        self._last_early: list[SubGroup] = []
        self._hooks: dict[torch.Tensor, RemovableHandle] = {}
        self._steps = 0
        self._written = 0
        self._limits: tuple[float, float] | None = None
        self._last: StepReport | None = None
        self._broken: str | None = None
        self._closed = False
        self._process = os.getpid()
        self._gradients_lost = False
        self._loading = self.register_load_state_dict_pre_hook(opaque)
        self._hook_parameters()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient. Blocks until the states are written.

        Returns what ``closure`` returns, if one is given; it is called once, before. On any exception parameters and states are
        brought back to the step before, and gradients stay, to try again; only with ``step_in_backward`` they go.
        """
        self._check_usable()
        begun = time.perf_counter()
        loss = None
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            stepped = self._step_all()
            self._report_step(begun, stepped)
        except BaseException as error:
            self._undo(error)
            raise
        return loss

    @property
    def steps(self) -> int:
        """Steps made since the optimizer was made. After an exception out of ``step``: whether that was made. Only one that comes
        when all is done, Ctrl-C say, leaves it made."""
        return self._steps

    def report(self) -> StepReport:
        """Of the last step. Raises RuntimeError before the first."""
        if self._last is None:
            raise RuntimeError("there is nothing to report before the first step")
        return self._last

    def measure_limits(self, nbytes: int = 256 << 20) -> tuple[float, float]:
        """Bytes/s that the drive reads and writes for this optimizer's store; kept for :meth:`report`. Takes some tenths of a
        second."""
        self._check_usable()
        names = [f"limits.{number}" for number in range(RING)]
        largest = max(each.numel for each in self._sub_groups)
        with self._pool.lease(max(4 * largest, 1 << 20) * RING) as lease:
            parts = lease.buffer.chunk(RING)
            rounds = -(-nbytes // lease.nbytes)

            def seconds(move: Callable[[str, torch.Tensor], Any]) -> float:
                begun = time.perf_counter()
                for future in [move(name, part) for name, part in zip(names, parts, strict=True)]:
                    future.result()
                return time.perf_counter() - begun

            seconds(self._store.put)  # allocates
            writing, reading = zip(*((seconds(self._store.put), seconds(self._store.get)) for _ in range(rounds)), strict=True)
        for name in names:
            self._store.delete(name).result()
        self._limits = rounds * lease.nbytes / sum(reading), rounds * lease.nbytes / sum(writing)
        return self._limits

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """``torch.nn.utils.clip_grad_norm_`` over all parameters, also where their gradients are on the drive. Returns the
        norm."""
        if self._step_in_backward:
            raise RuntimeError("step_in_backward uses gradients before their norm is known: to clip, set it to False")
        params = [param for group in self.param_groups for param in group["params"]]
        if self._gradients is not None:
            self._offload_the_rest()
            self._gradients.flush()
            return self._gradients.clip(params, max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As any optimizer's; gradients on the drive are dropped, and what backward has stepped since the last step is taken
        back. Raises OSError if that fails."""
        self._check_process()
        if self._sweep.under_way:
            self._take_back()
        self._arrived.clear()
        super().zero_grad(set_to_none)
        self._gradients_lost = False
        if self._gradients is not None:
            self._gradients.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As any optimizer's. Raises like the constructor, and adds nothing then."""
        super().add_param_group(param_group)
        if hasattr(self, "_store"):
            try:
                self._add_sub_groups([self.param_groups[-1]], len(self.param_groups) - 1)
            except BaseException:
                del self.param_groups[-1]
                raise
            self._hook_parameters()

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer in memory has it, with ``master_weight`` in a parameter's state if there is one. Tensors are mapped
        from the drive: no memory is taken, and they are valid until the next step."""
        self._check_usable()
        self._check_between_steps()
        if self._checksum:
            self.state.verify()  # type: ignore[attr-defined]
        return super().state_dict()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What GradScaler.step asks an optimizer first."""
        if self._offload_gradients or self._step_in_backward:
            option = "offload_gradients" if self._offload_gradients else "step_in_backward"
            raise RuntimeError(f"a GradScaler needs the gradients after backward, and {option} takes them away: set it to False")
        return False

    def close(self) -> None:
        """Give the memory back and remove the files. Idempotent. Save ``state_dict()`` before."""
        if not hasattr(self, "_store"):
            return
        self._check_process()
        if self._sweep.under_way:
            with contextlib.suppress(OSError, MemoryError):
                self._take_back()
        self._closed = True
        for hook in self._hooks.values():
            hook.remove()
        self._sweep.release()
        self._scratch.release()
        if self._gradients is not None:
            self._gradients.clear()
        for sub_group in self._sub_groups:
            if sub_group.resident is not None:
                sub_group.resident.release()
                sub_group.resident = None
        self._store.close()

    def __enter__(self) -> OffloadedOptimizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an OffloadedOptimizer owns files and cannot be copied or pickled; use state_dict()")

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the states of another optimizer of this class, offloaded or not. One sub-group at a time is copied.

        Where there are master weights, ``master_weight`` of a parameter's state, or else the parameter, is taken.
        On any exception all stays as it was. After a step that could not be undone this makes the optimizer usable again.
        """
        self._check_open()
        self._check_between_steps()
        self._loading.remove()
        self._loading = self.register_load_state_dict_pre_hook(opaque)  # after those of the user
        super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._sweep.forget()
        undo = [sub_group.remember() for sub_group in self._sub_groups]
        for sub_group in self._sub_groups:
            self._choose_place(sub_group)
        residents = [sub_group for sub_group in self._sub_groups if sub_group.in_memory]
        loaded = False
        try:
            for sub_group in self._sub_groups:
                if not sub_group.in_memory:
                    held = take_over(sub_group, state["state"], state["param_groups"])
                    sub_group.layout = None
                    if held:
                        self._sweep.write_now(sub_group, held)
                    else:
                        sub_group.current = None
            with held_back():
                for number, sub_group in enumerate(residents):
                    try:
                        self._settle_resident(sub_group, take_over(sub_group, state["state"], state["param_groups"]))
                    except BaseException as error:
                        if number:
                            self._broken = f"load_state_dict failed when it had replaced states in memory ({error}): load again"
                        raise
                for sub_group in self._sub_groups:
                    sub_group.stale.clear()
                self.param_groups = state["param_groups"]
                self._remember_versions()
                self._broken, loaded = None, True
        except BaseException:
            if not loaded:
                for forget in undo:
                    forget()
            raise
        finally:
            self._sweep.forget()

    # -- stepping

    def _step_all(self) -> int:
        if self._gradients_lost:
            raise RuntimeError("the gradients went with the step that failed: run backward again")
        self._offload_the_rest()
        self._keep_to_budget()
        waiting = [each for each in self._sub_groups if each not in self._early and self._has_gradient(each)]
        for sub_group in waiting:
            self._choose_place(sub_group)
        on_drive = self._sweep.kept_first([each for each in waiting if not each.in_memory])
        self._look_for_changes()
        self._sweep.expect(on_drive)
        for sub_group in on_drive:
            self._sweep.step(sub_group, partial(self._gradients_of, sub_group), self.param_groups)
        self._sweep.drain()
        # From here on nothing can fail but the optimizer's own code: what stays in memory has no other copy.
        with held_back():
            in_memory = [each for each in waiting if each.in_memory]
            begun = time.perf_counter()
            for sub_group in in_memory:
                self._step_in_memory(sub_group)
            self._sweep.times.computing += time.perf_counter() - begun
            self._commit(waiting)
        return len(waiting)

    def _commit(self, stepped: Sequence[SubGroup]) -> None:
        self._sweep.commit()
        stepped = [*self._early, *stepped]
        for sub_group in stepped:
            sub_group.pull(self.param_groups)
        self._last_early, self._early = self._early, []
        self._arrived.clear()
        if self._gradients is not None:
            self._gradients.clear()
        if self._step_in_backward:
            super().zero_grad()  # also those of what stays in memory, which was stepped last
        self._remember_versions()
        self._steps += 1

    def _take_back(self) -> None:
        """Undo what was stepped since the last whole step. With ``step_in_backward``, the gradients of that are gone."""
        with held_back():
            under_way = self._sweep.under_way
            if self._step_in_backward and (under_way or self._arrived):
                self._gradients_lost = True
                super().zero_grad()
            try:
                self._sweep.undo()
            except (OSError, MemoryError) as error:
                self._broken = self._broken or f"step {self._steps + 1} could not be undone ({error}): load a checkpoint"
                raise
            finally:
                self._early = []
                self._arrived.clear()
            if under_way:
                self._remember_versions()

    def _undo(self, error: BaseException) -> None:
        with held_back():
            with contextlib.suppress(OSError, MemoryError):
                self._take_back()  # also where it is broken: what is on the drive must not be undone later, over what was loaded
            said = self._broken or f"the optimizer and its parameters are as after step {self._steps}"
            if self._gradients_lost:
                said += ", the gradients are gone: run backward again"
            if isinstance(error, OSError) and error.errno is not None:
                error.strerror = f"{error.strerror}; {said}"
            elif hasattr(error, "add_note"):
                error.add_note(said)

    def _step_in_memory(self, sub_group: SubGroup) -> None:
        block = None if sub_group.resident is None else sub_group.resident.buffer
        try:
            held = sub_group.step(block, self._gradients_of(sub_group), self.param_groups)
            if held is not None:
                self._settle_resident(sub_group, held)
                del held
                give_back_heap()
        except BaseException:
            self._broken = (
                f"step {self._steps + 1} failed in sub-group {sub_group.index}, which dram_budget keeps in memory only, and"
                f" could not be undone: load a checkpoint"
            )
            raise
        sub_group.spilled = False

    def _settle_resident(self, sub_group: SubGroup, held: Held) -> None:
        old = sub_group.resident
        layout = sub_group.lay_out(held)
        sub_group.resident = self._pool.lease(max(layout.nbytes, 1))
        for section, (_, _, tensor) in zip(layout.sections, held, strict=True):
            section.of(sub_group.resident.buffer).copy_(tensor)
        sub_group.spilled = False
        if old is not None:
            old.release()

    def _choose_place(self, sub_group: SubGroup) -> None:
        """Whether it stays in memory is decided at its first step, in the order of the sub-groups, and holds from then on."""
        if sub_group.in_memory is None:
            in_memory = sum(self._memory(each) for each in self._sub_groups if each.in_memory)
            sub_group.in_memory = in_memory + self._memory(sub_group) <= self._dram_budget

    def _keep_to_budget(self) -> None:
        """Move states to the drive that turned out larger than they were thought to be."""
        residents = [each for each in self._sub_groups if each.resident is not None]
        too_much = sum(each.layout.nbytes for each in residents if each.layout is not None) - self._dram_budget
        while too_much > 0:
            sub_group = residents.pop()
            spill(sub_group, self._store)
            with held_back():
                assert sub_group.resident is not None
                assert sub_group.layout is not None
                too_much -= sub_group.layout.nbytes
                sub_group.resident.release()
                sub_group.resident, sub_group.in_memory, sub_group.spilled = None, False, False

    def _memory(self, sub_group: SubGroup) -> int:
        """Bytes that it takes to keep it there; an estimate before its first step."""
        nbytes = self._estimate(sub_group) if sub_group.layout is None else sub_group.layout.nbytes
        return nbytes + (_bytes_of_gradients(sub_group) if self._offload_gradients else 0)

    def _has_gradient(self, sub_group: SubGroup) -> bool:
        if self._gradients is not None and self._gradients.has(sub_group):
            return True
        return any(piece.param.grad is not None for piece in sub_group.pieces)

    def _gradients_of(self, sub_group: SubGroup) -> Gradients:
        found: list[torch.Tensor | None] = []
        offloaded = self._gradients.take(sub_group) if self._gradients is not None else {}
        for index, piece in enumerate(sub_group.pieces):
            gradient = offloaded.get(index)
            found.append(piece.gradient if gradient is None else gradient)
        full = [index for index, gradient in enumerate(found) if gradient is not None and sub_group.masters[index]]
        end = 0
        scratch = self._scratch.take(sum(-(-4 * sub_group.pieces[index].numel // 64) * 64 for index in full))
        for index in full:
            gradient = found[index]
            assert gradient is not None
            if gradient.layout is not torch.strided:
                found[index] = gradient.to("cpu", torch.float32)
                continue
            flat = scratch[end : end + 4 * gradient.numel()].view(torch.float32)
            found[index] = flat.as_strided(gradient.shape, dense_strides(gradient)).copy_(gradient)
            end += -(-4 * gradient.numel() // 64) * 64
        return found

    def _offload_the_rest(self) -> None:
        """Gradients that no hook has seen: given by hand, or of parameters that needed none when they were hooked."""
        if self._gradients is not None:
            for param in self._pieces:
                if param.grad is not None:
                    with held_back():
                        self._offload(param)

    def _offload(self, param: torch.Tensor) -> None:
        assert self._gradients is not None
        for sub_group, _ in self._pieces[param]:
            self._choose_place(sub_group)
        self._gradients.add(param, self._pieces[param])
        param.grad = None

    # -- in backward

    def _hook_parameters(self) -> None:
        if not self._step_in_backward and self._gradients is None:
            return
        for group in self.param_groups:
            for param in group["params"]:
                if param not in self._hooks and param.requires_grad:
                    self._hooks[param] = param.register_post_accumulate_grad_hook(self._gradient_arrived)

    @torch.no_grad()
    def _gradient_arrived(self, param: torch.Tensor) -> None:
        self._check_usable()
        self._gradients_lost = False
        if self._gradients is not None:
            self._offload(param)
            return
        try:
            self._step_what_is_complete(param)
        except BaseException as error:
            self._undo(error)
            raise

    def _step_what_is_complete(self, param: torch.Tensor) -> None:
        self._look_for_changes()
        if not self._arrived and self._last_early:
            self._sweep.expect(self._sweep.kept_first(self._last_early))
        for sub_group, index in self._pieces[param]:
            arrived = self._arrived.setdefault(sub_group, set())
            if index in arrived:
                raise RuntimeError("step_in_backward takes one backward for each step(): this is a second one")
            arrived.add(index)
            if len(arrived) < sum(piece.param.requires_grad for piece in sub_group.pieces):
                continue
            self._choose_place(sub_group)
            if not sub_group.in_memory:
                self._sweep.step(sub_group, partial(self._gradients_of, sub_group), self.param_groups)
                self._early.append(sub_group)
                for piece in sub_group.pieces:
                    if all(each in self._early for each, _ in self._pieces[piece.param]):
                        piece.param.grad = None

    # -- setting up

    def _defaults(self) -> dict[str, Any]:
        """Of the class, with the options given: from one made for nothing, since some make their states at once."""
        return dict(self._class([torch.nn.Parameter(torch.zeros(1, 1))], **self._options).defaults)

    def _make(self, groups: list[dict[str, Any]]) -> Optimizer:
        return self._class(groups, **self._options)

    def _has_master(self, piece: Piece) -> bool:
        return self._master_weights and (piece.param.dtype in LOW_PRECISION or piece.param.device.type != "cpu")

    def _may_be_cut(self, param: torch.Tensor) -> bool:
        exact = param.dtype in (torch.float32, torch.float64) or self._master_weights  # others are rounded by where vectors end
        return self._class in ELEMENTWISE and exact and local_of(param).is_contiguous()

    def _add_sub_groups(self, groups: Sequence[dict[str, Any]], first: int) -> None:
        added: set[torch.Tensor] = set()
        for group in groups:
            for param in group["params"]:
                if param in added:
                    raise ValueError(f"a parameter of shape {tuple(param.shape)} is twice in a group: give it once")
                added.add(param)
                if param.device.type != "cpu" and not self._master_weights:
                    raise ValueError(f"a parameter on {param.device} needs master_weights=True: states are stepped on the CPU")
        del self._states_an_element[first:]
        self._states_an_element += [self._estimated_states_an_element(group) for group in groups]
        more = [
            SubGroup(number, pieces, self._has_master, self._make)
            for number, pieces in enumerate(
                partition(groups, self._sub_group_size, self._may_be_cut, first), len(self._sub_groups)
            )
        ]
        self._check_budget([*self._sub_groups, *more])
        self._sub_groups += more
        for sub_group in more:
            for index, piece in enumerate(sub_group.pieces):
                self._pieces.setdefault(piece.param, []).append((sub_group, index))

    def _estimated_states_an_element(self, group: dict[str, Any]) -> float:
        """Tensors of a parameter's size, from a trial on one of no consequence; where that fails, those of Adam."""
        dimensions = max((param.dim() for param in group["params"]), default=1)
        trial = torch.nn.Parameter(torch.zeros((32,) * max(1, min(dimensions, 3)), dtype=torch.float32))
        trial.grad = torch.zeros_like(trial)
        try:
            optimizer = self._make([{**{k: v for k, v in group.items() if k not in NOT_OPTIONS}, "params": [trial]}])
            optimizer.step()
            kept = [value.numel() for value in optimizer.state[trial].values() if isinstance(value, torch.Tensor)]
            return sum(numel for numel in kept if numel > 1) / trial.numel()
        except Exception:
            return 2.0

    def _estimate(self, sub_group: SubGroup) -> int:
        """Bytes of its block, at most."""
        nbytes = 0
        for piece, master in zip(sub_group.pieces, sub_group.masters, strict=True):
            tensors = self._states_an_element[piece.group] + master
            nbytes += int(tensors * (piece.numel * (4 if master else piece.param.element_size()) + PAGE))
        return -(-nbytes // PAGE) * PAGE

    def _check_budget(self, sub_groups: Sequence[SubGroup]) -> None:
        """Whether the pool has memory for what stays there, and for the ring: blocks, copies of parameters, gradients."""
        staying, ring, largest = 0, 0, 0
        for each in sub_groups:
            if each.in_memory is not False and staying + self._memory(each) <= self._dram_budget:
                staying += self._memory(each)
                continue
            largest = max(largest, each.numel)
            masters = sum(4 * piece.numel for piece, master in zip(each.pieces, each.masters, strict=True) if master)
            gradients = (OPEN + 1) * _bytes_of_gradients(each) if self._offload_gradients else 0
            ring = max(ring, RING * (self._estimate(each) + _bytes_of_gradients(each)) + masters + gradients)
        wanted = (staying + ring) * 9 // 8  # the pool lends up to an eighth more
        if wanted > self._pool.budget:
            raise OutOfBuffers(
                f"{RING} sub-groups of {largest} elements and dram_budget={self._dram_budget} take {wanted} bytes, the buffer"
                f" pool's budget is {self._pool.budget}; give a smaller sub_group_size or dram_budget, or call set_buffer_budget"
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise RuntimeError("this optimizer is closed")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError("this optimizer is the parent process's: a forked child cannot use it")

    def _check_usable(self) -> None:
        self._check_open()
        if self._broken is not None:
            raise RuntimeError(f"this optimizer cannot go on: {self._broken}")

    def _check_between_steps(self) -> None:
        if self._broken is None and self._sweep.under_way:
            raise RuntimeError(
                "backward has stepped some of the parameters: call step() first, or zero_grad(), which takes that back"
            )

    def _look_for_changes(self) -> None:
        """Notice parameters that others changed, before the step itself changes any."""
        if self._master_weights and not self._sweep.under_way:
            for param, version in self._versions.items():
                if _version(param) != version:
                    for sub_group, index in self._pieces[param]:
                        if sub_group.masters[index]:
                            sub_group.stale.add(index)

    def _remember_versions(self) -> None:
        if self._master_weights:
            self._versions = {param: _version(param) for param in self._pieces}

    def _report_step(self, begun: float, stepped: int) -> None:
        seconds = time.perf_counter() - begun
        times = self._sweep.finish_times()
        self._written += times.bytes_written
        limit = None
        if self._limits is not None:
            limit = (times.bytes_read / self._limits[0] + times.bytes_written / self._limits[1]) / seconds
        self._last = StepReport(
            step=self._steps,
            seconds=seconds,
            computing=times.computing,
            reading=times.reading,
            writing=times.writing,
            waiting=times.waiting_for_reads + times.waiting_for_writes,
            bytes_read=times.bytes_read,
            bytes_written=times.bytes_written,
            read_gb_per_second=times.bytes_read / times.reading / 1e9 if times.reading else 0.0,
            write_gb_per_second=times.bytes_written / times.writing / 1e9 if times.writing else 0.0,
            share_of_limit=limit,
            bytes_written_in_all=self._written,
            resident_bytes=sum(each.resident.nbytes for each in self._sub_groups if each.resident is not None),
            sub_groups=stepped,
        )
        if self._verbose:
            print(self._last.line(), flush=True)


def _own(
    nvme_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, float],
) -> dict[str | os.PathLike[str], float]:
    """The directories with their weights, or each rank's own in them."""
    many = torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    own = f"rank{torch.distributed.get_rank()}" if many else ""
    if isinstance(nvme_path, (str, os.PathLike)):
        nvme_path = [nvme_path]
    weights = nvme_path if isinstance(nvme_path, Mapping) else dict.fromkeys(nvme_path, 1.0)
    return {Path(path) / own: weight for path, weight in weights.items()}


def _version(param: torch.Tensor) -> tuple[int, int]:
    """Changes when the parameter does."""
    local = local_of(param)
    return local._version, local.data_ptr()


def _bytes_of_gradients(sub_group: SubGroup) -> int:
    return sum(-(-piece.numel * piece.param.element_size() // PAGE) * PAGE for piece in sub_group.pieces)


def _required(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.default is parameter.empty]
