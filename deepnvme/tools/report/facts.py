"""The findings of ds_report as data, before they are printed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Status = Literal["", "OKAY", "YES", "NO", "WARNING", "FAIL"]
"""Judgement of a finding; empty if there is nothing to judge."""
Value = str | int | float | bool | None
"""Value of a finding; None if it is unknown or absent."""


@dataclass(frozen=True)
class Fact:
    """One finding of the report: a line of its text, and an entry of its JSON."""

    name: str
    """Name of the finding in the text report."""
    value: Value
    """The value; sizes in bytes. None if it is unknown or absent."""
    text: str = ""
    """Text of the value as printed; empty for ``str(value)``."""
    status: Status = ""
    """Judgement; empty if there is nothing to judge."""
    problems: tuple[str, ...] = ()
    """Problems of the finding, one text each: what is wrong or missing, then what to type to fix it."""
    named: str = ""
    """Key of the finding in JSON; empty for the name in snake_case."""

    @classmethod
    def checked(
        cls, name: str, value: Value, text: str, problem: str, named: str = "", good: Status = "", bad: Status = "WARNING"
    ) -> Fact:
        """Return a finding with the status ``bad`` if there is a problem, and ``good`` otherwise.

        Args:
            name: Name in the text report.
            value: The value; sizes in bytes.
            text: The value as printed; empty for ``str(value)``.
            problem: What is wrong or missing, and what to type to fix it; empty if nothing is wrong.
            named: Key in JSON; empty for the name in snake_case.
            good: Status without a problem.
            bad: Status with a problem.
        """
        return cls(name, value, text, bad if problem else good, (problem,) if problem else (), named)

    @property
    def key(self) -> str:
        """Key of the finding in JSON. It stays the same in all releases, because programs read it."""
        return self.named or re.sub(r"\W+", "_", self.name.lower()).strip("_")

    @property
    def shown(self) -> str:
        """The text of the value as it is printed."""
        return self.text or ("none" if self.value is None else str(self.value))
