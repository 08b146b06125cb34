"""Atomic commits of several tables: after a crash, all tables are at the new commit or all at the previous one."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from .session import TableSession
from .table import Table


class CommonCommits:
    """Commits several tables together, atomically.

    First each table is prepared: its changes are on the drive, and its manifest says so. Then the tables are committed, the
    first table first: its commit decides for all. A crash before this decision leaves each table at its last commit. After a
    later crash, the next CommonCommits object for these tables finishes the remaining commits: it recognises them by the name
    of the first table's commit. The constructor does that.

    Args:
        tables: Opened ``writable``, with no row changed since then. The first table decides.

    Raises:
        OSError: From the drive.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._sessions = [table.session for table in tables]
        self._unfinished: tuple[str, list[dict[str, Any]]] | None = None
        if len(tables) > 1:
            names = {commit_name(session) for session in self._sessions} - {""}
            for session in self._sessions:
                with session.lock:
                    writer = session.writer_here()
                    if writer.prepared is not None and writer.prepared.name in names:
                        writer.adopt_prepared()

    def commit(self, attributes: Sequence[Mapping[str, Any]]) -> None:
        """Commit all tables. Blocks until they are on stable storage.

        Args:
            attributes: One mapping for each table, as for :meth:`Table.commit`.

        Raises:
            OSError: From the drive. commit() may be called again.
        """
        self.finish()
        name, noted = secrets.token_hex(8), [dict(each) for each in attributes]
        if len(self._sessions) == 1:
            name = ""
        else:
            for session, each in zip(self._sessions, noted, strict=True):
                with session.lock:
                    session.writer_here().prepare(name, each)
            self._unfinished = name, noted
        self._commit(name, noted)

    def finish(self) -> None:
        """Finish a commit that failed or was interrupted after all tables were prepared. Blocks.

        Must be called before rows are changed. The commit may be in force in some of the tables already. Does nothing if no
        commit is unfinished.

        Raises:
            OSError: From the drive. Call finish() again, or :meth:`rollback`.
        """
        if self._unfinished is not None:
            self._commit(*self._unfinished)

    def rollback(self) -> None:
        """Undo the changes of all tables since the last commit. Blocks.

        If the first table has made an unfinished commit, that commit is finished first and is then the last commit.

        Raises:
            OSError: From the drive. rollback() may be called again.
        """
        if self._unfinished is not None and commit_name(self._sessions[0]) == self._unfinished[0]:
            self.finish()
        for session in self._sessions:  # the first table first: then none of the others is prepared for a commit in force
            with session.lock:
                session.writer_here().rollback()
        self._unfinished = None

    def _commit(self, name: str, attributes: Sequence[Mapping[str, Any]]) -> None:
        for session, each in zip(self._sessions, attributes, strict=True):
            with session.lock:
                session.writer_here().commit(each, name)
        self._unfinished = None


def commit_name(session: TableSession) -> str:
    """Return the name of a table's last commit; "" if the table was committed alone."""
    with session.lock:
        return session.writer_here().epochs.name
