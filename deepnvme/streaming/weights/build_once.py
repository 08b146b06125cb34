"""Opens a weight store, or builds it if it is missing. If several processes need it, one builds it and the others wait."""

from __future__ import annotations

import errno
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepnvme._polling import PROCESS_POLL_SECONDS
from deepnvme.files.directory_lock import DirectoryLock, DirectoryOwner, StoreLocked
from deepnvme.store.manifest import MANIFEST_NAME
from deepnvme.telemetry.descriptions import printable

from .weight_store import WeightStore

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig

BUILDING = "building"
"""Name of a temporary directory, inside the store's first directory, that the building process locks and later removes."""
BUILD_WAIT_SECONDS = 3600.0
"""Seconds to wait for another process that builds: enough for some TB. If that process dies, waiting ends at once."""
_LONGEST_SHOWN = 200
"""Characters shown of an origin that another program has written."""

_logger = logging.getLogger(__name__)


def opened_or_built(
    where: Sequence[Path],
    origin: Mapping[str, Any],
    build: Callable[[Path], WeightStore],
    aio_config: AioConfig | None = None,
) -> WeightStore:
    """Open the weight store in the directories, or build it if there is none. Blocks.

    While another process or thread builds the store, waits for it, and logs a warning that names it.

    Args:
        where: The store's directories.
        origin: The facts about the checkpoint that the store's origin must have, as JSON.
        build: Builds and opens the store. Its argument is a temporary directory inside the store's first one, which may contain
            files of a process that was killed.
        aio_config: Settings of the engine that opens the store; None for the profile of the drive.

    Raises:
        ValueError: If the directories have a store of another origin; the message names the differences.
        StoreLocked: If another process has been building for an hour, or uses the directory for something else; the message
            names it.
        Exception: What ``build`` raises.
    """
    first = where[0]
    if (first / MANIFEST_NAME).exists():  # opening where nothing is would lock the directory against a process about to build
        try:
            store = open_existing(where, origin, aio_config)
        except StoreLocked:
            store = None
        if store is not None:
            return store
    owner = _alone_in(first / BUILDING)
    try:
        return open_existing(where, origin, aio_config) or build(first / BUILDING)
    finally:
        owner.release()


def open_existing(where: Sequence[Path], origin: Mapping[str, Any], aio_config: AioConfig | None = None) -> WeightStore | None:
    """Open the weight store in the directories; return None if there is none. Arguments are those of :func:`opened_or_built`.

    Raises:
        ValueError: If the store's origin differs from ``origin``; the message names the differences.
        Exception: What :meth:`WeightStore.open` raises otherwise.
    """
    try:
        store = WeightStore.open(where, aio_config=aio_config)
    except FileNotFoundError:
        return None
    try:
        found = _facts(store.origin)
        wrong = [
            f"{key}: expected {origin.get(key)!r}, found {found.get(key)!r}"
            for key in {**origin, **found}
            if origin.get(key) != found.get(key)
        ]
        if wrong:
            text = f"'{where[0]}' has the store of another checkpoint, or version of it: {'; '.join(wrong)}"
            raise ValueError(f"{text}; choose another directory, or remove what is in this one")
    except BaseException:
        store.close()
        raise
    return store


def _facts(origin: str) -> dict[str, Any]:
    """Parse a store's origin into facts. Text that is not a JSON object becomes the only fact, "origin"."""
    try:
        found = json.loads(origin or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"origin": origin[:_LONGEST_SHOWN]}


def _alone_in(directory: Path) -> DirectoryLock:
    """Lock a directory, waiting while another process or thread has it locked. Raises StoreLocked after an hour."""
    began = time.monotonic()
    said = False
    owner = DirectoryOwner("WeightStore", "wait until it is built")
    while True:
        try:
            return DirectoryLock(directory, owner, collect=not said)
        except StoreLocked as error:
            if time.monotonic() - began > BUILD_WAIT_SECONDS:
                waited = f"waited {BUILD_WAIT_SECONDS:.0f} s for {error.holder} to build the store"
                text = f"{waited}; end that, or choose another directory"
                raise StoreLocked(errno.EBUSY, text, str(directory.parent)) from None
            if not said:
                _logger.warning("waiting for %s to build the store in '%s'", error.holder, printable(directory.parent))
                said = True
        time.sleep(PROCESS_POLL_SECONDS)
