"""The manifest of a table: describes the rows, and says which commit was the last. Its presence makes a directory a table.

Each commit ends an epoch. Each row of an updatable table has two versions on the drive, each with the number of its epoch.

1. A version is valid if its epoch is at most ``committed``, and not in a range of ``abandoned``. Of two valid versions, the
   one with the larger epoch is the row's value. Epoch 0 stands for a row that was never written: zeros.
2. A writer overwrites the version that is not the row's value. So the last commit is on the drive until the next one is made.
3. ``reserved`` is on the drive before any version of an epoch up to it is written. A writer that finds ``reserved`` above
   ``committed`` follows a writer that crashed, and abandons the epochs between. So no epoch is used twice.
4. A commit flushes the files of rows, then replaces the manifest, then flushes its directory. The replacement is the commit.
5. ``prepared`` is this table's part of a commit of several tables. It is in force if the first table's last commit has the
   same ``name``; the next writer of all these tables then makes it the last commit of the others. It is void once another
   writer has changed a row.
6. The identity at the end of each file of rows is ``identity``, or one of ``previous``: see :mod:`deepnvme.tables.identity`. A
   new identity is written to the manifest before any file. ``previous`` is empty once a commit has flushed all files.

docs/formats.md lists the fields, and what a crash at each point leaves.
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
"""Temporary name of the manifest while a table is being created."""
_KIND = "deepnvme table 2"
_MOST_BYTES = 64 << 20
"""Limit of a manifest. Each crash between two commits, and each rollback, adds some 30 bytes."""
_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_Identity = Annotated[str, Field(pattern=r"\A[0-9a-f]{32}\z")]
_STRICT = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")


class CorruptTable(OSError):
    """Raised (errno EBADMSG) if a table's manifest or the size of a file is wrong, or another package version wrote the table."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EBADMSG, f"this is no whole table: {why}", str(path))


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Prepared:
    """This table's part of a commit of several tables. It is in force once the first table has committed under the same name."""

    epoch: _Count
    name: str
    """Random name of the commit: the same in all its tables, and in no other commit."""
    attributes: dict[str, Any]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Epochs:
    """Which versions of rows are valid, and the name and attributes of the last commit."""

    committed: _Count
    """Epoch of the last commit; 0 before the first."""
    reserved: _Count
    """Largest epoch whose versions may be on the drive."""
    abandoned: tuple[tuple[_Count, _Count], ...]
    """Ranges of epochs that were never committed, ascending: first and last of each."""
    attributes: dict[str, Any]
    """Attributes given with the last commit, such as the number of steps: anything that JSON can hold."""
    name: str = ""
    """Name of the last commit, if it was made together with other tables; else ""."""
    prepared: Prepared | None = None
    """A prepared commit of several tables, which is in force if the first table has made it; None if there is none."""
    identity: _Identity
    """The table's identity. Each writer gives the table a new one before its first write."""
    previous: tuple[_Identity, ...] = ()
    """Former identities that some files may still have; none once a commit has flushed ``identity`` to all files."""

    def adopt(self, prepared: Prepared) -> Epochs:
        """Return these epochs after a prepared commit has become the last commit."""
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
        """Return these epochs for a new writer, which abandons what the previous writer reserved and did not commit."""
        first, last = self.present, self.reserved
        if last < first:
            return self
        before = self.abandoned
        if before and before[-1][1] == first - 1:
            first, before = before[-1][0], before[:-1]
        return replace(self, abandoned=(*before, (first, last)))

    @property
    def present(self) -> int:
        """The epoch that versions written now belong to."""
        last_abandoned = self.abandoned[-1][1] if self.abandoned else 0
        return max(self.committed, last_abandoned) + 1


NO_COMMITS = Epochs(committed=0, reserved=0, abandoned=(), attributes={}, identity="0" * 32)
"""The epochs of a file in place, which has no manifest: its rows cannot be changed."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class _Fields(Epochs):
    """The fields of the manifest file."""

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
        OSError: From the drive. Either the previous or the new manifest is in force then.
        ValueError: If JSON cannot hold the attributes, or the manifest would be too large.
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
    """Tells whether a table's manifest was replaced since this watch was made.

    It keeps the manifest file open; otherwise a later manifest could get the same inode and the same time.

    Raises:
        FileNotFoundError: If there is no manifest.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / MANIFEST_NAME
        with with_filename(self._path):
            self._file = io.FileIO(str(self._path))

    def replaced(self) -> bool:
        """Return whether the manifest was replaced or removed. Raises OSError if the file system cannot be asked."""
        return not refers_to(self._path, self._file.fileno())

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def load_manifest(directory: Path, name: str = MANIFEST_NAME) -> tuple[TableLayout, Epochs]:
    """Return the layout and the epochs of a table. The layout has the file paths that the manifest recorded.

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
