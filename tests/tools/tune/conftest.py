"""What the tests of ds_io and ds_nvme_tune have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from deepnvme.tune.io import main as ds_io_main
from deepnvme.tune.sweep import main as ds_nvme_tune_main


@dataclass(frozen=True)
class Ran:
    """What a command said, and its exit status."""

    status: int | str | None
    out: str
    err: str

    def behind_the_announcement(self) -> list[str]:
        """The lines on stderr of ds_nvme_tune behind the first one, which says how much it will write."""
        first, *lines = self.err.splitlines()
        assert first.startswith("ds_nvme_tune: writes ")
        return lines

    def refusal(self, status: int) -> str:
        """The one line on stderr, behind what will be written and the steps, of a command that failed with ``status``."""
        lines = [line for line in self.err.splitlines() if not re.match(r" +\d+ % |ds_nvme_tune: writes ", line)]
        assert (self.status, len(lines)) == (status, 1), self
        assert re.match(r"(ds_io|ds_nvme_tune): ", lines[0])
        assert "Traceback" not in self.out
        return lines[0]


Command = Callable[..., Ran]


def run_command(main: Callable[[Sequence[str]], None], capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process; arguments may be paths and numbers."""

    def run(*arguments: object) -> Ran:
        status: int | str | None = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code
        return Ran(status, *capsys.readouterr())

    return run


@pytest.fixture
def ds_io(capsys: pytest.CaptureFixture[str]) -> Command:
    return run_command(ds_io_main, capsys)


@pytest.fixture
def ds_nvme_tune(capsys: pytest.CaptureFixture[str]) -> Command:
    return run_command(ds_nvme_tune_main, capsys)
