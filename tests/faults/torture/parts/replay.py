"""SIGKILL while a child extends a replay buffer of torchrl, and commits: the buffer is the last commit, whole."""

from __future__ import annotations

import importlib.util
import signal
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import torch

from .. import Torn
from ..ways import Saving
from . import kills

if TYPE_CHECKING:
    from deepnvme.integrations.torchrl import NVMeStorage

SHORT, SECONDS = 1, 120

SIZE, EACH = 300, 70
"""Slots, and transitions of a commit; of 20 KB, so that there are some 200 spare places."""
kills._FORKS.set_forkserver_preload([kills.__name__, __name__])


class Replaying(Saving):
    """Some numbered transitions for each value, and a commit. Others follow, of the next commit, when it is killed."""

    _storage: NVMeStorage | None = None
    _written = 0

    def _opened(self) -> NVMeStorage:
        from deepnvme.integrations.torchrl import NVMeStorage

        if self._storage is None:
            self._storage = NVMeStorage(SIZE, self.directory / "replay")
        return self._storage

    def save(self, value: int) -> None:
        if self._storage is None:
            self._written = value * EACH
        self._write((value + 1) * EACH - self._written)
        self._opened().commit()
        self._write(value * 17 % EACH)

    def _write(self, count: int) -> None:
        from tensordict import TensorDict

        numbers = torch.arange(self._written, self._written + count)
        if count:
            data = TensorDict({"number": numbers, "pixels": numbers[:, None].float().expand(count, 5000)}, [count])
            self._opened().set(numbers % SIZE, data)
        self._written += count

    def close(self) -> None:
        if self._storage is not None:
            self._storage.close()
            self._storage = None

    def load(self) -> int:
        if self._storage is not None:
            self._storage._resources.close()  # as a kill does: without the commit of close()
            self._storage = None
        storage = self._opened()
        found = storage.get(torch.arange(len(storage)))
        written = int(found["number"].max()) + 1
        first = max(written - SIZE, 0)
        expected = torch.arange(first, written).roll(first % SIZE)
        if not torch.equal(found["number"], expected) or not bool((found["pixels"] == expected[:, None]).all()):
            raise Torn(f"after {written} transitions there are {found['number'].tolist()}")
        if written % EACH or storage.next_cursor != written % SIZE:
            raise Torn(f"there are {written} transitions, and the cursor is {storage.next_cursor}")
        self._written = written
        return written // EACH - 1


def requires() -> str | None:
    return None if importlib.util.find_spec("torchrl") else "needs torchrl"


def attack(random: Random, directory: Path) -> None:
    with kills.Child(Replaying, directory) as child:
        child.listen(random.randint(1, 8))
        time.sleep(random.random() * random.choice([0.005, 0.05, 0.2]))
        child.stop(signal.SIGKILL)
        last = child.last
    kills.check(Replaying(directory), last, "Replaying")
