"""Hooks that bring a module's parameters into memory while it computes, in the forward and in the backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from deepnvme.cache.block import Block
from deepnvme.offload.activations.saved_tensor import View, is_plain
from deepnvme.states.usability import OneThread
from deepnvme.states.versions import VersionedBlock

from .blocks_on_drive import BlocksOnDrive
from .frozen_parameters import FrozenParameters
from .parameter_block import ParameterBlock


class SavedParameter:
    """Stands for a tensor over a parameter that autograd saves: records its layout in the block, without keeping the memory.

    Args:
        uses: Brings the block into memory in the backward.
        block: The block.
        part: The block itself, or that of its frozen parameters.
        view: Layout of the tensor in the memory of ``part``.
    """

    __slots__ = ("_block", "_changes", "_part", "_uses", "_view")

    def __init__(self, uses: ParameterUses, block: ParameterBlock, part: VersionedBlock, view: View) -> None:
        self._uses, self._block, self._part, self._view = uses, block, part, view
        self._changes = part.changes

    def unpack(self) -> torch.Tensor:
        """Return the tensor. Reads the block if it is not in memory.

        Raises:
            RuntimeError: If a step has changed the parameters since the forward.
            OSError: From reading.
        """
        if self._part.changes != self._changes:
            raise RuntimeError(
                f"the parameter that the {self._view} looks at was changed by a step since the forward: run the forward again"
            )
        self._uses.use_in_backward(self._block)
        return self._block.tensor(self._part, self._view)


class ParameterUses:
    """Begins and ends the uses of blocks of parameters, by hooks on their modules and on what autograd saves.

    In a forward, a block is in memory while its module runs. In a backward, a block's use begins when autograd asks for the first
    saved tensor over the block, or when its module's forward is computed again. It ends when the block's gradients are complete
    and another block is used: nothing of the module's backward is then left to be computed. With frozen parameters something may
    be left, so a block is kept while blocks inside of its module are used. At the end of a backward all uses end.

    Args:
        modules: The block of each module.
        blocks: All blocks.
        drive: Store and cache of the blocks.
        begun_in_backward: Called with each block whose use in a backward has begun.
        ended_in_backward: Called with each block whose use in a backward is about to end.
        begins_between_steps: Called before a forward outside of a step uses its first block.
    """

    def __init__(
        self,
        modules: Mapping[nn.Module, ParameterBlock],
        blocks: Iterable[ParameterBlock],
        drive: BlocksOnDrive,
        begun_in_backward: Callable[[ParameterBlock], None],
        ended_in_backward: Callable[[ParameterBlock], None],
        begins_between_steps: Callable[[], None],
    ) -> None:
        self.recording = False
        """Whether forwards with gradients are allowed, since their saved tensors go through :meth:`saved`."""
        self.one_thread = OneThread()
        """The thread that runs a method of the training. Other threads cannot use the model meanwhile."""
        self._blocks = tuple(blocks)
        self._absent = {address for block in self._blocks for address in block.absent_addresses()}
        self._drive = drive
        self._begun_in_backward, self._ended_in_backward = begun_in_backward, ended_in_backward
        self._begins_between_steps = begins_between_steps
        self._in_use: dict[ParameterBlock, None] = {}  # those in memory for a use
        self._in_forward: list[ParameterBlock] = []
        self._in_backward: dict[ParameterBlock, None] = {}  # the newest last
        self._complete: set[ParameterBlock] = set()  # of these, those whose gradients have all arrived
        self._before_use: Callable[[ParameterBlock, bool], None] | None = None
        self._used_last: ParameterBlock | None = None  # in a forward, and in memory for the next micro-batch
        self._handles: list[RemovableHandle] = []
        self._around: dict[ParameterBlock, set[ParameterBlock]] = {}  # of a block, those with frozen parameters around it
        for module, block in modules.items():
            if not all(param.requires_grad for param in block.params):
                for inner in module.modules():
                    if inner is not module and inner in modules:
                        self._around.setdefault(modules[inner], set()).add(block)
            begin, end = (functools.partial(each, block) for each in (self._begin_forward, self._end_forward))
            self._handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True)]
            params = set(block.params)
            for inner in module.modules():
                if inner is not module and not params.isdisjoint(inner.parameters(recurse=False)):
                    self._handles.append(inner.register_forward_pre_hook(functools.partial(self._begin_inner_forward, block)))

    def remove(self) -> None:
        """Remove the hooks from the modules."""
        for handle in self._handles:
            handle.remove()

    @contextlib.contextmanager
    def calling_before_use(self, function: Callable[[ParameterBlock, bool], None]) -> Iterator[None]:
        """Call a function before each use of a block by the model, within this context. For several micro-batches side by side.

        A block then stays in memory until one of the micro-batches uses another block. Uses in a backward end with the context,
        not with the first backward.

        Args:
            function: Called with the block, and with whether the use belongs to a backward.
        """
        self._before_use = function
        try:
            yield
        finally:
            self._before_use = None
            self._keep_for_next(None)

    # -- uses

    def begin(self, block: ParameterBlock) -> None:
        """Begin a use of a block: its parameters are in memory from now on. Blocks while they are read. Raises OSError."""
        if block.holds == 0:
            block.check_absent()
            if block.ranks is None:
                self._drive.acquire(block)
                try:
                    self._begin_frozen(block.frozen)
                except BaseException:
                    self._drive.cache.release([block])
                    raise
            else:
                self._gather(block)
            block.attach()
            self._in_use[block] = None
        block.holds += 1

    def _gather(self, block: ParameterBlock) -> None:
        begun: list[Block] = []
        try:
            for part in block.parts:
                self._drive.acquire(part)
                begun.append(part)
            block.gather_shards(self.recording)
        finally:
            self._drive.cache.release(begun)

    def _begin_frozen(self, frozen: FrozenParameters | None) -> None:
        if frozen is not None:
            self._drive.acquire(frozen)
            if frozen.quantized:
                try:
                    frozen.dequantize()
                finally:
                    self._drive.cache.release([frozen])

    def end(self, block: ParameterBlock) -> None:
        """End one use of a block. With the last use its parameters lose their memory, and the cache may drop it. Never blocks."""
        block.holds -= 1
        if block.holds == 0:
            self._in_use.pop(block, None)
            block.detach()
            if block.ranks is None:
                self._drive.cache.release([block])
                if block.frozen is not None and not block.frozen.quantized:
                    self._drive.cache.release([block.frozen])

    # Two methods and no context: a generator that an interrupt gives up ends when it is collected, after everything was reset.

    def begin_change(self, block: ParameterBlock) -> None:
        """Bring the tensors that a step changes into memory: the shards or, with one process, the parameters. Raises OSError.

        Whole parameters that were gathered from shards before keep their values.
        """
        if block.ranks is None:
            self.begin(block)
        else:
            self._drive.acquire(block)
            block.attach_shards()

    def end_change(self, block: ParameterBlock) -> None:
        """End a use that :meth:`begin_change` has begun. Never blocks."""
        if block.ranks is None:
            self.end(block)
        else:
            block.detach_shards()
            self._drive.cache.release([block])

    def reset(self) -> None:
        """End all uses of blocks, also those that an interrupt has left half begun or half ended. Never blocks."""
        self.recording = False
        self._in_forward.clear()
        self._in_backward.clear()
        self._complete.clear()
        self._used_last = None
        self._in_use.clear()
        for block in self._blocks:
            block.holds = 0
            block.detach()
            block.detach_shards()
        self._drive.cache.end_uses()

    def end_all(self) -> None:
        """End all uses that hooks have begun."""
        for block in (*self._in_forward, *self._in_backward):
            self.end(block)
        self._in_forward.clear()
        self._in_backward.clear()
        self._complete.clear()

    # -- forward

    def _begin_forward(self, block: ParameterBlock, *_: object) -> None:
        if torch._C._current_graph_task_id() >= 0:  # deep in a backward, autograd may go on in a thread of its own
            self.use_in_backward(block, computed_again=True)
            return
        self.one_thread.check()
        if torch.is_grad_enabled() and not self.recording:
            raise RuntimeError(
                "a forward with gradients of a model whose parameters are on the drive has to run in OffloadedTraining.step() or"
                " micro_batch(); to evaluate, use torch.no_grad()"
            )
        self._call_before_use(block, in_backward=False)
        if not self.recording and not self._in_forward:
            self._begins_between_steps()
        ranks = None if self.recording else block.ranks  # a step tells the others of any failure
        with contextlib.nullcontext() if ranks is None else ranks.reporting_failures():
            self.begin(block)
        self._in_forward.append(block)

    def _begin_inner_forward(self, block: ParameterBlock, module: nn.Module, *_: object) -> None:
        """Bring a block into memory when a checkpointed module inside of its module is computed again by itself."""
        if torch._C._current_graph_task_id() >= 0:
            self.use_in_backward(block, computed_again=True)
        elif block.holds == 0:
            raise RuntimeError(
                f"the parameters of this {type(module).__name__} are on the drive: they are in memory only while the module runs"
                f" that is their block"
            )

    def _call_before_use(self, block: ParameterBlock, in_backward: bool) -> None:
        if self._before_use is not None:
            self._before_use(block, in_backward)
            if block is not self._used_last:
                self._keep_for_next(None)

    def _keep_for_next(self, block: ParameterBlock | None) -> None:
        """Keep a block in memory for the micro-batch that uses it next, and end the use of the block kept before."""
        if block is not None:
            self.begin(block)
        before, self._used_last = self._used_last, block
        if before is not None:
            self.end(before)

    def _end_forward(self, block: ParameterBlock, module: nn.Module, _: object, output: object) -> None:
        if torch._C._current_graph_task_id() >= 0 or self.one_thread.is_another:  # whose use was refused
            return
        if block in self._in_forward:  # also called if the use could not begin
            self._in_forward.reverse()
            self._in_forward.remove(block)
            self._in_forward.reverse()
            if self._before_use is not None and block is not self._used_last:
                self._keep_for_next(block)
            self.end(block)
            # Autograd saves nothing of an embedding's weight. Without a use, gradients would wait for the end of the backward.
            trained = isinstance(module, nn.Embedding) and module.weight.requires_grad
            if trained and isinstance(output, torch.Tensor) and output.requires_grad:
                hook = functools.partial(self._begin_backward_of_embedding, block)
                output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _begin_backward_of_embedding(self, block: ParameterBlock, _: torch.Tensor) -> None:
        if self.recording:
            self.use_in_backward(block)

    # -- backward

    def saved(self, tensor: torch.Tensor) -> SavedParameter | None:
        """Return what autograd keeps in place of a tensor over a parameter; None for any other tensor.

        Raises RuntimeError for a parameter that is not in memory.
        """
        if is_plain(tensor):
            if tensor.numel() and tensor.data_ptr() in self._absent:
                raise RuntimeError(
                    f"a parameter, seen in the shape {tuple(tensor.shape)}, was used outside of the forward of its block's module"
                    " when it is on the drive: name only modules that are called, or give the blocks as modules,"
                    " so that no others are found"
                )
            for block in self._in_use:
                found = block.view_of(tensor)
                if found is not None:
                    return SavedParameter(self, block, *found)
        return None

    def use_in_backward(self, block: ParameterBlock, computed_again: bool = False) -> None:
        """Begin a use of a block for the backward that runs now, unless it is in use. Blocks while it is read. Raises OSError.

        Args:
            block: The block.
            computed_again: Whether a forward is computed again with the block. Its saved tensors belong to
                torch.utils.checkpoint, and keep the block's memory.
        """
        self._call_before_use(block, in_backward=True)
        if block in self._in_backward:
            return
        if not self._in_backward and self._before_use is None:
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        self._end_complete(block)
        self.begin(block)
        self._in_backward[block] = None
        # Of a frozen block no gradient says when the tensors of a checkpoint are no longer used: then it is the backward's end.
        if not computed_again and not any(param.requires_grad for param in block.params):
            self._complete.add(block)
        self._begun_in_backward(block)

    def completed(self, block: ParameterBlock) -> None:
        """Record that all gradients of a block are complete, so that its use ends when another block is used."""
        self._end_complete(block)
        if block in self._in_backward:
            self._complete.add(block)

    def end_backward(self) -> None:
        """End all uses that belong to a backward."""
        # That which stays in memory last, as in a process that has all of its gradients: another one may lack some.
        for block in sorted(self._in_backward, key=lambda each: each is self._blocks[-1]):
            self._end_in_backward(block)

    def _end_complete(self, used: ParameterBlock) -> None:
        """End the uses of blocks whose gradients are complete, except blocks around ``used``, the block to be used now."""
        around = self._around.get(used, ())
        for block in [each for each in self._in_backward if each in self._complete and each not in around]:
            self._end_in_backward(block)

    def _end_in_backward(self, block: ParameterBlock) -> None:
        self._ended_in_backward(block)
        del self._in_backward[block]
        self._complete.discard(block)
        self.end(block)
