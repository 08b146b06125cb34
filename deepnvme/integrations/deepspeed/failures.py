"""A drive that fails one rank ends the training of all: each rank's error names the path and errno.

DeepSpeed alone leaves the other ranks in a collective until the failed rank's process has gone, with an error that says no more
than that a connection was closed. Here the failed rank puts its error into the store that the ranks met in, before it raises it;
a thread of each rank looks there twice a second, so that no step costs anything, and what a collective raises is turned into that
error.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from .places import Replacement, attribute, module

_logger = logging.getLogger(__name__)

_METHODS = {
    "deepspeed.runtime.engine.DeepSpeedEngine": ("__init__", "forward", "backward", "step", "save_checkpoint", "load_checkpoint"),
    "deepspeed.runtime.zero.partition_parameters.Init": ("__init__", "_post_init_method"),
}
_LOOKS_EVERY = 0.5  # seconds
_HEARD_WITHIN = 5.0  # seconds that the failed rank waits for the others to look
_PARTED_WITHIN = 1.0  # seconds that a rank which serves the store waits at its end
_FAILURE, _HEARD = "failure", "heard"
_PARTED = "null"
"""In place of a failure: looking on would find no store, of which torch prints a page."""


def replacements() -> Iterator[Replacement]:
    """Of the methods, the engine's and those of ``zero.Init``, that transfer something or wait for ranks that do."""
    for path, names in _METHODS.items():
        place, _, name = path.rpartition(".")
        owner = attribute(module(place), name)
        for method in names:
            yield Replacement(owner, method, _shared(attribute(owner, method)))


def _shared(own: Any) -> Any:
    """A method whose OSErrors are raised on all ranks."""

    @functools.wraps(own)
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        try:
            result = own(self, *arguments, **named)
        except OSError as error:
            ranks = _ranks_of_this_process()
            if ranks is not None:
                ranks.tell(error)
            raise
        except RuntimeError as error:
            ranks = _ranks_of_this_process()
            failure = None if ranks is None else ranks.failure()
            if failure is None:
                raise
            raise failure from error
        if own.__name__ == "__init__":
            _ranks_of_this_process()  # looks from now on
        return result

    return method


class RankFailures:
    """What the ranks of one process group tell each other: the first failure.

    In the group's own store, which ends with the rank that serves it: the failed rank waits, for some seconds at most, until
    the others have looked.
    """

    def __init__(self, store: Any, rank: int, count: int) -> None:
        self._store = dist.PrefixStore("deepnvme", store)  # type: ignore[attr-defined]
        self._rank, self._count = rank, count
        self._failure: dict[str, Any] | None = None
        self._over = False  # nobody will tell anything any more
        self._looking = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="deepnvme-failures", daemon=True)
        self._thread.start()

    def tell(self, error: OSError) -> None:
        """Have the other ranks know. Once; blocks until they do, some seconds at most. Never raises."""
        self._ended.set()
        self._thread.join()
        if self._over:
            return
        self._over = True
        text = error.strerror if error.errno is not None else str(error)  # as shutil.Error, of several
        self._failure = {"rank": self._rank, "errno": error.errno, "text": text, "path": _text(error.filename)}
        with contextlib.suppress(RuntimeError):  # the store has gone, with the rank that served it
            self._store.set(_FAILURE, json.dumps(self._failure))
            self._wait_for_the_others(_HEARD_WITHIN)

    def part(self) -> None:
        """At the end of this process: no rank looks any longer. Never raises."""
        self._ended.set()
        self._thread.join()
        if not self._over:
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(_FAILURE, "", _PARTED)
                self._wait_for_the_others(_PARTED_WITHIN if self._rank == 0 else 0.0)

    def failure(self) -> OSError | None:
        """What another rank has told, as an error of this one."""
        self._look()
        if self._failure is None or self._failure["rank"] == self._rank:
            return None
        text = f"{self._failure['text']} (on rank {self._failure['rank']})"
        code = self._failure["errno"]
        return OSError(text) if code is None else OSError(code, text, self._failure["path"])

    def _wait_for_the_others(self, seconds: float) -> None:
        heard = self._store.add(_HEARD, 1)
        deadline = time.monotonic() + seconds
        while heard < self._count and time.monotonic() < deadline:
            time.sleep(0.02)
            heard = self._store.add(_HEARD, 0)

    def _watch(self) -> None:
        while not self._over and not self._ended.wait(_LOOKS_EVERY):
            self._look()

    def _look(self) -> None:
        with self._looking:
            if self._over:
                return
            try:
                if not self._store.check([_FAILURE]):
                    return
                self._failure = json.loads(self._store.get(_FAILURE))
                self._store.add(_HEARD, 1)
            except RuntimeError:  # the store has gone, with the rank that served it
                pass
            self._over = True
        if self._failure is not None:
            _logger.error("rank %(rank)s failed: [Errno %(errno)s] %(text)s: '%(path)s'", self._failure)


_lock = threading.Lock()
_group: tuple[Any, RankFailures] | None = None


def _ranks_of_this_process() -> RankFailures | None:
    """None where there is one only."""
    global _group
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    with _lock:
        world = dist.group.WORLD
        if _group is None or _group[0] is not world:
            if _group is not None:
                _group[1].part()
            store = dist.distributed_c10d._get_default_store()
            _group = world, RankFailures(store, dist.get_rank(), dist.get_world_size())
            atexit.register(_group[1].part)
        return _group[1]


def _text(path: Any) -> str | None:
    return None if path is None else os.fsdecode(path)
