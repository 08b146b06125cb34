"""The numbers of a report, by name, for loggers."""

from __future__ import annotations

import dataclasses
from typing import Any


class ReportFigures:
    """Base class of reports (dataclasses) that can return their numbers as a dictionary."""

    def as_dict(self, prefix: str = "") -> dict[str, int | float]:
        """Return all numbers of the report, fields and properties, by name.

        The numbers of a report in a field of this one are included under the field's name and theirs: ``activations_bytes_read``.
        Other values, such as strings, mappings and None (unknown), are left out.

        Args:
            prefix: Prepended to all names.
        """
        fields = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]  # a subclass is a dataclass
        classes = reversed(type(self).__mro__)
        properties = [name for each in classes for name, value in vars(each).items() if isinstance(value, property)]
        figures: dict[str, int | float] = {}
        for name in (*fields, *properties):
            if name.startswith("_"):
                continue
            value: Any = getattr(self, name)
            if isinstance(value, ReportFigures):
                figures.update(value.as_dict(f"{prefix}{name}_"))
            elif isinstance(value, int | float) and not isinstance(value, bool):
                figures[prefix + name] = value
        return figures
