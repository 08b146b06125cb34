"""Reading and writing of blocks, with bytes and times counted for the report of each step."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from deepnvme.cache.block import Block
from deepnvme.store.futures import StoreFuture
from deepnvme.store.tensor_store import TensorStore
from deepnvme.telemetry.high_water_mark import HighWaterMark
from deepnvme.telemetry.stopwatch import Stopwatch

from .report import DriveReport

_logger = logging.getLogger(__name__)


class _TransferTimes:
    """Bytes of one step's reads, or of its writes, and the seconds during which at least one was in flight."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.nbytes = 0
        self._under_way: list[StoreFuture[Any]] = []
        self._since = 0.0

    def started(self, future: StoreFuture[Any], nbytes: int) -> None:
        """Record the start of a transfer of ``nbytes`` bytes."""
        self.record_ended()
        if not self._under_way:
            self._since = time.perf_counter()
        self._under_way.append(future)
        self.nbytes += nbytes

    def record_ended(self) -> None:
        """Record which transfers have ended. A transfer counts as in flight until a call of this method finds it done."""
        if self._under_way:
            self._under_way = [future for future in self._under_way if not future.done()]
            if not self._under_way:
                self.seconds += time.perf_counter() - self._since


@dataclass
class StepTimes:
    """Seconds that one step computed and waited, and the transfers that it made."""

    begun: float | None = None
    """``time.perf_counter()`` when work for the step began; None before."""
    computing: Stopwatch = field(default_factory=Stopwatch)
    waiting: Stopwatch = field(default_factory=Stopwatch)
    reads: _TransferTimes = field(default_factory=_TransferTimes)
    writes: _TransferTimes = field(default_factory=_TransferTimes)

    def begin(self) -> None:
        """Record that work for the step begins. Only the first call in a step has an effect."""
        if self.begun is None:
            self.begun = time.perf_counter()


class StoredBlock(Block):
    """A block that holds one tensor of a store. Its memory may be larger than the tensor, which lies at the beginning.

    Args:
        name: The tensor's name in the store.
        content_bytes: Bytes of the tensor.
        nbytes: Bytes of memory, if more than ``content_bytes``. Blocks of equal size reuse each other's pinned memory.
    """

    __slots__ = ("_content_bytes",)

    def __init__(self, name: str, content_bytes: int, nbytes: int = 1) -> None:
        super().__init__(name, max(content_bytes, nbytes), stored=True)
        self._content_bytes = content_bytes

    @property
    def content(self) -> torch.Tensor:
        """The tensor's bytes in memory. Raises RuntimeError if the block has no memory."""
        return self.memory.buffer[: self._content_bytes]

    def rename(self, name: str) -> None:
        """Change the block's tensor name in the store from the next write on. Reads use the old name until then."""
        self.name = name


def shortage(held: int, block: Block) -> str:
    """Return the beginning of an OutOfBuffers message: ``held`` bytes are leased, and memory for ``block`` is missing."""
    return f"the sub-groups in memory have leased {held} bytes and need {block.nbytes} more"


class CountedIO:
    """Reads from and writes to a store, counts bytes and times for the current step, and keeps the report of the last one.

    Transfers through ``store`` directly are not counted.

    Args:
        store: Where blocks are.
    """

    def __init__(self, store: TensorStore) -> None:
        self.store = store
        self.times = StepTimes()
        self.leased = HighWaterMark()
        """Bytes of memory that are leased for blocks and gradients."""
        self.bytes_written_in_all = 0
        """Bytes of all writes started so far, for any purpose."""
        self._last: DriveReport | None = None
        self._ended: float | None = None  # time.perf_counter() at the end of the last step

    def get(self, name: str, out: torch.Tensor) -> StoreFuture[torch.Tensor]:
        """Start reading the tensor ``name`` into ``out``, and count it. See :meth:`TensorStore.get`."""
        future = self.store.get(name, out)
        self.times.reads.started(future, out.nbytes)
        return future

    def put(self, name: str, tensor: torch.Tensor) -> StoreFuture[int]:
        """Start writing ``tensor`` under ``name``, and count it. See :meth:`TensorStore.put`."""
        future = self.store.put(name, tensor)
        self.times.writes.started(future, tensor.nbytes)
        self.bytes_written_in_all += tensor.nbytes
        return future

    def read(self, block: Block, buffer: torch.Tensor) -> StoreFuture[torch.Tensor]:
        """Start reading a block from the store into the block's memory, and count the transfer."""
        assert isinstance(block, StoredBlock)
        return self.get(block.name, block.content)

    def write(self, block: Block, buffer: torch.Tensor) -> StoreFuture[int]:
        """Start writing a block's content to the store, and count the transfer."""
        assert isinstance(block, StoredBlock)
        return self.put(block.name, block.content)

    def record_ended(self) -> None:
        """Record which transfers have ended. Call it after each wait: a transfer counts as in flight until then."""
        self.times.reads.record_ended()
        self.times.writes.record_ended()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leave the transfers of the ``with`` body out of the step's report. ``bytes_written_in_all`` still includes them."""
        times, self.times = self.times, StepTimes()
        try:
            yield
        finally:
            self.times = times

    def finish(self) -> StepTimes:
        """Return the bytes and times counted since the last call of this method, and start counting from zero."""
        self.record_ended()
        times, self.times = self.times, StepTimes()
        return times

    def end_step(self, step: int) -> dict[str, Any]:
        """End a step. All transfers counted since the last step, or the last :meth:`finish`, are attributed to it.

        Args:
            step: Number of the step, from 1.

        Returns:
            The fields of a :class:`DriveReport` by name, without ``waiting``.
        """
        times = self.finish()
        now = time.perf_counter()
        seconds = now - times.begun if times.begun is not None else 0.0
        period = seconds if self._ended is None else now - self._ended
        self._ended = now
        return {
            "step": step,
            "seconds": seconds,
            "period": period,
            "reading": times.reads.seconds,
            "writing": times.writes.seconds,
            "bytes_read": times.reads.nbytes,
            "bytes_written": times.writes.nbytes,
            "peak_bytes": self.leased.restart(),
        }

    def keep_report(self, report: DriveReport) -> None:
        """Set :attr:`last` to ``report``, and log it with level DEBUG."""
        self._last = report
        if _logger.isEnabledFor(logging.DEBUG):
            _logger.debug("%s", report.line())

    @property
    def last(self) -> Any:
        """The report of the last step. Raises RuntimeError before the first step."""
        if self._last is None:
            raise RuntimeError("there is nothing to report before the first step")
        return self._last
