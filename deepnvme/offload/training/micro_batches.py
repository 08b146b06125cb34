"""The micro-batches of a step: their arguments, and running them side by side, so that a block is read once for all of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .blocks.parameter_block import ParameterBlock
from .model import TrainedModel
from .turns import Turn, take_turns


class MicroBatch(NamedTuple):
    """Arguments for the model's forward on one micro-batch, and its share of the batch."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    share: float
    """Its rows over those of the whole batch."""


def micro_batches_of(args: Sequence[Any], kwargs: Mapping[str, Any], count: int) -> list[MicroBatch]:
    """Divide the tensors among the arguments of a model along their first dimension. Raises ValueError if that cannot be done."""
    if count == 1:
        return [MicroBatch(args, kwargs, 1)]
    rows = {each.shape[0] for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.dim()}
    if len(rows) != 1 or min(rows) < count:
        raise ValueError(f"the first dimensions of the tensors must be equal, and at least {count}: got {sorted(rows)}")
    (row_count,) = rows
    found = []
    begin = 0
    for number in range(count):
        end = row_count * (number + 1) // count

        def cut(value: Any, begin: int = begin, end: int = end) -> Any:
            return value[begin:end] if isinstance(value, torch.Tensor) and value.dim() else value

        share = (end - begin) / row_count
        found.append(MicroBatch([cut(each) for each in args], {name: cut(each) for name, each in kwargs.items()}, share))
        begin = end
    return found


def draw_seeds(count: int) -> list[int]:
    """Draw the seed of each micro-batch from torch's default generator.

    So micro-batches draw the same random numbers whether they run one after the other or side by side.
    """
    return torch.randint(1 << 62, (count,), device="cpu").tolist()


@contextlib.contextmanager
def restoring_random_state() -> Iterator[None]:
    """Give torch's default generator the state back that it had at the beginning of this context."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


class SideBySide:
    """Runs the micro-batches of a step so that each block is used by all of them before the next one is: vertical accumulation.

    Each runs in a thread, which waits for its turn wherever the model or its backward is about to use another block. So gradients
    are summed in the order in which they would be one after the other.

    Args:
        trained: The blocks.
        saved_tensors: Returns a context under which a forward and its backward run.
    """

    def __init__(self, trained: TrainedModel, saved_tensors: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        self._trained, self._saved_tensors = trained, saved_tensors
        self._own = threading.local()

    def run(self, forwards: Sequence[Callable[[], torch.Tensor]], seeds: Sequence[int]) -> list[torch.Tensor]:
        """Run the forward, which returns the loss, and the backward of each micro-batch. Blocks.

        Args:
            forwards: One for each micro-batch.
            seeds: Of the random numbers of each micro-batch.

        Returns:
            The losses, detached.

        Raises:
            OSError: From the drive.
        """
        losses: list[torch.Tensor] = [torch.empty(0)] * len(forwards)

        def function(index: int) -> Callable[[Turn], None]:
            def run(turn: Turn) -> None:
                self._own.place = _Place(turn)
                with self._saved_tensors():
                    loss = forwards[index]()
                    losses[index] = loss.detach()
                    loss.backward()  # type: ignore[no-untyped-call]

            return run

        turns = [Turn(function(index), seed) for index, seed in enumerate(seeds)]
        with (
            restoring_random_state(),
            self._trained.running(len(forwards), of=len(forwards)),
            self._trained.uses.calling_before_use(self._before_use),
        ):
            take_turns(turns)
        return losses

    def _before_use(self, block: ParameterBlock, in_backward: bool) -> None:
        """Let the other micro-batches use their blocks first, before this one goes on to another."""
        place: _Place = self._own.place
        if place.goes_on_to(block, in_backward):
            place.turn.pause()


class _Place:
    """How far a micro-batch has come."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self._last_in_forward: ParameterBlock | None = None
        self._in_backward: set[ParameterBlock] = set()

    def goes_on_to(self, block: ParameterBlock, in_backward: bool) -> bool:
        """Note a use. Returns whether it is of another block.

        The backward begins with the block that the forward has ended with, so that what it has saved need not be kept.
        """
        if not in_backward:
            self._last_in_forward = block
            return True
        if block in self._in_backward:
            return False
        first = not self._in_backward
        self._in_backward.add(block)
        return not (first and block is self._last_in_forward)
