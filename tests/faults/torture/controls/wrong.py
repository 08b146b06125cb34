"""Raises Wrong in its second try."""

from __future__ import annotations

import random as randoms
from pathlib import Path

from .. import Wrong

SHORT, SECONDS = 3, 30
_tries = 0


def attack(random: randoms.Random, directory: Path) -> None:
    global _tries
    _tries += 1
    if _tries == 2:
        raise Wrong("on purpose")
