"""A sub-group of an optimizer's parameters, stepped by a torch optimizer of its own on tensors that lie in one block."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepnvme.memory.alignment import PAGE, padded

from .params import ParamSlice, param_version

MASTER = "master_weight"
"""Key of the float32 master weight in a parameter's state, beside the optimizer's own keys."""

BlockTensors = list[tuple[int, str, torch.Tensor]]
"""The tensors that a block holds, as (index of the piece, key in the optimizer's state, tensor)."""

CACHE_LINE = 64
"""Size of a CPU cache line, in bytes."""


@dataclass(frozen=True)
class BlockSection:
    """Where one tensor lies in a block, and its dtype, shape and stride."""

    piece: int
    """Index in the sub-group's ``pieces``."""
    key: str
    """Key in the optimizer's state, or ``MASTER`` for the master weight."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the block's start."""
    nbytes: int
    stride: tuple[int, ...]
    """Strides in elements, equal to the parameter's: fused kernels walk a parameter and its states in memory order."""

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of ``block``, the block's bytes (uint8, one dimension)."""
        return block[self.offset : self.offset + self.nbytes].view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class BlockLayout:
    """Where all tensors of a block lie."""

    sections: tuple[BlockSection, ...]
    nbytes: int
    """Size of the block, a multiple of the page size."""

    def fill(self, block: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
        """Copy one tensor for each section to its place in ``block``."""
        for section, tensor in zip(self.sections, tensors, strict=True):
            section.of(block).copy_(tensor)


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides (elements) of a dense copy: the tensor's own if contiguous, else those of ``torch.empty_like``."""
    if tensor.is_contiguous() and 0 in tensor.stride():  # an expanded tensor of one element counts as contiguous
        return torch.empty(tensor.shape, device="meta").stride()
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def lay_out(tensors: BlockTensors, on_pages: Container[int] = ()) -> BlockLayout:
    """Assign each tensor an offset in one block, in the given order.

    Args:
        tensors: (index of the piece, key, tensor). Only dtype, shape and strides of the tensor are used.
        on_pages: Indices of pieces whose tensors must begin on a page. Tensors of a page or more also begin on a page, all
            others on a cache line.
    """
    sections = []
    end = 0
    for piece, key, tensor in tensors:
        alignment = PAGE if tensor.nbytes >= PAGE or piece in on_pages else CACHE_LINE
        begin = padded(end, alignment)
        end = begin + tensor.nbytes
        sections.append(BlockSection(piece, key, tensor.dtype, tuple(tensor.shape), begin, tensor.nbytes, dense_strides(tensor)))
    return BlockLayout(tuple(sections), padded(end, PAGE))


class SubGroup:
    """Parameters (or slices of them) that are read, stepped and written together, with their optimizer states.

    Large state tensors lie in a block, which the caller keeps in memory only while it is needed. Small states stay in memory.
    Compared and hashed by identity.
    """

    def __init__(
        self,
        index: int,
        pieces: Sequence[ParamSlice],
        masters: Sequence[bool],
        make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    ) -> None:
        """Describe a sub-group that has not been stepped yet.

        Args:
            index: Number of the sub-group, from which its blocks are named.
            pieces: The parameters or slices.
            masters: For each piece, whether it has a float32 master weight.
            make_optimizer: Makes the torch optimizer that steps the sub-group, from parameter groups.
        """
        self.index = index
        self.pieces = tuple(pieces)
        self.masters = tuple(masters)
        self.layout: BlockLayout | None = None
        self.small: list[dict[str, Any]] = [{} for _ in pieces]
        self.current: int | None = None
        """Version number of the block on the drive that has the states of the last completed step.

        None before the first step, and while those states are only in memory.
        """
        self.resident = False
        """Whether the sub-group's block stays in memory between steps."""
        self.stale: set[int] = set()
        """Indices of pieces whose parameter was changed by other code, so that the master weight has to be updated."""
        self._versions: list[tuple[int, int]] = []
        self._make_optimizer = make_optimizer
        self._optimizer: torch.optim.Optimizer | None = None
        self._stand_ins: list[torch.nn.Parameter] = []
        self._pushed: dict[int, dict[str, Any]] = {}

    @property
    def numel(self) -> int:
        """Number of elements of all pieces."""
        return sum(piece.numel for piece in self.pieces)

    @property
    def full_gradient_bytes(self) -> int:
        """Bytes of float32 gradients for the pieces with master weights."""
        return sum(_padded_gradient(piece) for piece, master in zip(self.pieces, self.masters, strict=True) if master)

    def has_all_gradients(self, arrived: set[int]) -> bool:
        """Return whether ``arrived``, indices of pieces, covers all pieces whose parameter requires a gradient."""
        return len(arrived) == sum(piece.param.requires_grad for piece in self.pieces)

    # -- what happens to its block and its parameters

    def lay_out(self, held: BlockTensors) -> BlockLayout:
        """Set and return the layout of a block that holds these tensors."""
        # Slices of a parameter begin on a page, so that all of them can be mapped as one tensor.
        cut = {index for index, piece in enumerate(self.pieces) if not piece.whole}
        self.layout = lay_out(held, cut)
        return self.layout

    def set_current_block(self, number: int | None) -> None:
        """Record the version number of the block with the current states, on the drive or being written; None: only in memory."""
        self.current = number

    def set_resident(self, resident: bool) -> None:
        """Decide whether the block stays in memory between steps."""
        self.resident = resident

    def replace_small(self, small: list[dict[str, Any]]) -> None:
        """Replace the states that are kept outside the block, and forget what belonged to the states before."""
        self.small, self.layout, self.stale = small, None, set()

    def remember_params(self) -> None:
        """Record the parameters' current versions, against which :meth:`changed_pieces` compares."""
        self._versions = [param_version(piece.param) for piece in self.pieces]

    def changed_pieces(self) -> set[int]:
        """Return the indices of pieces whose parameter was changed since :meth:`remember_params`; none before its first call.

        Changes through ``.data`` are not noticed: torch does not count them as versions.
        """
        seen = zip(self.pieces, self._versions, strict=False)
        return {index for index, (piece, version) in enumerate(seen) if param_version(piece.param) != version}

    def mark_stale(self, pieces: Iterable[int]) -> None:
        """Mark pieces whose parameter other code has changed, so that the next step updates their master weights."""
        self.stale.update(index for index in pieces if self.masters[index])

    # -- its step

    def pull(self, groups: Sequence[dict[str, Any]]) -> None:
        """Copy options that the sub-group's optimizer has changed back to ``groups``. Some optimizers count steps in an option.

        Args:
            groups: The ``param_groups`` of the offloaded optimizer.
        """
        for (group, pushed), own in zip(self._pushed.items(), self._groups(), strict=True):
            _copy_changed_options(own, pushed, groups[group])

    def sections(self, piece: int) -> Iterator[BlockSection]:
        """Return the block sections of one piece's tensors; none before the first step."""
        return (section for section in (self.layout.sections if self.layout else ()) if section.piece == piece)

    def step(
        self,
        block: torch.Tensor | None,
        collected: Mapping[int, torch.Tensor],
        scratch: torch.Tensor,
        groups: Sequence[dict[str, Any]],
    ) -> BlockTensors | None:
        """Make one step of all pieces that have a gradient. Parameters, and state tensors in ``block``, change in place.

        Args:
            block: The bytes of the sub-group's block; None before its first step.
            collected: Gradients by index of the piece. A piece that is missing takes its gradient from ``param.grad``; a piece
                without any gradient is not stepped.
            scratch: Memory of ``full_gradient_bytes``, in which gradients for master weights are converted to float32.
            groups: The ``param_groups`` of the offloaded optimizer, for the options of this step.

        Returns:
            None if ``block`` has all state tensors; otherwise the tensors that a new block has to hold. A new block is needed in
            the first step, and when a state tensor appears, disappears or changes its shape or dtype.
        """
        views = self._views(block)
        try:
            optimizer = self._bind(views, groups)
            self._step_stand_ins(optimizer, self._gradients_of(collected, scratch))
            held = self._settle(block, self._held(block, optimizer))
            self.stale.clear()
            return held
        finally:
            self._unbind()

    def _gradients_of(self, collected: Mapping[int, torch.Tensor], scratch: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the gradients of the pieces, in float32 for pieces with master weights."""
        found = []
        end = 0
        for index, piece in enumerate(self.pieces):
            gradient = collected.get(index)
            gradient = piece.gradient if gradient is None else gradient
            if gradient is not None and self.masters[index]:
                gradient = _to_float32(gradient, scratch[end:])
                end += _padded_gradient(piece)
            found.append(gradient)
        return found

    def _step_stand_ins(self, optimizer: torch.optim.Optimizer, gradients: Sequence[torch.Tensor | None]) -> None:
        """Step the stand-ins that have a gradient, and copy their new values to the parameters."""
        stepped = [index for index, gradient in enumerate(gradients) if gradient is not None]
        if not stepped:
            return
        for stand_in, gradient in zip(self._stand_ins, gradients, strict=True):
            stand_in.grad = gradient
        step_without_global_hooks(optimizer)
        for index in stepped:
            stand_in, piece = self._stand_ins[index], self.pieces[index]
            stand_in.grad = None
            own = piece.of(piece.param)
            if self.masters[index]:
                own.copy_(stand_in.data)
            elif stand_in.data_ptr() != own.data_ptr():  # the optimizer replaced the parameter's tensor by a new one
                state = optimizer.state.get(stand_in, {})
                for key, value in state.items():
                    if _share_memory(value, own):
                        state[key] = value.clone()  # the optimizer kept the old tensor as a state: copy before overwriting it
                own.copy_(stand_in.data)

    def _belongs_in_block(self, piece: int, value: Any) -> bool:
        """Return whether a value of a piece's state belongs in the block, and not in ``small``.

        A tensor of more than one element does. For a cut piece, so does every one-dimensional tensor, even of one element: it is
        cut like the parameter.
        """
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return False
        return value.numel() > 1 or (not self.pieces[piece].whole and value.dim() == 1)

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the current small states, layout, version number and optimizer options.

        It restores neither parameters nor blocks.
        """
        small = [copied(values) for values in self.small]
        layout, current, stale = self.layout, self.current, set(self.stale)
        options = [dict(group) for group in self._groups()]
        pushed = {group: dict(values) for group, values in self._pushed.items()}

        def undo() -> None:
            self.small, self.layout, self.current, self.stale, self._pushed = small, layout, current, stale, pushed
            if options:
                for group, values in zip(self._groups(), options, strict=True):
                    group.clear()
                    group.update(values)
            else:
                self._optimizer = None

        return undo

    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups if self._optimizer is not None else []

    def _views(self, block: torch.Tensor | None) -> list[dict[str, torch.Tensor]]:
        views: list[dict[str, torch.Tensor]] = [{} for _ in self.pieces]
        if block is not None and self.layout is not None:
            for section in self.layout.sections:
                views[section.piece][section.key] = section.of(block)
        return views

    def _bind(self, views: list[dict[str, torch.Tensor]], groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return the sub-group's optimizer, with state from ``views`` and options from ``groups``.

        Its parameters are stand-ins that share memory with the master weights or, for a piece without one, with the parameter.
        """
        first = self._optimizer is None
        if first:
            self._stand_ins = [
                torch.nn.Parameter(torch.empty(0, device="cpu"), requires_grad=piece.param.is_floating_point())
                for piece in self.pieces
            ]
        for index, (piece, stand_in) in enumerate(zip(self.pieces, self._stand_ins, strict=True)):
            work = piece.of(piece.param)
            if self.masters[index]:
                if MASTER not in views[index]:
                    views[index][MASTER] = work.to("cpu", torch.float32, copy=True)
                elif index in self.stale:
                    # Where the parameter equals the rounded master weight, it was only loaded again: keep the master's precision.
                    master = views[index][MASTER]
                    master.copy_(torch.where(master.to(work.dtype) == work.to("cpu"), master, work.to("cpu", torch.float32)))
                work = views[index][MASTER]
            stand_in.data = work
        if first:
            wanted = sorted({piece.group for piece in self.pieces})
            self._optimizer = self._make_optimizer(
                [
                    {
                        **options_of(groups[group]),
                        "params": [s for s, piece in zip(self._stand_ins, self.pieces, strict=True) if piece.group == group],
                    }
                    for group in wanted
                ]
            )
            self._pushed = {group: {} for group in wanted}
        optimizer = self._optimizer
        assert optimizer is not None
        for (group, pushed), own in zip(self._pushed.items(), optimizer.param_groups, strict=True):
            _copy_changed_options(groups[group], pushed, own)
        for index, stand_in in enumerate(self._stand_ins):
            state = {**self.small[index], **{key: view for key, view in views[index].items() if key != MASTER}}
            if state:
                optimizer.state[stand_in] = state
        return optimizer

    def _held(self, block: torch.Tensor | None, optimizer: torch.optim.Optimizer) -> BlockTensors:
        """Return the tensors that belong in the block after a step, and keep all other state in ``small``."""
        held: BlockTensors = []
        for index, stand_in in enumerate(self._stand_ins):
            if self.masters[index]:
                held.append((index, MASTER, stand_in.data))
            small = {}
            for key, value in optimizer.state.get(stand_in, {}).items():
                if self._belongs_in_block(index, value):
                    held.append((index, key, value))
                else:
                    small[key] = value.clone() if block is not None and _share_memory(value, block) else value
            self.small[index] = small
        return held

    def _settle(self, block: torch.Tensor | None, held: BlockTensors) -> BlockTensors | None:
        """Copy state tensors outside their sections of the block there. If they do not fit the layout, just return ``held``."""
        if block is None or self.layout is None or not _fits(self.layout, held):
            return held
        moved = []  # an optimizer may make new tensors rather than change its own, or swap two of them
        for section, (_, _, tensor) in zip(self.layout.sections, held, strict=True):
            view = section.of(block)
            if (view.data_ptr(), view.stride()) != (tensor.data_ptr(), tensor.stride()):
                moved.append((view, tensor.clone() if _share_memory(tensor, block) else tensor))
        for view, tensor in moved:
            view.copy_(tensor)
        return None

    def _unbind(self) -> None:
        """Drop the references to gradients, parameters and the block, so that their owners can free the memory."""
        for stand_in in self._stand_ins:
            stand_in.grad = None
            stand_in.data = torch.empty(0, device="cpu")
        if self._optimizer is not None:
            self._optimizer.state.clear()


def step_without_global_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call ``optimizer.step()`` without torch's global optimizer step hooks.

    Those run once for the step of the whole offloaded optimizer, of which this call is a part. Hooks that the optimizer has
    registered on itself are called.
    """
    step = type(optimizer).step
    if getattr(step, "hooked", False):  # torch.optim.Optimizer wraps each class's step in a function that calls all hooks
        step = step.__wrapped__  # type: ignore[attr-defined]
    for before in optimizer._optimizer_step_pre_hooks.values():
        before(optimizer, (), {})
    step(optimizer)
    for after in optimizer._optimizer_step_post_hooks.values():
        after(optimizer, (), {})


def _padded_gradient(piece: ParamSlice) -> int:
    """Return the bytes of a piece's float32 gradient, rounded up to whole cache lines."""
    return padded(4 * piece.numel, CACHE_LINE)


def _to_float32(gradient: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Return a gradient in float32: a strided one at the start of ``scratch`` (bytes), any other in new CPU memory."""
    if gradient.layout is not torch.strided:
        return gradient.to("cpu", torch.float32)
    flat = scratch[: 4 * gradient.numel()].view(torch.float32)
    return flat.as_strided(gradient.shape, dense_strides(gradient)).copy_(gradient)


def _fits(layout: BlockLayout, held: BlockTensors) -> bool:
    """Return whether ``held`` has the tensors of the layout: the same number, order, keys, dtypes and shapes."""
    return len(layout.sections) == len(held) and all(
        (section.piece, section.key, section.dtype, section.shape) == (piece, key, tensor.dtype, tuple(tensor.shape))
        for section, (piece, key, tensor) in zip(layout.sections, held, strict=True)
    )


def _share_memory(a: Any, b: torch.Tensor) -> bool:

    if not isinstance(a, torch.Tensor) or a.layout != torch.strided:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of a parameter's state, which later steps do not change."""

    return {key: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value) for key, value in values.items()}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group: everything but its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _copy_changed_options(source: Mapping[str, Any], copied_before: dict[str, Any], target: dict[str, Any]) -> None:
    """Copy to ``target`` the options of ``source`` that have changed since the last copy, which ``copied_before`` records."""
    for key in copied_before.keys() - source.keys():  # as in a state from before the first step
        del copied_before[key]
        target.pop(key, None)
    for key, value in options_of(source).items():
        if not (key in copied_before and _same(copied_before[key], value)):
            target[key] = copied_before[key] = value


def _same(a: Any, b: Any) -> bool:

    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b  # contents are not compared: only the optimizer reads them
    return bool(a == b)
