"""What is logged, under which names; and that logging is left to the program."""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme

from .support.training import give_gradients, parameters

ROOT = Path(deepnvme.__file__).parent


def test_no_module_configures_logging() -> None:
    forbidden = {"addHandler", "basicConfig", "setLevel", "removeHandler", "dictConfig", "fileConfig"}
    for path in ROOT.rglob("*.py"):
        calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        found = {call.attr for call in calls if isinstance(call, ast.Attribute)} & forbidden
        assert not found, f"{path}: {found}"


def test_loggers_have_the_names_of_their_modules() -> None:
    for path in ROOT.rglob("*.py"):
        for line in path.read_text().splitlines():
            if line.startswith("_logger ="):
                assert line == "_logger = logging.getLogger(__name__)", path


def test_nothing_is_written_to_stderr_unless_the_program_asks(drive: Path, interpreters: Any) -> None:
    code = f"""
import torch, deepnvme, logging
{{setup}}
param = torch.nn.Parameter(torch.ones(5000))
with deepnvme.OffloadedOptimizer([param], torch.optim.AdamW, nvme_path={str(drive)!r} + "/states") as optimizer:
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


def test_each_step_is_logged_for_debugging(drive: Path, caplog: pytest.LogCaptureFixture) -> None:
    params = parameters()
    with deepnvme.OffloadedOptimizer(params, torch.optim.AdamW, nvme_path=drive / "states") as optimizer:
        caplog.set_level(logging.DEBUG, logger="deepnvme.states")
        give_gradients(params, 0)
        optimizer.step()
        assert caplog.messages == [optimizer.report().line()]


def test_a_save_that_fails_is_not_logged_as_saved(drive: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="deepnvme")
    with pytest.raises(FileNotFoundError):
        deepnvme.save([1], drive / "missing" / "a.pt")
    assert caplog.messages == []


def test_a_file_s_name_cannot_add_lines_to_a_log(drive: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="deepnvme")
    (folder := drive / "a\nroot: all is well\x1b[2K").mkdir()
    deepnvme.save([1], folder / "file.pt")
    deepnvme.OffloadedOptimizer(parameters(), torch.optim.AdamW, nvme_path=folder / "states").close()
    assert len(caplog.messages) == 2
    for message in caplog.messages:
        assert f"{drive}/a\\nroot: all is well\\x1b[2K/" in message
        assert message.isprintable()
