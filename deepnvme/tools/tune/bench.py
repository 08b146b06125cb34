"""Makes the transfers that a search measures.

Each folder has one tensor and one file for the whole search. Handles are made anew for each setting.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deepnvme.drives.aio_config import AioConfig

from .figures import Percentiles, latency_between
from .folder import NotMeasurable, drop_pages, first_line, settle, workspace
from .job import Observation, Operation

_MIB = 1 << 20
# Handles being closed at the same time. More of them would use up the system's asynchronous I/O events (fs.aio-max-nr).
_MOST_RETIRING = 4


class TrialBench:
    """Reads and writes a tensor in each folder with different settings, and measures the transfers.

    A context manager: entering it allocates the tensors and writes the files, and raises NotMeasurable or OSError if that fails;
    leaving it removes the files. Not thread-safe.

    Args:
        folders: Folders to measure.
        io_size: Bytes of the tensor and of the file for each folder.
        gpu: Whether the tensors are in GPU memory.
        gds: Whether GPU tensors are moved by GPUDirect Storage.
        progress: Called with a description of each step while the context is entered.
    """

    def __init__(self, folders: Sequence[Path], io_size: int, gpu: bool, gds: bool, progress: Callable[[str], None]) -> None:
        self.bytes_written = 0
        self._folders, self._io_size, self._gpu, self._gds, self._progress = folders, io_size, gpu, gds, progress
        self._stack = contextlib.ExitStack()
        self._setting: AioConfig | None = None
        self._handles: list[Any] = []
        self._retiring: deque[Future[None]] = deque()
        self._offset = 0

    def __enter__(self) -> TrialBench:
        from . import transfers  # here, because it takes seconds to import torch

        with contextlib.ExitStack() as stack:
            self._paths = [stack.enter_context(workspace(folder, "ds_nvme_tune-")) / "tensor" for folder in self._folders]
            self._retirer = stack.enter_context(ThreadPoolExecutor(_MOST_RETIRING))
            self._keeper = transfers.make_handle(AioConfig(use_gds=self._gds))
            # A GPU for each folder, as DeepSpeed maps them; if there are fewer GPUs, in turn.
            devices = [transfers.gpu(index, in_turn=True) if self._gpu else None for index in range(len(self._folders))]
            self._buffers = [transfers.TransferBuffer(self._io_size, self._keeper, device, self._gds) for device in devices]
            for path, tensor in zip(self._paths, self._buffers, strict=True):
                self._progress(f"{path.parent.parent}: laying out a file")
                self._keeper.sync_pwrite(tensor.to_write(), str(path))
                settle(path.parent)
                self.bytes_written += self._io_size
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._handles.clear()  # waits for transfers that an interrupt has left in flight, before the files are removed
        self._stack.close()

    def usable(self, settings: Sequence[AioConfig]) -> tuple[list[AioConfig], dict[str, str]]:
        """Return the settings that work on this machine, and the reasons why the others do not.

        A setting works if handles can be made with it. The system's limit on events or threads may prevent that.

        Returns:
            The working settings, and a reason for each refused setting, by a text of the setting's options.

        Raises:
            NotMeasurable: If no setting works.
        """
        refused: dict[AioConfig, str] = {}
        for setting in settings:
            try:
                self._handles_for(setting)
            except (OSError, RuntimeError, ValueError) as error:
                refused[setting] = first_line(error)
        if len(refused) == len(settings):
            raise NotMeasurable(f"no setting can be used here: {next(iter(refused.values()))}")
        found = [setting for setting in settings if setting not in refused]
        return found, {str(setting): reason for setting, reason in refused.items()}

    def move(self, group: Sequence[int], setting: AioConfig, operation: Operation, nbytes: int) -> Observation:
        """Transfer data to or from several folders at the same time, and measure it. Blocks.

        The files' pages are dropped from the page cache first. Each call continues in the files where the last call ended,
        because the same bytes could be cached by the drive, or by a virtual drive's host.

        Args:
            group: Indices of the folders.
            setting: Settings of the handles.
            operation: Whether to read or to write.
            nbytes: Bytes for each folder.

        Raises:
            OSError, RuntimeError, ValueError: If no handle can be made with the setting, or a transfer fails.
        """
        handles = dict(zip(group, self._handles_for(setting), strict=False))
        before = [handle.stats() for handle in handles.values()]
        offset = self._offset if self._offset + nbytes <= self._io_size else 0
        self._offset = offset + nbytes // _MIB * _MIB
        drop_pages(self._paths[index] for index in group)
        cpu, start = time.process_time(), time.perf_counter()
        for index, handle in handles.items():
            buffer, path = self._buffers[index], str(self._paths[index])
            if operation == "read":
                handle.async_pread(buffer.to_read(nbytes), path, offset)
            else:
                handle.async_pwrite(buffer.to_write(nbytes), path, offset)
        for index, handle in handles.items():
            handle.wait()
            if operation == "read":
                self._buffers[index].arrived(nbytes)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        moved = nbytes * len(group)
        self.bytes_written += moved if operation == "write" else 0
        pairs = zip(before, handles.values(), strict=True)
        latency = Percentiles.of(sum((latency_between(earlier, handle.stats()) for earlier, handle in pairs), Counter[float]()))
        return Observation(moved, seconds, cpu, latency.p99)

    def _handles_for(self, setting: AioConfig) -> list[Any]:
        """Return one handle with this setting for each folder. Handles of the previous setting are closed in the background."""
        from . import transfers

        if setting != self._setting:
            self._setting = None
            # Closed in another thread: closing a handle of libaio takes 40 ms, which here would be half of a search's time.
            self._wait_for_retiring(_MOST_RETIRING - 1)
            retired, self._handles = self._handles, []
            self._retiring.append(self._retirer.submit(retired.clear))
            try:
                self._handles = [transfers.make_handle(setting) for _ in self._folders]
            except (OSError, RuntimeError, ValueError):
                # The events of handles that are still being closed count against the limit.
                self._wait_for_retiring(0)
                self._handles = [transfers.make_handle(setting) for _ in self._folders]
            self._setting = setting
        return self._handles

    def _wait_for_retiring(self, left: int) -> None:
        """Wait until at most ``left`` groups of handles are still being closed."""
        while len(self._retiring) > left:
            self._retiring.popleft().result()
