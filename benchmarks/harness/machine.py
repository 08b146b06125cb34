"""The machine that figures are of, for the record."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from deepnvme.memory.system_memory import meminfo
from deepnvme.tools.tune.folder import folder_facts


def described(directory: Path) -> dict[str, Any]:
    """Without a name or a path of it."""
    facts = folder_facts(directory)
    return {
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory": meminfo("MemTotal"),
        "filesystem": facts.filesystem,
        "device": Path(facts.device).name,
    }
