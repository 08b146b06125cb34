"""TensorNVMe's names of backends, and the settings of an engine that has the backend of such a name."""

from __future__ import annotations

import warnings

from deepnvme._lazy import public_names
from deepnvme.config import AioConfig
from deepnvme.engine import Backend
from deepnvme.ops import load_async_io
from deepnvme.profiles import settings_for

__all__ = ["get_backends", "probe_backend"]

__dir__ = public_names(__name__)

_ENGINE_NAMES: dict[str, Backend] = {"uring": "io_uring", "aio": "libaio", "pthread": "threads"}


def get_backends() -> set[str]:
    """Return the names of the backends that work here, of ``uring``, ``aio`` and ``pthread``.

    TensorNVMe returns those that it was compiled with, whether or not the kernel accepts them.
    """
    return {name for name in _ENGINE_NAMES if probe_backend(name)}


def probe_backend(backend: str) -> bool:
    """Return whether a backend works here; False for an unknown name."""
    return backend in _ENGINE_NAMES and _obstacle(backend) is None


def _obstacle(backend: str) -> str | None:
    """Return why one of TensorNVMe's backends does not work here; None if it does."""
    obstacle: str | None = load_async_io().backends()[_ENGINE_NAMES[backend]]
    return obstacle


def settings_with(path: str, n_entries: int, backend: str | None) -> AioConfig:
    """Return the settings of the drive that a file is on, with the backend asked for.

    If that backend does not work here, the engine chooses, and there is a RuntimeWarning: TensorNVMe's default is ``uring``,
    which many containers do not allow.

    Args:
        path: The file.
        n_entries: Only checked: the drive's settings say how many blocks are under way.
        backend: TensorNVMe's name of the backend; None for the first that works.

    Raises:
        ValueError: If ``n_entries`` is less than 1.
        RuntimeError: For an unknown backend.
    """
    if n_entries < 1:
        raise ValueError(f"n_entries must be at least 1, got {n_entries}")
    if backend is not None and backend not in _ENGINE_NAMES:
        raise RuntimeError(f"backend must be one of {', '.join(_ENGINE_NAMES)}, got {backend!r}")
    chosen: Backend = "auto"
    if backend is not None:
        obstacle = _obstacle(backend)
        if obstacle is None:
            chosen = _ENGINE_NAMES[backend]
        else:
            text = f"TensorNVMe's backend {backend!r} does not work here ({obstacle}): using another"
            # 4: this function, the base class's __init__, the class's own, and its caller
            warnings.warn(text, RuntimeWarning, stacklevel=4)
    settings = settings_for(path)
    poll = settings.poll and chosen in ("auto", "io_uring")
    return settings.model_copy(update={"backend": chosen, "poll": poll})
