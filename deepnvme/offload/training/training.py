"""Training of a model whose parameters, gradients and optimizer states are on a drive, and in memory one block at a time."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from deepnvme._former_names import check_optimizer_options, former_names
from deepnvme.checkpoint.saving import save
from deepnvme.drives.mounts import warn_of_memory
from deepnvme.drives.profiles import AnyPath
from deepnvme.files.directory_lock import DirectoryOwner
from deepnvme.memory.budget import MemoryBudget, budget_bytes, is_automatic
from deepnvme.model.quantization import SCHEMES, Scheme
from deepnvme.offload.activations.saved_tensor import KeptTensor, unpack_saved
from deepnvme.offload.activations.saving import DEFAULT_MEMORY_BUDGET, save_on_disk
from deepnvme.offload.options import TrainingOptions
from deepnvme.offload.pinned_arena import PinnedArena
from deepnvme.states.gradients import pieces_of
from deepnvme.states.partition import ELEMENTWISE, SubGroupPlanner
from deepnvme.states.state_dict import OffloadedStates
from deepnvme.states.sub_group import SubGroup
from deepnvme.states.usability import UsabilityGuard
from deepnvme.telemetry.callers import stack_level
from deepnvme.telemetry.descriptions import path_list, printable, representation, size_for_people
from deepnvme.telemetry.drive_wear import WriteEstimate
from deepnvme.telemetry.sizes import byte_count

from .blocks.blocks_on_drive import BlocksOnDrive
from .blocks.limits import needs_of_blocks
from .blocks.parameter_block import ParameterBlock
from .blocks.trained_block import TrainedBlock
from .initial_values import Checkpoint, InitialValues, leave_on_meta
from .micro_batches import MicroBatch, SideBySide, draw_seeds, micro_batches_of
from .model_partition import ModelPartition, names_of_parameters, partition_model
from .ranks import TrainingRanks
from .report import TrainingReport
from .state import TrainingState
from .step import TrainingStep

_logger = logging.getLogger(__name__)

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "parameters": ("memory", "nvme"),
    "activations": ("memory", "nvme"),
    "accumulation": ("vertical", "horizontal"),
    "quantize": (None, *SCHEMES),
}
_WHOLE = 1 << 62
"""Elements of a sub-group if a whole block has to be stepped at once: no limit."""
_PART = 1 << 21
"""Elements of a sub-group if parts of a block can be stepped one after the other.

This is 24 MiB of states with AdamW and master weights. While one sub-group is stepped, others are read and written. When a
block of 154 MB of states was one sub-group, in memory for less than two such blocks, reading and writing took turns: a step
took 0.84 instead of 0.72 s.
"""


_trainings: weakref.WeakKeyDictionary[nn.Module, weakref.ref[OffloadedTraining]] = weakref.WeakKeyDictionary()
"""The last training of each model."""


class _OptimizerOptions(Optimizer):
    """The optimizer's options, for learning-rate schedulers: ``param_groups`` has one group for each block. It steps nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing. Called after each step of the training, so that hooks and schedulers see it."""


class OffloadedTraining:
    """Trains a model whose parameters, gradients and optimizer states are on a drive, in plain PyTorch.

    >>> training = OffloadedTraining(model, torch.optim.AdamW, path="/mnt/nvme", lr=1e-4)
    >>> for batch in loader:
    ...     loss = training.step(batch)

    A block's parameters are in memory while it computes. They are read ahead in the order of the last step. When the backward has
    all gradients of a block, the block is stepped, and written while the next one computes. Parameters outside of the blocks stay
    in memory, and their states are on the drive. Results are the same bits as in memory.

    Methods must be called by one thread at a time: while one runs, another thread gets a RuntimeError. Between steps, only
    :meth:`load_state_dict` may change parameters. Any other change is found at the next use, and raises RuntimeError as well.

    A step is made as a whole, or undone: after an exception parameters and states are as after the last completed step.

    Each training has a directory of its own below the path, so several can have one path. The files of a training are removed
    when it and its model are garbage.

    A model has one training: before making another one of the same model, ``close(restore=True)`` the first. With a
    ``checkpoint``, the first training is closed without restoring its values, if the same thread made it (a notebook's cell that
    runs again). If the first is used afterwards, it raises RuntimeError and says where the second was made. A UserWarning is
    given if no :meth:`state_dict` has the newest steps.

    Args:
        model: The model, on the CPU or, as a whole or in part, on the meta device. Parameters and buffers on the meta device are
            replaced by ones with the values of ``checkpoint``, or else of their modules' ``reset_parameters()`` and a
            transformers model's ``_init_weights``, one block at a time. From then on the parameters get their values from the
            drive. If the drive fails meanwhile, make the model anew.
        optimizer_class: A torch optimizer that steps each parameter by itself.
        path: Directory on the drive, created if it is missing; or several, over which blocks are striped.
        blocks: The modules whose parameters are read and dropped together. None: the layers, and large modules beside them. Names
            of modules, or patterns such as "model.layers.*.mlp": blocks in addition to those. Modules: only these are blocks. A
            parameter belongs to the innermost block around it. One that several blocks use, or that the model uses outside of
            them, stays in memory.
        checkpoint: File of the initial values: .safetensors, a .pt or .bin of a state_dict, the index.json of several files, or a
            directory with one of these. It is read one block at a time, and converted to the dtypes of the model. If a part of
            the model is on the meta device, the checkpoint may lack parameters that are in memory, such as those of adapters.
            None for the values in memory, also ones mapped from a file by ``model.load_state_dict(torch.load(path, mmap=True),
            assign=True)``, or for new ones.
        memory_budget: Bytes of parameters, gradients, states and saved activations that are in memory; or "8GB", "50%", "auto",
            see :data:`deepnvme.memory.MemoryBudget`, of what is available before the model's own memory is released. 0 for the
            least that the largest block needs; None for 1 GiB, or that least if it is more. Other tensors that a forward computes
            with are not counted.
        quantize: "int8" or "int4" to quantise frozen weights, which do not require gradients, on the drive, as
            :meth:`deepnvme.streaming.WeightStore.build` does. They are dequantised into their own dtypes when their block is
            used: results are bit-identical to a training with the dequantised values. None to keep all weights as they are.
        activations: "memory" to keep saved activations in memory, outside of the budget; or "nvme": :class:`save_on_disk` writes
            those that do not fit into ``activation_budget``. Fewer are saved if the model uses ``torch.utils.checkpoint``.
        master_weights: Whether parameters in bfloat16 and float16 have a float32 weight in the states.
        micro_batches: Backwards in a step, whose gradients are summed.
        max_norm: Total norm to clip gradients to, as ``clip_grad_norm_`` does. Parameters are then stepped after the last
            backward. None for no clipping.
        advanced: Rarely used options: ``accumulation``, ``activation_budget``, ``aio_config``, ``param_groups``, ``parameters``
            and ``process_group``. Each may also be given as a keyword argument of this class.
        **optimizer_kwargs: Keyword arguments of ``optimizer_class``.

    Raises:
        ValueError: For parameters or options that cannot be offloaded, a memory budget that is too small for a single block (the
            message says how much is needed), a checkpoint of another model, values that cannot be quantised, or a parameter or
            buffer on the meta device that would get no value.
        TypeError: For an argument of a wrong type, or an unknown one, such as a misspelt one.
        RuntimeError: If the model has another training already, which is named.
        OSError: If the drive or the checkpoint cannot be read, or the drive cannot be written.
    """

    @former_names(TrainingOptions, nvme_path="path", config="aio_config")
    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[Optimizer],
        *,
        path: AnyPath | Sequence[AnyPath],
        blocks: Iterable[nn.Module | str] | None = None,
        checkpoint: Checkpoint | None = None,
        memory_budget: MemoryBudget | None = None,
        quantize: Scheme | None = None,
        activations: str = "memory",
        master_weights: bool = False,
        micro_batches: int = 1,
        max_norm: float | None = None,
        advanced: TrainingOptions | None = None,
        **optimizer_kwargs: Any,
    ) -> None:
        _check_checkpoint(checkpoint)
        check_optimizer_options(OffloadedTraining.__init__, optimizer_kwargs, optimizer_class)
        given = advanced or TrainingOptions()
        choices = {"parameters": given.parameters, "accumulation": given.accumulation}
        _check_choices(micro_batches, activations=activations, quantize=quantize, **choices)
        flexible = memory_budget is None or is_automatic(memory_budget)
        memory_budget = budget_bytes(DEFAULT_MEMORY_BUDGET if memory_budget is None else memory_budget, "memory_budget")
        activation_bytes = _activation_bytes(activations, given.activation_budget, memory_budget)
        self.model = model
        self._optimizer_class, self._memory_budget = optimizer_class, memory_budget
        self._vertical = given.accumulation == "vertical"
        self._guard = UsabilityGuard("training")
        self._owner = DirectoryOwner("OffloadedTraining")
        self._saved_steps = 0  # how many the last state_dict() or load_state_dict() knew of
        self._close_predecessor(has_values=checkpoint is not None)
        partition = partition_model(model, blocks)
        self._ranks = TrainingRanks(given.process_group, max(map(len, (*partition.params, partition.rest))))
        with self._ranks.reporting_failures():
            if self._ranks.several:
                _check_distributed_options(optimizer_class, quantize)
            initial = InitialValues(model, checkpoint, self._ranks)
            size = _PART if optimizer_class in ELEMENTWISE else _WHOLE
            self._planner = SubGroupPlanner(optimizer_class, optimizer_kwargs, master_weights, size)
            defaults = self._planner.defaults()
            partition = initial.place(partition)
            self.optimizer = _OptimizerOptions(_grouped([*partition.params, partition.rest], given.param_groups), defaults)
            """An optimizer object for learning-rate schedulers: its ``param_groups`` have the options of each step."""
            self._values_memory = PinnedArena(0)  # of dequantised or gathered parameters
            parameter_blocks = _parameter_blocks(model, partition, self._values_memory, quantize, self._ranks)
            self._values_memory.resize(_values_bytes(parameter_blocks))
            sub_groups = _sub_groups(parameter_blocks, self.optimizer.param_groups, self._planner)
            stay = given.parameters == "memory"
            needs = needs_of_blocks(sub_groups, parameter_blocks, self._planner, stay, self._ranks.several)
            beside = _values_bytes(parameter_blocks) + activation_bytes
            if memory_budget and not flexible:
                _check_budget(memory_budget, needs.least + beside, activation_bytes if given.activation_budget is None else 0)
            paths = _absolute(path)
            warn_of_memory(paths)
            self._drive = BlocksOnDrive(paths, given.aio_config, self._owner, needs.limit(memory_budget - beside))
            trained = [TrainedBlock(*each, self._drive) for each in zip(parameter_blocks, sub_groups, strict=True)]
            self._trained = TrainingStep(
                model, partition, trained, self._drive, self._ranks, self.optimizer, micro_batches, max_norm
            )
            pieces = pieces_of(each for stepping in sub_groups for each in stepping)
            states = OffloadedStates(pieces, self._drive.versions, self._check_between_steps)
            self._state = TrainingState(self._trained, self._planner, states, self._trained.blocks_of_modules)
            self._saver = None
            if activations != "memory":
                self._saver = save_on_disk(self._drive.directories, memory_budget=activation_bytes, aio_config=given.aio_config)
                self._saver.leave_out(self._trained.uses.saved)
            self._side_by_side = SideBySide(self._trained, self._saved_tensors)
            try:
                self._to_drive(initial, stay)
                self._ranks.meet()  # the first one that is done does not go on before all are
                _logger.info("the training in %s %s", printable(path), self.estimate_writes())
            except BaseException:
                self.close()
                raise
            _trainings[model] = weakref.ref(self)

    def _close_predecessor(self, has_values: bool) -> None:
        """Close the training that the model has already, if any. Raises RuntimeError if it may not be closed, and OSError.

        Args:
            has_values: Whether this training has values for the model, so that those of its predecessor are not needed.
        """
        found = _trainings.get(self.model)
        before = None if found is None else found()
        if before is None or before.closed:
            return
        if before._owner.of_other_thread or not before._guard.in_own_process or not has_values:
            raise RuntimeError(
                f"this {type(self.model).__name__} is trained by {before._owner}: call its close(restore=True), which puts the"
                f" values of its {before.steps} steps into memory, before another one is made of it; or give a checkpoint, and"
                " make it in the same thread"
            )
        before._close_for_successor(self._owner)

    def _to_drive(self, initial: InitialValues, stay: bool) -> None:
        """Write the model's initial values to the drive, and free the parameters' memory; blocks may stay in the cache."""
        blocks = [block.parameters for block in self._trained.blocks]
        initial.write(self._trained.blocks_of_modules, blocks[-1], self._drive.cache)
        parts = [part for block in blocks for part in block.parts]
        self._drive.cache.flush(parts)
        if stay:
            self._drive.cache.keep(dict.fromkeys(parts, True))
        self._trained.keep_rest()

    # -- steps

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, so that the training cannot be used any more."""
        return self._guard.closed

    def __repr__(self) -> str:
        return representation(
            self,
            lambda: f"of {type(self.model).__name__} by {self._optimizer_class.__name__}",
            lambda: f"in {path_list(self._drive.directories)}",
            lambda: f"memory_budget={size_for_people(self._memory_budget)}",
            lambda: f"{len(self._trained.blocks)} blocks",
            lambda: f"{self.steps} steps made",
            lambda: self._guard.state(),
        )

    @property
    def steps(self) -> int:
        """Number of completed steps, including those that a loaded state had made."""
        return self._trained.steps

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Make a step. Blocks until it is on the drive.

        With arguments, this runs the model's forward and backward with them first. A single mapping, tuple or list, as data
        loaders give it, is unpacked into arguments. With several ``micro_batches``, tensors are divided along their first
        dimension, and each part's loss is weighted by its share of the rows. Without arguments, call it after all of the step's
        micro-batches were run by :meth:`micro_batch` or :meth:`run_micro_batches`.

        Returns:
            The loss, detached: the model's output, or its ``loss``, summed over the micro-batches. None without arguments.

        Raises:
            ValueError: If the arguments cannot be divided.
            RuntimeError: If micro-batches are missing; after :meth:`close`; in a forked child.
            OSError: If the drive cannot be read or written. The step was undone.
        """
        micro_batches: list[MicroBatch] = []
        with self._claimed():
            if (args or kwargs) and self._trained.micro_batches_run:
                raise RuntimeError("step() with arguments runs all micro-batches of a step itself: end the one under way first")
            with self._trained.undone_if_it_fails():
                if args or kwargs:
                    micro_batches = micro_batches_of(*_unpack_batch(args, kwargs), self._trained.micro_batches)
                losses = self._run([functools.partial(self._loss, each) for each in micro_batches]) if micro_batches else []
                self._trained.finish_step()
            self._drive.io.keep_report(self._trained.report(None if self._saver is None else self._saver.report()))
        return sum(losses[1:], losses[0]) if losses else None

    def report(self) -> TrainingReport:
        """Return timings and bytes of the last completed step. Raises RuntimeError before the first step."""
        last: TrainingReport = self._drive.io.last
        return last

    def estimate_writes(self) -> WriteEstimate:
        """Return how many bytes of parameters, states and gradients each step will write to this process's drive.

        Assumes gradients for all trained parameters, and leaves checkpoints out. Activations are not counted, since only a
        forward shows how many are saved: see :meth:`report`. The constructor logs the estimate at level INFO.
        """
        return self._trained.estimate_writes(self._planner)

    def run_micro_batches(self, forwards: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """Run forward and backward of all micro-batches of a step. Call :meth:`step` afterwards.

        >>> training.run_micro_batches([functools.partial(model, batch) for batch in batches])
        >>> training.step()

        The step then has as many micro-batches as ``forwards``, whatever ``micro_batches`` is. With vertical accumulation,
        forwards run side by side, each in a thread of its own.

        Args:
            forwards: For each micro-batch, a function that runs the forward and returns the loss.

        Returns:
            The losses, detached.

        Raises:
            RuntimeError: If a step is under way; after :meth:`close`; in a forked child.
            OSError: If the drive cannot be read or written. The step was undone.
        """
        with self._claimed():
            if self._trained.micro_batches_run:
                raise RuntimeError("a step is under way: call step() or undo_step() before run_micro_batches()")
            with self._trained.undone_if_it_fails():
                return self._run(forwards)

    def _run(self, forwards: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        if len(forwards) == 1:
            return [self._forward_and_backward(forwards[0], in_step=1)]
        seeds = draw_seeds(len(forwards))
        if self._vertical:
            return self._side_by_side.run(forwards, seeds)
        losses = []
        for forward, seed in zip(forwards, seeds, strict=True):
            with torch.random.fork_rng(devices=()):
                torch.default_generator.manual_seed(seed)
                losses.append(self._forward_and_backward(forward, in_step=len(forwards)))
        return losses

    def _forward_and_backward(self, forward: Callable[[], torch.Tensor], in_step: int) -> torch.Tensor:
        """Run forward and backward of one micro-batch in a step of ``in_step`` micro-batches. Return the loss, detached."""
        with self._one_micro_batch(in_step):
            loss = forward()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

    def _loss(self, micro_batch: MicroBatch) -> torch.Tensor:
        output = self.model(*micro_batch.args, **micro_batch.kwargs)
        loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
        return loss if micro_batch.share == 1 else loss * micro_batch.share

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Run one forward and one backward of a step in this context.

        >>> with training.micro_batch():
        ...     loss = model(batch)
        ...     loss.backward()
        >>> training.step()

        An exception undoes the step, including its earlier micro-batches. Blocks are read for each micro-batch: :meth:`step` with
        arguments reads them once for all.

        Raises:
            RuntimeError: If all micro-batches of the step were run; after :meth:`close`; in a forked child.
            OSError: If the drive cannot be read or written. The step was undone.
        """
        with self._one_micro_batch():
            yield

    @contextlib.contextmanager
    def _one_micro_batch(self, in_step: int | None = None) -> Iterator[None]:
        with self._claimed(), self._trained.undone_if_it_fails(), self._trained.running(in_step=in_step), self._saved_tensors():
            yield

    def gradient_norm(self) -> torch.Tensor:
        """Return the 2-norm of all gradients before clipping; it may be infinite or NaN. Blocks.

        Call it between the last micro-batch and :meth:`step`.

        Raises:
            RuntimeError: If micro-batches are missing, or without ``max_norm``, since norms are not measured then.
            OSError: If the drive cannot be read or written. The step was undone.
        """
        with self._claimed(), self._trained.undone_if_it_fails():
            return self._trained.gradient_norm()

    def undo_step(self) -> None:
        """Go back to the last completed step, if micro-batches of a new one were run.

        Raises:
            RuntimeError: After :meth:`close`; in a forked child.
            OSError: If the drive cannot be read. Call undo_step() again then.
        """
        with self._claimed():
            self._trained.finish_undo()
            self._trained.abandon_step()

    def _saved_tensors(self) -> contextlib.AbstractContextManager[object]:
        if self._saver is not None:
            return self._saver
        uses = self._trained.uses
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: uses.saved(tensor) or KeptTensor(tensor), unpack_saved)

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[None]:
        """Claim the training for the current thread during this context, so that other threads are refused.

        Raises RuntimeError if another thread has claimed it, after :meth:`close`, and in a forked child.
        """
        self._guard.check_open()
        with self._trained.uses.one_thread.claimed():
            yield

    def _check_between_steps(self) -> None:
        self._guard.check_open()
        self._trained.check_between_steps()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run a context on all processes together: wait for all at its beginning and end. If it fails on one, it fails on all.

        For work beside the training, such as writing a file and reading it. With one process, it does nothing.

        >>> with training.together():
        ...     if torch.distributed.get_rank() == 0:
        ...         write_report()

        Raises:
            RuntimeError: If another process has failed, does not make the same calls, or has ended; after :meth:`close`; in a
                forked child.
        """
        self._guard.check_open()
        with self._ranks.calling_together():
            yield
            self._ranks.meet()

    # -- states

    def state_dict(self) -> dict[str, Any]:
        """Return the model and the optimizer as of the last completed step, with tensors mapped from the drive.

        The tensors take no memory. They keep their values when steps are made, and occupy space on the drive while they live.
        With ``quantize`` the first call writes the dequantised weights, which occupy space from then on.

        Returns:
            A dictionary with these keys. "model": what ``model.state_dict()`` would be. "optimizer": a dictionary with "state" by
            the names of parameters, and "param_groups", whose "params" are names, as ``torch.distributed.checkpoint.state_dict``
            uses them. "steps": the number of steps. "quantized", only with ``quantize``: the bytes of quantised weights by name;
            "model" has their dequantised values.

        Raises:
            RuntimeError: Within a step.
            OSError: If an earlier step still has to be undone and cannot be; or if dequantised weights cannot be written.
        """
        with self._claimed():
            self._check_between_steps()
            state = self._state.get()
            self._saved_steps = self.steps
            return state

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`state_dict` to a file as ``torch.save`` does, see :func:`deepnvme.save`. Blocks until it is on the drive.

        An earlier file is replaced only when the new one is complete. To resume from the file with little memory:

        >>> training.load_state_dict(torch.load(path, mmap=True))

        Raises:
            RuntimeError: Within a step.
            OSError: If the drive cannot be read or written. An earlier file is unchanged.
        """
        with self._claimed():
            with self.together():  # what is done next is no exchange that could tell of a failure
                state = self.state_dict()
            save(state, path, group=self._ranks.group)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the model, the optimizer's states and options, and :attr:`steps`. One block at a time is in memory.

        Args:
            state: As :meth:`state_dict` returns it. Its tensors may be mapped from a file.

        Raises:
            ValueError: If names, shapes or states are not those of the model and its optimizer, or a value cannot be quantised.
                Nothing is changed then.
            RuntimeError: Within a step.
            OSError: If the drive cannot be read or written. Nothing is changed then.
        """
        with self._claimed():
            self._check_between_steps()
            with self._ranks.calling_together():
                self._state.load(state)
                self._saved_steps = self.steps

    @torch.no_grad()
    def close(self, restore: bool = False) -> None:
        """Remove the hooks and the files. Idempotent.

        Args:
            restore: Whether to give the parameters the values of the last completed step, in memory. Otherwise parameters of
                blocks have no values: they are replaced by parameters on the meta device, and so are the others if there is no
                memory for a copy. A UserWarning is given if no :meth:`state_dict` has the newest steps.

        Raises:
            RuntimeError: While another thread runs a method. Also with ``restore``, if other code has changed parameters that are
                on the drive; these changes are dropped, and the next call closes. Nothing is closed then.
            OSError: From reading parameters with ``restore``: nothing is closed then. From closing or removing a file: the
                training is closed, and everything else is released.
        """
        if self.closed or not self._guard.in_own_process:
            return
        with self._claimed():
            self._close(restore)
        if not restore and self.steps != self._saved_steps:
            warnings.warn(
                f"this OffloadedTraining is closed without restore=True: its {self.steps} steps are lost. save() keeps them, and"
                f" close(restore=True) puts them into the {type(self.model).__name__}",
                stacklevel=stack_level(),
            )

    def _close(self, restore: bool, because: str | None = None) -> None:
        """Close without a warning. With ``because``, later calls raise RuntimeError with it. Raises like :meth:`close`."""
        if self.closed or not self._guard.in_own_process:
            return
        uses, blocks = self._trained.uses, self._trained.blocks
        rest = blocks[-1].parameters
        restored: dict[torch.Tensor, torch.Tensor] = {}
        if restore:
            self._trained.finish_undo()
            self._trained.check_absent()
            if not self._trained.micro_batches_run:
                self._state.write_changed_rest()
            self._trained.undo()
            with self._ranks.calling_together():
                for block in blocks:
                    uses.begin(block.parameters)
                    restored.update((param, param.data.clone()) for param in block.parameters.params)
                    uses.end(block.parameters)
        elif rest.holds:
            with contextlib.suppress(RuntimeError):  # without memory for a copy they are without values, as those in blocks
                restored.update((param, param.data.clone()) for param in rest.params)
            uses.end(rest)
        self._guard.close(None if because is None else lambda: because)
        with contextlib.ExitStack() as ending:  # from the last to the first, whether or not one of them raises
            ending.callback(self._drive.close)
            ending.callback(self._values_memory.resize, 0)
            if self._saver is not None:
                ending.callback(self._saver.close)
            self._trained.remove_hooks()
            self._state.remove_hooks()
            uses.end_all()
            self._drive.cache.clear()
            for param, value in restored.items():
                param.data = value
            leave_on_meta(self.model)

    def _close_for_successor(self, other: DirectoryOwner) -> None:
        """Close this training for a new one of the same model. Warns of lost steps with UserWarning. Raises OSError."""
        if self.steps != self._saved_steps:
            warnings.warn(
                f"another OffloadedTraining is made of this {type(self.model).__name__}: the one before is closed, and its"
                f" {self.steps} steps are lost. save() keeps them",
                stacklevel=stack_level(),
            )
        because = f"this training was closed: another one was made of its model at {other.made_at}: use that one"
        self._close(restore=False, because=because)

    def __enter__(self) -> OffloadedTraining:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._close(restore=False)  # what was raised says enough

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an OffloadedTraining owns files and cannot be copied or pickled; use state_dict()")


def _check_checkpoint(checkpoint: object) -> None:
    """Raise TypeError for a checkpoint that is not a path."""
    if checkpoint is not None and not isinstance(checkpoint, str | os.PathLike):
        raise TypeError(
            f"checkpoint must be a path, got a {type(checkpoint).__name__}: the model's load_state_dict(mapping, assign=True)"
            " takes values that are in memory or mapped from a file"
        )


def _absolute(path: AnyPath | Sequence[AnyPath]) -> list[Path]:
    """Return one path, or several, as absolute ones."""
    several = [path] if isinstance(path, str | bytes | os.PathLike) else path
    return [Path(os.path.abspath(os.fsdecode(each))) for each in several]


def _check_choices(micro_batches: int, **given: str | None) -> None:
    """Raise ValueError for an option whose value is not one of its choices."""
    for name, choice in given.items():
        if choice not in _CHOICES[name]:
            raise ValueError(f"{name} must be one of {', '.join(filter(None, _CHOICES[name]))}, got {choice!r}")
    if micro_batches < 1:
        raise ValueError(f"micro_batches must be positive, got {micro_batches}")


def _activation_bytes(activations: str, activation_budget: MemoryBudget | None, memory_budget: int) -> int:
    """Return the part of the memory budget for activations, in bytes; 0 if all stay in memory. Raises ValueError, TypeError."""
    nbytes = memory_budget // 4
    if activation_budget is not None:
        parse = byte_count if is_automatic(activation_budget) else budget_bytes
        nbytes = parse(activation_budget, "activation_budget")
    return 0 if activations == "memory" else nbytes


def _check_budget(budget: int, least: int, share: int) -> None:
    """Raise ValueError if a budget is less than half of ``least``, of which ``share`` is the budget's quarter for activations.

    A budget that is nearer is exceeded, with a message in the log: a program that ran with a smaller model still runs.
    """
    if budget < least:
        needed = -(-(least - share) * 4 // 3) if share else least
        message = (
            f"memory_budget must be at least {needed}, which the activations and the largest block need, with its gradients and a"
            f" part of its states, or 0 for no more than that; got {budget}"
        )
        if 2 * budget < least:
            raise ValueError(message)
        _logger.warning("the training takes more than its budget: %s", message)


def _check_distributed_options(optimizer_class: type[Optimizer], quantize: Scheme | None) -> None:
    """Raise ValueError for an optimizer or quantisation that several processes cannot use."""
    if optimizer_class not in ELEMENTWISE:
        names = ", ".join(sorted(each.__name__ for each in ELEMENTWISE))
        raise ValueError(f"with a process_group the optimizer must be one of {names}, got {optimizer_class.__name__}")
    if quantize is not None:
        raise ValueError(f"quantize={quantize!r} is for one process: leave it out with a process_group")


def _parameter_blocks(
    model: nn.Module, partition: ModelPartition, arena: PinnedArena, quantize: Scheme | None, ranks: TrainingRanks
) -> list[ParameterBlock]:
    """Return the blocks of the model's parameters. The last one has those that stay in memory, whole on each rank."""
    names = names_of_parameters(model)
    blocks = [*partition.params, partition.rest]
    sharing = [*([ranks if ranks.several else None] * len(partition.params)), None]
    return [
        ParameterBlock(number, params, [names[each] for each in params], arena, quantize, shared)
        for number, (params, shared) in enumerate(zip(blocks, sharing, strict=True))
    ]


def _sub_groups(
    blocks: Sequence[ParameterBlock], param_groups: Sequence[dict[str, Any]], planner: SubGroupPlanner
) -> list[list[SubGroup]]:
    """Return, for each block, the sub-groups that step its parameters or shards; none for a block without trained parameters."""
    found: list[list[SubGroup]] = []
    for block in blocks:
        stepped = dict(zip(block.params, block.shards, strict=True))
        groups = [{**group, "params": [stepped[each] for each in group["params"] if each in stepped]} for group in param_groups]
        trained = any(group["params"] for group in groups)
        found.append(planner.sub_groups_of(groups, 0, sum(map(len, found))) if trained else [])
    return found


def _values_bytes(blocks: Sequence[ParameterBlock]) -> int:
    """Return the bytes for dequantised or gathered values beside the blocks: those of the last block and of the largest other."""
    *others, last = (block.values_nbytes for block in blocks)
    return last + max(others, default=0)


def _grouped(params: Sequence[Sequence[nn.Parameter]], param_groups: Iterable[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups: the given ones, or one for each block.

    Raises ValueError unless the given groups have each trained parameter once, and no others.
    """
    trained = [[param for param in some if param.requires_grad] for some in params]
    if param_groups is None:
        return [{"params": some} for some in trained if some]
    groups = [{**group, "params": list(group["params"])} for group in param_groups]
    if Counter(param for group in groups for param in group["params"]) != Counter(param for some in trained for param in some):
        raise ValueError("param_groups must have each parameter of the model that requires a gradient once, and no other")
    return groups


def _unpack_batch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return positional and keyword arguments of a forward: a single mapping, tuple or list is unpacked into them."""
    if len(args) == 1 and not kwargs:
        (batch,) = args
        if isinstance(batch, Mapping):
            return (), batch
        if isinstance(batch, tuple | list):
            return batch, {}
    return args, kwargs
