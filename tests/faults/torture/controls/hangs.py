"""Its second try never ends."""

from __future__ import annotations

import random as randoms
import time
from pathlib import Path

SHORT, SECONDS = 3, 1
_tries = 0


def attack(random: randoms.Random, directory: Path) -> None:
    global _tries
    _tries += 1
    while _tries == 2:
        time.sleep(1)
