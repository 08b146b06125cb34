"""What is put in place of DeepSpeed's, all of it or nothing."""

from __future__ import annotations

import importlib
import re
import threading
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from deepnvme.ops.op_builder import AsyncIOBuilder

from . import checkpoints, failures, ops, swapping
from .places import Replacement, UnknownShape, set_all, undo_all

TESTED = ("0.19.5", "0.19.8")
"""The first and the last version of DeepSpeed that this was tested with."""


class _Options(NamedTuple):
    swappers: bool
    checkpoint: bool


_enabled: _Options | None = None
_set: list[Replacement] = []
_warned = False
_changing = threading.Lock()


def enable(*, swappers: bool = False, checkpoint: bool = False) -> None:
    """Have DeepSpeed use this package in this process, from the next engine on. Before or after ``import deepspeed``.

    DeepSpeed's ``AsyncIOBuilder``, ``GDSBuilder`` and ``PinMemoryBuilder`` give this package's ops, and the accelerator's
    ``is_pinned`` knows their memory. ``swappers``: ZeRO stage 3 takes this package's swapper classes. ``checkpoint``: where
    the JSON says ``"checkpoint": {"writer": {"type": "fast"}}``, without ``decoupled``, checkpoints go through
    :class:`deepnvme.checkpoint.NVMeCheckpointEngine`. docs/deepspeed.md says what else changes.

    Idempotent; called again with other options, those count. Blocks while the op is compiled, if it was not yet. Where it
    cannot be, DeepSpeed's own stays in all places, and one RuntimeWarning says why.

    Raises ModuleNotFoundError without DeepSpeed, RuntimeError for a version that this was not tested with, or one that does
    not have what is replaced where it is expected; nothing is changed then.
    """
    global _enabled, _warned
    options = _Options(swappers, checkpoint)
    with _changing:
        if _enabled == options:
            return
        version = _version()
        try:
            AsyncIOBuilder().load()
        except RuntimeError as error:
            if not _warned:
                _warned = True
                warnings.warn(f"DeepSpeed stays as it is: {error}", RuntimeWarning, stacklevel=2)
            return
        before, _enabled = _enabled, None
        undo_all(_set)
        try:
            _put(options)
        except BaseException as error:
            if before is not None:
                _put(before)
            if not isinstance(error, UnknownShape):
                raise
            raise RuntimeError(
                f"DeepSpeed {version} is not what deepnvme.integrations.deepspeed was made for: {error}; nothing was changed"
            ) from error


def disable() -> None:
    """Have DeepSpeed be as it was. Engines that were made meanwhile keep what they were made with. Idempotent."""
    global _enabled
    with _changing:
        _enabled = None
        undo_all(_set)


def _put(options: _Options) -> None:
    global _enabled
    _set.extend(set_all(list(_replacements(options))))  # each is looked at before the first is set
    _enabled = options


def _replacements(options: _Options) -> Iterator[Replacement]:
    yield from ops.replacements()
    yield from swapping.replacements(ours=options.swappers)
    yield from failures.replacements()
    if options.checkpoint:
        yield from checkpoints.replacements()


def _version() -> str:
    """DeepSpeed's, which is imported here."""
    first, last = TESTED
    try:
        deepspeed: Any = importlib.import_module("deepspeed")
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        text = f"DeepSpeed is not installed, there is nothing to enable: pip install deepspeed=={last}"
        raise ModuleNotFoundError(text, name="deepspeed") from error
    version = str(getattr(deepspeed, "__version__", "of no version"))
    if not _numbers(first) <= _numbers(version) <= _numbers(last):
        raise RuntimeError(
            f"deepnvme.integrations.deepspeed was tested with DeepSpeed {first} to {last}, this is {version}: "
            f"pip install deepspeed=={last}, or train without it; nothing was changed"
        )
    return version


def _numbers(version: str) -> tuple[int, ...]:
    """Of "0.19.8+abc": (0, 19, 8); a pre-release counts as what it precedes."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found[0].split(".")) if found else ()
