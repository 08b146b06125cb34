"""Its second try kills the process."""

from __future__ import annotations

import os
import random as randoms
import signal
from pathlib import Path

SHORT, SECONDS = 3, 30
_tries = 0


def attack(random: randoms.Random, directory: Path) -> None:
    global _tries
    _tries += 1
    if _tries == 2:
        os.kill(os.getpid(), signal.SIGBUS)
