"""A bar for those who see it, and nothing for a log."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch

import deepnvme
from deepnvme._progress import following
from deepnvme.safetensors import load_file, save_file


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_is_printed_where_stderr_is_no_terminal(drive: Path, capfd: pytest.CaptureFixture[str]) -> None:
    deepnvme.save([torch.ones(3)], drive / "file.pt", progress=True)
    deepnvme.load(drive / "file.pt", progress=True)
    assert capfd.readouterr() == ("", "")


def test_nor_where_it_is_closed(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    deepnvme.save([torch.ones(3)], drive / "file.pt", progress=True)


def test_a_terminal_gets_a_bar(drive: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    deepnvme.save([torch.ones(300_000)], drive / "file.pt", progress=True)
    deepnvme.load(drive / "file.pt", progress=True)
    save_file({"a": torch.ones(3)}, drive / "file.safetensors", progress=True)
    load_file(drive / "file.safetensors", progress=True)
    for what in ("saving", "loading"):
        assert f"{what} {drive / 'file.pt'}" in terminal.getvalue()
    assert "1.2/1.2 MB" in terminal.getvalue()
    assert capfd.readouterr().out == ""


def test_a_function_is_told_as_it_is() -> None:
    with following(print, "saving") as told:
        assert told is print
    with following(None, "saving") as told:
        assert told is None
