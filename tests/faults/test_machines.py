"""The package on machines that lack something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .torture.parts.machines import MACHINES, requires

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1300)]

PROGRAM = """
import json, tempfile
from pathlib import Path
from tests.faults.torture.parts.machines import Impossible, run, warm_up
warm_up()
outcomes = {{}}
for name in {names!r}:
    with tempfile.TemporaryDirectory(dir={directory!r}) as directory:
        try:
            run(name, Path(directory))
            outcomes[name] = "works", ""
        except Impossible as error:
            outcomes[name] = "impossible", str(error)
        except AssertionError as error:
            outcomes[name] = "wrong", str(error)
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def outcomes(interpreters: Any, io_dir: Path) -> dict[str, tuple[str, str]]:
    """On each: what came of it, and what there is to say."""
    missing = requires()
    if missing is not None:
        pytest.skip(missing)
    found: dict[str, tuple[str, str]] = {}
    names = list(MACHINES)
    for begin in range(0, len(names), 5):  # some in each program: to warm up takes seconds, and each program has a limit
        program = PROGRAM.format(names=names[begin : begin + 5], directory=str(io_dir))
        found |= json.loads(interpreters.run(program).check())
    return found


@pytest.mark.root
@pytest.mark.parametrize("name", MACHINES)
def test_all_works_or_is_refused_naming_the_file(outcomes: dict[str, tuple[str, str]], name: str) -> None:
    outcome, text = outcomes[name]
    if outcome == "impossible":
        pytest.skip(text)
    assert outcome == "works", text
