"""The attacks of tests/faults/torture, a few tries of each; and that the program which counts them sees what goes wrong."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..support.patience import PATIENCE
from .torture import Torn, Wrong
from .torture.__main__ import table
from .torture.interruption import interrupted
from .torture.one_part import part_named
from .torture.parts import power_cuts
from .torture.running import all_parts, run_part

pytestmark = pytest.mark.slow

SEED = 1


@pytest.mark.parametrize("part", all_parts())
def test_a_few_tries(part: str, drive: Path) -> None:
    outcome = run_part(part, drive, SEED, tries=part_named(part).SHORT)
    if outcome.skipped is not None:
        pytest.skip(outcome.skipped)
    assert not outcome.failures, "\n".join(outcome.reports)
    assert outcome.tries == part_named(part).SHORT


@pytest.mark.parametrize(
    ("control", "failures"),
    [("wrong", {"wrong": 1}), ("hangs", {"hung": 1}), ("crashes", {"crashed": 1}), ("leaks", {"leaked": 3}), ("skipped", {})],
)
def test_what_goes_wrong_is_counted(control: str, failures: dict[str, int], drive: Path) -> None:
    outcome = run_part(f"controls.{control}", drive, SEED, tries=3)
    assert dict(outcome.failures) == failures
    assert outcome.skipped == ("needs what there is not" if control == "skipped" else None)
    assert all("--seed 1 --first" in report for report in outcome.reports)
    assert ("skipped: needs" if control == "skipped" else control) in table([outcome])


@pytest.mark.root
def test_a_rename_without_fsync_is_seen_to_lose_data_in_a_power_cut(drive: Path) -> None:
    """As it nearly always does; some tries may find all."""
    missing = power_cuts.requires()
    if missing is not None:
        pytest.skip(missing)

    assert any(_lost_in_a_power_cut(power_cuts.control, drive / str(number)) for number in range(20))


@pytest.mark.root
def test_a_direct_write_that_is_not_flushed_is_seen_to_be_lost_with_a_drives_volatile_cache(drive: Path) -> None:
    missing = power_cuts.requires()
    if missing is not None:
        pytest.skip(missing)

    assert not _lost_in_a_power_cut(power_cuts.cache_control, drive / "durable", volatile=False)
    assert any(_lost_in_a_power_cut(power_cuts.cache_control, drive / str(number), volatile=True) for number in range(20))


def _lost_in_a_power_cut(attack: Callable[..., None], directory: Path, **options: bool) -> bool:
    directory.mkdir()
    try:
        attack(random.Random(0), directory, **options)
    except (Torn, Wrong) as lost:
        return "was saved" in str(lost)
    return False


def test_the_table_of_a_failure_ends_the_program_with_1(drive: Path) -> None:
    words = [sys.executable, "-m", "tests.faults.torture", "--part", "controls.wrong", "--tries", "3", "--dir", str(drive)]
    ended = subprocess.run(words, cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 1, ended.stderr
    assert "on purpose" in ended.stdout
    assert list(drive.iterdir()) == []


def test_an_interruption_comes_at_each_point_once() -> None:
    def count(limit: int, seen: list[int]) -> None:
        for number in map(int, range(limit)):
            seen.append(number)

    outside = {"count": count}
    exec("def operation(seen):\n    for n in range(5):\n        seen.append(n)\n    len(seen)\n", outside)  # no code of the tests
    points = interrupted(0, lambda: outside["operation"]([])).passed
    assert points >= 1 + 5 + 1  # its begin, and each call
    lengths = []
    for number in range(1, points + 1):
        seen: list[int] = []
        assert interrupted(number, lambda seen=seen: outside["operation"](seen)).where
        lengths.append(len(seen))
    assert lengths == sorted(lengths)
    assert set(lengths) == set(range(6))
    assert not interrupted(points + 1, lambda: outside["operation"]([])).where


def test_an_interruption_in_the_last_call_of_a_block_does_not_skip_the_end_of_it() -> None:
    outside: dict[str, Any] = {"lock": threading.Lock()}
    exec("def operation():\n    with lock:\n        return len([])\n", outside)
    points = interrupted(0, outside["operation"]).passed
    for number in range(1, points + 1):
        assert interrupted(number, outside["operation"]).where
        assert not outside["lock"].locked()
