"""What ds_report finds out, before anything is printed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Status = Literal["", "OKAY", "YES", "NO", "WARNING", "FAIL"]


@dataclass(frozen=True)
class Fact:
    """One thing found out. ``status`` is empty where there is nothing to judge; each of ``problems`` says what is wrong
    or missing and, after it, what to type to mend it."""

    name: str
    value: str | int | float | bool | None  # sizes in bytes; None where it could not be found out
    text: str = ""  # the value as printed, where that differs
    status: Status = ""
    problems: tuple[str, ...] = ()
    named: str = ""  # its key in JSON, where that is not the name in snake_case

    @property
    def key(self) -> str:
        """What a program finds it by; stays the same from version to version."""
        return self.named or re.sub(r"\W+", "_", self.name.lower()).strip("_")

    @property
    def shown(self) -> str:
        """The value for a human reader."""
        return self.text or ("none" if self.value is None else str(self.value))


def human_size(size: int) -> str:
    """``size`` bytes as DeepSpeed's report prints it: "1.50 GB", by 1024."""
    value = float(size)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1024:
            return f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TB"
