"""Ways to save values, one after the other, and to see which is there: what kills, power cuts, Ctrl-C and faults attack."""

from __future__ import annotations

import contextlib
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

import deepnvme
from deepnvme.checkpoint import NVMeReader, NVMeWriter
from deepnvme.checkpoint.publication import SUFFIX
from deepnvme.data import SampleDataset, SampleWriter
from deepnvme.data.sample_files import MANIFEST_NAME as SAMPLES_MANIFEST
from deepnvme.data.sample_files import load_manifest
from deepnvme.files.directory_lock import LOCK_NAME
from deepnvme.nn import EmbeddingOnDisk
from deepnvme.streaming import WeightStore, stream
from deepnvme.swap import TensorStore
from deepnvme.tables import RowOptimizer, State, Table
from deepnvme.tables.manifest import MANIFEST_NAME

from . import Torn

_SIZES = (1000, 70_000, 300_000)


def tensors(value: int) -> dict[str, torch.Tensor]:
    """Through chunks and from where they are."""
    return {f"t{number}": torch.full((size,), float(value)) for number, size in enumerate(_SIZES)}


def value_of(found: dict[str, torch.Tensor], sizes: Sequence[int] = _SIZES) -> int:
    """That all of them have. Raises Torn."""
    values = {int(bound) for tensor in found.values() for bound in tensor.aminmax()}
    if len(values) != 1 or [found[name].numel() for name in sorted(found)] != list(sizes):
        raise Torn(f"there are {values} in {list(found)}")
    return values.pop()


class Saving:
    """A way to save values, one after the other, and to see which is there."""

    most_drives = 1
    """Directories that it can be given, each on a drive of its own."""

    def __init__(self, *directories: Path, durable: bool = False) -> None:
        self.directories, self.durable = directories, durable
        self.directory = directories[0]
        self.path = self.directory / "saved.pt"

    def save(self, value: int) -> None:
        deepnvme.save(tensors(value), self.path, fsync=self.durable)

    def load(self) -> int:
        return value_of(deepnvme.load(self.path))

    def close(self) -> None:
        """What is open. The next save or load opens it again."""

    def leftovers(self) -> list[str]:
        return [entry.name for entry in self.directory.iterdir() if entry.name.endswith(SUFFIX)]


class SavingBehind(Saving):
    def save(self, value: int) -> None:
        deepnvme.async_save(tensors(value), self.path, fsync=self.durable).result()


class Managing(Saving):
    def __init__(self, *directories: Path, durable: bool = False) -> None:
        super().__init__(*directories, durable=durable)
        self.manager = deepnvme.CheckpointManager(self.directory, keep=2)

    def save(self, value: int) -> None:
        self.manager.save(value, tensors(value), fsync=self.durable)

    def load(self) -> int:
        steps = self.manager.steps()
        found = [value_of(self.manager.load(step)) for step in steps]
        if found != steps:
            raise Torn(f"the checkpoints of {steps} have {found}")
        return steps[-1]


class SavingSafetensors(Saving):
    def save(self, value: int) -> None:
        deepnvme.safetensors.save_file(tensors(value), self.path, fsync=self.durable)

    def load(self) -> int:
        return value_of(deepnvme.safetensors.load_file(self.path))


class Committing(Saving):
    """Each with a put of all tensors before it, in place of those before."""

    most_drives = 3
    store: TensorStore | None = None

    def save(self, value: int) -> None:
        if self.store is None:
            self.store = self._opened()
        self.store.put_many(tensors(value)).result()
        self.store.commit()

    def close(self) -> None:
        store, self.store = self.store, None
        if store is not None:
            try:
                store.close()
            finally:
                store.close()

    def load(self) -> int:
        self.close()
        with self._opened() as store:
            return value_of({name: store.get(name).result() for name in sorted(store.names())})

    def _opened(self) -> TensorStore:
        return TensorStore([directory / "store" for directory in self.directories], persist=True)


class Distributing(Saving):
    def __init__(self, *directories: Path, durable: bool = False) -> None:
        super().__init__(*directories, durable=durable)
        self.path = self.directory / "checkpoint"
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)|Detected an existing checkpoint")

    def save(self, value: int) -> None:
        writer = NVMeWriter(self.path, thread_count=value % 3 + 1, sync_files=self.durable)
        with _unwrapped():
            dcp.save(tensors(value), storage_writer=writer, no_dist=True)

    def load(self) -> int:
        found = tensors(-1)
        with _unwrapped():
            dcp.load(found, storage_reader=NVMeReader(self.path), no_dist=True)
        return value_of(found)

    def leftovers(self) -> list[str]:
        named = {info.relative_path for info in dcp.FileSystemReader(self.path).read_metadata().storage_data.values()}
        return sorted({entry.name for entry in self.path.iterdir()} - named - {".metadata"})


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """What torch wraps into a CheckpointException; and into an AssertionError before, where the metadata cannot be read."""
    try:
        yield
    except CheckpointException as error:
        inner = next(iter(error.failures.values()))[0]
        said = re.search(r"metadata read failed: \[Errno (\d+)\][^:]*: '([^']*)'", str(inner))
        if isinstance(inner, AssertionError) and said is not None:
            raise OSError(int(said[1]), "metadata", said[2]) from error
        raise inner from error


class CreatingTables(Saving):
    """A new table for each value, in a new directory, in place of the one before the last. What is not made does not open."""

    def save(self, value: int) -> None:
        for old in (value, value - 2):
            shutil.rmtree(self._place(old), ignore_errors=True)
        self.make(value, self._place(value) / "new" / "made")

    def load(self) -> int:
        values = sorted((int(path.suffix[1:]) for path in self.directory.glob("made.*")), reverse=True)
        for value in values[:2]:
            with contextlib.suppress(FileNotFoundError):
                found = self.value_in(self._place(value) / "new" / "made")
                if found != value:
                    raise Torn(f"what was made of {value} has {found}")
                return value
        raise Torn(f"nothing made of {values} opens")

    def make(self, value: int, path: Path) -> None:
        Table.from_tensor(path, torch.full((500, 200), value), updatable=value % 2 == 0).close()

    def value_in(self, path: Path) -> int:
        with Table.open(path) as table:
            return value_of({"values": table.read(torch.arange(500))}, [100_000])

    def _place(self, value: int) -> Path:
        return self.directory / f"made.{value}"


class Building(CreatingTables):
    """A store of weights for each value."""

    def make(self, value: int, path: Path) -> None:
        WeightStore.build(_layer(value), path).close()

    def value_in(self, path: Path) -> int:
        layer = _layer(-1)
        with WeightStore.open(path) as store:
            stream(layer, store).close(restore=True)
        return value_of({"bias": layer.bias.detach(), "weight": layer.weight.detach()}, [1000, 300_000])


def _layer(value: int) -> torch.nn.Linear:
    layer = torch.nn.Linear(300, 1000)
    for param in layer.parameters():
        torch.nn.init.constant_(param, value)
    return layer


class CommittingRows(Saving):
    """Of a table with a state beside each row. Others are written behind when it is killed, and some were rolled back before."""

    most_drives = 3
    _ROWS, _WIDTH = 300, 300  # versions of several sectors, which can be torn; more of them than the least memory holds
    _table: Table | None = None

    def save(self, value: int) -> None:
        table = self._table
        if table is None:
            paths = self._paths()
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

    def _paths(self) -> list[Path]:
        return [directory / "table" for directory in self.directories]

    def _write(self, table: Table, value: int, step: int = 1) -> None:
        ids = torch.arange(0, self._ROWS, step)
        columns = {"values": torch.full((len(ids), self._WIDTH), value), "state": torch.full((len(ids),), value)}
        table.write_records(ids, columns)

    def close(self) -> None:
        if self._table is not None:
            self._table.close()
            self._table = None

    def load(self) -> int:
        self.close()
        with Table.open(self._paths()) as table:
            found = table.read_records(torch.arange(self._ROWS))
            values = {int(each) for column in found.values() for each in torch.unique(column)}
            if values != {table.attributes["value"]}:
                raise Torn(f"there are {values} in the commit of {table.attributes}")
        return values.pop()


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

    def close(self) -> None:
        for bag in self._bags:
            bag.table.close()
        self._bags, self._optimizer = (), None

    def load(self) -> int:
        self.close()
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


class WritingSamples(Saving):
    """Some samples for each value, and a commit. Others follow it, of the next commit, when it is killed."""

    most_drives = 3
    _EACH = 7
    _writer: SampleWriter | None = None
    _samples = 0

    def save(self, value: int) -> None:
        if self._writer is None:
            columns = {"value": torch.int64, "image": "bytes"}
            self._writer = SampleWriter(self._paths()[0], columns, directories=self._paths())
            self._samples = value * self._EACH
        self._write((value + 1) * self._EACH - self._samples)
        self._writer.commit()
        self._write(value % 4)

    def _paths(self) -> list[Path]:
        return [directory / "samples" for directory in self.directories]

    def _write(self, count: int) -> None:
        assert self._writer is not None
        for number in range(self._samples, self._samples + count):
            self._writer.append(value=number, image=bytes([number % 256]) * (number % 11 * 5000))
        self._samples += count

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def load(self) -> int:
        self.close()
        dataset = SampleDataset(self._paths()[0])
        for number, sample in enumerate(dataset.__getitems__(range(len(dataset)))):
            if sample["value"] != number or sample["image"] != bytes([number % 256]) * (number % 11 * 5000):
                raise Torn(f"sample {number} has the value {sample['value']}, and {len(sample['image'])} bytes")
        if len(dataset) % self._EACH:
            raise Torn(f"there are {len(dataset)} samples, part of a commit")
        return len(dataset) // self._EACH - 1

    def leftovers(self) -> list[str]:
        parts = load_manifest(self._paths()[0]).parts
        named = {Path(name).name for part in parts for name in (part.index, *part.files)}
        found = {path.name for directory in self._paths() for path in directory.glob("deepnvme-*.*")}
        return sorted(found - named - {SAMPLES_MANIFEST, LOCK_NAME})


REPEATABLE: tuple[type[Saving], ...] = (Saving, SavingBehind, Managing, SavingSafetensors, Distributing, Committing)
"""Those whose save may be called again, with another value, after one that failed: by the same object."""
WAYS = (*REPEATABLE, Building, CommittingRows, CreatingTables, CommittingEmbeddings, WritingSamples)
