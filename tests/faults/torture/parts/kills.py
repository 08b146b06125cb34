"""SIGKILL at a moment drawn by lot, while a child saves, builds or commits again and again.

What is there then is what the child had said was saved, or the next, whole; and what it left behind goes with the next.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import torch
import torch.distributed.checkpoint as dcp

import deepnvme
from deepnvme.checkpoint.publication import SUFFIX
from deepnvme.nn import EmbeddingOnDisk
from deepnvme.streaming.weights.weight_store import WeightStore
from deepnvme.swap import TensorStore
from deepnvme.tables import RowOptimizer, State, Table
from deepnvme.tables.manifest import MANIFEST_NAME

from .. import Leaked, Torn, Wrong

SHORT = 4
SECONDS = 120
_FORKS = multiprocessing.get_context("forkserver")  # of a process that has torch imported and nothing else: in some milliseconds
_FORKS.set_forkserver_preload([__name__])
_SIZES = (1000, 70_000, 300_000)


def tensors(value: int) -> dict[str, torch.Tensor]:
    """Through chunks and from where they are."""
    return {f"t{number}": torch.full((size,), float(value)) for number, size in enumerate(_SIZES)}


def value_of(found: dict[str, torch.Tensor]) -> int:
    """That all of them have. Raises Torn."""
    values = {int(bound) for tensor in found.values() for bound in tensor.aminmax()}
    if len(values) != 1 or [found[name].numel() for name in sorted(found)] != list(_SIZES):
        raise Torn(f"there are {values} in {list(found)}")
    return values.pop()


class Saving:
    """A way to save values, one after the other, and to see which is there."""

    most_drives = 1
    """Directories that it can be given, each on a drive of its own."""

    def __init__(self, *directories: Path) -> None:
        self.directories = directories
        self.directory = directories[0]
        self.path = self.directory / "saved.pt"

    def save(self, value: int) -> None:
        deepnvme.save(tensors(value), self.path, fsync=value % 3 == 0)

    def load(self) -> int:
        return value_of(torch.load(self.path, weights_only=True))

    def leftovers(self) -> list[str]:
        return [entry.name for entry in self.directory.iterdir() if entry.name.endswith(SUFFIX)]


class SavingBehind(Saving):
    def save(self, value: int) -> None:
        deepnvme.async_save(tensors(value), self.path, fsync=False).result()


class Managing(Saving):
    def __init__(self, *directories: Path) -> None:
        super().__init__(*directories)
        self.manager = deepnvme.CheckpointManager(self.directory, keep=2)

    def save(self, value: int) -> None:
        self.manager.save(value, tensors(value), fsync=False)

    def load(self) -> int:
        steps = self.manager.steps()
        found = [value_of(self.manager.load(step)) for step in steps]
        if found != steps:
            raise Torn(f"the checkpoints of {steps} have {found}")
        return steps[-1]


class SavingSafetensors(Saving):
    def save(self, value: int) -> None:
        deepnvme.safetensors.save_file(tensors(value), self.path, fsync=False)

    def load(self) -> int:
        return value_of(deepnvme.safetensors.load_file(self.path))


class Committing(Saving):
    """Each with a put of all tensors before it, in place of those before."""

    store: TensorStore | None = None

    def save(self, value: int) -> None:
        if self.store is None:
            self.store = TensorStore(self.directory / "store", persist=True)
        for name, tensor in tensors(value).items():
            self.store.put(name, tensor)
        self.store.commit()

    def load(self) -> int:
        if self.store is not None:
            self.store.close()
            self.store = None
        with TensorStore(self.directory / "store", persist=True) as store:
            return value_of({name: store.get(name).result() for name in sorted(store.names())})


class Distributing(Saving):
    durably = False

    def __init__(self, *directories: Path) -> None:
        super().__init__(*directories)
        self.path = self.directory / "checkpoint"
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)|Detected an existing checkpoint")

    def save(self, value: int) -> None:
        writer = deepnvme.NVMeWriter(self.path, thread_count=value % 3 + 1, sync_files=self.durably)
        dcp.save(tensors(value), storage_writer=writer, no_dist=True)

    def load(self) -> int:
        found = tensors(-1)
        dcp.load(found, storage_reader=dcp.FileSystemReader(self.path), no_dist=True)
        return value_of(found)

    def leftovers(self) -> list[str]:
        named = {info.relative_path for info in dcp.FileSystemReader(self.path).read_metadata().storage_data.values()}
        return sorted({entry.name for entry in self.path.iterdir()} - named - {".metadata"})


class Building(Saving):
    """A store for each value, in place of the one before the last. What is not built to its end does not open."""

    def save(self, value: int) -> None:
        shutil.rmtree(self._store(value - 2), ignore_errors=True)
        WeightStore.build(tensors(value), self._store(value)).close()

    def load(self) -> int:
        values = sorted((int(path.suffix[1:]) for path in self.directory.glob("store.*")), reverse=True)
        for value in values[:2]:
            with contextlib.suppress(FileNotFoundError), WeightStore.open(self._store(value)) as store:
                store.verify()
                found: dict[str, torch.Tensor] = {}
                for name, extent in store.extents.items():
                    memory = torch.empty(extent.nbytes, dtype=torch.uint8)
                    found.update(extent.tensors(store.read(name, memory).result()))
                if value_of(found) != value:
                    raise Torn(f"the store of {value} has {value_of(found)}")
                return value
        raise Torn(f"none of the stores of {values} opens")

    def _store(self, value: int) -> Path:
        return self.directory / f"store.{value}"


class CommittingRows(Saving):
    """Of a table with a state beside each row. Others are written behind when it is killed, and some were rolled back before."""

    most_drives = 3
    _ROWS, _WIDTH = 300, 300  # versions of several sectors, which can be torn; more of them than the least memory holds
    _table: Table | None = None

    def save(self, value: int) -> None:
        table = self._table
        if table is None:
            paths = [directory / "table" for directory in self.directories]
            if (paths[0] / MANIFEST_NAME).exists():
                table = Table.open(paths, writable=True, memory_budget=0)
            else:
                for path in paths:  # of a creation that was killed
                    shutil.rmtree(path, ignore_errors=True)
                states = {"state": State(torch.int64, ())}
                table = Table.create(paths, self._ROWS, self._WIDTH, torch.int64, states=states, memory_budget=0)
            self._table = table
        self._write(table, value)
        table.commit({"value": value})
        if value % 3 == 0:
            self._write(table, -value - 1)
            table.rollback()
        self._write(table, -value - 2, step=value % 5 + 1)

    def _write(self, table: Table, value: int, step: int = 1) -> None:
        ids = torch.arange(0, self._ROWS, step)
        columns = {"values": torch.full((len(ids), self._WIDTH), value), "state": torch.full((len(ids),), value)}
        table.write_records(ids, columns)

    def load(self) -> int:
        if self._table is not None:
            self._table.close()
            self._table = None
        with Table.open([directory / "table" for directory in self.directories]) as table:
            found = table.read_records(torch.arange(self._ROWS))
            values = {int(each) for column in found.values() for each in torch.unique(column)}
            if values != {table.attributes["value"]}:
                raise Torn(f"there are {values} in the commit of {table.attributes}")
        return values.pop()


class CreatingTables(Saving):
    """A new table for each value, in a new directory, in place of the one before the last."""

    most_drives = 3

    def save(self, value: int) -> None:
        for parent in self._parents(value - 2):
            shutil.rmtree(parent, ignore_errors=True)
        paths = [parent / "new" / "table" for parent in self._parents(value)]
        for path in paths:  # of a creation that was killed
            shutil.rmtree(path, ignore_errors=True)
        Table.from_tensor(paths, torch.full((500, 200), value), updatable=value % 2 == 0).close()

    def load(self) -> int:
        values = sorted((int(path.suffix[1:]) for path in self.directory.glob("tables.*")), reverse=True)
        for value in values[:2]:
            paths = [parent / "new" / "table" for parent in self._parents(value)]
            with contextlib.suppress(FileNotFoundError), Table.open(paths) as table:
                found = torch.unique(table.read_records(torch.arange(500))["values"]).tolist()
                if found != [value]:
                    raise Torn(f"the table of {value} has {found}")
                return value
        raise Torn(f"none of the tables of {values} opens")

    def _parents(self, value: int) -> list[Path]:
        return [directory / f"tables.{value}" for directory in self.directories]


class CommittingEmbeddings(Saving):
    """Of several tables that one optimizer trains: each commit has one more step of all of them, with states of rows."""

    most_drives = 3
    _TABLES, _ROWS, _DIM = 3, 200, 150
    _IDS = torch.arange(0, _ROWS, 3)
    _bags: Sequence[EmbeddingOnDisk] = ()
    _optimizer: RowOptimizer | None = None

    def save(self, value: int) -> None:
        optimizer = self._optimizer
        if optimizer is None:
            optimizer = self._open()
        if value % 3 == 0:
            _step(self._bags, optimizer, self._IDS)
            optimizer.rollback()
        if value:  # the first commit has the rows as they were made
            _step(self._bags, optimizer, self._IDS)
        optimizer.commit({"value": value})
        _step(self._bags, optimizer, self._IDS)  # written behind, perhaps, when it is killed
        optimizer.rollback()

    def _open(self) -> RowOptimizer:
        torch.manual_seed(0)
        bags = []
        for number in range(self._TABLES):
            first = number % len(self.directories)
            paths = [each / f"table{number}" for each in (*self.directories[first:], *self.directories[:first])]
            for path in paths if not (paths[0] / MANIFEST_NAME).exists() else ():  # of a creation that was killed
                shutil.rmtree(path, ignore_errors=True)
            bags.append(EmbeddingOnDisk(self._ROWS, self._DIM, path=paths, optimizer=torch.optim.SparseAdam, memory_budget=0))
        self._bags, self._optimizer = bags, RowOptimizer(torch.nn.ModuleList(bags), lr=0.01)
        return self._optimizer

    def load(self) -> int:
        for bag in self._bags:
            bag.table.close()
        optimizer = self._open()
        value = int(optimizer.attributes["value"])
        torch.manual_seed(0)
        in_memory = [torch.nn.Embedding(self._ROWS, self._DIM, sparse=True) for _ in range(self._TABLES)]
        reference = torch.optim.SparseAdam([bag.weight for bag in in_memory], lr=0.01)
        for _ in range(value):
            _step(in_memory, reference, self._IDS)
        ids = torch.arange(self._ROWS)
        same = [torch.equal(mine(ids), theirs(ids)) for mine, theirs in zip(self._bags, in_memory, strict=True)]
        if not all(same):
            raise Torn(f"of the tables at commit {value}, these are as in memory: {same}")
        states, expected = (each.state_dict()["state"] for each in (optimizer, reference))
        for number, wanted in expected.items():
            if any(not torch.equal(torch.as_tensor(states[number][name]), torch.as_tensor(wanted[name])) for name in wanted):
                raise Torn(f"table {number} has other states than {value} steps make")
        return value


def _step(bags: Sequence[Callable[[torch.Tensor], torch.Tensor]], optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    for number, bag in enumerate(bags):
        (bag(ids).square().sum() * (number + 1)).backward()
    optimizer.step()
    optimizer.zero_grad()


WAYS: tuple[type[Saving], ...] = (
    Saving, SavingBehind, Managing, SavingSafetensors, Distributing, Committing, Building, CommittingRows, CreatingTables,
    CommittingEmbeddings,
)  # fmt: skip


class Child:
    """A process that saves one value after the other until it is killed, at the end of ``with`` at the latest."""

    last = -1
    """That it has said to be saved, as far as was listened to."""

    def __init__(self, way: type[Saving], *directories: Path) -> None:
        self._what = way.__name__
        self._told, tells = _FORKS.Pipe(duplex=False)
        self._process = _FORKS.Process(target=_go_on, args=(way, directories, tells))
        self._process.start()
        tells.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._told.close()

    def listen(self, count: int) -> None:
        """Until it has said so many more. Raises Wrong if it ends."""
        for _ in range(count):
            try:
                self._hear(self._told.recv())
            except EOFError:
                self._process.join()
                raise Wrong(f"{self._what} ended by itself, with {self._process.exitcode}") from None

    def stop(self, by: signal.Signals) -> None:
        """Send it SIGKILL or SIGSTOP, and listen to what it has said before. Raises Wrong if it had ended."""
        assert self._process.pid is not None
        os.kill(self._process.pid, by)
        if by == signal.SIGKILL:
            self._process.join()
        with contextlib.suppress(EOFError):
            while self._told.poll():
                self._hear(self._told.recv())

    def _hear(self, said: int | str) -> None:
        if isinstance(said, str):
            raise Wrong(f"{self._what} ended by itself: {said}")
        self.last = said


def _go_on(way: type[Saving], directories: Sequence[Path], tells: Connection) -> None:
    """Save one value after the other, and say so, until killed."""
    torch.set_num_threads(1)
    value = 0
    try:
        saving = way(*directories)
        while True:
            saving.save(value)
            tells.send(value)  # in one piece: it is killed before or after
            value += 1
    except BaseException:
        tells.send(traceback.format_exc())


def attack(random: Random, directory: Path) -> None:
    way = random.choice(WAYS)
    directories = directories_for(way, random, directory)
    with Child(way, *directories) as child:
        child.listen(2)
        time.sleep(random.random() * random.choice([0.02, 0.2, 1.0]))
        child.stop(signal.SIGKILL)
        last = child.last
    check(way(*directories), last, way.__name__)


def directories_for(way: type[Saving], random: Random, directory: Path) -> list[Path]:
    """Make as many as are drawn by lot for it."""
    made = [directory / f"drive{number}" for number in range(random.randint(1, way.most_drives))]
    for each in made:
        each.mkdir()
    return made


def check(way: Saving, last: int, what: str) -> None:
    """That the last value that is known to be saved is there, or the next; and nothing of this after another. Raises Torn, Wrong
    or Leaked."""
    try:
        found = way.load()
        if found not in (last, last + 1):
            raise Wrong(f"{found} is there")
        way.save(found + 1)
        if way.load() != found + 1:
            raise Wrong(f"the next left {way.load()}")
        if way.leftovers():
            raise Leaked(f"there are {way.leftovers()} after the next")
    except Exception as error:
        kind = type(error) if isinstance(error, Torn | Wrong | Leaked) else Wrong
        text = str(error) if kind is not Wrong else "".join(traceback.format_exception(error))
        raise kind(f"{what}, after {last} was saved: {text}") from error
