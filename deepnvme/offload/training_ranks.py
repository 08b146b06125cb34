"""Exchanges between the processes that train one model: shards, gradients, norms, and whether a step is made or has failed."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from deepnvme._interrupts import defer_interrupts

from .forward_random_numbers import DrawsDiffer
from .params import local_of
from .saved_tensor import is_distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


class RankFailed(RuntimeError):
    """Raised if another process could not make a step, which none has made then."""


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


class _Failure(IntEnum):
    """Whether the sender of a message has failed."""

    NONE = 0
    FAILED = 1
    DRAWS_DIFFER = 2


class TrainingRanks:
    """The processes of a group, each with other batches and a shard of each parameter: some of its rows.

    A shard is what ``torch.chunk`` gives: of ``d`` rows, the first dimension, each rank has ``ceil(d / count)``, and the last
    ranks have fewer, or none. These are the shards of a DTensor with the placement ``Shard(0)``.

    Before each exchange every rank sends one message: what it is about to exchange, and of which block. A rank that has failed
    sends FAILURE instead, once, and all others raise RankFailed, so that none waits for it. Invariant: every rank has sent as
    many messages.

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
        self._message = torch.zeros(3 + most_parameters, dtype=torch.int32, device="cpu")
        self._failure_is_known = False
        self._failed_rank: int | None = None

    @property
    def several(self) -> bool:
        """Whether there are other processes."""
        return self.group is not None

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        """The group as a mesh, for DTensors."""
        from torch.distributed.device_mesh import DeviceMesh

        assert self.group is not None
        return DeviceMesh.from_group(self.group, "cpu")

    # -- shards

    def rows_of(self, param: torch.Tensor, rank: int | None = None) -> tuple[int, int]:
        """Return which rows a rank has, this one if none is given: the first, and one past the last."""
        rows = param.shape[0]
        each = -(-rows // self.count)
        rank = self.rank if rank is None else rank
        return min(rank * each, rows), min((rank + 1) * each, rows)

    def padded_shape(self, param: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of the shards of all ranks together, if each had as many rows as the first."""
        return (self.count * -(-param.shape[0] // self.count), *param.shape[1:])

    def shard_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows, as a view."""
        begin, end = self.rows_of(value)
        return value[begin:end]

    def local_shard(self, value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a value of a parameter, or of a state of its shape. Others are returned as they are.

        Raises ValueError for a DTensor that is not sharded as the parameters here are.
        """
        if is_distributed(value):
            return self.rows_in(value) if value.shape == param.shape else local_of(value)
        return self.shard_of(value) if value.shape == param.shape else value

    def rows_in(self, value: DTensor, name: str = "") -> torch.Tensor:
        """Return this rank's rows, which are what it has of a DTensor.

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
        """Return a whole tensor, of which a DTensor has the rows of each rank. Others are returned as they are.

        All ranks have to give a DTensor, or none. Blocks; raises like every exchange.

        Args:
            value: The tensor.
            number: Of the block that it belongs to.

        Raises:
            ValueError: If it is not sharded as parameters here are.
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
        """Return a shard of a parameter, or of a state of its shape, as a DTensor."""
        from torch.distributed.tensor import DTensor, Shard

        shape = param.shape
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(shard, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    # -- meetings

    def _synchronize(self, for_what: Purpose, number: int = 0, flags: Sequence[bool] = ()) -> torch.Tensor:
        """Send a message, and return the flags of all ranks, one row for each. Blocks until all have sent theirs.

        Raises:
            RankFailed: If another rank has failed.
            DrawsDiffer: If its forward drew another number of random numbers than expected.
            RuntimeError: If a rank is about to exchange something else, or is gone.
        """
        messages = self._exchange_messages(for_what, number, _Failure.NONE, flags)
        if not bool((messages[:, :2] == messages[0, :2]).all()):
            self._failure_is_known = True  # to all ranks, which have the same messages
            others = ", ".join(f"rank {rank}: {Purpose(each[0]).name} {each[1]}" for rank, each in enumerate(messages.tolist()))
            raise RuntimeError(
                f"the ranks do not use the same blocks in the same order ({others}): each has to run the same modules, and to"
                " call step(), state_dict(), save() and close(restore=True) when the others do"
            )
        return messages[:, 3 : 3 + len(flags)]

    def _exchange_messages(self, for_what: Purpose, number: int, failure: _Failure, flags: Sequence[bool] = ()) -> torch.Tensor:
        self._message.zero_()
        self._message[:3] = torch.tensor([for_what, number, failure], dtype=torch.int32)
        if flags:
            self._message[3 : 3 + len(flags)] = torch.tensor(flags, dtype=torch.int32)
        with defer_interrupts():
            messages = self._all_gather_rows(self._message)
            failures = messages[:, 2].tolist()
            self._failed_rank = failures.index(_Failure.FAILED) if _Failure.FAILED in failures else None
            if any(failures):
                self._failure_is_known = True
        if failure is _Failure.NONE and any(failures):
            self.raise_failure()
            raise DrawsDiffer
        return messages

    def check_alike(self, number: int, what: str) -> None:
        """Raise ValueError, on all ranks, if they do not give the same number. Blocks; raises like every exchange.

        Args:
            number: At most 31 bits that say what the rank has.
            what: Names that in the error.
        """
        if self.several:
            messages = self._exchange_messages(Purpose.AGREE, number, _Failure.NONE)
            if not bool((messages[:, :2] == messages[0, :2]).all()):
                self._failure_is_known = True
                raise ValueError(f"{what} are not the same on all ranks")

    def raise_failure(self) -> None:
        """Raise RankFailed if a rank has told in the newest exchange that it has failed."""
        if self._failed_rank is not None:
            raise RankFailed(
                f"rank {self._failed_rank} failed in this step, and its own error says why: what was begun is undone on all ranks"
            )

    def _all_gather(self, found: torch.Tensor, given: torch.Tensor) -> None:
        # The function has another name since torch 2.13, which warns of the older one.
        gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(found, given, group=self.group)

    def _all_gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """Return a matrix whose rows are the vectors that the ranks have, in the order of the ranks."""
        found = row.new_empty(self.count * len(row))
        self._all_gather(found, row)
        return found.view(self.count, len(row))

    def expect_new_failures(self) -> None:
        """From now on, treat an error of this rank as one that the others have not heard of."""
        self._failure_is_known = False

    @contextlib.contextmanager
    def expecting_new_failures(self) -> Iterator[None]:
        """Within this context, report errors of this rank again; afterwards the earlier failure counts as known."""
        self._failure_is_known = False
        try:
            yield
        finally:
            self._failure_is_known = True

    def report_failure(self, error: BaseException) -> None:
        """Tell the others that this rank has failed, unless they know of a failure. Blocks until all send a message.

        Has no effect if a rank is gone: the others then fail by themselves.
        """
        if self.several and not self._failure_is_known:
            failure = _Failure.DRAWS_DIFFER if isinstance(error, DrawsDiffer) else _Failure.FAILED
            with contextlib.suppress(RuntimeError):
                self._exchange_messages(Purpose.FAILURE, 0, failure)

    @contextlib.contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Tell the others of an exception in this context."""
        try:
            yield
        except GeneratorExit:  # an interrupt came before the context was entered
            raise
        except BaseException as error:
            self.report_failure(error)
            raise

    @contextlib.contextmanager
    def calling_together(self) -> Iterator[None]:
        """Wait until all ranks make the same call, and tell the others of an exception in this context."""
        self.expect_new_failures()
        with self.reporting_failures():
            self.all_agree(True)
            yield

    def agree_to_commit(self, step: int, ends: bool) -> None:
        """Wait until all ranks have reached the commit of a step. Raises like every exchange.

        Args:
            step: Its number.
            ends: Whether nothing is left to be done for which another rank would wait: what fails from now on is not reported,
                until :meth:`expect_new_failures`.
        """
        if self.several:
            with self._exchanging():
                self._synchronize(Purpose.COMMIT, step)
                self._failure_is_known = ends

    def all_agree(self, vote: bool) -> bool:
        """Return whether all ranks say yes. Raises like every exchange."""
        return bool(self._synchronize(Purpose.AGREE, flags=[vote]).all()) if self.several else vote

    @contextlib.contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Measure an exchange, message and data, and have no interrupt come between them: the others are in it as well."""
        begun = time.perf_counter()
        try:
            with defer_interrupts():
                yield
        finally:
            self.seconds += time.perf_counter() - begun

    # -- exchanges

    def broadcast_from_first(self, values: Sequence[torch.Tensor], number: int = 0) -> None:
        """Have the values that the first rank has. Blocks; raises like every exchange.

        Args:
            values: Dense tensors, alike on all ranks, which are overwritten.
            number: Of the block.
        """
        if not self.several:
            return
        with self._exchanging():
            self._synchronize(Purpose.BROADCAST, number)
            assert self.group is not None
            first = dist.get_global_rank(self.group, 0)
            for value in values:
                given = value.detach().contiguous()
                dist.broadcast(_bytes(given), first, group=self.group)
                value.detach().copy_(given)

    def gather(self, number: int, shards: Sequence[torch.Tensor], places: Sequence[torch.Tensor], to_train: bool) -> None:
        """Put the shards of all ranks together. Blocks; raises like every exchange.

        Args:
            number: Of the block.
            shards: This rank's.
            places: Where each whole parameter belongs, with the memory of :meth:`padded_shape`.
            to_train: Whether it is for a forward or backward of a step.
        """
        with self._exchanging():
            self._synchronize(Purpose.GATHER if to_train else Purpose.GATHER_TO_READ, number)
            for shard, place in zip(shards, places, strict=True):
                self._gather(shard, place)

    def _gather(self, shard: torch.Tensor, place: torch.Tensor) -> None:
        if not place.numel():
            return
        if len(shard) < len(place) // self.count:  # one of the last ranks
            padded = place.new_zeros((len(place) // self.count, *place.shape[1:]))
            padded[: len(shard)] = shard
            shard = padded
        self._all_gather(_bytes(place), _bytes(shard))

    def average_gradients(self, number: int, params: Sequence[nn.Parameter], whole: bool) -> list[torch.Tensor | None]:
        """Average the gradients of all ranks, and take them out of ``param.grad``. Blocks; raises like every exchange.

        Each is divided by the number of ranks, and they are summed in the order of the ranks, in their own dtype: with 2, 4 or 8
        ranks these are the bits of as many micro-batches in one process. A gradient that a rank does not have counts as zero.

        Args:
            number: Of the block.
            params: Its parameters that require gradients.
            whole: Whether to return whole gradients, and not this rank's rows of them.

        Returns:
            For each parameter the gradient; None if no rank has one.

        Raises:
            TypeError: For a sparse gradient.
        """
        with self._exchanging():
            present = [param.grad is not None for param in params]
            for param in params:
                if param.grad is not None and param.grad.layout is not torch.strided:
                    raise TypeError(f"a gradient of layout {param.grad.layout} cannot be summed over several processes")
            anywhere = self._synchronize(Purpose.AVERAGE, number, present).any(0).tolist()
            return [self._average(param, whole) if has else None for param, has in zip(params, anywhere, strict=True)]

    def _average(self, param: nn.Parameter, whole: bool) -> torch.Tensor:
        if param.grad is None:
            gradient = torch.zeros(param.shape, dtype=param.dtype, device="cpu")
        else:
            gradient = param.grad.detach().contiguous()
        param.grad = None
        rows = gradient if gradient.dim() else gradient.view(1)
        own = self.shard_of(rows)
        if not rows.numel():
            return gradient if whole else own
        sizes = [end - begin for begin, end in (self.rows_of(rows, rank) for rank in range(self.count))]
        of_ranks = rows.new_empty((self.count * len(own), *rows.shape[1:]))
        dist.all_to_all_single(
            _bytes_of_rows(of_ranks, rows), _bytes_of_rows(rows, rows), [len(own)] * self.count, sizes, group=self.group
        )
        parts = of_ranks.view(self.count, len(own), *rows.shape[1:])
        total = parts[0].div_(self.count)
        for part in parts[1:]:
            total.add_(part.div_(self.count))
        if not whole:
            return total.clone()  # without the memory of the other parts
        place = rows.new_empty(self.padded_shape(rows))
        self._gather(total, place)
        return place[: len(rows)].view(gradient.shape)

    def norms_of_shards(self, norms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the 2-norms of whole tensors, given those of this rank's shards. Blocks; raises like every exchange."""
        if not self.several or not norms:
            return list(norms)
        with self._exchanging():
            self._synchronize(Purpose.NORM, len(norms))
            squares = torch.stack([norm.double().square() for norm in norms])
            total, *others = self._all_gather_rows(squares)
            for each in others:
                total.add_(each)
            return [norm.to(before.dtype) for norm, before in zip(total.sqrt(), norms, strict=True)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor: there are dtypes that cannot be communicated."""
    return tensor.reshape(-1).view(torch.uint8)


def _bytes_of_rows(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor, one row for each of its rows."""
    width = like[:1].numel() * like.element_size() if len(like) else 0
    return _bytes(tensor).view(len(tensor), width)
