"""Cannot be run."""

from __future__ import annotations

import random as randoms
from pathlib import Path

SHORT, SECONDS = 3, 30


def requires() -> str:
    return "needs what there is not"


def attack(random: randoms.Random, directory: Path) -> None:
    raise AssertionError("it was run all the same")
