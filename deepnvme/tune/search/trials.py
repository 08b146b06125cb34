"""A tensor and a file in each folder, from the first transfer of a search to its last, and any setting's handle to move them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from deepnvme.config import AioConfig
from deepnvme.tune.measure import transfers
from deepnvme.tune.measure.buffer import TransferBuffer
from deepnvme.tune.measure.counters import cpu_seconds, latency_between
from deepnvme.tune.measure.figures import Percentiles, merged
from deepnvme.tune.measure.folder import Unsuitable, drop_pages, settle, workspace
from deepnvme.tune.measure.job import Operation

from .search import Observation

_MIB = 1 << 20
# More of them would use up the system's asynchronous I/O events (fs.aio-max-nr).
_MOST_RETIRING = 4

Shares = Mapping[Operation, Mapping[int, float]]
"""What part of the bytes each folder, by its number, gets: 1 for the one that gets most."""


class TrialBench:
    """Usable in ``with``, whose end removes the files. Raises Unsuitable or OSError from laying them out."""

    def __init__(self, folders: Sequence[Path], io_size: int, gpu: bool, gds: bool, progress: Callable[[str], None]) -> None:
        self.bytes_written = 0
        self._folders, self._io_size, self._gpu, self._gds, self._progress = folders, io_size, gpu, gds, progress
        self._stack = contextlib.ExitStack()
        self._setting: AioConfig | None = None
        self._handles: list[Any] = []
        self._retiring: deque[Future[None]] = deque()
        self._offset = 0

    def __enter__(self) -> TrialBench:
        with contextlib.ExitStack() as stack:
            self._paths = [stack.enter_context(workspace(folder, "ds_nvme_tune-")) / "tensor" for folder in self._folders]
            self._retirer = stack.enter_context(ThreadPoolExecutor(_MOST_RETIRING))
            self._keeper = transfers.make_handle(AioConfig(use_gds=self._gds))
            # A GPU for each folder, as DeepSpeed maps them, as far as there are so many.
            devices = [transfers.gpu_of_folder(index) if self._gpu else None for index in range(len(self._folders))]
            self._buffers = [TransferBuffer(self._io_size, self._keeper, device, gds=self._gds) for device in devices]
            for path, buffer in zip(self._paths, self._buffers, strict=True):
                self._progress(f"{path.parent.parent}: laying out a file")
                self._keeper.sync_pwrite(buffer.to_write(), str(path))
                settle(path.parent)
                self.bytes_written += self._io_size
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._handles.clear()  # waits for what an interrupt left under way, before the files go
        self._stack.close()

    def usable(self, settings: Sequence[AioConfig]) -> tuple[list[AioConfig], dict[str, str]]:
        """Those that a handle can be made with, and why it cannot with others: a limit on events or threads, for example."""
        found, refused = [], {}
        for setting in settings:
            try:
                self._handles_for(setting)
            except Unsuitable as error:
                refused[_text(setting)] = str(error)
            else:
                found.append(setting)
        if not found:
            raise Unsuitable(f"no setting can be used here: {next(iter(refused.values()), 'none was given')}")
        return found, refused

    def move(self, deal: Shares, setting: AioConfig, operation: Operation, nbytes: int) -> Observation:
        """Move to or from several folders at the same time, ``nbytes`` times its share each, none of it cached. Blocks.

        Each call goes on in the files where the last one ended, because the same bytes again and again might come from a cache of
        the drive's, or of a virtual drive's host.
        """
        shares = deal[operation]
        sizes = {index: max(int(nbytes * share) // _MIB * _MIB, min(_MIB, nbytes)) for index, share in shares.items()}
        handles = dict(zip(shares, self._handles_for(setting), strict=False))
        before = [handle.stats() for handle in handles.values()]
        offset = self._offset if self._offset + max(sizes.values()) <= self._io_size else 0
        self._offset = offset + max(sizes.values()) // _MIB * _MIB
        drop_pages(self._paths[index] for index in shares)
        cpu, start = cpu_seconds(), time.perf_counter()
        for index, handle in handles.items():
            buffer, path = self._buffers[index], str(self._paths[index])
            if operation == "read":
                handle.async_pread(buffer.to_read(sizes[index]), path, offset)
            else:
                handle.async_pwrite(buffer.to_write(sizes[index]), path, offset)
        for index, handle in handles.items():
            handle.wait()
            if operation == "read":
                self._buffers[index].arrived(sizes[index])
        seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
        if operation == "write":
            self.bytes_written += sum(sizes.values())
        pairs = zip(handles.values(), before, strict=True)
        latency = Percentiles.of_bins(merged(latency_between(earlier, handle.stats()) for handle, earlier in pairs))
        return Observation(sum(sizes.values()), seconds, cpu, latency.p50, latency.p99)

    def _handles_for(self, setting: AioConfig) -> list[Any]:
        """A handle for each folder; those of the setting before are let go."""
        if setting != self._setting:
            self._setting = None
            self._retire()
            try:
                self._handles = [transfers.make_handle(setting) for _ in self._folders]
            except Unsuitable:
                # The events of those that are still going count against the limit.
                self._wait_for_retiring(0)
                self._handles = [transfers.make_handle(setting) for _ in self._folders]
            self._setting = setting
        return self._handles

    def _retire(self) -> None:
        # Elsewhere, because libaio's take 40 ms to go, which would be half of a search.
        self._wait_for_retiring(_MOST_RETIRING - 1)
        retired, self._handles = self._handles, []
        self._retiring.append(self._retirer.submit(retired.clear))

    def _wait_for_retiring(self, left: int) -> None:
        while len(self._retiring) > left:
            self._retiring.popleft().result()


def _text(setting: AioConfig) -> str:
    shown = setting.model_dump(exclude_defaults=True)
    return ", ".join(f"{name} {value}" for name, value in shown.items()) or "the defaults"
