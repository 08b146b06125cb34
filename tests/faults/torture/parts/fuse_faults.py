"""Whatever users do, on a drive whose operations fail: EIO, ENOSPC, EDQUOT, short reads, delays; by FUSE.

After each fault the same object goes on with what it held before, or with what it was given; a file under its name is the old or
the new one; what fails is an OSError with the errno of the fault and a path that the user knows.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random as randoms
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ....support.faulty_filesystem import MODES, FaultyFilesystem, Mode, faulty_filesystem, obstacle
from .. import Leaked, Wrong

SHORT, SECONDS = 6, 120

Result = TypeVar("Result")

OPERATIONS = (
    "lookup", "getattr", "setattr", "ftruncate", "mkdir", "unlink", "rmdir", "rename", "open", "create", "read", "write", "flush",
    "fsync", "opendir", "readdir", "fsyncdir", "statfs", "fallocate",
)  # fmt: skip
OFTEN = ("read", "write", "fsync", "fsyncdir", "rename", "open", "create")
FULL = frozenset(("create", "write", "fallocate", "mkdir", "rename", "fsync", "flush", "fsyncdir"))
"""What may be told that there is no room."""


class Failed:
    """What an operation did not return."""

    def __init__(self, error: OSError) -> None:
        self.error = error


class FailingDrive:
    """A drive whose operations fail by chance while something is tried, and not otherwise."""

    def __init__(self, disk: FaultyFilesystem, mode: Mode, random: randoms.Random) -> None:
        self.disk = disk
        self.path = disk.path
        self.mode = mode
        self.random = random
        self.history: list[str] = []
        self.behind = False
        """Whether what uses it tells an error of one call in a later one."""
        self._met: set[str] = set()

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """As the block begins a fault or two lie in wait; as it ends all is well."""
        if self.random.random() < 0.7:
            for _ in range(self.random.choice((1, 1, 1, 2))):
                self._fail()
        try:
            yield
        finally:
            met = self.disk.heal()
            now = {entry.partition(":")[2] for entry in met} - {"hang", "short"}
            if self.mode == "writeback" or self.behind:
                # What could not be written behind is told to whoever asks next: a page cache says EIO, or that there is no room.
                now |= self._met | ({"EIO"} if "EDQUOT" in now else set())
            self._met = now
            if met:
                self.history.append(f"   met {', '.join(dict.fromkeys(met))}")

    def tries(self, what: str, operation: Callable[[], Result], *paths: Path, no_error: bool = False) -> Result | Failed:
        """What ``operation`` returns on the failing drive; or its error, which has to be that of the fault, and to name one of
        ``paths``, or what is in it."""
        self.history.append(what)
        try:
            with self.failing():
                return operation()
        except OSError as error:
            if no_error:
                raise
            self.check(error, *paths)
            return Failed(error)

    def check(self, error: OSError, *paths: Path) -> None:
        """Raise Wrong unless it is the fault's, and names one of ``paths``, or what is in it."""
        shown = f"{type(error).__name__}({error}), filename {error.filename!r}"
        self.history.append(f"   raised {shown}")
        if error.errno is None:
            raise Wrong(f"without errno: {shown}") from error
        if errno.errorcode[error.errno] not in self._met:
            raise Wrong(f"no fault of this call: {shown}; met: {sorted(self._met)}") from error
        if error.filename is None:
            raise Wrong(f"without filename: {shown}") from error
        named = Path(os.fsdecode(error.filename))
        if not any(named == path or path in named.parents for path in (paths or (self.path,))):
            raise Wrong(f"names another file than {', '.join(map(str, paths))}: {shown}") from error
        if named.name.endswith((".deepnvme-tmp", ".new")):
            raise Wrong(f"names a temporary file: {shown}") from error

    def check_no_leftovers(self, directory: Path) -> None:
        """Raise Leaked where a temporary file is left."""
        left = [name for name in os.listdir(directory) if name.endswith((".deepnvme-tmp", ".new"))]
        if left:
            raise Leaked(f"left behind: {left}")

    def _fail(self) -> None:
        random = self.random
        kinds = OFTEN if random.random() < 0.5 else OPERATIONS
        chosen = {random.choice(kinds) for _ in range(random.choice((1, 1, 2, 3)))}
        if random.random() < 0.1:
            chosen = set(OPERATIONS)
        name = "*"
        options: dict[str, Any] = {"skip": random.choice((0, 0, 0, 1, 2, 5, 20)), "times": random.choice((1, 1, 1, 2, 3, 10, -1))}
        if random.random() < 0.3:
            options.update(skip=0, times=-1, probability=random.choice((0.5, 0.1, 0.02)), seed=random.randrange(1 << 30))
        effect = random.random()
        if effect < 0.05:
            options.update(effect="hang", value=random.randrange(1, 30), times=min(options["times"] % 11, 5))
        elif effect < 0.1 and self.mode == "direct":
            chosen, options = {"read"}, {**options, "effect": "short", "value": random.choice((1, 512, 1000, 4096, 5000))}
            if options["value"] == 1:
                options["times"] = 10
        else:
            full = chosen <= FULL and random.random() < 0.5
            options["error"] = random.choice((errno.ENOSPC, errno.EDQUOT)) if full else errno.EIO
        self.history.append(f"   {','.join(sorted(chosen))} {options} {name}")
        self.disk.fail(",".join(sorted(chosen)), name=name, **options)


def requires() -> str | None:
    return obstacle()


def attack(random: randoms.Random, directory: Path) -> None:
    from ..uses import USES

    mode = random.choice(MODES)
    name, use = random.choice(list(USES.items()))
    with faulty_filesystem(directory, mode) as disk:
        drive = FailingDrive(disk, mode, random)
        try:
            use(drive, random)
        except BaseException as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note("\n".join([f"{name} in mode {mode}:", *drive.history]))
            raise
