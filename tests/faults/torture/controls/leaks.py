"""Each try leaves a descriptor open."""

from __future__ import annotations

import os
import random as randoms
from pathlib import Path

SHORT, SECONDS = 3, 30


def attack(random: randoms.Random, directory: Path) -> None:
    os.open(directory, os.O_RDONLY)
