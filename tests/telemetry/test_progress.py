"""A line for those who see it, and nothing for a log."""

from __future__ import annotations

import inspect
import io
import itertools
import re
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TypeVar

import pytest
import torch

import deepnvme
import deepnvme.streaming
from deepnvme.safetensors import load_file, load_model, save_file, save_model
from deepnvme.telemetry.progress import notice, shown_progress

LONG = 2.1
"""Seconds: longer than an operation may take without showing its progress."""


Shown = TypeVar("Shown", bound=io.StringIO)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make stderr a terminal, of a process that is alone. To be called in a test: pytest sets stderr again after fixtures."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    return _stderr(Terminal(), monkeypatch)


def a_notebook(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Make stderr that of a notebook: no terminal, and IPython's shell has a kernel."""
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return _stderr(io.StringIO(), monkeypatch)


def _stderr(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> Shown:
    for name in ("DEEPNVME_PROGRESS", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stderr", shown)
    return shown


def take(seconds: float, progress: bool | None) -> None:
    """Do something for a while, reporting its progress."""
    with shown_progress(progress, "working") as report:
        if report is not None:
            report(1_000_000_000, 4_000_000_000)
        time.sleep(seconds)
        if report is not None:
            report(2_000_000_000, 4_000_000_000)


def test_nothing_is_printed_where_stderr_is_no_terminal_or_closed(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    deepnvme.save([torch.ones(3)], drive / "file.pt", progress=True)
    assert log.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", None)
    deepnvme.save([torch.ones(3)], drive / "file.pt", progress=True)
    closed = Terminal()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    deepnvme.save([torch.ones(3)], drive / "file.pt", progress=True)


def test_a_terminal_that_goes_away_fails_no_save(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)

    def gone(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(terminal, "write", gone)
    deepnvme.save([torch.ones(3)], drive / "file.pt", progress=True)
    assert torch.equal(deepnvme.load(drive / "file.pt", progress=False)[0], torch.ones(3))
    notice("nobody hears it")


def test_without_a_word_what_takes_long_is_shown_and_what_is_quick_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    take(0.0, None)
    assert terminal.getvalue() == ""
    take(LONG, None)
    assert "working" in terminal.getvalue()
    assert "2.0 of 4.0 GB" in terminal.getvalue()


def test_what_is_not_wanted_is_not_shown_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    take(LONG, False)
    monkeypatch.setenv("DEEPNVME_PROGRESS", "off")
    take(LONG, None)
    notice("compiling")
    assert terminal.getvalue() == ""
    take(0.0, True)  # an argument weighs more than the environment
    assert "working" in terminal.getvalue()


def test_of_the_processes_of_torchrun_only_the_first_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    monkeypatch.setenv("LOCAL_RANK", "1")
    take(LONG, None)
    assert terminal.getvalue() == ""


def test_a_notebook_gets_a_line_that_is_blank_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = a_notebook(monkeypatch)
    take(0.15, True)
    states = notebook.getvalue().split("\r")
    assert [state.rstrip() for state in states] == [
        "", "working: 1.0 of 4.0 GB", states[2].rstrip(), "", ""
    ]  # fmt: skip
    assert states[2].startswith("working: 2.0 of 4.0 GB, ")
    assert states[2].rstrip().endswith(" GB/s")
    assert len(states[3]) >= len(states[2])


def test_a_line_in_a_notebook_is_not_redrawn_for_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = a_notebook(monkeypatch)
    with shown_progress(True, "working", "steps") as report:
        assert report is not None
        for step in range(1, 1001):
            report(step, 1000)
    assert notebook.getvalue().count("working") < 50
    assert "working: 1000/1000" in notebook.getvalue()


def test_the_speed_is_that_since_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = a_terminal(monkeypatch)
    with shown_progress(True, "working") as report:
        assert report is not None
        time.sleep(0.3)
        for done in (1, 2, 3):  # at one instant
            report(done * 1_000_000_000, 3_000_000_000)
    speeds = [float(speed) for speed in re.findall(r"([\d.]+) GB/s", shown.getvalue())]
    assert speeds
    assert max(speeds) <= 10


def test_one_large_tensor_is_not_loaded_in_silence(drive: Path) -> None:
    obj = {"a": torch.zeros(160 << 20, dtype=torch.uint8)}
    deepnvme.save(obj, drive / "file.pt", checksum=False)
    save_file(obj, drive / "file.safetensors")
    for load, path in ((deepnvme.load, drive / "file.pt"), (load_file, drive / "file.safetensors")):
        told: list[tuple[int, int]] = []
        load(path, progress=lambda *now, told=told: told.append(now))
        done = [bytes_done for bytes_done, _ in told]
        assert done == sorted(done)
        assert done[-1] == 160 << 20
        assert max(after - before for before, after in itertools.pairwise([0, *done])) <= 64 << 20


def test_a_function_is_told_as_it_is() -> None:
    with shown_progress(print, "saving") as report:
        assert report is print
    with shown_progress(False, "saving") as report:
        assert report is None


@pytest.mark.parametrize(
    "operation",
    [
        deepnvme.save,
        deepnvme.load,
        deepnvme.CheckpointManager.save,
        save_file,
        load_file,
        save_model,
        load_model,
        deepnvme.streaming.from_pretrained,
        deepnvme.streaming.WeightStore.build,
    ],
    ids=lambda operation: operation.__qualname__,
)
def test_whatever_moves_much_shows_its_progress_by_default(operation: object) -> None:
    assert inspect.signature(operation).parameters["progress"].default is None  # type: ignore[arg-type]


def test_a_file_s_name_does_not_command_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = a_terminal(monkeypatch)
    with shown_progress(True, "loading [red]a\nb\x1b]0;title\x07\udcff") as report:
        assert report is not None
        report(1, 2)
    notice("stored in '/mnt/a\x1b]0;title\x07\n'")
    text = shown.getvalue()
    assert "loading [red]a\\nb\\x1b]0;title\\x07\\udcff" in text
    assert "deepnvme: stored in '/mnt/a\\x1b]0;title\\x07\\n'\n" in text
    assert "\x1b]" not in text
