"""What is logged, under which names; and that logging is left to the program."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme

from .support.training import parameters


def test_nothing_is_written_to_stderr_unless_the_program_asks(drive: Path, interpreters: Any) -> None:
    code = f"""
import torch, deepnvme, logging
{{setup}}
param = torch.nn.Parameter(torch.ones(5000))
with deepnvme.OffloadedOptimizer([param], torch.optim.AdamW, path={str(drive)!r} + "/states") as optimizer:
    param.sum().backward()
    optimizer.step()
deepnvme.save([1], {str(drive)!r} + "/a.pt")
assert logging.getLogger("deepnvme").handlers == []
"""
    quiet = interpreters.run(code.format(setup=""))
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    told = interpreters.run(code.format(setup="logging.basicConfig(level=logging.INFO, format='%(name)s: %(message)s')"))
    estimate, saved = told.stderr.splitlines()
    assert estimate.startswith(f"deepnvme.offload.optimizer: AdamW with its states in {drive}/states writes ")
    assert saved.startswith(f"deepnvme.checkpoint.publication: saved '{drive}/a.pt': ")


def test_a_save_that_fails_is_not_logged_as_saved(drive: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="deepnvme")
    with pytest.raises(FileNotFoundError):
        deepnvme.save([1], drive / "missing" / "a.pt")
    assert caplog.messages == []


def test_a_file_s_name_cannot_add_lines_to_a_log(drive: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="deepnvme")
    (folder := drive / "a\nroot: all is well\x1b[2K").mkdir()
    deepnvme.save([1], folder / "file.pt")
    deepnvme.OffloadedOptimizer(parameters(), torch.optim.AdamW, path=folder / "states").close()
    assert len(caplog.messages) == 2
    for message in caplog.messages:
        assert f"{drive}/a\\nroot: all is well\\x1b[2K/" in message
        assert message.isprintable()
