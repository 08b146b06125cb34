"""ds_report: which ops, backends and system settings for tensor I/O this machine has, and how to fix what is missing.

The table has the form of DeepSpeed's (deepspeed/env_report.py). :func:`gather` collects the findings, :func:`render` and
:func:`as_json` format them; none of them compiles an op or imports torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepnvme.ops.op_builder import GDSBuilder
from deepnvme.telemetry.descriptions import printable
from deepnvme.version import __version__

from . import directory_probes, machine_probes
from .facts import Fact, Status

_OP_WIDTH = 23
_INSTALLED_WIDTH = 11
_FACT_WIDTH = 33
_NOTE = (
    "NOTE: Ops not installed will be just-in-time (JIT) compiled at",
    "      runtime if needed. Op compatibility means that your system",
    "      meets the required dependencies to JIT install the op.",
)
_RULE = "-" * (_OP_WIDTH + _INSTALLED_WIDTH + len("op name") + len("installed"))


@dataclass(frozen=True)
class Report:
    """The findings of :func:`gather` about a machine, section by section."""

    ninja: Fact
    """Path of ninja, which compiling ops requires."""
    ops: list[Fact]
    """The ops: whether each is installed (its value), and whether it can work on this machine (its status)."""
    backends: list[Fact]
    """The backends of async_io, fastest first."""
    environment: list[Fact]
    """Versions of torch, this package, compilers and CUDA."""
    system: list[Fact]
    """The kernel and its limits that matter to I/O."""
    selected_backend: str | None
    """The backend that "auto" selects; None if async_io can be neither loaded nor compiled."""
    directory: list[Fact] | None = None
    """Findings about one directory; None if none was given."""


def gather(directory: str | os.PathLike[str] | None = None) -> Report:
    """Examine this machine and, if given, a directory. Blocks for about 1.5 s, mostly to identify the processor.

    Args:
        directory: Directory to examine by writing a small file there, which is removed. None for no directory.

    Raises:
        OSError: If ``directory`` is not a directory that can be entered.
        ValueError: If ``directory`` is an empty string.
    """
    if directory is not None and not os.fspath(directory):
        raise ValueError("it is empty")
    gds = GDSBuilder().probe()
    backends, selected = machine_probes.backends()
    return Report(
        directory=None if directory is None else directory_probes.directory_facts(Path(directory)),
        ninja=machine_probes.ninja(),
        ops=machine_probes.ops(),
        backends=backends,
        selected_backend=selected,
        environment=machine_probes.environment(gds),
        system=machine_probes.system(),
    )


def render(report: Report, *, operators: bool = True, explanations: bool = True) -> str:
    """Return the report as the text that ``ds_report`` prints.

    Args:
        report: What :func:`gather` returned.
        operators: Whether to include the table of ops and backends.
        explanations: Whether to include the lines that say what is wrong and how to fix it.
    """
    lines: list[str] = []

    def explain(status: Status, problems: Sequence[str]) -> None:
        for problem in problems if explanations else ():
            if not any(problem in line for line in lines):  # a problem of an op is not repeated for its backends
                lines.append(f"  [{status}] {printable(problem)}" if status else f"  {printable(problem)}")

    def facts(title: str, listed: Sequence[Fact]) -> None:
        lines.append(title)
        for fact in listed:
            state = [f"[{fact.status}]"] if fact.status else []
            lines.append(" ".join([_dotted(fact.name, _FACT_WIDTH), printable(fact.shown), *state]))
            explain(fact.status, fact.problems)

    if operators:
        lines += [_RULE, "DeepNVMe C++ extension op report", _RULE]
        lines += [*_NOTE, _RULE, "JIT compiled ops requires ninja"]
        lines.append(f"{_dotted('ninja', _OP_WIDTH)} [{report.ninja.status}]")
        explain(report.ninja.status, report.ninja.problems)
        lines += [_RULE, f"{_dotted('op name', _OP_WIDTH)} {_dotted('installed', _INSTALLED_WIDTH)} compatible", _RULE]
        for op in report.ops:
            installed = "[YES]" if op.value else "[NO]"
            dots = "." * (_INSTALLED_WIDTH - len(installed))
            lines.append(f"{_dotted(op.name, _OP_WIDTH)} {installed} {dots} [{op.status}]")
            explain("NO", op.problems)
        lines.append(_RULE)
        facts("async_io backends:", report.backends)
        if report.selected_backend is not None:
            lines.append(f"{_dotted('auto takes', _FACT_WIDTH)} {report.selected_backend}")
        lines.append(_RULE)
    facts("DeepNVMe general environment info:", report.environment)
    facts("I/O on this machine:", report.system)
    if report.directory is not None:
        facts("I/O in this directory:", report.directory)
    return "\n".join(lines)


def as_json(report: Report, *, operators: bool = True, explanations: bool = True) -> str:
    """Return the report as a JSON object.

    Each section maps a finding's key to an object with "value" (sizes in bytes), "text" as :func:`render` shows it, "status"
    and "problems". A "value" of null means unknown, absent or unlimited: "text" says which.

    Args:
        report: What :func:`gather` returned.
        operators: Whether to include ninja, ops and backends.
        explanations: Whether to include "problems".
    """

    def section(facts: Sequence[Fact]) -> dict[str, object]:
        reasons = [{"problems": fact.problems} if explanations else {} for fact in facts]
        return {
            fact.key: {"value": fact.value, "text": fact.shown, "status": fact.status, **more}
            for fact, more in zip(facts, reasons, strict=True)
        }

    document: dict[str, object] = {}
    if operators:
        document = {**section([report.ninja]), "selected_backend": report.selected_backend}
    for name in (*(("ops", "backends") if operators else ()), "environment", "system", "directory"):
        if (facts := getattr(report, name)) is not None:
            document[name] = section(facts)
    return json.dumps(document, indent=2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ``ds_report`` command. Exits with status 2 if the arguments are wrong.

    Args:
        arguments: Command line without the program's name; None for ``sys.argv[1:]``.
    """
    parser = argparse.ArgumentParser("ds_report", description="What this machine offers to tensor I/O.")
    parser.add_argument("--version", action="version", version=f"deepnvme {__version__}")
    parser.add_argument("--path", metavar="DIR", help="also report on this directory: filesystem, device, direct I/O, space")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--hide_operator_status", action="store_true", help="leave out the table of ops and backends")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help="leave out the reasons and remedies")
    options = parser.parse_args(arguments)
    try:
        report = gather(options.path)
    except (OSError, ValueError) as error:
        if options.path is None:
            raise
        reason = getattr(error, "strerror", None) or error
        parser.exit(2, f"ds_report: --path {options.path!r} cannot be examined: {reason}\n")
    shown = {"operators": not options.hide_operator_status, "explanations": not options.hide_errors_and_warnings}
    emit(as_json(report, **shown) if options.json else render(report, **shown))


def emit(text: str) -> None:
    """Print a text to stdout; characters that its encoding lacks are escaped.

    Does nothing if stdout was closed from the start, or nobody reads the pipe any more. Raises other OSErrors.
    """
    if sys.stdout is None:  # closed before the start: ds_report >&-
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        # Flushing the rest of the buffer at exit would fail again, and change the exit status.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # for example "ds_report | head"
            raise


def _dotted(name: str, width: int) -> str:
    return f"{name} {'.' * (width - len(name))}"
