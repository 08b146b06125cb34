"""A sub-group of an optimizer's parameters: stepped by an optimizer of its own, on tensors that lie in a block."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepnvme.memory.alignment import padded

from .block_layout import CACHE_LINE, BlockLayout, BlockSection, lay_out

if TYPE_CHECKING:
    import torch

    from deepnvme.memory.pool import Lease

    from .partition import ParamSlice

NOT_OPTIONS = ("params", "param_names")
"""Keys of a group that say what it is of."""
MASTER = "master_weight"
"""Key, beside those of the optimizer's state, of the weights in full precision."""

Gradients = Callable[[Sequence[int]], Sequence["torch.Tensor | None"]]
"""Of the pieces with these indices; valid until others are asked for."""
Held = list[tuple[int, str, "torch.Tensor"]]
"""(piece, key, tensor): what a block is to hold."""


class SubGroup:
    """The tensors of ``pieces`` that an optimizer keeps: large ones in a block that is here only while it is needed, the
    others in memory."""

    def __init__(
        self,
        index: int,
        pieces: Sequence[ParamSlice],
        has_master: Callable[[ParamSlice], bool],
        make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        portion: int | None = None,
    ) -> None:
        """``portion``: elements with master weights that are stepped at a time, or one piece that has more; None for all at
        once. Their gradients are in float32 meanwhile."""
        self.index = index
        self.pieces = tuple(pieces)
        self.masters = tuple(has_master(piece) for piece in pieces)
        self._portions = self._cut(portion)
        self.layout: BlockLayout | None = None
        self.small: list[dict[str, Any]] = [{} for _ in pieces]
        self.current: int | None = None
        """Which of its blocks on the drive is the last whole step's; None if none is: before the first, or when it stays in
        memory."""
        self.in_memory: bool | None = None
        """Whether its block is to stay there; None until that is decided."""
        self.resident: Lease | None = None
        """Its block, where it does."""
        self.stale: set[int] = set()
        """Pieces whose parameter was changed by others: their master weight is to follow."""
        self._make_optimizer = make_optimizer
        self._optimizer: torch.optim.Optimizer | None = None
        self._stand_ins: list[torch.nn.Parameter] = []
        self._pushed: dict[int, dict[str, Any]] = {}

    @property
    def numel(self) -> int:
        """Elements."""
        return sum(piece.numel for piece in self.pieces)

    @property
    def full_gradient_bytes(self) -> int:
        """Of the float32 gradients that there are at a time."""
        return max(sum(padded_gradient(self.pieces[each]) for each in part if self.masters[each]) for part in self._portions)

    def lay_out(self, held: Held) -> BlockLayout:
        """Give all that is held its place in the block, from now on."""
        cut = {index for index, piece in enumerate(self.pieces) if not piece.whole}  # to be mapped as one with the others
        self.layout = lay_out(held, cut)
        return self.layout

    def pull(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take over what the optimizer has changed in its groups: some count steps there."""
        for (group, pushed), own in zip(self._pushed.items(), self._groups(), strict=True):
            for key, value in own.items():
                if key not in NOT_OPTIONS and not (key in pushed and _same(pushed[key], value)):
                    groups[group][key] = pushed[key] = value

    def sections(self, piece: int) -> Iterator[BlockSection]:
        """Of one piece."""
        return (section for section in (self.layout.sections if self.layout else ()) if section.piece == piece)

    def image(self) -> BlockLayout:
        """For copies of the parameters that the block alone could not bring back."""
        return lay_out(
            [
                (index, "image", piece.of(piece.param))
                for index, piece in enumerate(self.pieces)
                if not self.masters[index] or self.current is None or index in self.stale
            ]
        )

    def step(self, block: torch.Tensor | None, gradients: Gradients, groups: Sequence[dict[str, Any]]) -> Held | None:
        """Step the parameters, and what of their state lies in ``block``, in place.

        None if ``block`` holds it all then; otherwise what a block has to hold from now on: the first time, and when the
        optimizer's state has changed its form. Pieces without a gradient stay as they are.
        """
        views = self._views(block)
        try:
            optimizer = self._bind(views, groups)
            for portion in self._portions:
                self._step_portion(optimizer, portion, gradients(portion))
            held = self._settle(block, self._held(block, optimizer))
            self.stale.clear()
            return held
        finally:
            self._unbind()

    def _cut(self, portion: int | None) -> list[list[int]]:
        portions: list[list[int]] = [[]]
        numel = 0
        for index, piece in enumerate(self.pieces):
            more = piece.numel if self.masters[index] else 0
            if portion is not None and portions[-1] and numel + more > portion:
                portions.append([])
                numel = 0
            portions[-1].append(index)
            numel += more
        return portions

    def _step_portion(
        self, optimizer: torch.optim.Optimizer, portion: Sequence[int], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        stepped = [index for index, gradient in zip(portion, gradients, strict=True) if gradient is not None]
        if not stepped:
            return
        for index, gradient in zip(portion, gradients, strict=True):
            self._stand_ins[index].grad = gradient
        step_without_global_hooks(optimizer)
        for index in stepped:
            stand_in, piece = self._stand_ins[index], self.pieces[index]
            stand_in.grad = None
            own = piece.of(piece.param)
            if self.masters[index]:
                own.copy_(stand_in.data)
            elif stand_in.data_ptr() != own.data_ptr():  # an optimizer that makes a new tensor of it
                state = optimizer.state.get(stand_in, {})
                for key, value in state.items():
                    if _share_memory(value, own):
                        state[key] = value.clone()  # the old one, in a state's place now
                own.copy_(stand_in.data)

    def _belongs_in_block(self, piece: int, value: Any) -> bool:
        """Whether this is kept there, of a piece's state: tensors of some size, and all that are cut like the parameter."""
        import torch

        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return False
        return value.numel() > 1 or (not self.pieces[piece].whole and value.dim() == 1)

    def remember(self) -> Callable[[], None]:
        """What undoes the changes that a step makes to what is kept in memory."""
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
        import torch

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
                elif index in self.stale:  # or only loaded again, which must not round it
                    master = views[index][MASTER]
                    master.copy_(torch.where(master.to(work.dtype) == work.to("cpu"), master, work.to("cpu", torch.float32)))
                work = views[index][MASTER]
            stand_in.data = work
        if first:
            wanted = sorted({piece.group for piece in self.pieces})
            self._optimizer = self._make_optimizer(
                [
                    {
                        **{k: v for k, v in groups[group].items() if k not in NOT_OPTIONS},
                        "params": [s for s, piece in zip(self._stand_ins, self.pieces, strict=True) if piece.group == group],
                    }
                    for group in wanted
                ]
            )
            times = {stand_in: piece.times for stand_in, piece in zip(self._stand_ins, self.pieces, strict=True)}
            for made in self._optimizer.param_groups:  # only now: torch has warned of it once
                made["params"] = [stand_in for stand_in in made["params"] for _ in range(times[stand_in])]
            self._pushed = {group: {} for group in wanted}
        optimizer = self._optimizer
        assert optimizer is not None
        for (group, pushed), own in zip(self._pushed.items(), optimizer.param_groups, strict=True):
            for key, value in groups[group].items():
                if key not in NOT_OPTIONS and not (key in pushed and _same(pushed[key], value)):
                    own[key] = pushed[key] = value
        for index, stand_in in enumerate(self._stand_ins):
            state = {**self.small[index], **{key: view for key, view in views[index].items() if key != MASTER}}
            if state:
                optimizer.state[stand_in] = state
        return optimizer

    def _held(self, block: torch.Tensor | None, optimizer: torch.optim.Optimizer) -> Held:
        held: Held = []
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

    def _settle(self, block: torch.Tensor | None, held: Held) -> Held | None:
        if block is None or self.layout is None or not _fits(self.layout, held):
            return held
        moved = []  # by an optimizer that makes new tensors rather than change its own, or has them change places
        for section, (_, _, tensor) in zip(self.layout.sections, held, strict=True):
            view = section.of(block)
            if (view.data_ptr(), view.stride()) != (tensor.data_ptr(), tensor.stride()):
                moved.append((view, tensor.clone() if _share_memory(tensor, block) else tensor))
        for view, tensor in moved:
            view.copy_(tensor)
        return None

    def _unbind(self) -> None:
        import torch

        for stand_in in self._stand_ins:
            stand_in.grad = None
            stand_in.data = torch.empty(0, device="cpu")
        if self._optimizer is not None:
            self._optimizer.state.clear()


def step_without_global_hooks(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()``, but for torch's hooks of all optimizers' steps: those are for the step of the whole, of which this is
    a part. Hooks that the optimizer has given itself are called."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):  # torch.optim.Optimizer wraps the method of each class, and calls all hooks around it
        step = step.__wrapped__  # type: ignore[attr-defined]
    for before in optimizer._optimizer_step_pre_hooks.values():
        before(optimizer, (), {})
    step(optimizer)
    for after in optimizer._optimizer_step_post_hooks.values():
        after(optimizer, (), {})


def padded_gradient(piece: ParamSlice) -> int:
    """Bytes of its float32 gradient, beside others: whole cache lines."""
    return padded(4 * piece.numel, CACHE_LINE)


def _fits(layout: BlockLayout, held: Held) -> bool:
    return len(layout.sections) == len(held) and all(
        (section.piece, section.key, section.dtype, section.shape) == (piece, key, tensor.dtype, tuple(tensor.shape))
        for section, (piece, key, tensor) in zip(layout.sections, held, strict=True)
    )


def _share_memory(a: Any, b: torch.Tensor) -> bool:
    import torch

    if not isinstance(a, torch.Tensor) or a.layout != torch.strided:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """A state that stays as it is when the optimizer goes on."""
    import torch

    return {key: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value) for key, value in values.items()}


def _same(a: Any, b: Any) -> bool:
    import torch

    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b  # its content is the optimizer's to read
    return bool(a == b)
