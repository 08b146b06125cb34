"""Processes that train rows of a table, and are killed: whether the table then is its last commit, whole."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch

ROWS, WIDTH, TOUCHED = 20_000, 48, 4000
_BUDGET = 2 << 20
"""Bytes: less than the rows and states that a few steps touch, so that some are written before a commit."""
_STEPS_A_COMMIT = 2
_LONGEST = 0.6
"""Seconds after which a process is killed at the latest."""


def kills(path: Path, count: int, seed: int = 0) -> int:
    """Train in a process and kill it, so many times. Returns how many times the table was not its last commit then.

    The process is forked, since starting Python takes longer than it is to live. So this one uses one thread, and no engine while
    it forks.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _kills(path, count, random.Random(seed))
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(path, ignore_errors=True)


def _kills(path: Path, count: int, generator: random.Random) -> int:
    failed = 0
    shutil.rmtree(path, ignore_errors=True)
    _train_in_child(path, None)
    reference = _Reference()
    for _ in range(count):
        _train_in_child(path, generator.uniform(0.02, _LONGEST))
        failed += not reference.is_in(path)
    return failed


def _train_in_child(path: Path, seconds: float | None) -> None:
    """Train in a forked process: until it is killed, or only begin."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _train(path, only_begin=seconds is None)
            status = 0
        finally:
            os._exit(status)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if seconds is None and status != 0:
        raise RuntimeError(f"the first process ended with status {status}")


def _train(path: Path, only_begin: bool) -> None:
    from deepnvme.nn import EmbeddingBagOnDisk
    from deepnvme.tables import RowOptimizer

    torch.manual_seed(0)
    bag = EmbeddingBagOnDisk(ROWS, WIDTH, path=path, mode="sum", optimizer=torch.optim.SparseAdam, memory_budget=_BUDGET)
    optimizer = RowOptimizer(bag, torch.optim.SparseAdam, lr=0.01)
    if only_begin:
        optimizer.commit()
        return
    number = bag.table.attributes.get("commits", 0)
    while True:
        for step in range(_STEPS_A_COMMIT):
            _step(bag, optimizer, number * _STEPS_A_COMMIT + step)
        number += 1
        optimizer.commit({"commits": number})


def _step(bag: Any, optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(ROWS, (TOUCHED // 8, 8), generator=generator)
    bag(ids).sin().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class _Reference:
    """The same training in memory, as far as the table has come."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._bag = torch.nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
        self._optimizer = torch.optim.SparseAdam(self._bag.parameters(), lr=0.01)
        self._commits = 0

    def is_in(self, path: Path) -> bool:
        """Whether rows and states of the table are those of its last commit."""
        from deepnvme.tables import Table

        with Table.open(path) as table:
            commits = table.attributes.get("commits", 0)
            if commits < self._commits:
                return False
            while self._commits < commits:
                for step in range(_STEPS_A_COMMIT):
                    _step(self._bag, self._optimizer, self._commits * _STEPS_A_COMMIT + step)
                self._commits += 1
            records = table.read_records(torch.arange(ROWS))
        state = self._optimizer.state[self._bag.weight]
        wanted = {"values": self._bag.weight.detach(), **{name: state[name] for name in ("exp_avg", "exp_avg_sq") if name in
        state}}
        return all(torch.equal(records[name], value) for name, value in wanted.items())
