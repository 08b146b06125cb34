"""Train a model whose parameters, gradients and optimizer states are on a drive, and in memory one block after the other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from deepnvme._interrupts import defer_interrupts
from deepnvme._shortened_lists import listed
from deepnvme.memory.byte_count import byte_count
from deepnvme.memory.pool import BufferPool, buffer_pool
from deepnvme.profiles import engine_for
from deepnvme.store.own_directory import open_own_store, remove_directories
from deepnvme.transfer.block import Block
from deepnvme.transfer.block_cache import BlockCache
from deepnvme.transfer.block_memory import PooledMemory

from .activations import save_on_disk
from .block_versions import BlockVersions
from .counted_io import CountedIO
from .gradients import GradientHooks
from .parameter_block import ParameterBlock
from .parameter_uses import ParameterUses, ScheduledBlocks
from .partition import SubGroupPlanner
from .resident_sub_groups import ResidentBlocks
from .saved_tensor import KeptTensor, Packed
from .state_dict import OffloadedStates
from .sub_group import SubGroup
from .trained_block import TrainedBlock

if TYPE_CHECKING:
    from deepnvme.config import AioConfig
    from deepnvme.profiles import AnyPath

    from .activation_store import ActivationStore

_PREFIX = "deepnvme-training"
_WHOLE = 1 << 62
"""Elements of a sub-group: all of a block's."""


class _Options(Optimizer):
    """The options of the steps, for schedulers of the learning rate: ``param_groups`` has one group for each block."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: called when a step was made, for hooks and schedulers."""


class OffloadedTraining:
    """Trains a model whose parameters, gradients and optimizer states are on a drive, in plain PyTorch.

    >>> training = OffloadedTraining(model, torch.optim.AdamW, blocks=list(model.layers), nvme_path="/mnt/nvme", lr=1e-4)
    >>> for batch in loader:
    ...     loss = training.step(batch)

    A block's parameters are in memory while it computes. They are read ahead in the order of the last step. When the backward has
    all gradients of a block, it is stepped, and written while the next one computes. Parameters outside of the blocks stay in
    memory, and their states are on the drive. Results are the same bits as in memory.

    A step is made as a whole, or undone: after an exception parameters and states are as after the last completed step.

    Args:
        model: In memory, on the CPU. Its parameters get their values from the drive from now on.
        optimizer_class: A torch optimizer that steps each parameter by itself.
        blocks: Modules of the model whose parameters come and go, none inside of another one. A parameter that several of them
            use, or the model beside them, stays in memory.
        nvme_path: Directory on the drive, created if it is missing; or several, over which blocks are striped.
        memory_budget: Bytes of blocks (parameters, gradients and states) that are in memory. More only for what one block needs.
        activations: "memory", or "nvme" to have :class:`save_on_disk` keep those that ``activation_budget`` has no room for.
        activation_budget: Bytes of activations in memory, with "nvme".
        master_weights: Whether parameters in bfloat16 and float16 have a float32 weight in the states.
        micro_batches: Backwards in a step, whose gradients are summed.
        max_norm: To clip gradients to, as ``clip_grad_norm_`` does. Parameters are stepped after the last backward then.
        pool: Where memory is leased.
        config: Settings of the engine; None for the profile of the drive.
        **optimizer_kwargs: The optimizer's.

    Raises:
        ValueError: For parameters or options that cannot be offloaded.
        OSError: From the drive.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[Optimizer],
        *,
        blocks: Iterable[nn.Module],
        nvme_path: AnyPath | Sequence[AnyPath],
        memory_budget: int = 1 << 30,
        activations: str = "memory",
        activation_budget: int = 1 << 30,
        master_weights: bool = False,
        micro_batches: int = 1,
        max_norm: float | None = None,
        pool: BufferPool | None = None,
        config: AioConfig | None = None,
        **optimizer_kwargs: Any,
    ) -> None:
        if activations not in ("memory", "nvme"):
            raise ValueError(f'activations must be "memory" or "nvme", got {activations!r}')
        if micro_batches < 1:
            raise ValueError(f"micro_batches must be positive, got {micro_batches}")
        memory_budget = byte_count(memory_budget, "memory_budget")
        self.model = model
        self.steps = 0
        """Number of completed steps."""
        self._micro_batches, self._max_norm = micro_batches, max_norm
        self._micro_batch = 0  # that are done, of the current step
        self._not_undone = False
        self._closed = False
        self._process = os.getpid()
        modules, params, rest = _divided(model, list(blocks))
        planner = SubGroupPlanner(optimizer_class, optimizer_kwargs, master_weights, _WHOLE)
        paths = [nvme_path] if isinstance(nvme_path, str | bytes | os.PathLike) else list(nvme_path)
        directories = [Path(os.path.abspath(os.fsdecode(each))) for each in paths]
        groups = [{"params": [each for each in some if each.requires_grad]} for some in (*params, rest)]
        self.optimizer = _Options([group for group in groups if group["params"]], planner.defaults())
        """Has the options of each step in its ``param_groups``, one for each block: for a scheduler."""
        self._engine = engine_for(directories, config)
        try:
            self._store, self._directories = open_own_store(directories, _PREFIX, self._engine)
        except BaseException:
            self._engine.close()
            raise
        self._io = CountedIO(self._store, verbose=False)
        memory_pool = buffer_pool() if pool is None else pool
        memory = PooledMemory(memory_pool, memory_budget, _shortage)
        self._schedule = ScheduledBlocks(BlockCache(self._io, memory))
        self._versions = BlockVersions(self._store)
        self._blocks = self._trained_blocks([*params, rest], planner)
        self._rest = self._blocks[-1]
        self._block_of: dict[torch.Tensor, TrainedBlock] = {param: block for block in self._blocks for param in block.trained}
        self._by_parameters = {block.parameters: block for block in self._blocks}
        self._uses = ParameterUses(
            {module: block.parameters for module, block in zip(modules, self._blocks, strict=False)},
            self._by_parameters,
            self._schedule,
            self._backward_begins,
            self._backward_ends,
        )
        residents = ResidentBlocks(self._io, self._versions, memory_pool)  # there are none
        self._states = OffloadedStates(_pieces(self._blocks), self._store, self._versions, residents, self._check_between_steps)
        self._guarding = True
        self._guards = [
            module.register_state_dict_pre_hook(self._check_state_dict)  # type: ignore[no-untyped-call]
            for module in {model, *(each for module in modules for each in module.modules())}
        ]
        self._restored: dict[torch.Tensor, torch.Tensor] = {}
        self._hooks = GradientHooks(self._gradient_arrived)
        self._hooks.add(self._block_of)
        self._saver = _Activations(self._uses, directories, activation_budget, config) if activations == "nvme" else None
        try:
            self._to_drive()
        except BaseException:
            self.close()
            raise

    def _trained_blocks(self, params: Sequence[Sequence[nn.Parameter]], planner: SubGroupPlanner) -> list[TrainedBlock]:
        groups = self.optimizer.param_groups
        group_of = {param: number for number, group in enumerate(groups) for param in group["params"]}
        found = []
        for number, some in enumerate(params):
            trained = [each for each in some if each.requires_grad]
            sub_group = None
            if trained:
                group = group_of[trained[0]]
                (sub_group,) = planner.sub_groups_of([groups[group]], group, number)
            found.append(TrainedBlock(ParameterBlock(number, some), sub_group, self._schedule, self._versions))
        return found

    def _to_drive(self) -> None:
        """Write the model's parameters to the drive, and free their memory, but for those outside of the blocks."""
        cache = self._schedule.cache
        for block in self._blocks:
            cache.create(block.parameters)
            block.parameters.fill(param.detach() for param in block.parameters.params)
            cache.release([block.parameters], changed=True)
            block.parameters.detach()
        cache.keep({self._rest.parameters: True})
        cache.flush([block.parameters for block in self._blocks])
        self._uses.begin(self._rest.parameters)

    # -- steps

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Make a step. Blocks until it is on the drive.

        With arguments: run the model's forward and backward with them before. If there are several ``micro_batches``, tensors are
        divided along their first dimension, and each part's loss counts as its share of the rows. Without arguments: after as
        many :meth:`micro_batch`.

        Returns:
            The loss, detached: the model's output, or its ``loss``, summed over the micro-batches. None without arguments.

        Raises:
            RuntimeError: If there were fewer micro-batches than there should be; after :meth:`close`; in a forked child.
            OSError: From the drive. The step was undone.
        """
        total: torch.Tensor | None = None
        if args or kwargs:
            if self._micro_batch:
                raise RuntimeError("step() with arguments runs all micro-batches of a step itself: end the one under way first")
            for part_args, part_kwargs, share in _divided_arguments(args, kwargs, self._micro_batches):
                with self.micro_batch():
                    output = self.model(*part_args, **part_kwargs)
                    loss = output if isinstance(output, torch.Tensor) else output.loss
                    if share != 1:
                        loss = loss * share
                    loss.backward()
                total = loss.detach() if total is None else total + loss.detach()
        with self._undone_if_it_fails():
            if self._micro_batch < self._micro_batches:
                raise RuntimeError(f"a step has {self._micro_batches} micro-batches, and only {self._micro_batch} were run")
            self._finish()
        return total

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Run one forward and one backward of a step in this context.

        >>> with training.micro_batch():
        ...     loss = model(batch)
        ...     loss.backward()
        >>> training.step()

        An exception undoes the step, with the micro-batches before.
        """
        with self._undone_if_it_fails():
            if self._micro_batch == self._micro_batches:
                raise RuntimeError(f"all {self._micro_batches} micro-batches of this step were run: call step()")
            if self._micro_batch == 0:
                self._schedule.order.begin_step()
            self._uses.recording = True
            try:
                with self._saved_tensors():
                    yield
            finally:
                self._uses.recording = False
            self._uses.end_all()
            with torch.no_grad():
                for block in self._blocks:
                    self._gradients_are_in(block)
            self._micro_batch += 1

    def _saved_tensors(self) -> contextlib.AbstractContextManager[object]:
        if self._saver is not None:
            return self._saver
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: self._uses.saved(tensor) or KeptTensor(tensor), _unpack)

    @contextlib.contextmanager
    def _undone_if_it_fails(self) -> Iterator[None]:
        self._check_usable()
        if self._not_undone:
            self._undo()
        try:
            yield
        except BaseException as error:
            try:
                with defer_interrupts():
                    self._undo()
            except OSError as failed:
                if hasattr(error, "add_note"):
                    error.add_note(f"the step could not be undone yet, the next call tries it again: {failed}")
            raise

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError("this training is the parent process's: a forked child cannot use it")
        if self._closed:
            raise RuntimeError("this training is closed")

    # -- in the backward

    def _gradient_arrived(self, param: torch.Tensor) -> None:
        block = self._block_of[param]
        if not self._uses.recording:
            raise RuntimeError("the backward has to run in micro_batch(), as the forward did")
        if block.stepped or param in block.arrived:
            raise RuntimeError("there is one backward in each micro_batch(): give micro_batches for several, or sum the losses")
        block.arrived.add(param)
        if len(block.arrived) == len(block.trained):
            self._uses.completed(block.parameters)

    def _backward_begins(self, parameters: ParameterBlock) -> None:
        self._by_parameters[parameters].gradients.load()

    @torch.no_grad()
    def _backward_ends(self, parameters: ParameterBlock) -> None:
        self._gradients_are_in(self._by_parameters[parameters])

    def _gradients_are_in(self, block: TrainedBlock) -> None:
        """Step a block that has all gradients of the step, or store them."""
        if not block.arrived or block.stepped:
            return
        last = self._micro_batch == self._micro_batches - 1
        if last and self._max_norm is None:
            self._step_block(block)
        else:
            block.gradients.store()
        block.arrived.clear()

    def _step_block(self, block: TrainedBlock) -> None:
        block.gradients.load()
        self._uses.begin(block.parameters)
        try:
            block.step(self.optimizer.param_groups)
        finally:
            self._uses.end(block.parameters)
        block.gradients.drop()

    # -- the end of a step

    @torch.no_grad()
    def _finish(self) -> None:
        waiting = [block for block in self._blocks if not block.stepped and block.gradients.any]
        factor = None if self._max_norm is None else self._clip_factor(waiting, self._max_norm)
        for block in reversed(waiting):  # the last ones' gradients are needed first by what is in memory still
            block.gradients.load()
            if factor is not None:
                block.gradients.scale(factor)
            self._step_block(block)
        self._commit()
        self.optimizer.step()

    def _commit(self, step: int | None = None) -> None:
        """Wait until what has changed is on the drive, and take it for the newest step's: number ``step``, or the next."""
        changed = [each for block in self._blocks for each in block.to_write()]
        self._uses.end(self._rest.parameters)
        self._schedule.cache.flush(changed)
        self._uses.begin(self._rest.parameters)
        with defer_interrupts():
            for block in self._blocks:
                block.commit(self.optimizer.param_groups)
            self.steps = self.steps + 1 if step is None else step
            self._micro_batch = 0
        self._versions.tidy()

    def _clip_factor(self, blocks: Iterable[TrainedBlock], max_norm: float) -> torch.Tensor:
        """Return what to multiply gradients with, as ``torch.nn.utils.clip_grad_norm_`` does."""
        norms: dict[torch.Tensor, torch.Tensor] = {}
        for block in blocks:
            block.gradients.load()
            block.gradients.measure()
            norms.update({block.trained[index]: norm for index, norm in block.gradients.norms.items()})
            block.gradients.store()
        in_order = [norms[param] for param in self.model.parameters() if param in norms]
        total = torch.linalg.vector_norm(torch.stack(in_order))
        return torch.clamp(max_norm / (total + 1e-6), max=1.0)

    def _undo(self) -> None:
        """Go back to the last completed step. Raises OSError if the drive cannot be read; to be called again then."""
        self._not_undone = True
        self._uses.recording = False
        self._uses.end_all()
        for block in self._blocks:
            block.gradients.drop()
        if self._rest.parameters.holds:
            self._uses.end(self._rest.parameters)
        self._schedule.cache.clear()
        for block in self._blocks:
            block.undo()
        self._micro_batch = 0
        self._uses.begin(self._rest.parameters)
        self._not_undone = False

    # -- states

    def state_dict(self) -> dict[str, Any]:
        """Return the model and the optimizer as of the last completed step, with tensors mapped from the drive.

        The tensors take no memory. They keep their values when steps are made, and occupy space on the drive while they live.

        Returns:
            "model": what ``model.state_dict()`` would be. "optimizer": "state" by the names of parameters, and "param_groups",
            whose "params" are names: what ``torch.distributed.checkpoint.state_dict`` uses. "steps": the number of steps.

        Raises:
            RuntimeError: Within a step.
            OSError: If an earlier step still has to be undone and cannot be.
        """
        self._check_between_steps()
        names = self._names()
        values: dict[torch.Tensor, torch.Tensor] = {}
        for block in self._blocks:
            if block.parameters.params:
                mapped = self._versions.map([(block.parameters, 0, block.parameters.layout.nbytes)])
                sections = block.parameters.layout.sections
                values.update((block.parameters.params[section.piece], section.of(mapped)) for section in sections)
        with self._readable():
            model = self.model.state_dict(keep_vars=True)
        groups = [{**group, "params": [names[each] for each in group["params"]]} for group in self.optimizer.param_groups]
        model = {name: values.get(value, value) if isinstance(value, torch.Tensor) else value for name, value in model.items()}
        return {
            "model": model,
            "optimizer": {"state": {names[param]: state for param, state in self._states.items()}, "param_groups": groups},
            "steps": self.steps,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the model, the optimizer's states and options, and :attr:`steps`. One block at a time is in memory.

        Args:
            state: As :meth:`state_dict` returns it. Its tensors may be mapped from a file.

        Raises:
            ValueError: If names or shapes are not those of the model. Nothing is changed then.
            RuntimeError: Within a step.
            OSError: From the drive. Nothing is changed then.
        """
        self._check_between_steps()
        names, model, optimizer = self._names(), state["model"], state["optimizer"]
        _check_fits(self.model, model, names)
        options = {name: group for group in optimizer["param_groups"] for name in group["params"]}
        missing = [name for param, name in names.items() if param.requires_grad and name not in options]
        if missing:
            raise ValueError(f"the optimizer's param_groups do not have {listed(missing, 8)}")
        before = [dict(group) for group in self.optimizer.param_groups]
        with self._undone_if_it_fails():
            try:
                for group in self.optimizer.param_groups:
                    group.update({key: value for key, value in options[names[group["params"][0]]].items() if key != "params"})
                for block in self._blocks:
                    self._load_block(block, names, model, optimizer["state"])
                self._commit(int(state["steps"]))
            except BaseException:
                for group, values in zip(self.optimizer.param_groups, before, strict=True):
                    group.clear()
                    group.update(values)
                raise
            for name, buffer in self.model.named_buffers():
                if name in model:
                    buffer.copy_(model[name])

    def _load_block(
        self, block: TrainedBlock, names: Mapping[torch.Tensor, str], model: Mapping[str, Any], states: Mapping[str, Any]
    ) -> None:
        if not block.parameters.params:
            return
        self._uses.begin(block.parameters)
        try:
            params = block.parameters.params
            found: dict[torch.Tensor, Any] = {each: states[names[each]] for each in block.trained if names[each] in states}
            block.load([model[names[param]] for param in params], found, self.optimizer.param_groups)
        finally:
            self._uses.end(block.parameters)

    def _names(self) -> dict[torch.Tensor, str]:
        """Return the first name of each parameter."""
        return {param: name for name, param in reversed(list(self.model.named_parameters(remove_duplicate=False)))}

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        """Let ``model.state_dict()`` be called."""
        self._guarding = False
        try:
            yield
        finally:
            self._guarding = True

    def _check_state_dict(self, *_: object) -> None:
        """Raise RuntimeError if somebody else asks a module for its state: of a block it would be NaN."""
        if self._guarding:
            raise RuntimeError("the parameters are on the drive: take 'model' of OffloadedTraining.state_dict()")

    def _check_between_steps(self) -> None:
        self._check_usable()
        if self._not_undone:
            self._undo()
        if self._micro_batch:
            raise RuntimeError("a step is under way: run its other micro-batches, and call step()")

    @torch.no_grad()
    def close(self, restore: bool = False) -> None:
        """Remove the hooks and the files. Idempotent.

        Args:
            restore: Whether to give the parameters the values of the last completed step, in memory. Otherwise those in blocks
                have none any more.

        Raises:
            OSError: From reading them. Nothing is closed then.
        """
        if self._closed or os.getpid() != self._process:
            return
        if restore:
            self._undo()
            for block in self._blocks:
                self._uses.begin(block.parameters)
                values = [param.data.clone() for param in block.parameters.params]
                self._uses.end(block.parameters)
                self._restored.update(zip(block.parameters.params, values, strict=True))
        elif self._rest.parameters.holds:
            self._restored.update((param, param.data.clone()) for param in self._rest.parameters.params)
            self._uses.end(self._rest.parameters)
        self._closed = True
        self._uses.remove()
        self._hooks.remove()
        for handle in self._guards:
            handle.remove()
        self._uses.end_all()
        self._schedule.cache.clear()
        for param, value in self._restored.items():
            param.data = value
        self._restored.clear()
        if self._saver is not None:
            self._saver.close()
        self._store.close()
        self._engine.close()
        remove_directories(self._directories)

    def __enter__(self) -> OffloadedTraining:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an OffloadedTraining owns files and cannot be copied or pickled; use state_dict()")


class _Activations(save_on_disk):
    """Keeps activations on the drive, and of parameters only where they are."""

    def __init__(self, uses: ParameterUses, paths: Sequence[Path], budget: int, config: AioConfig | None) -> None:
        super().__init__(paths, memory_budget=budget, config=config)
        self._uses = uses

    def _pack(self, store: ActivationStore, tensor: torch.Tensor) -> Packed:
        return self._uses.saved(tensor) or super()._pack(store, tensor)


def _unpack(packed: Packed) -> torch.Tensor:
    return packed.unpack()


def _shortage(held: int, block: Block) -> str:
    return f"the blocks in memory have leased {held} bytes and {block.name} needs {block.nbytes} more"


def _pieces(blocks: Iterable[TrainedBlock]) -> dict[torch.Tensor, list[tuple[SubGroup, int]]]:
    """Return where each parameter is stepped: its sub-group, and its place there."""
    sub_groups = [block.sub_group for block in blocks if block.sub_group is not None]
    return {piece.param: [(each, index)] for each in sub_groups for index, piece in enumerate(each.pieces)}


def _check_fits(model: nn.Module, state: Mapping[str, Any], names: Mapping[torch.Tensor, str]) -> None:
    """Raise ValueError if a state has not all parameters of a model, in their shapes."""
    wrong = [
        f"{name}: {tuple(state[name].shape) if name in state else 'missing'} instead of {tuple(param.shape)}"
        for param, name in names.items()
        if name not in state or state[name].shape != param.shape
    ]
    if wrong:
        raise ValueError(f"this is the state of another model than this {type(model).__name__}: {listed(wrong, 8)}")


def _divided(
    model: nn.Module, modules: Sequence[nn.Module]
) -> tuple[list[nn.Module], list[list[nn.Parameter]], list[nn.Parameter]]:
    """Return the blocks' modules, the parameters of each, and those that stay in memory. Raises ValueError."""
    inside = {each: name for name, each in model.named_modules()}
    for module in modules:
        if module not in inside:
            raise ValueError(f"blocks: a {type(module).__name__} is no module of the model")
    taken: dict[nn.Module, nn.Module] = {}
    for module in modules:
        for each in module.modules():
            if each in taken:
                raise ValueError(f"blocks: {inside[each]!r} is in two of them, {inside[taken[each]]!r} and {inside[module]!r}")
            taken[each] = module
    owners: dict[nn.Parameter, set[nn.Module | None]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(param, set()).add(taken.get(module))
    for param in owners:
        if type(param) is not nn.Parameter or param.device.type != "cpu" or param.layout is not torch.strided:
            kind = f"a {type(param).__name__} of layout {param.layout} on {param.device}"
            raise ValueError(f"only parameters that are dense, on the CPU, and of no subclass can be offloaded, got {kind}")
    found: Mapping[nn.Module, list[nn.Parameter]] = {module: [] for module in modules}
    rest = []
    for param, users in owners.items():
        (first, *more) = users
        if first is None or more:
            rest.append(param)
        else:
            found[first].append(param)
    modules = [module for module in modules if found[module]]
    return list(modules), [found[module] for module in modules], rest


def _divided_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], parts: int
) -> Iterator[tuple[list[Any], dict[str, Any], float]]:
    """Yield the arguments of each micro-batch, and its share of the rows."""
    if parts == 1:
        yield list(args), dict(kwargs), 1
        return
    rows = {each.shape[0] for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.dim()}
    if len(rows) != 1 or min(rows) < parts:
        raise ValueError(f"the first dimensions of the tensors must be equal, and at least {parts}: got {sorted(rows)}")
    (count,) = rows
    begin = 0
    for part in range(parts):
        end = count * (part + 1) // parts

        def cut(value: Any, begin: int = begin, end: int = end) -> Any:
            return value[begin:end] if isinstance(value, torch.Tensor) and value.dim() else value

        yield [cut(each) for each in args], {name: cut(each) for name, each in kwargs.items()}, (end - begin) / count
        begin = end
