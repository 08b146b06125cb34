"""Commits of several tables, which after a crash are all there or none."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from .table import Table


class CommonCommits:
    """Commits several tables together.

    Each table is prepared: its changes are on the drive, and its manifest says so. Then the first one is committed, which decides
    for all, and after it the others. A crash before that leaves each table at the commit before; after it, whoever has the
    tables together next finds the first one's name of the commit, and makes it the last one of those that were only prepared.

    Args:
        tables: Opened ``writable``; no row was changed since. The first one decides.

    Raises:
        OSError: From the drive.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = list(tables)
        self._unfinished: tuple[str, list[dict[str, Any]]] | None = None
        if len(tables) > 1:
            names = {table.commit_name for table in tables} - {""}
            for table in tables:
                table.adopt_prepared(names)

    def commit(self, attributes: Sequence[Mapping[str, Any]]) -> None:
        """Commit all tables. Blocks until they are on stable storage.

        Args:
            attributes: Of each table, as for :meth:`Table.commit`.

        Raises:
            OSError: From the drive. It may be called again.
        """
        self.finish()
        if len(self._tables) == 1:
            self._tables[0].commit(attributes[0])
            return
        name, noted = secrets.token_hex(8), [dict(each) for each in attributes]
        for table, each in zip(self._tables, noted, strict=True):
            table.prepare_commit(name, each)
        self._unfinished = name, noted
        self.finish()

    def finish(self) -> None:
        """Finish a commit that was decided, or perhaps was, and then failed or was interrupted. No row may be changed before.

        Raises:
            OSError: From the drive; call it again, or :meth:`rollback`.
        """
        if self._unfinished is not None:
            name, noted = self._unfinished
            for table, each in zip(self._tables, noted, strict=True):
                table.commit_prepared(name, each)
            self._unfinished = None

    def rollback(self) -> None:
        """Undo the changes of all tables since the last commit; one that was decided is finished before. Blocks.

        Raises:
            OSError: From the drive; call it again.
        """
        if self._unfinished is not None and self._tables[0].commit_name == self._unfinished[0]:
            self.finish()
        for table in self._tables:  # the first one first: then none of the others is prepared for what is in force
            table.rollback()
        self._unfinished = None
