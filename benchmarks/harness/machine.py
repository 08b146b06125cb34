"""The machine that figures are of, for the record."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil

from deepnvme.tools.tune.folder import folder_facts


def described(directory: Path) -> dict[str, Any]:
    """Without a name or a path of it."""
    facts = folder_facts(directory)
    return {
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory": psutil.virtual_memory().total,
        "filesystem": facts.filesystem,
        "device": Path(facts.device).name,
    }
