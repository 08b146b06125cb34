"""The uses of the torture on a drive that drops writes and calls them done: each has to notice, or it could not find anything."""

from __future__ import annotations

import random as randoms
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..support.faulty_filesystem import FaultyFilesystem, faulty_filesystem, obstacle
from .torture import Torn, Wrong
from .torture.parts.fuse_faults import FailingDrive
from .torture.uses import USES


class LyingDrive(FailingDrive):
    def _fail(self) -> None:
        self.disk.fail("write", effect="lie", times=-1, probability=0.5, seed=self.random.randrange(1 << 30))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("name", USES)
def test_a_drive_that_lies_is_found_out(name: str, drive: Path) -> None:
    missing = obstacle()
    if missing is not None:
        pytest.skip(missing)
    for seed in range(20):
        own = drive / str(seed)
        own.mkdir()
        with faulty_filesystem(own) as disk:
            found = _found(USES[name], disk, seed)
        if found is not None:
            return
    pytest.fail("20 tries on a drive that loses half of what is written have found nothing")


def _found(use: Callable[[Any, randoms.Random], None], disk: FaultyFilesystem, seed: int) -> str | None:
    """What was noticed; no exception, whose frames would keep files open."""
    random = randoms.Random(seed)
    try:
        use(LyingDrive(disk, "direct", random), random)
    except (Wrong, Torn) as error:
        return str(error)
    except Exception as error:  # the package itself has noticed: a corrupt file, an object that cannot be unpickled
        return repr(error)
    return None
