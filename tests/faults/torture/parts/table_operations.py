"""Tables, used at random and compared with memory; copied, moved and opened again."""

from __future__ import annotations

import multiprocessing
import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch

from deepnvme.tables import State, Table

from .. import Wrong

SHORT = 4
SECONDS = 120
OPERATIONS = 100
"""Of one try."""
_DTYPES = (
    torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64,
)  # fmt: skip
_FORKS = multiprocessing.get_context("fork")

Columns = dict[str, torch.Tensor]


def attack(random: Random, directory: Path) -> None:
    world = _World(random, directory)
    try:
        for _ in range(OPERATIONS):
            world.do_something()
    finally:
        world.close()


@dataclass
class _Content:
    """A table as it has to be."""

    path: Path
    columns: Columns
    """As the last commit has them."""
    updatable: bool
    attributes: dict[str, int] = field(default_factory=dict)
    table: Table | None = None
    changed: Columns = field(default_factory=dict)
    """As the table has them, if it is open."""

    def close(self) -> None:
        if self.table is not None:
            self.table.close()
        self.table = None


class _World:
    """A table, and what was made of it by copying and moving."""

    def __init__(self, random: Random, directory: Path) -> None:
        self._random, self._directory = random, directory
        self._names = 0
        self._tables: list[_Content] = []
        self._generator = torch.Generator().manual_seed(random.randrange(1 << 62))

    def close(self) -> None:
        for table in self._tables:
            table.close()

    def do_something(self) -> None:
        if not self._tables:
            return self._create()
        operations: list[tuple[int, Callable[[_Content], None]]] = [
            (20, self._check), (20, self._write), (8, self._write_records), (8, self._commit), (3, self._rollback),
            (8, self._reopen), (4, self._fork), (4, self._copy), (4, self._move),
        ]  # fmt: skip
        weights, actions = zip(*operations, strict=True)
        action = self._random.choices(actions, weights)[0]
        action(self._random.choice(self._tables))
        return None

    def _create(self) -> None:
        random = self._random
        rows = random.choice([1, 7, 200, 1500, 4000])
        dtype = random.choice(_DTYPES)
        shape = random.choice([(1,), (3,), (16,), (5, 7), (200,)])
        states = {}
        if random.random() < 0.4:
            states = {f"state {each}": State(random.choice(_DTYPES), random.choice([(), (2,), (9,)]), each) for each in range(2)}
        updatable = random.random() < 0.8
        values = self._values(rows, shape, dtype)
        path = self._new_path()
        Table.create(
            path, rows, shape, dtype, values=lambda begin, end: values[begin:end], states=states, updatable=updatable
        ).close()
        columns = {"values": values}
        columns |= {name: torch.full((rows, *each.shape), each.initial, dtype=each.dtype) for name, each in states.items()}
        self._tables.append(_Content(path, columns, updatable))

    def _write(self, content: _Content) -> None:
        table = self._opened(content)
        if not content.updatable:
            return
        values = content.changed["values"]
        ids = self._ids(len(values))
        rows = self._values(ids.numel(), values.shape[1:], values.dtype)
        table.write(ids, rows)
        for position, row in enumerate(ids.tolist()):
            values[row] = rows[position]

    def _write_records(self, content: _Content) -> None:
        table = self._opened(content)
        if not content.updatable:
            return
        ids = self._ids(table.rows).unique()
        names = self._random.sample(sorted(content.changed), self._random.randint(0, len(content.changed)))
        known = content.changed
        columns = {name: self._values(len(ids), known[name].shape[1:], known[name].dtype) for name in names}
        table.write_records(ids, columns)
        for name, values in columns.items():
            content.changed[name][ids] = values

    def _commit(self, content: _Content) -> None:
        table = self._opened(content)
        if not content.updatable:
            return
        if self._random.random() < 0.5:
            content.attributes = {"number": self._random.randrange(1000)}
            table.commit(content.attributes)
        else:
            table.commit()
        content.columns = _clone(content.changed)

    def _rollback(self, content: _Content) -> None:
        table = self._opened(content)
        if not content.updatable:
            return
        table.rollback()
        content.changed = _clone(content.columns)

    def _reopen(self, content: _Content) -> None:
        """What was not committed is lost."""
        content.close()
        self._check(content)

    def _fork(self, content: _Content) -> None:
        """A forked child of one that only reads has the same rows."""
        table = self._opened(content)
        if content.updatable:
            return
        if self._random.random() < 0.3:
            table.prefetch(self._ids(table.rows))
        receiver, sender = _FORKS.Pipe(duplex=False)
        torch.set_num_threads(1)  # as the workers of a DataLoader have it: the pool of threads is not there in a child
        state = self._random.randrange(1 << 62)

        def child() -> None:
            self._random.seed(state)
            try:
                self._check(content)
                sender.send("")
            except BaseException:
                sender.send(traceback.format_exc())

        process = _FORKS.Process(target=child)
        process.start()
        sender.close()
        with receiver:
            said = receiver.recv()
        process.join()
        if said or process.exitcode:
            raise Wrong(f"in a forked child: {said}")
        self._check(content)

    def _copy(self, content: _Content) -> None:
        """The last commit, as another table."""
        if len(self._tables) > 3:
            gone = self._random.choice(self._tables)
            gone.close()
            shutil.rmtree(gone.path)
            self._tables.remove(gone)
            if gone is content:
                return
        content.close()
        path = self._new_path()
        shutil.copytree(content.path, path)
        self._tables.append(_Content(path, _clone(content.columns), content.updatable, dict(content.attributes)))

    def _move(self, content: _Content) -> None:
        content.close()
        content.path = content.path.rename(self._new_path())
        self._check(content)

    def _opened(self, content: _Content) -> Table:
        if content.table is None:
            content.table = Table.open(content.path, writable=content.updatable, memory_budget=self._budget())
            content.changed = _clone(content.columns)
        return content.table

    def _check(self, content: _Content) -> None:
        table, columns = self._opened(content), content.changed
        ids = self._ids(table.rows) if self._random.random() < 0.7 else torch.arange(table.rows)
        if self._random.random() < 0.5:
            found = {"values": table.read(ids) if self._random.random() < 0.5 else table.read_async(ids).result()}
        else:
            ids = ids.unique()
            found = table.read_records(ids, keep=self._random.random() < 0.5)
        for name, values in found.items():
            assert isinstance(values, torch.Tensor)
            wanted = columns[name][ids]
            if not torch.equal(values, wanted):
                wrong = [row for row, *both in zip(ids.tolist(), values, wanted, strict=True) if not torch.equal(*both)]
                raise Wrong(f"{table} has other {name} in {len(wrong)} of {len(ids)} rows, such as {wrong[:5]}")
        if table.attributes != content.attributes:
            raise Wrong(f"{table} has the attributes {table.attributes}, and not {content.attributes}")

    def _ids(self, rows: int) -> torch.Tensor:
        count = self._random.choice([1, 5, 100, 2 * rows])
        return torch.randint(rows, (count,), generator=self._generator)

    def _values(self, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        numbers = torch.randint(-1000, 1000, (rows, *shape), generator=self._generator)
        return numbers.to(dtype)

    def _budget(self) -> int:
        return self._random.choice([0, 10_000, 1 << 20])

    def _new_path(self) -> Path:
        self._names += 1
        return self._directory / str(self._names)


def _clone(columns: Columns) -> Columns:
    return {name: each.clone() for name, each in columns.items()}
