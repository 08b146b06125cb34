"""Processes that train rows of two tables, and are killed: whether the tables then are their last commit, whole."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch

TABLES, ROWS, WIDTH, TOUCHED = 2, 10_000, 48, 2000
_BUDGET = 1 << 20
"""Bytes, of each table: less than the rows and states that a few steps touch, so that some are written before a commit."""
_STEPS_A_COMMIT = 2
_LONGEST = 0.6
"""Seconds after which a process is killed at the latest."""


def kills(path: Path, count: int, seed: int = 0) -> int:
    """Train in a process and kill it, so many times. Returns how many times the tables were not their last commit then.

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


def _opened(path: Path) -> tuple[list[Any], Any]:
    from deepnvme.nn import EmbeddingBagOnDisk
    from deepnvme.tables import RowOptimizer

    torch.manual_seed(0)
    bags = [
        EmbeddingBagOnDisk(
            ROWS, WIDTH, path=path / str(number), mode="sum", optimizer=torch.optim.SparseAdam, memory_budget=_BUDGET
        )
        for number in range(TABLES)
    ]
    return bags, RowOptimizer(torch.nn.ModuleList(bags), torch.optim.SparseAdam, lr=0.01)


def _train(path: Path, only_begin: bool) -> None:
    bags, optimizer = _opened(path)
    if only_begin:
        optimizer.commit()
        return
    number = optimizer.attributes.get("commits", 0)
    while True:
        for step in range(_STEPS_A_COMMIT):
            _step(bags, optimizer, number * _STEPS_A_COMMIT + step)
        number += 1
        optimizer.commit({"commits": number})


def _step(bags: list[Any], optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for bag in bags:
        bag(torch.randint(ROWS, (TOUCHED // 8, 8), generator=generator)).sin().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class _Reference:
    """The same training in memory, as far as the tables have come."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._bags = [torch.nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True) for _ in range(TABLES)]
        self._optimizer = torch.optim.SparseAdam([bag.weight for bag in self._bags], lr=0.01)
        self._commits = 0

    def is_in(self, path: Path) -> bool:
        """Whether rows and states of the tables are those of their last commit."""
        bags, optimizer = _opened(path)
        tables = [bag.table for bag in bags]
        try:
            commits = optimizer.attributes.get("commits", 0)
            if commits < self._commits or any(table.attributes.get("commits", 0) != commits for table in tables):
                return False
            while self._commits < commits:
                for step in range(_STEPS_A_COMMIT):
                    _step(self._bags, self._optimizer, self._commits * _STEPS_A_COMMIT + step)
                self._commits += 1
            return all(self._equals(table, bag.weight) for table, bag in zip(tables, self._bags, strict=True))
        finally:
            for table in tables:
                table.close()

    def _equals(self, table: Any, weight: torch.Tensor) -> bool:
        records = table.read_records(torch.arange(ROWS))
        wanted = {"values": weight.detach(), **self._optimizer.state[weight]}
        return all(torch.equal(values, wanted[name]) for name, values in records.items() if name in wanted)
