"""Tables of one to three volumes, used at random and compared with memory; copied, moved, mixed up and opened again."""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch

from deepnvme.files.directory_lock import StoreLocked
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

    directories: list[Path]
    columns: Columns
    """As the last commit has them."""
    updatable: bool
    history: list[object]
    """Something for each commit: copies with the same have the same rows."""
    attributes: dict[str, int] = field(default_factory=dict)
    writer: Table | None = None
    changed: Columns = field(default_factory=dict)
    """As the writer has them."""
    reader: Table | None = None

    def close(self) -> None:
        for table in (self.writer, self.reader):
            if table is not None:
                table.close()
        self.writer = self.reader = None


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
            (20, self._read), (20, self._write), (8, self._write_records), (8, self._commit), (3, self._rollback),
            (8, self._reopen), (4, self._read_only), (4, self._fork), (4, self._copy), (4, self._move), (4, self._move_one),
            (6, self._wrong_order), (6, self._mix),
        ]  # fmt: skip
        weights, actions = zip(*operations, strict=True)
        action = self._random.choices(actions, weights)[0]
        action(self._random.choice(self._tables))
        return None

    # -- what users do

    def _create(self) -> None:
        random = self._random
        rows = random.choice([1, 7, 200, 1500, 4000])
        dtype = random.choice(_DTYPES)
        shape = random.choice([(1,), (3,), (16,), (5, 7), (200,)])
        states = {}
        if random.random() < 0.4:
            states = {f"state {each}": State(random.choice(_DTYPES), random.choice([(), (2,), (9,)]), each) for each in range(2)}
        updatable = random.random() < 0.9
        values = self._values(rows, shape, dtype)
        directories = self._new_directories(random.choice([1, 2, 3]))
        Table.create(
            directories, rows, shape, dtype, values=lambda begin, end: values[begin:end], states=states, updatable=updatable
        ).close()
        columns = {"values": values}
        columns |= {name: torch.full((rows, *each.shape), each.initial, dtype=each.dtype) for name, each in states.items()}
        self._tables.append(_Content(directories, columns, updatable, [object()]))

    def _read(self, content: _Content) -> None:
        self._check(self._any_table(content), content)

    def _write(self, content: _Content) -> None:
        if (table := self._writer(content)) is None:
            return
        values = content.changed["values"]
        ids = self._ids(len(values))
        rows = self._values(ids.numel(), values.shape[1:], values.dtype)
        table.write(ids, rows)
        for position, row in enumerate(ids.tolist()):
            values[row] = rows[position]

    def _write_records(self, content: _Content) -> None:
        if (table := self._writer(content)) is None:
            return
        ids = self._ids(table.rows).unique()
        names = self._random.sample(sorted(content.changed), self._random.randint(0, len(content.changed)))
        known = content.changed
        columns = {name: self._values(len(ids), known[name].shape[1:], known[name].dtype) for name in names}
        table.write_records(ids, columns)
        for name, values in columns.items():
            content.changed[name][ids] = values

    def _commit(self, content: _Content) -> None:
        if (table := self._writer(content)) is None:
            return
        if self._random.random() < 0.5:
            content.attributes = {"number": self._random.randrange(1000)}
            table.commit(content.attributes)
        else:
            table.commit()
        if any(not torch.equal(content.columns[name], each) for name, each in content.changed.items()):
            content.history = [*content.history, object()]
        content.columns = _clone(content.changed)

    def _rollback(self, content: _Content) -> None:
        if (table := self._writer(content)) is None:
            return
        table.rollback()
        content.changed = _clone(content.columns)

    def _reopen(self, content: _Content) -> None:
        """What was not committed is lost."""
        content.close()
        self._check(self._any_table(content), content)

    def _read_only(self, content: _Content) -> None:
        """Readers see the last commit, and are refused beside a writer."""
        if content.writer is not None:
            try:
                Table.open(content.directories)
            except StoreLocked:
                content.close()
            else:
                raise Wrong(f"{content.directories} was opened beside a writer")
        self._check_opened(content.directories, content)

    def _fork(self, content: _Content) -> None:
        """A forked child reads what its parent reads."""
        if content.writer is not None:
            content.close()
        table = self._reader(content)
        if self._random.random() < 0.3:
            table.prefetch(self._ids(table.rows))
        receiver, sender = _FORKS.Pipe(duplex=False)
        torch.set_num_threads(1)  # as the workers of a DataLoader have it: the pool of threads is not there in a child
        state = self._random.randrange(1 << 62)

        def child() -> None:
            self._random.seed(state)
            try:
                self._compare(table, content.columns, content.attributes)
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
        self._check(table, content)

    def _copy(self, content: _Content) -> None:
        """The last commit, as another table."""
        if len(self._tables) > 3:
            gone = self._random.choice(self._tables)
            gone.close()
            for each in gone.directories:
                shutil.rmtree(each)
            self._tables.remove(gone)
            if gone is content:
                return
        content.close()
        content.changed = {}
        copies = self._new_directories(len(content.directories))
        for each, copy in zip(content.directories, copies, strict=True):
            shutil.copytree(each, copy)
        columns, attributes = _clone(content.columns), dict(content.attributes)
        self._tables.append(_Content(copies, columns, content.updatable, content.history, attributes))

    def _move(self, content: _Content) -> None:
        content.close()
        moved = self._new_directories(len(content.directories))
        for before, after in zip(content.directories, moved, strict=True):
            before.rename(after)
        content.directories = moved
        self._check(self._any_table(content), content)

    def _move_one(self, content: _Content) -> None:
        """A directory goes to another drive."""
        content.close()
        number = self._random.randrange(len(content.directories))
        (after,) = self._new_directories(1)
        shutil.copytree(content.directories[number], after)
        shutil.rmtree(content.directories[number])
        content.directories[number] = after
        self._check(self._any_table(content), content)

    # -- what users do by mistake

    def _wrong_order(self, content: _Content) -> None:
        content.close()
        order = self._random.sample(content.directories, self._random.randint(1, len(content.directories)))
        if order == content.directories:
            return self._check_opened(order, content)
        self._refused(order, (ValueError, FileNotFoundError))
        return None

    def _mix(self, content: _Content) -> None:
        """Directories of two tables: they may be read only where both have the same rows, and never written."""
        other = self._random.choice(self._tables)
        if other is content or len(other.directories) != len(content.directories) or len(content.directories) == 1:
            return
        content.close()
        other.close()
        mixed = [self._random.choice(pair) for pair in zip(content.directories, other.directories, strict=True)]
        if mixed in (content.directories, other.directories):
            return
        if content.history == other.history:  # harmless while it is only read
            with contextlib.suppress(ValueError), Table.open(mixed, memory_budget=self._budget()) as table:
                self._compare(table, content.columns, None)
        else:
            self._refused(mixed, (ValueError,))

    # -- and what has to be there

    def _refused(self, directories: Path | list[Path], errors: tuple[type[Exception], ...]) -> None:
        """That these are no table, to nobody: as tables of all directories are checked later, also that nothing was changed."""
        for writable in (False, True):
            try:
                table = Table.open(directories, writable=writable)
            except errors as error:
                if not any(str(each) in str(error) for each in (directories if isinstance(directories, list) else [directories])):
                    raise Wrong(f"the error names none of {directories}: {error}") from error
            else:
                table.close()
                raise Wrong(f"{directories} was opened as a table")

    def _check_opened(self, directories: Path | list[Path], content: _Content) -> None:
        with Table.open(directories, memory_budget=self._budget()) as table:
            self._compare(table, content.columns, content.attributes)

    def _any_table(self, content: _Content) -> Table:
        if content.writer is not None:
            return content.writer
        if content.updatable and self._random.random() < 0.7:
            writer = self._writer(content)
            assert writer is not None
            return writer
        return self._reader(content)

    def _reader(self, content: _Content) -> Table:
        if content.reader is None:
            content.reader = Table.open(content.directories, memory_budget=self._budget())
        return content.reader

    def _writer(self, content: _Content) -> Table | None:
        if content.writer is None and content.updatable:
            content.close()
            content.writer = Table.open(content.directories, writable=True, memory_budget=self._budget())
            content.changed = _clone(content.columns)
        return content.writer

    def _check(self, table: Table, content: _Content) -> None:
        changed = table is content.writer
        self._compare(table, content.changed if changed else content.columns, content.attributes)

    def _compare(self, table: Table, columns: Columns, attributes: dict[str, int] | None) -> None:
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
        if attributes is not None and table.attributes != attributes:
            raise Wrong(f"{table} has the attributes {table.attributes}, and not {attributes}")

    def _ids(self, rows: int) -> torch.Tensor:
        count = self._random.choice([1, 5, 100, 2 * rows])
        return torch.randint(rows, (count,), generator=self._generator)

    def _values(self, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        numbers = torch.randint(-1000, 1000, (rows, *shape), generator=self._generator)
        return numbers.to(dtype)

    def _budget(self) -> int:
        return self._random.choice([0, 10_000, 1 << 20])

    def _new_directories(self, count: int) -> list[Path]:
        self._names += 1
        return [self._directory / f"{self._names}-{volume}" for volume in range(count)]


def _clone(columns: Columns) -> Columns:
    return {name: each.clone() for name, each in columns.items()}
