"""Transfers that fail, below whatever has an engine open: a store, an optimizer, a cache of keys and values."""

from __future__ import annotations

import contextlib
import errno
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from deepnvme import Engine

TRANSFERS = ("read", "write", "fsync")


class FailedTransfer:
    """The future of a transfer that ended with this error."""

    def __init__(self, error: OSError) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def exception(self, timeout: float | None = None) -> OSError:
        return self._error

    def result(self, timeout: float | None = None) -> int:
        raise self._error


@contextlib.contextmanager
def transfers_are(replaced: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace the ``read``, ``write`` and ``fsync`` of every engine meanwhile: by ``replaced(name, sound)``, ``sound`` being the
    engine's own. A property, because what is fetched from it is no method of ``Engine``, behind which the compiled one is called.
    """
    with contextlib.ExitStack() as patches:
        for name in TRANSFERS:
            sound = Engine.__dict__[name]
            patches.enter_context(mock.patch.object(Engine, name, property(functools.partial(_replace, replaced, name, sound))))
        yield


def _replace(replaced: Any, name: str, sound: Any, engine: Engine) -> Any:
    return replaced(name, sound.__get__(engine))


def transfers_through(other: Any) -> contextlib.AbstractContextManager[None]:
    """Every engine reads, writes and flushes by means of ``other`` meanwhile, such as what the fixture ``faulty`` makes."""
    return transfers_are(lambda name, sound: getattr(other, name))


class FailingDrive:
    """Reads and writes of every engine fail with EIO while this is entered: those that ``fails`` picks by their operation.

    What fails is torn: something else is written, or zeros are read. Its error is raised where ``at_once`` says so, and else when
    the transfer is asked how it ended. ``failed`` counts the failures.
    """

    def __init__(self, fails: Callable[[str], bool], at_once: Callable[[], bool] = lambda: False) -> None:
        self._fails, self._at_once = fails, at_once
        self._patches = contextlib.ExitStack()
        self.failed = 0

    def __enter__(self) -> FailingDrive:
        self._patches.enter_context(transfers_are(self._replaced))
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.close()

    def _replaced(self, operation: str, sound: Callable[..., Any]) -> Callable[..., Any]:
        return sound if operation == "fsync" else functools.partial(self._transfer, operation, sound)

    def _transfer(self, operation: str, sound: Callable[..., Any], tensor: torch.Tensor, file: Any, offset: int = 0) -> Any:
        if not self._fails(operation):
            return sound(tensor, file, offset)
        self.failed += 1
        error = OSError(errno.EIO, f"{operation} of {tensor.nbytes} bytes at offset {offset}", "drive")
        if self._at_once():
            raise error
        if operation == "write":
            sound(torch.zeros_like(tensor), file, offset).result()
        else:
            tensor.view(-1).view(torch.uint8).zero_()
        return FailedTransfer(error)


def failing(operation: str, first: int, count: int = 1, at_once: bool = False) -> FailingDrive:
    """Transfers of this kind fail from the ``first`` on, as many as ``count``; ``at_once``, or when asked how they ended."""
    left = first

    def fails(asked: str) -> bool:
        nonlocal left
        left -= asked == operation
        return asked == operation and -count <= left < 0

    return FailingDrive(fails, lambda: at_once)
