"""Exchanges between the processes that train one model: shards, gradients, norms, and whether a step is made or has failed.

Each exchange begins with a meeting, in which every rank sends what it is about to do, or that it has failed.

Invariants:

1. Every rank has sent as many messages as the others. So an exchange of data, which begins with a meeting, is the same on all.
2. A rank that has failed sends FAILURE in place of its next message, once, and all others raise RankFailed: none waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn

from deepnvme._interrupts import defer_interrupts
from deepnvme.memory.alignment import padded
from deepnvme.offload.activations.saved_tensor import is_distributed, may_share_memory
from deepnvme.states.params import local_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


class RankFailed(RuntimeError):
    """Raised if another process has failed in a call that all make together. If the call was a step, no process has made it."""


class Purpose(IntEnum):
    """Tag sent with each exchange between ranks. All must send the same, so ranks that make different calls are noticed."""

    FAILURE = 0
    """The rank has failed. It sends this in place of its next message."""
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
    MEET = 6
    """The ranks begin or end a call."""
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
        """Rank of this process in the group."""
        # Memory that is not torch's: a rank that has none left can still say so.
        self._message = array("i", bytes(4 * (2 + max(most_parameters, 1))))
        self._messages = array("i", bytes(4 * self.count * len(self._message)))
        self._failure_is_known = False

    @property
    def several(self) -> bool:
        """Whether the group has more than one process."""
        return self.group is not None

    def _synchronize(self, for_what: Purpose, number: int = 0, values: Sequence[int] = ()) -> list[list[int]]:
        """Send a message, and return the values of all ranks' messages, one row for each rank. Blocks until all have sent.

        Allocate the memory for the data that is exchanged next before this call: after it, the other ranks wait for the data.

        Raises:
            RankFailed: If another rank has failed.
            RuntimeError: If a rank is about to exchange something else, or its process has ended.
        """
        messages = self._exchange_messages(for_what, number, values)
        if any(each[:2] != messages[0][:2] for each in messages):
            self._failure_is_known = True  # to all ranks, which have the same messages
            others = ", ".join(f"rank {rank}: {Purpose(each[0]).name} {each[1]}" for rank, each in enumerate(messages))
            raise RuntimeError(
                f"the ranks do not use the same blocks in the same order ({others}): each has to run the same modules, also to"
                " evaluate, and to call step(), gradient_norm(), undo_step(), state_dict(), save(), load_state_dict() and"
                " close(restore=True) when the others do"
            )
        return [each[2 : 2 + len(values)] for each in messages]

    def _exchange_messages(self, for_what: Purpose, number: int = 0, values: Sequence[int] = ()) -> list[list[int]]:
        length = len(self._message)
        padding = [0] * (length - 2 - len(values))
        self._message[:] = array("i", [for_what, number, *values, *padding])
        with defer_interrupts():
            received, sent = (torch.frombuffer(each, dtype=torch.int32) for each in (self._messages, self._message))
            self._all_gather(received, sent)
            found = self._messages.tolist()
            messages = [found[begin : begin + length] for begin in range(0, len(found), length)]
            failures = [each[0] == Purpose.FAILURE for each in messages]
            if any(failures):
                self._failure_is_known = True
        if any(failures) and for_what is not Purpose.FAILURE:
            raise RankFailed(f"rank {failures.index(True)} failed, and its own error says why")
        return messages

    def check_alike(self, names: Iterable[str], what: str) -> None:
        """Raise ValueError, on all ranks, if they do not give the same names. Blocks; raises like every exchange.

        Args:
            names: This rank's names. A checksum of them is exchanged.
            what: Says in the error what the names are.
        """
        if self.several:
            numbers = self._synchronize(Purpose.COMPARE, values=[crc32("\n".join(names).encode()) >> 1])
            if any(each != numbers[0] for each in numbers):
                self._failure_is_known = True
                raise ValueError(f"{what} are not the same on all ranks")

    def _all_gather(self, found: torch.Tensor, given: torch.Tensor) -> None:
        # The function has another name since torch 2.13, which warns of the older one.
        gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(found, given, group=self.group)

    def expect_new_failures(self) -> None:
        """From now on, report a failure of this rank to the others, even if a failure was reported before."""
        self._failure_is_known = False

    def report_failure(self) -> None:
        """Tell the others that this rank has failed, unless a failure was reported already. Blocks until all send a message.

        Has no effect if a rank's process has ended: the others then fail by themselves.
        """
        if self.several and not self._failure_is_known:
            with contextlib.suppress(RuntimeError):
                self._exchange_messages(Purpose.FAILURE)

    @contextlib.contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Report an exception in this context to the others, even if a failure was reported before."""
        self.expect_new_failures()
        try:
            yield
        except GeneratorExit:  # an interrupt came before the context was entered
            raise
        except BaseException:
            self.report_failure()
            raise

    @contextlib.contextmanager
    def calling_together(self) -> Iterator[None]:
        """Wait until all ranks make the same call, and report an exception in this context to the others."""
        with self.reporting_failures():
            self.meet()
            yield

    def agree_to_commit(self, step: int) -> None:
        """Wait until all ranks have reached the commit of this step. Raises like every exchange.

        After this call no rank waits for another one, so failures are not reported until :meth:`expect_new_failures`.
        """
        if self.several:
            with defer_interrupts():  # between message and data: the others are in it as well
                self._synchronize(Purpose.COMMIT, step)
                self._failure_is_known = True

    def meet(self) -> None:
        """Wait for all ranks. Raises like every exchange."""
        if self.several:
            self._synchronize(Purpose.MEET)


class TrainingRanks(RankMeetings):
    """The processes of a group, each with other batches and a shard of each parameter: some of its rows.

    A shard is what ``torch.chunk`` gives: if the first dimension has ``d`` rows, each rank has ``ceil(d / count)`` of them, and
    the last ranks have fewer, or none. These are the shards of a DTensor with the placement ``Shard(0)``.

    Each exchange begins with a meeting, see :class:`RankMeetings`, and may raise RankFailed or RuntimeError from it.
    """

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        """The group as a DeviceMesh, for DTensors."""
        from torch.distributed.device_mesh import DeviceMesh

        assert self.group is not None
        return DeviceMesh.from_group(self.group, "cpu")

    # -- shards

    def rows_of(self, param: torch.Tensor, rank: int | None = None) -> tuple[int, int]:
        """Return the rows of a parameter that a rank has, as (first row, one past the last). ``rank`` None is this rank."""
        rows = param.shape[0]
        each = -(-rows // self.count)
        rank = self.rank if rank is None else rank
        return min(rank * each, rows), min((rank + 1) * each, rows)

    def padded_shape(self, param: torch.Tensor) -> tuple[int, ...]:
        """Return the parameter's shape with its rows padded, so that the shards of all ranks have as many rows as the first."""
        return (self.count * -(-param.shape[0] // self.count), *param.shape[1:])

    def shard_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a whole tensor, as a view."""
        begin, end = self.rows_of(value)
        return value[begin:end]

    def local_shard(self, value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a tensor with the shape of ``param``. A tensor of another shape is returned whole.

        Raises ValueError for a DTensor that is not sharded like the parameters here.
        """
        if is_distributed(value):
            return self.rows_in(value) if value.shape == param.shape else local_of(value)
        return self.shard_of(value) if value.shape == param.shape else value

    def rows_in(self, value: DTensor, name: str = "") -> torch.Tensor:
        """Return this rank's rows of a DTensor: its local tensor.

        Raises ValueError for another placement than ``Shard(0)``, or a mesh of other processes.
        """
        from torch.distributed.tensor import Shard

        processes = [dist.get_rank()] if self.group is None else dist.get_process_group_ranks(self.group)
        mesh, placements = value.device_mesh, value.placements
        by_rows = len(placements) == 1 and type(placements[0]) is Shard and placements[0].dim == 0
        if (by_rows or self.count == 1) and mesh.mesh.flatten().tolist() == processes:
            return local_of(value)
        placed = ", ".join(map(str, placements))
        raise ValueError(
            f"{name or 'a value'} is a DTensor with the placement ({placed}) over the processes {mesh.mesh.tolist()}: it has to"
            f" be Shard(0) over the process_group, {processes}; or give a whole tensor, as its full_tensor(), or a file"
        )

    def whole_of(self, value: torch.Tensor, number: int) -> torch.Tensor:
        """Return the whole tensor of a DTensor, gathered from all ranks. A plain tensor is returned as it is.

        Either all ranks give a DTensor, or none. Blocks; raises RankFailed, RuntimeError.

        Args:
            value: The DTensor or tensor.
            number: Number of the block that it belongs to.

        Raises:
            ValueError: If the DTensor is not sharded like the parameters here.
        """
        if not is_distributed(value):
            return value
        shard = self.rows_in(value).cpu().contiguous()
        if not self.several:
            return shard
        place = shard.new_empty(self.padded_shape(value))
        self.gather(number, [shard], [place], to_train=False)
        return place[: len(value)]

    def as_dtensor(self, shard: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        """Return a DTensor with this rank's shard of a parameter, or of a state with the parameter's shape."""
        from torch.distributed.tensor import DTensor, Shard

        shape = param.shape
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(shard, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    # -- exchanges

    def broadcast_from_first(self, values: Sequence[torch.Tensor], number: int = 0) -> None:
        """Overwrite tensors on all ranks with the values of the first rank. Blocks; raises RankFailed, RuntimeError.

        Args:
            values: Dense tensors, with the same shapes and dtypes on all ranks.
            number: Number of the block that they belong to.
        """
        if not self.several:
            return
        with defer_interrupts():  # between message and data: the others are in it as well
            sent = [value.detach().contiguous() for value in values]
            self._synchronize(Purpose.BROADCAST, number)
            assert self.group is not None
            first = dist.get_global_rank(self.group, 0)
            for value, given in zip(values, sent, strict=True):
                dist.broadcast(_bytes(given), first, group=self.group)
                value.detach().copy_(given)

    def gather(self, number: int, shards: Sequence[torch.Tensor], places: Sequence[torch.Tensor], to_train: bool) -> None:
        """Gather whole parameters from the shards of all ranks. Blocks; raises RankFailed, RuntimeError.

        Args:
            number: Number of the block.
            shards: This rank's shards.
            places: For each shard, the tensor to gather into, of the shape :meth:`padded_shape`.
            to_train: Whether the parameters are gathered for a forward or backward of a step.
        """
        with defer_interrupts():  # between message and data: the others are in it as well
            short = [place.nbytes for shard, place in zip(shards, places, strict=True) if self._is_short(shard, place)]
            padding = torch.empty(max(short, default=0) // self.count, dtype=torch.uint8, device="cpu")
            self._synchronize(Purpose.GATHER if to_train else Purpose.GATHER_TO_READ, number)
            for shard, place in zip(shards, places, strict=True):
                self._gather(shard, place, padding)

    def _is_short(self, shard: torch.Tensor, place: torch.Tensor) -> bool:
        """Return whether this rank's shard has fewer rows than the first rank's."""
        return len(shard) < len(place) // self.count

    def _gather(self, shard: torch.Tensor, place: torch.Tensor, padding: torch.Tensor) -> None:
        """Gather one tensor from its shards. ``padding`` is memory for a short shard padded to the first rank's size."""
        if not place.numel():
            return
        if self._is_short(shard, place):
            with_padding = padding[: place.nbytes // self.count].view(place.dtype).view(-1, *place.shape[1:])
            with_padding[len(shard) :].zero_()
            with_padding[: len(shard)].copy_(shard)
            shard = with_padding
        self._all_gather(_bytes(place), _bytes(shard))

    def average_gradients(self, number: int, params: Sequence[nn.Parameter], whole: bool) -> list[torch.Tensor | None]:
        """Average the gradients of all ranks, and set ``param.grad`` to None. Blocks; raises RankFailed, RuntimeError.

        Gradients are divided by the number of ranks and summed in the order of the ranks, in their own dtype: with 2, 4 or 8
        ranks the averages have the bits of as many micro-batches in one process. A gradient that a rank lacks counts as zero.

        Args:
            number: Number of the block.
            params: The block's parameters that require gradients.
            whole: Whether to return whole gradients, and not only this rank's rows of them.

        Returns:
            For each parameter the averaged gradient; None if no rank has one.

        Raises:
            TypeError: For a sparse gradient.
        """
        with defer_interrupts():  # between message and data: the others are in it as well
            # Autograd may have given a gradient memory that the gradient of an activation is in as well.
            shared = [param.grad is not None and may_share_memory(param.grad) for param in params]
            here = [param.grad is not None for param in params]
            gradients: list[torch.Tensor | None] = [
                torch.zeros(param.shape, dtype=param.dtype, device="cpu") if param.grad is None else _dense(param.grad.detach())
                for param in params
            ]
            averages = [
                self._place_of_average(each, whole, also_elsewhere)
                for each, also_elsewhere in zip(gradients, shared, strict=True)
                if each is not None
            ]
            memory = self._memory_to_average(gradients, whole)
            anywhere = [any(of_ranks) for of_ranks in zip(*self._synchronize(Purpose.AVERAGE, number, here), strict=True)]
            for index, (param, average) in enumerate(zip(params, averages, strict=True)):
                gradient = gradients[index]
                param.grad = gradients[index] = None  # each is freed once it is averaged
                if gradient is not None and anywhere[index]:
                    self._average(gradient, average, memory, whole)
            return [average if has else None for average, has in zip(averages, anywhere, strict=True)]

    def _place_of_average(self, gradient: torch.Tensor, whole: bool, shared: bool) -> torch.Tensor:
        if whole:
            return torch.empty_like(gradient) if shared else gradient
        return torch.empty_like(self.shard_of(_rows(gradient)))

    def _memory_to_average(self, gradients: Sequence[torch.Tensor | None], whole: bool) -> torch.Tensor:
        """Return memory to average any one of these gradients: for the parts received, and to gather a whole average."""
        most = 0
        for rows in (_rows(each) for each in gradients if each is not None):
            received = self.count * padded(self.shard_of(rows).nbytes)
            gathered = (self.count + 1) * padded(self._bytes_of_first(rows)) if whole else 0
            most = max(most, received + gathered)
        return torch.empty(most, dtype=torch.uint8, device="cpu")

    def _bytes_of_first(self, rows: torch.Tensor) -> int:
        """Return the bytes of the first rank's shard, which is the largest."""
        return math.prod(self.padded_shape(rows)) * rows.element_size() // self.count

    def _average(self, gradient: torch.Tensor, average: torch.Tensor, memory: torch.Tensor, whole: bool) -> None:
        """Average one gradient. Allocates no memory, because an error would leave the other ranks waiting.

        Args:
            gradient: This rank's gradient.
            average: The tensor for the average: all of it, or this rank's rows.
            memory: Memory from :meth:`_memory_to_average`.
            whole: Whether ``average`` is for all rows.
        """
        rows = _rows(gradient)
        own = self.shard_of(rows)
        if not rows.numel():
            return
        sizes = [end - begin for begin, end in (self.rows_of(rows, rank) for rank in range(self.count))]
        received, rest = memory[: self.count * own.nbytes], memory[self.count * padded(own.nbytes) :]
        sent = _bytes_of_rows(rows)
        dist.all_to_all_single(
            received.view(self.count * len(own), sent.shape[1]), sent, [len(own)] * self.count, sizes, group=self.group
        )
        parts = received.view(rows.dtype).view(self.count, *own.shape)
        total = parts[0].div_(self.count)
        for part in parts[1:]:
            total.add_(part.div_(self.count))
        if not whole:
            average.copy_(total)
            return
        first = self._bytes_of_first(rows)
        place = rest[: self.count * first].view(rows.dtype).view(self.padded_shape(rows))
        self._gather(total, place, rest[self.count * padded(first) :])
        average.view(rows.shape).copy_(place[: len(rows)])

    def norms_of_shards(self, norms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the 2-norms of whole tensors, given the norms of this rank's shards. Blocks; raises RankFailed, RuntimeError."""
        if not self.several or not norms:
            return list(norms)
        with defer_interrupts():  # between message and data: the others are in it as well
            squares = torch.stack([norm.double().square() for norm in norms])
            found = squares.new_empty(self.count * len(squares))
            self._synchronize(Purpose.NORM, len(norms))
            self._all_gather(found, squares)
            total, *others = found.view(self.count, len(squares))
            for each in others:
                total.add_(each)
            return [norm.to(before.dtype) for norm, before in zip(total.sqrt(), norms, strict=True)]


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a contiguous tensor. Raises TypeError for a sparse one."""
    if gradient.layout is not torch.strided:
        raise TypeError(f"a gradient of layout {gradient.layout} cannot be summed over several processes")
    return gradient.contiguous()


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a view with at least one dimension."""
    return tensor if tensor.dim() else tensor.view(1)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as uint8, since some dtypes cannot be communicated."""
    return tensor.reshape(-1).view(torch.uint8)


def _bytes_of_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous, non-empty tensor's memory as uint8 of two dimensions: a row of bytes for each row."""
    return _bytes(tensor).view(len(tensor), -1)
