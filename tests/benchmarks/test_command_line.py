"""Options that cannot be, and how a benchmark ends that cannot go on."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from harness.command_line import Parser, measuring
from harness.workloads import ContenderFailed

from deepnvme.tools.tune.folder import NotMeasurable


@pytest.fixture(autouse=True)
def terminated_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def parser() -> Parser:
    parser = Parser("What it does.\n\nAnd more.")
    parser.add_deepspeed_python()
    return parser


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dir", "/nowhere"], "--dir: '/nowhere' is not a directory"),
        (["--json", "/nowhere/file"], "--json: '/nowhere' is not a directory"),
        (["--deepspeed-python", "no-such-python"], "--deepspeed-python: 'no-such-python' cannot be run"),
    ],
)
def test_a_place_that_is_not_there_is_refused_before_anything_is_measured(
    parser: Parser, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as end:
        parser.parse(arguments)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("reason", [NotMeasurable("a full drive"), ContenderFailed("a full drive")], ids=repr)
def test_what_makes_it_impossible_is_told_in_one_line(reason: Exception) -> None:
    with pytest.raises(SystemExit) as end, measuring("it"):
        raise reason
    assert end.value.code == "it: a full drive"  # on stderr, and the status is 1


def test_a_terminated_run_ends_as_an_interrupted_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end, measuring("it"):
        signal.raise_signal(signal.SIGTERM)
    assert end.value.code == 130
    assert capsys.readouterr().err == "it: interrupted; its files are removed\n"
