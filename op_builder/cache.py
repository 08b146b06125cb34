"""Where compiled ops are kept, and the lock under which they are made."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

_POLL = 0.05  # seconds between two tries for the lock; flock itself cannot time out


def root() -> Path:
    """``$TORCH_EXTENSIONS_DIR/deepnvme`` if that variable is set, else ``deepnvme`` in the user's cache directory
    (``$XDG_CACHE_HOME`` or ``~/.cache``). It need not exist yet."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR") or os.environ.get("XDG_CACHE_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute() / "deepnvme"
    home = os.path.expanduser("~")
    # A user without a home (in a container, say) gets a place that cannot be written, and the error that says what to set.
    return Path("/" if home == "~" else home).absolute() / ".cache" / "deepnvme"


def build_timeout() -> float:
    """Seconds to wait for another process's build: DEEPNVME_BUILD_TIMEOUT, or 600."""
    text = os.environ.get("DEEPNVME_BUILD_TIMEOUT", "600")
    try:
        seconds = float(text)
        if seconds >= 0:
            return seconds
    except ValueError:
        pass
    raise ValueError(f"DEEPNVME_BUILD_TIMEOUT must be a number of seconds, 0 or more, got {text!r}")


@contextlib.contextmanager
def exclusive(path: Path, timeout: float) -> Iterator[None]:
    """Hold the lock file ``path`` for the block. The kernel releases it when the holder dies, however it dies.

    Blocks up to ``timeout`` seconds, then raises TimeoutError naming the holder. OSError if the file cannot be
    written or locked. Excludes other threads as well as other processes.
    """
    import fcntl  # absent on Windows, where this module must still import

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise OSError(error.errno, f"flock: {error.strerror}", str(path)) from error
            if time.monotonic() >= deadline:
                holder = os.pread(descriptor, 4096, 0).decode(errors="replace") or "an unknown process"
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
