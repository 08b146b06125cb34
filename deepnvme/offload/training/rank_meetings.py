"""Meetings of the processes that train one model: each sends what it is about to do, or that it has failed.

Invariants:

1. Every rank has sent as many messages as the others. So an exchange of data, which begins with a meeting, is the same on all.
2. A rank that has failed sends FAILURE in place of its next message, once, and all others raise RankFailed: none waits for it.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum

import torch
import torch.distributed as dist

from deepnvme._interrupts import defer_interrupts


class RankFailed(RuntimeError):
    """Raised if another process has failed in what all do together: a step, which none has made then, or another call."""


class Purpose(IntEnum):
    """What an exchange is for. All ranks have to send the same."""

    FAILURE = 0
    """The rank has failed. It sends this in place of what the others send."""
    BROADCAST = 1
    """Every rank gets the first rank's values."""
    GATHER = 2
    """Every rank gets whole parameters, to train."""
    AVERAGE = 3
    """Gradients are averaged."""
    NORM = 4
    """Norms of whole gradients are computed from those of shards."""
    COMMIT = 5
    """All ranks have reached the end of a step."""
    AGREE = 6
    """The ranks decide what to do next, or begin a call."""
    GATHER_TO_READ = 7
    """Every rank gets whole parameters, and does not train."""
    COMPARE = 8
    """The ranks compare what each was given, in the form of a number."""


class RankMeetings:
    """Sends and receives the messages of the ranks of a group.

    Args:
        group: The group, which can communicate tensors on the CPU; None for this process alone.
        most_parameters: Most parameters of one block. A message of averaging says for each whether this rank has a gradient, and
            all messages have the same size.
    """

    def __init__(self, group: dist.ProcessGroup | None, most_parameters: int = 0) -> None:
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None
        """The group; None if there is no other process."""
        self.count = 1 if self.group is None else dist.get_world_size(self.group)
        """Number of ranks."""
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        """Of this process, in the group."""
        self.seconds = 0.0
        """Time in exchanges so far, waiting for other ranks among it."""
        # Memory that is not torch's: a rank that has none left can still say so.
        self._message = array("i", bytes(4 * (3 + most_parameters)))
        self._messages = array("i", bytes(4 * self.count * len(self._message)))
        self._failure_is_known = False

    @property
    def several(self) -> bool:
        """Whether the group has more than one process."""
        return self.group is not None

    def _synchronize(self, for_what: Purpose, number: int = 0, values: Sequence[int] = ()) -> list[list[int]]:
        """Send a message, and return the values in those of all ranks, one row for each. Blocks until all have sent theirs.

        Memory for the data that follows has to be there before: the others wait for that data.

        Raises:
            RankFailed: If another rank has failed.
            RuntimeError: If a rank is about to exchange something else, or is gone.
        """
        messages = self._exchange_messages(for_what, number, failed=False, values=values)
        if any(each[:2] != messages[0][:2] for each in messages):
            self._failure_is_known = True  # to all ranks, which have the same messages
            others = ", ".join(f"rank {rank}: {Purpose(each[0]).name} {each[1]}" for rank, each in enumerate(messages))
            raise RuntimeError(
                f"the ranks do not use the same blocks in the same order ({others}): each has to run the same modules, also to"
                " evaluate, and to call step(), gradient_norm(), undo_step(), state_dict(), save(), load_state_dict() and"
                " close(restore=True) when the others do"
            )
        return [each[3 : 3 + len(values)] for each in messages]

    def _exchange_messages(self, for_what: Purpose, number: int, failed: bool, values: Sequence[int] = ()) -> list[list[int]]:
        length = len(self._message)
        padding = [0] * (length - 3 - len(values))
        self._message[:] = array("i", [for_what, number, failed, *values, *padding])
        with defer_interrupts():
            received, sent = (torch.frombuffer(each, dtype=torch.int32) for each in (self._messages, self._message))
            self._all_gather(received, sent)
            found = self._messages.tolist()
            messages = [found[begin : begin + length] for begin in range(0, len(found), length)]
            failures = [bool(each[2]) for each in messages]
            if any(failures):
                self._failure_is_known = True
        if any(failures) and not failed:
            raise RankFailed(f"rank {failures.index(True)} failed, and its own error says why")
        return messages

    def check_alike(self, number: int, what: str) -> None:
        """Raise ValueError, on all ranks, if they do not give the same number. Blocks; raises like every exchange.

        Args:
            number: At most 31 bits that say what the rank has.
            what: Names that in the error.
        """
        if self.several:
            numbers = self._synchronize(Purpose.COMPARE, values=[number])
            if any(each != numbers[0] for each in numbers):
                self._failure_is_known = True
                raise ValueError(f"{what} are not the same on all ranks")

    def _all_gather(self, found: torch.Tensor, given: torch.Tensor) -> None:
        # The function has another name since torch 2.13, which warns of the older one.
        gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(found, given, group=self.group)

    def expect_new_failures(self) -> None:
        """From now on, treat an error of this rank as one that the others have not heard of."""
        self._failure_is_known = False

    def report_failure(self) -> None:
        """Tell the others that this rank has failed, unless they know of a failure. Blocks until all send a message.

        Has no effect if a rank is gone: the others then fail by themselves.
        """
        if self.several and not self._failure_is_known:
            with contextlib.suppress(RuntimeError):
                self._exchange_messages(Purpose.FAILURE, 0, failed=True)

    @contextlib.contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Tell the others of an exception in this context."""
        try:
            yield
        except GeneratorExit:  # an interrupt came before the context was entered
            raise
        except BaseException:
            self.report_failure()
            raise

    @contextlib.contextmanager
    def reporting_new_failures(self) -> Iterator[None]:
        """Tell the others of an exception in this context, also if they were told of one before."""
        self.expect_new_failures()
        with self.reporting_failures():
            yield

    @contextlib.contextmanager
    def calling_together(self) -> Iterator[None]:
        """Wait until all ranks make the same call, and tell the others of an exception in this context."""
        with self.reporting_new_failures():
            self.all_agree(True)
            yield

    def agree_to_commit(self, step: int) -> None:
        """Wait until all ranks have reached the commit of this step. Raises like every exchange.

        No rank waits for another one in what follows, so failures are not reported until :meth:`expect_new_failures`.
        """
        if self.several:
            with self._exchanging():
                self._synchronize(Purpose.COMMIT, step)
                self._failure_is_known = True

    def all_agree(self, vote: bool) -> bool:
        """Return whether all ranks say yes. Raises like every exchange."""
        return all(each for (each,) in self._synchronize(Purpose.AGREE, values=[vote])) if self.several else vote

    @contextlib.contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Measure an exchange, message and data, and have no interrupt come between them: the others are in it as well."""
        begun = time.perf_counter()
        try:
            with defer_interrupts():
                yield
        finally:
            self.seconds += time.perf_counter() - begun
