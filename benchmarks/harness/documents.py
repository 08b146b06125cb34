"""The JSON document that a benchmark writes: when and where it ran, with what settings, all figures, and the verdicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from harness import machine
from harness.comparison import Comparison
from harness.figures import Verdict
from harness.interleave import Result


class Settings(Protocol):
    """What a benchmark was asked to do: a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def directory(self) -> Path: ...


def document(benchmark: str, started: str, settings: Settings, verdicts: Iterable[Verdict], **figures: Any) -> dict[str, Any]:
    """Return the document as JSON types. Settings that are paths on this machine are null.

    Args:
        benchmark: Name of the benchmark.
        started: When it started, as :func:`harness.command_line.measuring` says.
        settings: Its settings.
        verdicts: Whether targets were met.
        figures: Everything else, as JSON types, by its key in the document.
    """
    given = dataclasses.asdict(settings)
    return {
        "benchmark": benchmark,
        "started": started,
        "machine": machine.described(settings.directory),
        "settings": {
            name: None if name == "deepspeed_python" or isinstance(value, Path) else value for name, value in given.items()
        },
        **figures,
        "targets": [verdict.as_json() for verdict in verdicts],
    }


def all_comparisons(comparisons: Mapping[str, Comparison[Any, Any]]) -> dict[str, Any]:
    """Return several comparisons as JSON types, by the name of each."""
    return {name: each.as_json() for name, each in comparisons.items()}


def all_workloads(results: Iterable[Result]) -> list[dict[str, Any]]:
    """Return each workload with what every contender took for it, as JSON types."""
    return [{**vars(result.workload), "series": [series.as_json() for series in result.series]} for result in results]
