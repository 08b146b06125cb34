"""The attacks of tests/faults/torture, a few tries of each; and that the program which counts them sees what goes wrong."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..support.patience import PATIENCE
from .torture import Torn, Wrong
from .torture.__main__ import table
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
