"""Report a drive's failure on one rank to all ranks, so that each rank's error names the path and errno.

With DeepSpeed alone, the other ranks wait in a collective until the failed rank's process is gone, and then get an error that
says only that a connection was closed. Here the failed rank writes its error to the process group's store before raising it. A
thread of each rank reads that store twice a second, so steps cost no time. When a collective then fails on another rank, its
error is replaced by the failed rank's.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from .replacement import Replacement, around, attribute, module

_logger = logging.getLogger(__name__)

_METHODS = {
    "deepspeed.runtime.engine.DeepSpeedEngine": ("__init__", "forward", "backward", "step", "save_checkpoint", "load_checkpoint"),
    "deepspeed.runtime.zero.partition_parameters.Init": ("__init__", "_post_init_method"),
}
_READ_EVERY = 0.5  # seconds
_HEARD_WITHIN = 5.0  # seconds that the failed rank waits for the others to read its error
_LEFT_WITHIN = 1.0  # seconds that the rank which serves the store waits for the others when its process ends
_FAILURE, _HEARD = "failure", "heard"
_LEFT = "null"
"""Stored in the process group's store when a process ends, so that all ranks stop reading.

If the store were gone while a rank reads it, torch would print a page of errors.
"""


def replacements() -> Iterator[Replacement]:
    """Return replacements of the methods of DeepSpeed's engine and ``zero.Init`` that do I/O or wait for ranks doing I/O."""
    for path, names in _METHODS.items():
        place, _, name = path.rpartition(".")
        owner = attribute(module(place), name)
        for method in names:
            yield around(owner, method, _sharing_failures)


def _sharing_failures(own: Any, *arguments: Any, **named: Any) -> Any:
    """Call a method; report its OSErrors to all ranks, and replace a RuntimeError by the OSError of another rank."""
    try:
        result = own(*arguments, **named)
    except (OSError, RuntimeError) as error:
        ranks = _ranks_of_this_process()
        if ranks is not None and isinstance(error, OSError):
            ranks.report(error)
        elif ranks is not None and (failure := ranks.failure()) is not None:
            raise failure from error
        raise
    if own.__name__ == "__init__":
        _ranks_of_this_process()  # starts the thread that watches for failures
    return result


class RankFailures:
    """Shares the first failure of any rank with all ranks of a process group, through the group's store.

    Starts a daemon thread that reads the store twice a second. The store ends with the rank that serves it, so a failed rank
    waits, for a few seconds at most, until the other ranks have read its failure. Thread-safe.

    Args:
        store: The process group's ``torch.distributed`` store.
        rank: This rank.
        count: Number of ranks.
    """

    def __init__(self, store: Any, rank: int, count: int) -> None:
        self._store = dist.PrefixStore("deepnvme", store)  # type: ignore[attr-defined]
        self._rank, self._count = rank, count
        self._failure: dict[str, Any] | None = None
        self._over = False  # there is nothing more to read: a failure was found, or the ranks are ending
        self._reading = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="deepnvme-failures", daemon=True)
        self._thread.start()

    def report(self, error: OSError) -> None:
        """Send this rank's error to the other ranks. Only the first call has an effect.

        Blocks until all ranks have read it, for a few seconds at most. Raises nothing if the store is gone.
        """
        self._ended.set()
        self._thread.join()
        if self._over:
            return
        self._over = True
        text = error.strerror if error.errno is not None else str(error)  # shutil.Error, of several errors, has no errno
        path = None if error.filename is None else os.fsdecode(error.filename)
        self._failure = {"rank": self._rank, "errno": error.errno, "text": text, "path": path}
        with contextlib.suppress(RuntimeError):  # the store is gone, with the rank that served it
            self._store.set(_FAILURE, json.dumps(self._failure))
            self._wait_for_the_others(_HEARD_WITHIN)

    def leave(self) -> None:
        """Make all ranks stop reading the store, because this process ends. Raises nothing if the store is gone.

        Rank 0, which probably serves the store, waits up to a second until the other ranks have read the message.
        """
        self._ended.set()
        self._thread.join()
        if not self._over:
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(_FAILURE, "", _LEFT)
                self._wait_for_the_others(_LEFT_WITHIN if self._rank == 0 else 0.0)

    def failure(self) -> OSError | None:
        """Return an OSError with another rank's errno, text and path; None if no other rank has failed."""
        self._read_store()
        if self._failure is None or self._failure["rank"] == self._rank:
            return None
        text = f"{self._failure['text']} (on rank {self._failure['rank']})"
        code = self._failure["errno"]
        return OSError(text) if code is None else OSError(code, text, self._failure["path"])

    def _wait_for_the_others(self, seconds: float) -> None:
        """Wait until all ranks have read what this rank has stored, for ``seconds`` at most."""
        heard = self._store.add(_HEARD, 1)
        deadline = time.monotonic() + seconds
        while heard < self._count and time.monotonic() < deadline:
            time.sleep(0.02)
            heard = self._store.add(_HEARD, 0)

    def _watch(self) -> None:
        """Read the store twice a second until nothing more can follow. Runs in the daemon thread."""
        while not self._over and not self._ended.wait(_READ_EVERY):
            self._read_store()

    def _read_store(self) -> None:
        """Read the store once, and log the failure of another rank if there is one."""
        with self._reading:
            if self._over:
                return
            with contextlib.suppress(RuntimeError):  # the store is gone, with the rank that served it
                if not self._store.check([_FAILURE]):
                    return
                self._failure = json.loads(self._store.get(_FAILURE))
                self._store.add(_HEARD, 1)
            self._over = True
        if self._failure is not None:
            _logger.error("rank %(rank)s failed: [Errno %(errno)s] %(text)s: %(path)r", self._failure)


_lock = threading.Lock()
_group: tuple[Any, RankFailures] | None = None


def _ranks_of_this_process() -> RankFailures | None:
    """Return the RankFailures of the default process group, made when first needed; None if there is only one rank."""
    global _group
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    with _lock:
        world = dist.group.WORLD
        if _group is None or _group[0] is not world:
            if _group is not None:
                _group[1].leave()
            store = dist.distributed_c10d._get_default_store()
            _group = world, RankFailures(store, dist.get_rank(), dist.get_world_size())
            atexit.register(_group[1].leave)
        return _group[1]
