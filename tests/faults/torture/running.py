"""Parts run in processes of their own, watched: for tries that are wrong, and for those that hang or crash."""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from . import parts
from .one_part import GRACE_SECONDS, missing, part_named

FAILURES = ("wrong", "torn", "hung", "crashed", "leaked")
_REPOSITORY = Path(__file__).resolve().parents[3]
_START_SECONDS = 180
"""In which a process imports torch and compiles the ops."""


@dataclass
class Outcome:
    """What became of a part's tries."""

    part: str
    tries: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    reports: list[str] = field(default_factory=list)
    """Of each failure: the command that repeats the try, and what was seen."""
    skipped: str | None = None
    """What is missing to run it."""
    seconds: float = 0.0


def all_parts() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(parts.__path__))


def run_part(name: str, directory: Path, seed: int, tries: int | None = None, seconds: float | None = None) -> Outcome:
    """Attack the part: so many times, or for so long. Blocks. A process that hangs or dies is followed by another."""
    outcome = Outcome(name)
    part = part_named(name)
    outcome.skipped = missing(part)
    if outcome.skipped is not None:
        return outcome
    begun = time.monotonic()
    end = None if seconds is None else begun + seconds
    number = 0
    while (tries is None or number < tries) and (end is None or time.monotonic() < end):
        left = None if tries is None else tries - number
        number += _watch(outcome, part.SECONDS, directory, seed, number, left, end)
    outcome.seconds = time.monotonic() - begun
    return outcome


def _watch(outcome: Outcome, seconds: float, directory: Path, seed: int, first: int, tries: int | None, end: float | None) -> int:
    """How many tries a process made before its end, the one that ended it included."""
    words = ["-m", f"{__package__}.one_part", outcome.part, "--seed", str(seed), "--first", str(first), "--dir", str(directory)]
    words += [] if tries is None else ["--tries", str(tries)]
    made = 0
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", *words],
            cwd=_REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            start_new_session=True,
        )
        assert process.stdout is not None
        with process, process.stdout, selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            unread = b""
            hung = False
            deadline = time.monotonic() + _START_SECONDS + seconds
            while tries is None or made < tries:
                if end is not None and made and time.monotonic() >= end:
                    break
                wait = deadline + GRACE_SECONDS - time.monotonic()
                if wait <= 0 or not selector.select(wait):
                    hung = True
                    break
                more = os.read(process.stdout.fileno(), 1 << 16)
                if not more:
                    break
                unread += more
                *lines, unread = unread.split(b"\n")
                for line in lines:
                    said_of_it = json.loads(line)
                    made += 1
                    outcome.tries += 1
                    if said_of_it["outcome"] != "passed":
                        _note(outcome, said_of_it["outcome"], seed, said_of_it["number"], said_of_it["text"])
                deadline = time.monotonic() + seconds
            finished = tries is not None and made >= tries
            stopped = finished or (not hung and end is not None and time.monotonic() >= end)
            if not stopped and not hung:
                process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started
            process.wait()
        if not stopped:
            said.seek(0)
            kind = "hung" if hung else "crashed"
            _note(outcome, kind, seed, first + made, f"exit status {process.returncode}\n{said.read()[-8000:]}")
            outcome.tries += 1
            made += 1
    return made


def _note(outcome: Outcome, kind: str, seed: int, number: int, text: str) -> None:
    outcome.failures[kind] += 1
    again = f"python -m {__package__}.one_part {outcome.part} --seed {seed} --first {number} --tries 1 --dir DIR"
    outcome.reports.append(f"{outcome.part}: try {number} {kind}; again: {again}\n{text}")
