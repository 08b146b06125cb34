"""Where compiled ops are kept, and the lock under which they are made.

A compiled op runs with the user's rights. So it is loaded only from a path that no other user can have changed: every directory
on the path belongs to the user or to root, and neither its group nor others can write to it. (In a sticky directory, such as
/tmp, others can make entries, but not replace those of the user or of root.) The path is followed from the root directory
downwards, link by link, so no other user can change a part that was checked, and the path can be used afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

_POLL = 0.05  # seconds between two tries for the lock; flock itself cannot time out
_MOST_LINKS = 40  # on the way to a directory, as the kernel's own limit

_told: set[str] = set()


class Unusable(PermissionError):
    """Other users could have written to ``filename``, or files in it cannot be executed. ``strerror`` says which."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EACCES, why, str(path))

    def __str__(self) -> str:
        return f"{self.filename!r} {self.strerror}"


def root() -> Path:
    """Return the cache's root: ``$TORCH_EXTENSIONS_DIR/deepnvme``, else ``deepnvme`` in the user's cache directory.

    The user's cache directory is ``$XDG_CACHE_HOME`` or ``~/.cache``. The root need not exist yet, and may be unusable: see
    :func:`directory`.
    """
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen).expanduser().absolute() / "deepnvme"
    # A user without a home (in a container, say) gets a place that is not used: see _check_home.
    return _of_the_user() or Path("/.cache/deepnvme")


def directory(name: str, make: bool = False) -> Path:
    """Return the path of the cache's directory ``name``, without symbolic links. It need not exist, unless ``make`` is true.

    Only the user and root can change the directory and those above it, and files in it can be executed.

    It is in :func:`root`. If that is unusable, it is in the first usable one of the user's cache directory and the user's private
    directories (mode 0700) in /var/tmp and the directory for temporary files, and a warning says so, once. A home directory that
    does not exist or is read-only is unusable, too. A ``TORCH_EXTENSIONS_DIR`` that cannot be written to is an error.

    Raises:
        Unusable: If none of them is usable.
        OSError: If the directory cannot be made in ``TORCH_EXTENSIONS_DIR``.
    """
    chosen = root()
    if sys.platform != "linux":  # nothing is compiled
        return chosen / name
    told_to = bool(os.environ.get("TORCH_EXTENSIONS_DIR"))
    problem: OSError
    try:
        if not told_to:
            _check_home()
        return _usable(chosen / name, make)
    except Unusable as error:
        problem = error
    except OSError as error:
        if told_to:
            raise
        problem = error
    for place in private_places():
        try:
            usable = _usable(place / name, make, mode=0o700)
        except OSError:
            continue
        if str(chosen) not in _told:
            # Not imported at the top: setup.py uses this package where nothing of deepnvme can be imported.
            from deepnvme.telemetry.callers import stack_level

            _told.add(str(chosen))
            warnings.warn(
                f"compiled ops are not kept in {str(chosen)!r}: {problem}. They are kept in {str(place)!r} instead. "
                "Mend that, or set TORCH_EXTENSIONS_DIR to one that only you can write to and whose files can be executed",
                stacklevel=stack_level(),
            )
        return usable
    raise problem


def read(file: Path) -> bytes:
    """Return the content of a file in a directory of the cache. Raises Unusable if another user could have written it."""
    found, missing = _follow(file.parent)
    if missing:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
    _check_mode(found, os.lstat(found))
    try:
        # O_NONBLOCK: of anything but a regular file, opening could wait for somebody.
        descriptor = os.open(found / file.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise Unusable(file, "is a symbolic link") if error.errno == errno.ELOOP else error from None
    with open(descriptor, "rb") as content:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Unusable(file, "is not a regular file")
        _check_owner(file, status, _owners())
        _check_mode(file, status)
        return content.read()


def build_timeout() -> float:
    """Return the seconds to wait for another process's build: DEEPNVME_BUILD_TIMEOUT, or 600."""
    text = os.environ.get("DEEPNVME_BUILD_TIMEOUT", "600")
    try:
        seconds = float(text)
        if seconds >= 0:
            return seconds
    except ValueError:
        pass
    raise ValueError(f"DEEPNVME_BUILD_TIMEOUT must be a number of seconds, 0 or more, got {text!r}")


@contextlib.contextmanager
def exclusive(path: Path, timeout: float, waiting: Callable[[str], None] = lambda holder: None) -> Iterator[None]:
    """Hold the lock file ``path`` for the block. The kernel releases it when the holder dies, however it dies.

    Blocks up to ``timeout`` seconds, then raises TimeoutError naming the holder. OSError if the file cannot be
    written or locked. Excludes other threads as well as other processes. ``waiting`` is called with the holder's name, once, if
    the lock is not free.
    """
    import fcntl  # absent on Windows, where this module must still import

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        deadline = time.monotonic() + timeout
        told = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise OSError(error.errno, f"flock: {error.strerror}", str(path)) from error
            # A holder writes its name a moment after it has locked the file.
            holder = os.pread(descriptor, 4096, 0).decode(errors="replace")
            if not told and holder:
                told = True
                waiting(holder)
            if time.monotonic() >= deadline:
                holder = holder or "an unknown process"
                raise TimeoutError(
                    f"waited {timeout:g} s for another build to finish: {str(path)!r} is locked by {holder}. "
                    "End that process if it is stuck, or wait longer by setting DEEPNVME_BUILD_TIMEOUT (seconds)"
                )
            time.sleep(_POLL)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _of_the_user() -> Path | None:
    """Return the package's directory in the user's cache; None if the user has no home."""
    chosen = os.environ.get("XDG_CACHE_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute() / "deepnvme"
    home = _home()
    return None if home is None else Path(home).absolute() / ".cache" / "deepnvme"


def _home() -> str | None:
    """Return the user's home directory, which need not exist: that of HOME, or of the user database if HOME is unset or empty."""
    if os.environ.get("HOME") == "":  # expanduser would make it the root directory
        import pwd  # not on every platform

        try:
            return pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            return None
    home = os.path.expanduser("~")
    return None if home == "~" else home


def _check_home() -> None:
    """Raise OSError if the user's cache would be in a home directory that does not exist, as /nonexistent never shall."""
    if not os.environ.get("XDG_CACHE_HOME"):
        home = _home()
        if home is None:
            raise FileNotFoundError(errno.ENOENT, "the user has no home directory")
        if not os.path.isdir(home):
            raise FileNotFoundError(errno.ENOENT, "the home directory does not exist", home)


def private_places() -> Iterator[Path]:
    """Yield directories to use if the chosen one cannot be: in the user's cache, then the user's own below /var/tmp and /tmp."""
    own = _of_the_user()
    with contextlib.suppress(OSError):
        _check_home()
        if own is not None:
            yield own
    for shared in ("/var/tmp", tempfile.gettempdir()):
        yield Path(shared, f"deepnvme-{os.geteuid()}")


def _usable(path: Path, make: bool, mode: int = 0o755) -> Path:
    """Return a path without links, its directory made with ``mode`` if ``make``.

    Raises:
        Unusable: If the directory is noexec, or other users could change it.
        OSError: If the directory, or an entry in it, cannot be made.
    """
    found, missing = _follow(path)
    if os.statvfs(found).f_flag & os.ST_NOEXEC:
        raise Unusable(found, "is on a file system that is mounted noexec, from which no compiled op can be loaded")
    if (missing or make) and not os.access(found, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "it cannot be written to", str(found))
    if missing and make:
        for name in missing:
            found /= name
            with contextlib.suppress(FileExistsError):  # made by another process of the user, or by somebody else
                found.mkdir(mode=mode)
        return _usable(path, make=False)
    if not missing:
        _check_mode(found, os.lstat(found))
    return found.joinpath(*missing)


def _owners() -> tuple[int, ...]:
    """Return the users who may own a directory on the path: root, this user, and the owner of the root directory."""
    # The owner of the root directory controls this process anyway. In a user namespace without root that is "nobody".
    return 0, os.geteuid(), os.lstat("/").st_uid


def _follow(path: Path) -> tuple[Path, list[str]]:
    """Follow an absolute path; return its part that exists, without symbolic links, and the names that are missing.

    Raises Unusable if another user could change a directory or a link on the way.
    """
    owners = _owners()
    found = Path("/")
    status = os.lstat(found)
    _check_mode_of_parent(found, status)
    names = [*reversed(path.parts[1:])]
    links = 0
    while names:
        name = names.pop()
        if name == "..":
            found = found.parent
            status = os.lstat(found)
            continue
        there = found / name
        shared = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
        try:
            entry = os.lstat(there)
        except FileNotFoundError:
            return found, [name, *reversed(names)]
        # "nobody" may be any user without a number in this namespace, also one who has made an entry in /tmp.
        _check_owner(there, entry, owners[:2] if shared else owners)
        if stat.S_ISLNK(entry.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = Path(os.readlink(there))
            if target.is_absolute():
                found = Path("/")
                status = os.lstat(found)
            names += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            continue
        if not stat.S_ISDIR(entry.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
        _check_mode_of_parent(there, entry)
        found, status = there, entry
    return found, []


def _check_owner(path: Path, status: os.stat_result, owners: tuple[int, ...]) -> None:
    """Raise Unusable if the owner is not one of ``owners``."""
    if status.st_uid not in owners:
        raise Unusable(path, f"belongs to another user ({status.st_uid})")


def _check_mode_of_parent(path: Path, status: os.stat_result) -> None:
    """Raise Unusable if others may rename or remove entries of the directory."""
    if not status.st_mode & stat.S_ISVTX:
        _check_mode(path, status)


def _check_mode(path: Path, status: os.stat_result) -> None:
    """Raise Unusable if others may write to it."""
    writers = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if writers:
        whose = "everybody" if writers & stat.S_IWOTH else f"its group ({status.st_gid})"
        raise Unusable(path, f"can be written to by {whose} (mode {stat.S_IMODE(status.st_mode):o})")
