"""Whether figures reach what they must."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from deepnvme.tools.tune.figures import Spread


@dataclass(frozen=True)
class Verdict:
    """One line of a target table. ``figure`` is None when it could not be measured; ``note`` then says why."""

    what: str
    figure: Spread | None
    sense: Literal["at least", "at most"]
    bound: float
    unit: str = ""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the bound; None if it was not measured."""
        if self.figure is None:
            return None
        return self.figure.median >= self.bound if self.sense == "at least" else self.figure.median <= self.bound

    def as_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "figure": vars(self.figure) if self.figure else None,
            "sense": self.sense,
            "bound": self.bound,
            "unit": self.unit,
            "met": self.met,
            "note": self.note,
        }
