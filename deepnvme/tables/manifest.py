"""The manifest of a table: a file that makes a directory a table, and says what its rows are and which commit was the last.

Each commit ends an epoch. Each row of an updatable table has two versions on the drive, each with the number of its epoch.

1. A version counts if its epoch is at most ``committed``, and not in a range of ``abandoned``. Of two that count, the one with
   the larger epoch is the row. Epoch 0 is that of a row that was never written: zeros.
2. A writer overwrites the version that is not the row. So the last commit is on the drive until the next one is in force.
3. ``reserved`` is on the drive before a version of an epoch up to it is written. A writer that finds ``reserved`` above
   ``committed`` follows one that crashed, and abandons these epochs. So no epoch is used twice.
4. A commit flushes the files of rows, then replaces the manifest, then flushes its directory. The replacement is the commit.
5. ``prepared`` is a commit of several tables. It is in force if the first table's last commit has the same ``name``; whoever has
   the tables together then makes it the last commit of the others. It is void once somebody else has changed a row.
6. ``identity`` is that at the end of each file of rows, or one of ``previous`` is: see :mod:`deepnvme.tables.identity`. The
   manifest has a new identity before a file has it, and ``previous`` is empty once a commit has flushed all files.

docs/formats.md has the fields, and what a crash at each point leaves.
"""

from __future__ import annotations

import errno
import io
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from deepnvme.files.directory_lock import refers_to
from deepnvme.files.manifest import read_manifest
from deepnvme.files.replacing import replace_durably, with_filename
from deepnvme.memory.tensor_bytes import dtype_named

from .layout import Column, State, TableLayout, columns_of

MANIFEST_NAME = "deepnvme-table.json"
"""Name of the manifest in the table's first directory."""
ROWS_NAME = "rows"
"""Name of the file with rows in each of the table's directories."""
UNFINISHED_NAME = "deepnvme-table.unfinished"
"""Name of the manifest until all files of rows have their names."""
_KIND = "deepnvme table 2"
_MOST_BYTES = 64 << 20
"""Limit of a manifest. Each crash between two commits, and each rollback, adds some 30 bytes."""
_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_Identity = Annotated[str, Field(pattern=r"\A[0-9a-f]{32}\z")]
_STRICT = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")


class CorruptTable(OSError):
    """A table is damaged (EBADMSG): its manifest, or the size of a file; or another version of the package has written it."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EBADMSG, f"this is no whole table: {why}", str(path))


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Prepared:
    """A commit of several tables that this table is ready for. It is in force once the first table has made it."""

    epoch: _Count
    name: str
    """The same for all tables, and for no other commit."""
    attributes: dict[str, Any]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Epochs:
    """Which versions of rows count, and what the last commit has noted."""

    committed: _Count
    """Epoch of the last commit; 0 before the first."""
    reserved: _Count
    """The last epoch of which versions may be on the drive."""
    abandoned: tuple[tuple[_Count, _Count], ...]
    """Ranges of epochs that were never committed, ascending: first and last of each."""
    attributes: dict[str, Any]
    """What the last commit has noted, such as the number of steps: anything that JSON can hold."""
    name: str = ""
    """Name of the last commit, if several tables have made it together."""
    prepared: Prepared | None = None
    """A commit that may be in force: the first table decides."""
    identity: _Identity
    """The table's identity, which its last writer has given it before the first write."""
    previous: tuple[_Identity, ...] = ()
    """Former identities that some files may still have; none once a commit has flushed ``identity`` to all files."""

    def adopt(self, prepared: Prepared) -> Epochs:
        """Return the epochs with a prepared commit as the last one."""
        abandoned = []
        for first, last in self.abandoned:  # a new writer has abandoned it, without the other tables
            parts = ((first, min(last, prepared.epoch - 1)), (max(first, prepared.epoch + 1), last))
            abandoned += [(begin, end) for begin, end in parts if begin <= end]
        return replace(
            self,
            committed=prepared.epoch,
            abandoned=tuple(abandoned),
            attributes=prepared.attributes,
            name=prepared.name,
            prepared=None,
        )

    def begin(self) -> Epochs:
        """Return the epochs for a new writer: epochs that the previous writer reserved and did not commit are abandoned."""
        first, last = self.present, self.reserved
        if last < first:
            return self
        before = self.abandoned
        if before and before[-1][1] == first - 1:
            first, before = before[-1][0], before[:-1]
        return replace(self, abandoned=(*before, (first, last)))

    @property
    def present(self) -> int:
        """The epoch of the versions that are written now."""
        last_abandoned = self.abandoned[-1][1] if self.abandoned else 0
        return max(self.committed, last_abandoned) + 1


NO_COMMITS = Epochs(committed=0, reserved=0, abandoned=(), attributes={}, identity="0" * 32)
"""The epochs of a file in place, which has no manifest: its rows cannot be changed."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class _Fields(Epochs):
    """The fields of the file."""

    kind: str
    rows: _Count
    columns: Annotated[list[tuple[str, str, list[_Count], _Count]], Field(min_length=1)]
    version_bytes: Annotated[int, Field(ge=0, le=1 << 41)]
    chunk: Annotated[int, Field(ge=1, le=1 << 40)]
    directories: Annotated[list[str], Field(min_length=1)]


_FILE = TypeAdapter(_Fields)


def save_manifest(directories: list[Path], layout: TableLayout, epochs: Epochs, name: str = MANIFEST_NAME) -> None:
    """Write the manifest into the first directory, to stable storage. Blocks.

    Raises:
        OSError: From the drive. Either the former manifest or this one is in force then.
        ValueError: If JSON cannot hold the attributes, or they are too large.
    """
    said = _Fields(
        kind=_KIND,
        rows=layout.rows,
        columns=[(each.name, str(each.dtype).removeprefix("torch."), list(each.shape), each.offset) for each in layout.columns],
        version_bytes=layout.version_bytes,
        chunk=layout.chunk,
        directories=[str(each) for each in directories],
        **vars(epochs),
    )
    data = _FILE.dump_json(said, indent=1) + b"\n"
    if len(data) > _MOST_BYTES:
        raise ValueError(f"the table's manifest may have {_MOST_BYTES} bytes, and would have {len(data)}")
    replace_durably(directories[0] / name, data)


class ManifestWatch:
    """Tells a reader whether the manifest was replaced since this was made. Keeps the file open: else the inode and the time of a
    later manifest could be the same.

    Raises:
        FileNotFoundError: If there is no manifest.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / MANIFEST_NAME
        with with_filename(self._path):
            self._file = io.FileIO(str(self._path))

    def replaced(self) -> bool:
        """Return whether the manifest is another file by now, or gone. Raises OSError if the system cannot tell."""
        return not refers_to(self._path, self._file.fileno())

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def load_manifest(directory: Path, name: str = MANIFEST_NAME) -> tuple[TableLayout, Epochs]:
    """Return the layout of a table, with its files where they were when the manifest was written, and its epochs.

    Raises:
        FileNotFoundError: If there is no table in the directory.
        CorruptTable: If the manifest is damaged.
    """
    return read_manifest(directory / name, _MOST_BYTES, _parse, CorruptTable)


def _parse(data: bytes) -> tuple[TableLayout, Epochs]:
    """Parse a table's manifest into the layout of its rows and its epochs. Raises ValueError if it is damaged."""
    try:
        said = _FILE.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        why = f"its field {where!r} is wrong, {first['msg']}" if where else f"it is no {first['msg'].removeprefix('Invalid ')}"
        raise ValueError(why) from None
    _check(said)
    columns = tuple(Column(name, dtype_named(dtype), tuple(shape), offset) for name, dtype, shape, offset in said.columns)
    values, *states = columns
    if columns != columns_of(values.dtype, values.shape, {each.name: State(each.dtype, each.shape) for each in states}):
        raise ValueError("its columns do not follow one another")
    files = tuple(Path(each) / ROWS_NAME for each in said.directories)
    layout = TableLayout(files, said.rows, columns, 0, said.version_bytes, said.chunk)
    return layout, Epochs(**{each.name: getattr(said, each.name) for each in fields(Epochs)})


def _check(said: _Fields) -> None:
    """Raise ValueError if fields contradict one another."""
    if said.kind != _KIND:
        raise ValueError(f"it is {said.kind!r}, and this version of the package reads {_KIND!r}: make the table again")
    last = 0
    for begin, end in said.abandoned:
        if not last < begin <= end or begin <= said.committed <= end:
            raise ValueError(f"the abandoned epochs {begin} to {end} overlap, or have the last commit, {said.committed}")
        last = end
    if not said.version_bytes and (said.committed or said.abandoned or said.prepared):
        raise ValueError("it has commits, and version_bytes 0, which is that of rows that cannot be changed")
