"""Batches read ahead in the order of the sampler, decoded by threads, and collated into pinned memory.

A batch is drawn from the order, read and decoded in the queue, and yielded. Its position is the epoch, and its number in it. The
loader's position is that of the batch to yield next. A batch stays in the queue until the iterator is called with a later
position, so that Ctrl-C loses no batch. After a resume, what was in the queue is drawn again.
"""

from __future__ import annotations

import errno
import math
import operator
import os
import time
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, thread
from dataclasses import astuple, dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import BatchSampler
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from deepnvme._interrupts import defer_interrupts
from deepnvme.memory.budget import MemoryBudget
from deepnvme.memory.pool import BufferPool, OutOfBuffers
from deepnvme.memory.tensor_bytes import copy_many
from deepnvme.telemetry.descriptions import representation, size_for_people, state_text
from deepnvme.telemetry.profiler_ranges import profiler_range
from deepnvme.telemetry.report_figures import ReportFigures

from .layouts import Empty
from .order import EpochSampler
from .reading import BatchRead, StoredSamples

_LEASED_FROM = 64 << 10
"""Bytes of a collated tensor from which its memory is leased. Smaller ones take less time from the heap."""


@dataclass(frozen=True)
class LoaderStats(ReportFigures):
    """Counters of a loader since it was made. ``as_dict()`` returns the numbers."""

    batches: int = 0
    """Batches yielded."""
    samples: int = 0
    """Samples in these batches."""
    skipped: int = 0
    """Samples that could not be read, and were left out."""
    bytes_read: int = 0
    """Bytes of memory that the batches were read into, padding included."""
    seconds: float = 0.0
    """Seconds from the first call of the iterator to the end of the last one."""
    seconds_waited: float = 0.0
    """Seconds that the caller waited for batches."""
    seconds_reading: float = 0.0
    """Seconds that threads waited for the drive, summed over the threads."""
    seconds_decoding: float = 0.0
    """Seconds that threads decoded and collated, summed over the threads."""

    def __add__(self, other: LoaderStats) -> LoaderStats:
        return LoaderStats(*map(operator.add, astuple(self), astuple(other)))

    @property
    def samples_per_second(self) -> float:
        """Samples yielded in a second."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def limit(self) -> str:
        """What the speed depends on: "caller" if it waits less than 10 % of the time, otherwise "drive" or "decoding"."""
        if self.seconds_waited < 0.1 * self.seconds:
            return "caller"
        return "drive" if self.seconds_reading > self.seconds_decoding else "decoding"


Position = tuple[int, int]
"""An epoch, and the number of a batch in it."""


class _Collating:
    """A batch in the making. Tensors are copied to their place as soon as each sample is decoded: the processor has them in its
    cache then, and their memory is used for the next sample. For images of 768 KiB, an image took 2.0 ms of one thread with
    decoding, and 2.25 ms where all were copied in the end.

    Args:
        count: Most samples.
        empty: Makes memory for tensors of a batch.
        collate_fn: The user's, for samples as they are; None for torch's ``default_collate``.
    """

    def __init__(self, count: int, empty: Empty, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self._count, self._empty, self._collate_fn = count, empty, collate_fn
        self._columns: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}  # memory, and what of it the samples have

    def add(self, sample: Any) -> Any:
        """Return the next sample, whose large tensors now are in the batch's memory."""
        if self._collate_fn is not None:
            return sample
        parts, structure = tree_flatten(sample)
        return tree_unflatten([self._moved(*each) for each in enumerate(parts)], structure)

    def _moved(self, number: int, part: Any) -> Any:
        if type(part) is not torch.Tensor or part.layout != torch.strided or part.nbytes * self._count < _LEASED_FROM:
            return part
        if part.device.type != "cpu" or not part.is_contiguous() or part.requires_grad or part.is_conj() or part.is_neg():
            return part
        if number not in self._columns:
            self._columns[number] = self._empty((self._count, *part.shape), part.dtype), []
        column, rows = self._columns[number]
        if (part.shape, part.dtype) != (column.shape[1:], column.dtype):
            return part
        rows.append(column[len(rows)])
        copy_many(*(array("Q", [each]) for each in (rows[-1].data_ptr(), part.data_ptr(), part.nbytes)))  # copy_ has threads
        return rows[-1]

    def collate(self, samples: list[Any]) -> Any:
        """Return the batch. Its memory belongs to it."""
        if self._collate_fn is not None:
            return self._collate_fn(samples)
        return collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: self._stacked})

    def _stacked(self, tensors: Sequence[torch.Tensor], *, collate_fn_map: object = None) -> torch.Tensor:
        for column, rows in self._columns.values():
            if len(rows) == len(tensors) and all(map(operator.is_, rows, tensors)):
                return column[: len(rows)]
        return torch.stack(list(tensors))


class DataLoader:
    """Batches of samples on the drive, in random order if asked, without worker processes.

    The engine reads ``prefetch`` batches ahead, in the order of the sampler; threads decode them. A ``transform`` should release
    the GIL, as those of torchvision, PIL and numpy do; for one that does not, torch's DataLoader takes the same dataset. At the
    end of an epoch, the next epoch's first batches are read already, if the sampler is an :class:`EpochSampler`.

    Iterate over it once for each epoch. A new iteration before the end of an epoch begins the next epoch. Not thread-safe.

    Args:
        dataset: Samples on the drive.
        batch_size: Samples of a batch.
        shuffle: Whether each epoch has a new random order.
        seed: Chooses the order.
        sampler: Yields the numbers of samples, instead of ``shuffle`` and ``seed``.
        batch_sampler: Yields lists of numbers, instead of ``batch_size``, ``shuffle``, ``seed``, ``sampler`` and ``drop_last``.
        transform: Called with each sample, in a thread; returns what is collated.
        collate_fn: Called with the list of samples of a batch. None for torch's ``default_collate``, into pinned memory.
        drop_last: Whether a last batch of fewer samples is left out.
        decode_threads: Threads that decode, each of them one batch at a time; at least 1.
        prefetch: Batches that are read or decoded ahead; at least 1.
        memory_budget: Memory for batches, see :data:`deepnvme.memory.MemoryBudget`. Without room for ``prefetch`` batches, fewer
            are read ahead, but always one.

    Raises:
        TypeError: If the dataset is not one of this package.
        ValueError: If an argument is out of range, or arguments exclude one another.
    """

    def __init__(
        self, dataset: StoredSamples, batch_size: int = 1, shuffle: bool = False, seed: int = 0,
        sampler: Iterable[int] | None = None, batch_sampler: Iterable[list[int]] | None = None, *,
        transform: Callable[[Any], Any] | None = None, collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False, decode_threads: int = 2, prefetch: int = 4, memory_budget: MemoryBudget = "512MiB",
    ) -> None:  # fmt: skip
        if not isinstance(dataset, StoredSamples):
            raise TypeError(f"dataset must be of deepnvme.data, got {type(dataset).__name__}: torch's DataLoader takes others")
        if min(batch_size, prefetch, decode_threads) < 1:
            got = f"batch_size={batch_size}, prefetch={prefetch}, decode_threads={decode_threads}"
            raise ValueError(f"batch_size, prefetch and decode_threads must be at least 1, got {got}")
        if batch_sampler is not None and (sampler is not None or batch_size != 1 or shuffle or drop_last):
            raise ValueError("batch_sampler excludes batch_size, shuffle, sampler and drop_last")
        if sampler is not None and shuffle:
            raise ValueError("sampler excludes shuffle")
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.sampler = EpochSampler(dataset, shuffle, seed, drop_last=drop_last) if sampler is None else sampler
        self._order = self.sampler if batch_sampler is None and isinstance(self.sampler, EpochSampler) else None
        self.batch_sampler = BatchSampler(self.sampler, batch_size, drop_last) if batch_sampler is None else batch_sampler
        self._transform = transform
        self._stacks = dataset.stacks and transform is None and collate_fn is None
        self._collate = collate_fn
        self._prefetch = prefetch
        self._pool = BufferPool(memory_budget)
        self._threads = ThreadPoolExecutor(decode_threads, "deepnvme decode")
        self._process, self._closed = os.getpid(), False
        self._resumes = False  # the next iteration begins at the position, not at the next epoch
        self._iteration: _Iteration | None = None  # that yields batches; None at the end of an epoch
        self._began: float | None = None
        self._stats = LoaderStats()
        self._queue: deque[tuple[Position, Future[tuple[Any, LoaderStats]]]] = deque()
        self._seek(0, 0)

    def __len__(self) -> int:
        """Return the number of batches of an epoch. Raises TypeError for a sampler without a length."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the next epoch, or over what is left after :meth:`load_state_dict`. Earlier iterators end."""
        self._iteration = _Iteration(self)
        return self._iteration

    def _begin(self) -> None:
        """Choose the epoch of an iteration, in the first call of its iterator.

        Not before: Lightning and torch's DataLoader allow ``set_epoch`` after ``iter``.
        """
        epoch, batch = self._epoch, self._batch
        if batch and not self._resumes:
            epoch, batch = epoch + 1, 0
        if self._order is not None and self._order.epoch != self._epoch:  # set_epoch, as for DistributedSampler
            epoch, batch = self._order.epoch, 0
        self._resumes = False
        self._seek(epoch, batch)

    def _seek(self, epoch: int, batch: int) -> None:
        """Set the position. Of what was read ahead, the batches from there on are kept."""
        self._epoch, self._batch = epoch, batch
        while self._queue and self._queue[0][0] != (epoch, batch):
            self._queue.popleft()[1].cancel()
        if not self._queue:
            self._draws = self._drawn(epoch, batch)
            self._next: tuple[Position, Sequence[int] | torch.Tensor] | None = None  # drawn, and not started
        if self._order is not None:
            self._order.set_epoch(epoch)

    def _drawn(self, epoch: int, first: int) -> Iterator[tuple[Position, Sequence[int] | torch.Tensor]]:
        """Yield position and numbers of each batch from a position on, also of later epochs if their order is known."""
        if self._order is None:
            yield from (((epoch, first + at), batch) for at, batch in enumerate(islice(self.batch_sampler, first, None)))
            return
        while count := len(self):
            batches = self._order.batches(epoch, first * self.batch_size, self.batch_size)
            yield from (((epoch, at), batch) for at, batch in zip(range(first, count), batches, strict=False))
            epoch, first = epoch + 1, 0

    def _read_ahead(self) -> None:
        """Start reading until enough batches are in the queue, or the memory is used up. Does not wait for samples."""
        while len(self._queue) < self._prefetch:
            position = self._epoch, self._batch + len(self._queue)
            try:
                self._next = self._next or next(self._draws, None)
                if self._next is None:
                    return
                position, numbers = self._next
                read = self.dataset.start(numbers, self._pool, only_leased=bool(self._queue))
                self._check_budget(read.memory.nbytes)
                decoding = self._threads.submit(self._decode, read)
            except Exception as error:  # of this batch, whose turn comes later
                if self._queue and (isinstance(error, OutOfBuffers) or getattr(error, "errno", 0) == errno.EMFILE):
                    return  # until the memory, or the files, of a batch in the queue are free
                decoding = Future()
                decoding.set_exception(error)
            self._queue.append((position, decoding))
            self._next = None

    def _check_budget(self, nbytes: int) -> None:
        """Warn, for the first batch, if two of its size do not fit into the budget."""
        if 2 * nbytes > self._pool.budget and (self._stats.batches, len(self._queue)) == (0, 0):
            text = f"a batch takes {size_for_people(nbytes)}, and memory_budget is {size_for_people(self._pool.budget)}"
            text += ": nothing is read ahead, and memory is new for each batch; give it room for prefetch + 2 batches"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _decode(self, read: BatchRead) -> tuple[Any, LoaderStats]:
        """Wait for a read, and return the batch, and what it took."""
        begun = time.perf_counter()
        read.future.exception()  # waits
        there = time.perf_counter()
        if self._stacks:
            count, batch = read.stacked(self._empty)
        else:
            collating = _Collating(len(read.numbers), self._empty, self._collate)
            samples = [collating.add(self._transformed(*each)) for each in read.samples()]
            count, batch = len(samples), collating.collate(samples) if samples else None
        skipped, decoding = len(read.numbers) - count, time.perf_counter() - there
        return batch, LoaderStats(count > 0, count, skipped, read.memory.nbytes, 0.0, 0.0, there - begun, decoding)

    def _transformed(self, number: int, sample: Any) -> Any:
        if self._closed or getattr(thread, "_shutdown", False):  # closing, and the end of the program, wait for the reads only
            raise CancelledError
        try:
            return sample if self._transform is None else self._transform(sample)
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(f"raised by the transform of sample {number} of {self.dataset!r}")
            raise

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor, in pinned memory if the budget has room. The memory belongs to the tensor."""
        nbytes = math.prod(shape) * dtype.itemsize
        lease = self._pool.try_lease(nbytes) if nbytes >= _LEASED_FROM else None
        return torch.empty(shape, dtype=dtype) if lease is None else lease.tensor(shape, dtype)

    def _next_batch(self, iteration: _Iteration) -> Any:
        """Return the next batch. Blocks. Raises StopIteration at the end of the epoch, and errors of the batch."""
        if self._closed or self._process != os.getpid():  # the threads of a forked process are not there
            raise ValueError(f"the loader is {state_text(self._closed, self._process)}")
        begun = time.perf_counter()
        self._began = begun if self._began is None else self._began
        while iteration is self._iteration:
            with defer_interrupts():  # nothing is lost between two statements
                if not iteration.begun:
                    self._begin()
                    iteration.begun = True
                elif self._queue and self._queue[0][0] < (self._epoch, self._batch):
                    self._queue.popleft()
                self._read_ahead()
                if not self._queue or self._queue[0][0][0] != self._epoch:
                    self._seek(self._epoch + 1, 0)
                    self._iteration = None
                    break
            try:
                with profiler_range("wait_batch"):
                    batch, took = self._queue[0][1].result()  # after Ctrl-C, the same batch is the next one
            except Exception as error:
                self._batch += 1
                if isinstance(error, StopIteration):  # which would end the epoch without an error
                    raise RuntimeError("the transform or collate_fn raised StopIteration") from error
                raise
            now = time.perf_counter()
            stats = self._stats + took + LoaderStats(seconds_waited=now - begun)
            self._stats, begun = replace(stats, seconds=now - self._began), now
            self._batch += 1  # the last change: after an interrupt before it, the next call returns the same batch
            if took.samples:  # otherwise, all of them were left out
                return batch
        raise StopIteration

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next iteration has, if the sampler has epochs. transformers' Trainer calls it."""
        for order in (self.sampler, self.batch_sampler):
            if hasattr(order, "set_epoch"):
                order.set_epoch(epoch)

    def stats(self) -> LoaderStats:
        """Return counters since the loader was made. Never blocks."""
        return self._stats

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was yielded, and what the order depends on: a few numbers."""
        return {"epoch": self._epoch, "batch": self._batch, **self._order_facts()}

    def _order_facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"samples": len(self.dataset), "batch_size": self.batch_size, "drop_last": self.drop_last}
        if self._order is not None:
            facts |= {name: getattr(self._order, name) for name in ("shuffle", "seed", "world_size")}
        return facts

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batch at which ``state_dict`` was called: the next iteration has the rest of that epoch.

        If another epoch is set afterwards, the next iteration has that epoch from its beginning.
        With a sampler that is not an :class:`EpochSampler`, the sampler must yield the same order again.

        Raises:
            ValueError: If the order would be another one: other samples, batches, seed or number of processes.
        """
        differ = {name: (state.get(name), fact) for name, fact in self._order_facts().items() if state.get(name) != fact}
        if differ:
            texts = [f"{name} was {before}, and is {now}" for name, (before, now) in differ.items()]
            raise ValueError(f"the order of samples would be another one: {'; '.join(texts)}")
        with defer_interrupts():
            self._seek(state["epoch"], state["batch"])
            self._resumes = True

    def close(self) -> None:
        """Forget what was read ahead, end the threads, and free the memory that no batch has. Idempotent.

        Waits for reads in progress, and for batches that are being decoded. In a forked child, this has no effect.
        """
        if self._process != os.getpid():
            return
        self._closed = True
        self._threads.shutdown()  # waits for each read: until it ends, the engine keeps the memory
        self._queue.clear()
        self._pool.trim()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return representation(self, lambda: repr(self.dataset), lambda: state_text(self._closed, self._process))


class _Iteration(Iterator[Any]):
    """An iteration over an epoch."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self.begun = False
        """Whether its epoch is chosen."""

    def __next__(self) -> Any:
        return self._loader._next_batch(self)
