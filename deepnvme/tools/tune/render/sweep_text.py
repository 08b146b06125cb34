"""Formats the results of ds_nvme_tune as text and as JSON."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from deepnvme.tools.tune.measure.job import OPERATIONS, Operation
from deepnvme.tools.tune.search.estimates import CONFIDENCE
from deepnvme.tools.tune.search.results import Reference, Result, Search, Striping, Tuning
from deepnvme.tools.tune.sizes import GIB, size_text
from deepnvme.version import __version__


def render(tuning: Tuning, verbose: bool = False) -> str:
    """Return the text that ds_nvme_tune prints.

    A table of each search's finalists, a comparison of several folders alone and together, and at the end the lines
    that DeepSpeed's tuner prints. In DeepSpeed's line of the best performance a GB is 1024^3 bytes, as in its ds_io; everywhere
    else it is 10^9 bytes.

    Args:
        tuning: The results.
        verbose: Whether to list the settings that were eliminated, too.
    """
    parts = [_search(search, verbose) for search in tuning.searches]
    if tuning.striping is not None:
        parts.append(_striping(tuning.striping))
    if not tuning.complete and tuning.chosen.complete:
        parts.append("INTERRUPTED: what was to follow was not measured")
    notes = [f"left out: {setting}: {reason}" for setting, reason in tuning.refused.items()]
    limit = "" if tuning.write_limit is None else f" of at most {tuning.write_limit / 1e9:.1f}"
    if any(search.shortened for search in tuning.searches):
        notes.append("stopped at the limit of bytes written; a larger --max-writes gives narrower intervals")
    written = f"{tuning.seconds:.0f} s, {tuning.bytes_written / 1e9:.1f}{limit} GB written"
    notes.append(f"{written}; GB is 10^9 bytes above, 1024^3 in the line below")
    parts.append("\n".join(notes))
    parts.append(f"{_best(tuning.chosen.best)}\n{json.dumps(tuning.chosen.best.setting.to_deepspeed(), indent=3)}")
    return "\n\n".join(parts)


def as_document(tuning: Tuning) -> dict[str, Any]:
    """Return all results as JSON types. Sizes are in bytes, times in seconds, and a GB is 10^9 bytes.

    "aio" is the block for a DeepSpeed configuration.
    """
    return {
        "tool": "ds_nvme_tune",
        "version": __version__,
        **tuning.chosen.best.setting.to_deepspeed(),
        **vars(tuning),
        "searches": [_search_document(search) for search in tuning.searches],
        "striping": None if tuning.striping is None else _striping_document(tuning.striping),
    }


def _search_document(search: Search) -> dict[str, Any]:
    """Return a search as one JSON object, whose keys are the names of its fields."""
    return {
        **vars(search),
        "folders": [dataclasses.asdict(facts) for facts in search.folders],
        "best": _result_document(search.best),
        "results": [_result_document(result) for result in search.results],
        "measured": [dataclasses.asdict(facts) for facts in search.measured],
        "reference": None if search.reference is None else _reference_document(search.reference),
    }


def _reference_document(reference: Reference) -> dict[str, Any]:
    """Return the reference as one JSON object, with the fields of its setting beside its own."""
    return {**reference.setting.model_dump(), "samples": reference.samples, "spread": reference.spread}


def _result_document(result: Result) -> dict[str, Any]:
    """Return a result as one JSON object, with the fields of its setting beside its own."""
    document = dataclasses.asdict(result)
    setting = document.pop("setting").model_dump()
    return {**setting, **document, "in_flight_bytes": result.setting.in_flight_bytes}


def _striping_document(striping: Striping) -> dict[str, Any]:
    """Return the comparison as one JSON object; the rates of a direction that was not measured are null."""

    def rates(found: Mapping[Operation, float]) -> dict[str, float | None]:
        return {operation: found.get(operation) for operation in OPERATIONS}

    return {
        "alone": [{"folder": folder, **rates(found)} for folder, found in striping.alone],
        "together": rates(striping.together),
        "shared_device": striping.shared_device,
    }


def _best(result: Result) -> str:
    """Return DeepSpeed's line of the best performance."""
    shown = [
        f"{operation} = {figures.gb_per_second * 1e9 / GIB:5.2f}"
        for operation in OPERATIONS
        if (figures := result.figures(operation)) is not None
    ]
    return f"Best performance (GB/sec): {', '.join(shown)}"


def _search(search: Search, verbose: bool) -> str:
    """Return the text about one search."""
    where = " + ".join(f"{facts.path} ({facts.label})" for facts in search.folders)
    lines = [where]
    if not search.complete:
        lines.append("INTERRUPTED: what follows was measured before that")
    lines.append(_finalists(search.table, search.best))
    lines.append(f"* {search.reason}")
    if search.measured:
        final = search.measured[-1]
        lines.append(f"  measured in turn in {_count(final.passes, 'pass', 'passes')} of {size_text(final.nbytes)}")
    if search.reference is not None:
        spread = f"{100 * search.reference.spread:.0f} %"
        of = f"{search.reference.samples} reference transfers"
        lines.append(f"  machine noise: half of the {of} were within {spread} of their round's median")
    if search.eliminated:
        lines.append(_eliminated(search, verbose))
    return "\n".join(lines)


def _count(number: int, one: str, more: str) -> str:
    """Return a number with its noun."""
    return f"{number} {one if number == 1 else more}"


def _finalists(results: Sequence[Result], best: Result) -> str:
    """Return a table of results that were measured in turn, the recommended one marked by a star."""
    units = ("\nGB/s", "\nCPU s/GB", " p99\nms a block")
    measured = [f"{operation}{unit}" for unit, operation in itertools.product(units, best.operations)]
    rows = []
    for result in results:
        figures = [each for operation in best.operations if (each := result.figures(operation)) is not None]
        rows.append([
            "*" if result == best else "",
            *_setting(result),
            *(f"{each.gb_per_second:.2f}" for each in figures),
            *(f"{each.cpu_seconds_per_gb:.3f}" for each in figures),
            *(f"{each.latency_p99 * 1e3:.3g}" for each in figures),
            size_text(result.setting.in_flight_bytes),
            *_longer(result),
        ])  # fmt: skip
    return _table(["", *_SETTING, *measured, "in flight", *_LONGER], rows)


def _eliminated(search: Search, verbose: bool) -> str:
    """Return how many settings were eliminated, and with ``verbose`` a table of them, without figures of their own.

    Their rounds had transfers of other lengths; so each is only compared with the recommended setting, in the same round.
    """
    gone = search.eliminated
    counts = [(number, sum(each.rounds == number for each in gone)) for number in range(1, search.rounds)]
    listed = ", ".join(f"{count} in round {number}" for number, count in counts if count)
    line = f"  eliminated before: {listed}"
    if not verbose:
        return f"{line} (--verbose lists them)"
    rows = [["", *_setting(result), str(result.rounds), *_roughly_longer(result)] for result in gone]
    return "\n".join([line, _table(["", *_SETTING, "left in\nround", *_LONGER], rows)])


_SETTING = ("block", "depth", "workers", "backend")
_LONGER = ("takes longer\nthan *", f"{100 * CONFIDENCE:.0f} %\ninterval")


def _setting(result: Result) -> list[str]:
    """Return the columns :data:`_SETTING` of a result."""
    setting = result.setting
    backend = result.backend + (", single" if setting.single_submit else "")
    return [size_text(setting.block_size), str(setting.queue_depth), str(setting.intra_op_parallelism), backend]


def _longer(result: Result) -> list[str]:
    """Return the columns :data:`_LONGER` of a finalist."""
    found = result.difference
    if found is None:
        return ["", ""]
    ends = "unknown" if found.interval is None else " to ".join(f"{100 * each:+.1f}" for each in found.interval)
    return [f"{found.percent:+.1f} %", ends]


def _roughly_longer(result: Result) -> list[str]:
    """Return the columns :data:`_LONGER` of an eliminated setting: without an estimate if it may be nothing but noise."""
    estimate, ends = _longer(result)
    return [estimate if result.difference is not None and result.difference.clearly_slower else "not clear", ends]


def _striping(striping: Striping) -> str:
    """Return the table that compares folders alone and together."""
    named = [*((f"{folder} alone", rates) for folder, rates in striping.alone), ("together", striping.together)]
    rows = [[name, *(f"{rates[operation]:.2f}" for operation in striping.together)] for name, rates in named]
    fastest = [max(rates[operation] for _, rates in striping.alone) for operation in striping.together]
    pairs = zip(striping.together.values(), fastest, strict=True)
    rows.append(["together / the fastest alone", *(f"{rate / alone:.2f}" if alone else "-" for rate, alone in pairs)])
    note = "\nSome of the folders share a device: striping over those wins nothing." if striping.shared_device else ""
    return _table(["striping", *(f"{operation}\nGB/s" for operation in striping.together)], rows) + note


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as plain text, with all but the names aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("", "backend", "striping") else "right")
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())
