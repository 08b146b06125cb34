"""What the tests of ds_io and ds_nvme_tune have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from deepnvme.tune import io


@dataclass(frozen=True)
class Ran:
    """What a command said, and its exit status."""

    status: int | str | None
    out: str
    err: str


Command = Callable[..., Ran]


@pytest.fixture
def ds_io(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs ds_io in this process; arguments may be paths and numbers."""

    def run(*arguments: object) -> Ran:
        status: int | str | None = 0
        try:
            io.main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        return Ran(status, out, err)

    return run
