"""The recipe of the documentation trains with real DeepSpeed, by the command that it says."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from ..support.interpreters import REPOSITORY
from .running import environment, interpreter, reserved_port

RECIPE = REPOSITORY / "docs" / "recipes.md"


def test_the_recipe_trains(request: pytest.FixtureRequest, drive: Path) -> None:
    python = interpreter(request.config)
    section = RECIPE.read_text().partition("\n## DeepSpeed\n")[2]
    (program,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    command = program.splitlines()[0].removeprefix("# ")
    (drive / "train_deepspeed.py").write_text(program.replace("/mnt/nvme", str(drive)))
    torchrun, *words = shlex.split(command)
    assert torchrun == "torchrun"
    with reserved_port() as port:
        launcher = [python, "-m", "torch.distributed.run", "--master-port", str(port)]
        done = subprocess.run([*launcher, *words], capture_output=True, text=True, cwd=drive, env=environment(drive), timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained 4 steps" in done.stdout
    assert (drive / "deepspeed").is_dir()
