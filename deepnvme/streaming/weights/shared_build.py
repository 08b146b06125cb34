"""A store that the first of those who want it builds, and the others open: processes that are started together, say."""

from __future__ import annotations

import errno
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepnvme.store.directory_lock import DirectoryLock, StoreLocked
from deepnvme.store.manifest import MANIFEST_NAME

from .weight_store import WeightStore

BUILDING = "building"
"""The directory, in the store's first, that whoever builds has to himself, and that is gone afterwards."""
_PATIENCE = 3600.0
"""Seconds: some TB are built in that time. A builder that dies is not waited for."""
_BETWEEN_LOOKS = 0.05
"""Seconds."""
_LONGEST_SHOWN = 200
"""Characters of an origin that is none of ours."""

_logger = logging.getLogger(__name__)


def opened_or_built(
    where: Mapping[Any, float], origin: Mapping[str, Any], build: Callable[[Path], WeightStore]
) -> WeightStore:
    """The store that is in the directories, or that ``build`` builds there. Waits, and logs a warning that says for whom, while
    another process, or thread, does that.

    ``build``: gets a directory of its own, in the first of the store's, for what it does not need afterwards. It may have been
    somebody else's who was killed.

    Raises ValueError for a store of another origin; StoreLocked naming the one that has been building for an hour, or has the
    directory for something else.
    """
    first: Path = next(iter(where))
    if (first / MANIFEST_NAME).exists():  # to look closer where nothing is would lock out whoever is about to build
        try:
            store = opened(where, origin)
        except StoreLocked:
            store = None
        if store is not None:  # returned at once: Ctrl-C in any call before would leave the store open in a kept traceback
            return store
    owner = _alone_in(first / BUILDING)
    try:
        return opened(where, origin) or build(first / BUILDING)
    finally:
        try:
            owner.release()
        finally:
            owner.release()  # once more, in case Ctrl-C interrupted the first: a kept traceback would keep the lock


def opened(where: Mapping[Any, float], origin: Mapping[str, Any]) -> WeightStore | None:
    """The store that is there, if there is one."""
    try:
        store = WeightStore.open(where)
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
            text = f"'{next(iter(where))}' has the store of another checkpoint, or version of it: {'; '.join(wrong)}"
            raise ValueError(f"{text}; choose another directory, or remove what is in this one")
    except BaseException:
        store.close()
        raise
    return store


def _facts(origin: str) -> dict[str, Any]:
    """What a builder has said; of one that said something else, that as it is."""
    try:
        found = json.loads(origin or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"origin": origin[:_LONGEST_SHOWN]}


def _alone_in(directory: Path) -> DirectoryLock:
    """Waits until nobody else has it."""
    began = time.monotonic()
    said = False
    while True:
        try:
            return DirectoryLock(directory)
        except StoreLocked as error:
            if time.monotonic() - began > _PATIENCE:
                text = f"waited {_PATIENCE:.0f} s for {error.holder} to build the store; end that, or choose another directory"
                raise StoreLocked(errno.EBUSY, text, str(directory.parent)) from None
            if not said:
                _logger.warning("waiting for %s to build the store in '%s'", error.holder, directory.parent)
                said = True
        time.sleep(_BETWEEN_LOOKS)
