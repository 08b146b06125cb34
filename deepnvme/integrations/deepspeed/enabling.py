"""Replace parts of DeepSpeed by parts of this package, all of them or none, and restore them."""

from __future__ import annotations

import contextlib
import importlib
import threading
import warnings
from typing import Any

from packaging.version import InvalidVersion, Version

from deepnvme.ops.op_builder import AsyncIOBuilder
from deepnvme.telemetry.callers import stack_level

from . import checkpoint_engine, ops, swapper_replacements
from .replacement import UnexpectedDeepSpeed, set_all

TESTED = ("0.19.5", "0.19.8")
"""The first and the last version of DeepSpeed that this package was tested with."""


_enabled: tuple[bool, bool] | None = None  # the arguments of the last call of enable()
_set = contextlib.ExitStack()  # restores DeepSpeed's own parts
_warned = False
_changing = threading.Lock()


def enable(*, swappers: bool = False, checkpoint: bool = False) -> None:
    """Make DeepSpeed use this package in this process, for engines created from now on.

    DeepSpeed's ``AsyncIOBuilder``, ``GDSBuilder`` and ``PinMemoryBuilder`` then load this package's ops, and the accelerator's
    ``is_pinned`` recognises memory that these ops have pinned. docs/deepspeed.md lists what else changes.

    May be called before or after ``import deepspeed``. Idempotent; if called again with other options, the last ones count.
    Blocks while the op is compiled, if it was not compiled before. If it cannot be compiled, nothing of DeepSpeed is replaced
    and one RuntimeWarning says why. Thread-safe.

    Args:
        swappers: Also replace ZeRO stage 3's swapper classes.
        checkpoint: Also save and load checkpoints with :class:`deepnvme.checkpoint.NVMeCheckpointEngine` if DeepSpeed's JSON has
            ``"checkpoint": {"writer": {"type": "fast"}}`` without ``decoupled``.

    Raises:
        ModuleNotFoundError: If DeepSpeed is not installed.
        RuntimeError: If this version of DeepSpeed was not tested, or a part to be replaced is not where it is expected.

    After an exception, all parts are DeepSpeed's own.
    """
    global _enabled, _set, _warned
    with _changing:
        if _enabled == (swappers, checkpoint):
            return
        version = _version()
        try:
            AsyncIOBuilder().load()
        except RuntimeError as error:
            if not _warned:
                _warned = True
                warnings.warn(f"DeepSpeed stays as it is: {error}", RuntimeWarning, stacklevel=stack_level())
            return
        _undo()
        try:
            # All of them are found in DeepSpeed before the first one is set.
            wanted = [*ops.replacements()]
            wanted += swapper_replacements.replacements() if swappers else ()
            wanted += checkpoint_engine.replacements() if checkpoint else ()
        except UnexpectedDeepSpeed as error:
            raise RuntimeError(
                f"DeepSpeed {version} is not what deepnvme.integrations.deepspeed was made for: {error}; nothing is replaced"
            ) from error
        _set, _enabled = set_all(wanted), (swappers, checkpoint)


def disable() -> None:
    """Restore DeepSpeed's own parts. Existing engines keep the parts they were created with. Idempotent; thread-safe."""
    with _changing:
        _undo()


def _undo() -> None:
    """Restore DeepSpeed's own parts."""
    global _enabled
    _enabled = None
    _set.close()


def _version() -> str:
    """Import DeepSpeed and return its version. Raises RuntimeError if this version was not tested."""
    first, last = TESTED
    try:
        deepspeed: Any = importlib.import_module("deepspeed")
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        text = f"DeepSpeed is not installed, there is nothing to enable: pip install deepspeed=={last}"
        raise ModuleNotFoundError(text, name="deepspeed") from error
    version = str(getattr(deepspeed, "__version__", "of no version"))
    if not _is_tested(version):
        raise RuntimeError(
            f"deepnvme.integrations.deepspeed was tested with DeepSpeed {first} to {last}, this is {version}: "
            f"pip install deepspeed=={last}, or train without it; nothing was changed"
        )
    return version


def _is_tested(version: str) -> bool:
    """Return whether a version was tested. A pre-release and a local version, such as "0.19.8+abc", count as their release."""
    first, last = map(Version, TESTED)
    try:
        return first.release <= Version(version).release <= last.release
    except InvalidVersion:
        return False
