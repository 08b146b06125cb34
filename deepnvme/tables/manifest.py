"""The manifest of a table: describes the rows, and says which commit was the last. Its presence makes a directory a table.

Each commit ends an epoch. Each row of an updatable table has two versions on the drive, each with the number of its epoch.

1. A version is valid if its epoch is at most ``committed``, and not in a range of ``abandoned``. Of two valid versions, the
   one with the larger epoch is the row's value. Epoch 0 stands for a row that was never written: zeros.
2. A writer overwrites the version that is not the row's value. So the last commit is on the drive until the next one is made.
3. ``reserved`` is on the drive before any version of an epoch up to it is written. A writer that finds ``reserved`` above
   ``committed`` follows a writer that crashed, and abandons the epochs between. So no epoch is used twice.
4. A commit flushes the files of rows, then replaces the manifest, then flushes its directory. The replacement is the commit.
5. ``prepared`` is this table's part of a commit of several tables. It is valid if the first table's last commit has the same
   ``name``; the next writer of all these tables then makes it the last commit of the others. It is void once another writer
   has changed a row.

6. The first of several directories has the manifest; the others are members, see :mod:`deepnvme.files.identity`. A writer
   takes a new identity before its first write.

docs/formats.md lists the fields, and what a crash at each point leaves.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from deepnvme.files.identity import membership
from deepnvme.files.manifest import MOST_DIMENSIONS, read_manifest
from deepnvme.files.replacing import replace_durably
from deepnvme.memory.tensor_bytes import dtype_named

from .layout import Column, Shard, State, TableLayout, columns_of

MANIFEST_NAME = "deepnvme-table.json"
"""Name of the manifest in the table's first directory."""
MEMBERSHIP_NAME = "deepnvme-table.member.json"
"""Name of the membership in each of the table's other directories."""
ROWS_NAME = "rows"
"""Name of the file with rows in each of the table's directories."""
_KIND = "deepnvme table 3"
_MOST_BYTES = 64 << 20
"""Limit of a manifest. Each crash between two commits, and each rollback, adds some 30 bytes."""
_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_STRICT = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")


class CorruptTable(OSError):
    """Raised (errno EBADMSG) if a table's manifest or the size of a file is wrong, or another package version wrote the table."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EBADMSG, f"this is no whole table: {why}", str(path))


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Prepared:
    """This table's part of a commit of several tables. It is valid once the first table has made a commit of the same name."""

    epoch: _Count
    name: str
    """Random name of the commit: the same in all its tables, and in no other commit."""
    attributes: dict[str, Any]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Epochs:
    """Which versions of rows are valid, and the name and attributes of the last commit. Each commit ends an epoch."""

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
    """A prepared commit of several tables, which is valid if the first table has made it; None if there is none."""
    identity: str = ""
    """Random name that all directories of a table have, if it has several."""

    def adopt(self, prepared: Prepared) -> Epochs:
        """Return these epochs with ``prepared``, this table's part of a commit of several tables, as the last commit."""
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


NO_COMMITS = Epochs(committed=0, reserved=0, abandoned=(), attributes={})
"""The epochs of a file in place, which has no manifest: its rows cannot be changed."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class _Fields(Epochs):
    """The fields of the manifest file."""

    kind: str
    rows: _Count
    columns: Annotated[list[tuple[str, str, Annotated[list[_Count], Field(max_length=MOST_DIMENSIONS)]]], Field(min_length=1)]
    version_bytes: Annotated[int, Field(ge=0, le=1 << 41)]
    directories: Annotated[int, Field(ge=1, le=1 << 16)]
    chunk: Annotated[int, Field(ge=0, le=1 << 40)]

    def table_columns(self) -> tuple[Column, ...]:
        """Return the columns of each row. Raises ValueError for columns that no row can have."""
        values, *states = [State(dtype_named(dtype), tuple(shape)) for _, dtype, shape in self.columns]
        return columns_of(values.dtype, values.shape, dict(zip([name for name, _, _ in self.columns[1:]], states, strict=True)))


_FILE = TypeAdapter(_Fields)


def save_manifest(layout: TableLayout, epochs: Epochs) -> None:
    """Write the manifest into the table's first directory, to stable storage. Blocks.

    Raises:
        OSError: If the drive cannot be written. The table then has either the previous or the new manifest.
        ValueError: If JSON cannot hold the attributes, or the manifest would be too large.
    """
    said = _Fields(
        kind=_KIND,
        rows=layout.rows,
        columns=[(each.name, str(each.dtype).removeprefix("torch."), list(each.shape)) for each in layout.columns],
        version_bytes=layout.version_bytes,
        directories=len(layout.shards),
        chunk=layout.chunk,
        **vars(epochs),
    )
    data = _FILE.dump_json(said, indent=1) + b"\n"
    if len(data) > _MOST_BYTES:
        raise ValueError(f"the table's manifest may have {_MOST_BYTES} bytes, and would have {len(data)}")
    replace_durably(layout.files[0].parent / MANIFEST_NAME, data)


def load_manifest(directories: Sequence[Path]) -> tuple[TableLayout, Epochs]:
    """Return the layout and the epochs of the table in these directories.

    Raises:
        FileNotFoundError: If there is no table in the directory.
        CorruptTable: If the manifest is damaged.
        ValueError: If these are not all directories of one table, in its order.
    """
    first = directories[0]
    said = read_manifest(first / MANIFEST_NAME, _MOST_BYTES, _parse, CorruptTable)
    if len(directories) != said.directories:
        raise ValueError(f"the table in '{first}' has {said.directories} directories, got {len(directories)}: give all")
    for index, directory in enumerate(directories[1:], 1):
        member = membership(directory / MEMBERSHIP_NAME, CorruptTable)
        if member is None or member.index != index or not member.is_of(said.identity):
            raise ValueError(
                f"'{directory}' is not directory {index} (from 0) of the table in '{first}' as it is now: give directories that"
                " were copied or moved together, in the order in which the table was created"
            )
    shards = tuple(Shard(directory / ROWS_NAME) for directory in directories)
    layout = TableLayout(shards, said.rows, said.table_columns(), said.version_bytes, said.chunk)
    return layout, Epochs(**{each.name: getattr(said, each.name) for each in fields(Epochs)})


def _parse(data: bytes) -> _Fields:
    """Parse a table's manifest. Raises ValueError if it is damaged."""
    try:
        said = _FILE.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        why = f"its field {where!r} is wrong, {first['msg']}" if where else f"it is no {first['msg'].removeprefix('Invalid ')}"
        raise ValueError(why) from None
    said.table_columns()
    if said.kind != _KIND:
        raise ValueError(f"it is {said.kind!r}, and this version of the package reads {_KIND!r}: make the table again")
    last = 0
    for begin, end in said.abandoned:
        if not last < begin <= end or begin <= said.committed <= end:
            raise ValueError(f"the abandoned epochs {begin} to {end} overlap, or have the last commit, {said.committed}")
        last = end
    if not said.version_bytes and (said.committed or said.abandoned or said.prepared):
        raise ValueError("it has commits, and version_bytes 0, which is that of rows that cannot be changed")
    if (said.directories > 1) != (said.chunk > 0):
        raise ValueError(f"it has {said.directories} directories and the chunk {said.chunk}")
    return said
