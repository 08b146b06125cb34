"""ds_nvme_tune stores what it found as the drive's profile: with --save_profile, or if the user says so at the end."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

import deepnvme
from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.mounts import Drive, Kind, Mount
from deepnvme.drives.profiles import DriveProfile
from deepnvme.tools.tune import ds_nvme_tune as program
from deepnvme.tools.tune.ds_nvme_tune import profiles_from

from ...support.disks import Disk
from ...support.patience import PATIENCE
from ...support.tunings import tuning_of
from .conftest import Command

pytestmark = pytest.mark.usefixtures("configuration")

REPOSITORY = Path(__file__).resolve().parents[3]
ENDED = datetime(2026, 11, 1, 12, 30, tzinfo=timezone.utc)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuner has results at once."""
    monkeypatch.setattr(program, "tune", lambda order, progress: tuning_of(order.folders))


def stored(configuration: Path) -> list[DriveProfile]:
    return [DriveProfile.model_validate_json(path.read_text()) for path in sorted(configuration.rglob("*.json"))]


def two_folders(drive: Path) -> list[Path]:
    folders = [drive / "a", drive / "b"]
    for folder in folders:
        folder.mkdir()
    return folders


# -- what is stored ----------------------------------------------------------------------------------------------------


def on_drives(monkeypatch: pytest.MonkeyPatch, kinds: dict[Path, Kind | None]) -> None:
    """Has each folder be the mount point of a drive of that kind; None: it is not known where it is mounted."""

    def drive_of(path: Path) -> Drive:
        kind = kinds[path]
        return Drive(kind and Mount(str(path), "xfs", f"/dev/{path.name}", "rw"), (), kind or "unknown")

    monkeypatch.setattr(program, "drive_of", drive_of)


def test_each_drive_gets_the_best_settings_of_its_folder_alone(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = two_folders(drive)
    on_drives(monkeypatch, {a: "nvme", b: "nvme"})
    (first, second), skipped = profiles_from(tuning_of([a, b]), ENDED)
    assert skipped == []
    assert (first.mount, first.settings.queue_depth, first.read_gb_per_second, first.write_gb_per_second) == (str(a), 1, 1.0, 1.0)
    assert (second.mount, second.settings.queue_depth, second.read_gb_per_second) == (str(b), 2, 2.0)
    assert first.measured_at == "2026-11-01T12:30:00+00:00"


def test_of_several_folders_on_one_drive_the_first_counts(drive: Path) -> None:
    (found,), _ = profiles_from(tuning_of(two_folders(drive)), ENDED)
    assert found.settings.queue_depth == 1


def test_a_rate_that_was_not_measured_is_not_stored(drive: Path) -> None:
    (found,), _ = profiles_from(tuning_of([drive], read=False), ENDED)
    assert (found.read_gb_per_second, found.write_gb_per_second) == (None, 1.0)


def test_memory_and_unknown_mounts_have_no_profile_and_the_others_still_do(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = two_folders(drive)
    on_drives(monkeypatch, {drive: "memory", a: None, b: "ssd"})
    found, skipped = profiles_from(tuning_of([drive, a, b]), ENDED)
    assert [each.mount for each in found] == [str(b)]
    assert re.fullmatch(f"no drive profile for '{drive}': .* in memory.*", skipped[0])
    assert re.fullmatch(f"no drive profile for '{a}': .*mountinfo.*", skipped[1])


# -- the command line --------------------------------------------------------------------------------------------------


def test_what_was_found_reaches_the_engines_for_that_drive(ds_nvme_tune: Command, drive: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.json"
    few.write_text('{"block_size": ["256K"], "queue_depth": [7], "io_parallel": [2]}')
    ran = ds_nvme_tune("--nvme_dir", drive, "--io_size", "1M", "--seconds", 1, "--sweep_config", few, "--save_profile")
    assert ran.status == 0
    with deepnvme.engine_for([drive / "checkpoint.pt"]) as engine:
        assert (engine.block_size, engine.in_flight_bytes, engine.num_threads) == (256 << 10, 7 * (256 << 10), 2)


@pytest.mark.usefixtures("tuned")
def test_one_line_says_where_the_profile_is_and_what_it_governs(ds_nvme_tune: Command, drive: Path, configuration: Path) -> None:
    ran = ds_nvme_tune("--nvme_dir", drive, "--save_profile")
    (profile,) = stored(configuration)
    (line,) = ran.behind_the_announcement()
    assert f"'{profile.path}'" in line
    assert line.endswith(f"for files on {profile.mount}: block_size 4194304, queue_depth 1, 1 worker")
    assert profile.settings == AioConfig(block_size=4 << 20, queue_depth=1)
    assert abs(datetime.now().astimezone() - datetime.fromisoformat(profile.measured_at)).total_seconds() < 60


@pytest.mark.usefixtures("tuned")
def test_a_profile_that_is_switched_off_is_said_to_be(
    ds_nvme_tune: Command, drive: Path, configuration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPNVME_PROFILE", "off")
    assert "as soon as DEEPNVME_PROFILE is not off" in ds_nvme_tune("--nvme_dir", drive, "--save_profile").err
    assert len(stored(configuration)) == 1


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize("json_to_stdout", [[], ["--json"]], ids=["text", "json"])
def test_without_a_terminal_nothing_is_asked_and_a_line_says_how_to_store(
    ds_nvme_tune: Command, drive: Path, configuration: Path, json_to_stdout: list[str]
) -> None:
    ran = ds_nvme_tune("--nvme_dir", drive, *json_to_stdout)
    assert ran.status == 0
    (line,) = ran.behind_the_announcement()
    assert "--save_profile" in line
    json.loads(ran.out[ran.out.index("{") :])  # the block, or all of it, is still what stdout ends with
    assert stored(configuration) == []


@pytest.mark.usefixtures("tuned")
def test_with_no_save_profile_nothing_is_said(ds_nvme_tune: Command, drive: Path, configuration: Path) -> None:
    ran = ds_nvme_tune("--nvme_dir", drive, "--no_save_profile")
    assert (ran.status, ran.behind_the_announcement(), stored(configuration)) == (0, [], [])


@pytest.mark.usefixtures("tuned")
def test_settings_of_the_gds_op_are_no_profile(ds_nvme_tune: Command, drive: Path, configuration: Path) -> None:
    assert "--save_profile" in ds_nvme_tune("--nvme_dir", drive, "--gpu", "--gds", "--save_profile").refusal(2)
    ran = ds_nvme_tune("--nvme_dir", drive, "--gpu", "--gds")
    assert (ran.status, ran.behind_the_announcement(), stored(configuration)) == (0, [], [])


def test_an_interrupted_run_stores_nothing_and_says_so(
    ds_nvme_tune: Command, drive: Path, configuration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "tune", lambda order, progress: tuning_of(order.folders, complete=False))
    assert "no drive profile is stored" in ds_nvme_tune("--nvme_dir", drive, "--save_profile").refusal(130)
    assert "profile" not in ds_nvme_tune("--nvme_dir", drive).refusal(130)
    assert stored(configuration) == []


@pytest.mark.root
@pytest.mark.usefixtures("tuned")
def test_a_folder_in_memory_gets_a_note_instead(ds_nvme_tune: Command, tmpfs: Disk, configuration: Path) -> None:
    ran = ds_nvme_tune("--nvme_dir", tmpfs.path, "--save_profile")
    assert ran.status == 0
    (line,) = ran.behind_the_announcement()
    assert "in memory" in line
    assert stored(configuration) == []


@pytest.mark.usefixtures("tuned")
def test_a_configuration_directory_that_cannot_be_written_is_named_after_the_result(
    ds_nvme_tune: Command, drive: Path, configuration: Path
) -> None:
    configuration.write_text("a file, not a directory")
    ran = ds_nvme_tune("--nvme_dir", drive, "--save_profile")
    assert f"'{configuration}" in ran.refusal(1)
    assert "Best performance" in ran.out


def test_an_unknown_value_of_the_variable_is_told_before_anything_is_measured(
    ds_nvme_tune: Command, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPNVME_PROFILE", "maybe")
    monkeypatch.setattr(program, "tune", lambda *arguments: pytest.fail("it measured"))
    assert "DEEPNVME_PROFILE must be on or off, got 'maybe'" in ds_nvme_tune("--nvme_dir", drive).refusal(1)


# -- the question ------------------------------------------------------------------------------------------------------

PROGRAM = """
import fcntl, pathlib, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C on it is a signal
{prelude}
from deepnvme.tools.tune import ds_nvme_tune as program
from tests.support.tunings import tuning_of
program.tune = lambda order, progress: tuning_of(order.folders)
program.main(sys.argv[1:])
"""

# Goes on as a background job of the terminal. If that is stopped, waitstatus_to_exitcode raises ValueError.
BACKGROUND = """
import os
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, os.WUNTRACED)[1]))
os.setpgid(0, 0)
"""
# As after an interrupt that came when all had been measured.
INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
"""


def state(process: subprocess.Popen[bytes]) -> str:
    """The letter of ``proc_pid_stat(5)``: R where it runs, S where it waits."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0]


def answered(keys: bytes, *arguments: str | Path, before: bytes = b"", prelude: str = "") -> tuple[int, str]:
    """Runs ds_nvme_tune on a terminal on which ``keys`` are pressed when it asks; returns its status and what was shown.

    Args:
        keys: What is pressed at the question.
        before: What is pressed before the program starts.
        prelude: What the program does before it runs ds_nvme_tune.
    """
    ours, theirs = pty.openpty()
    command = [sys.executable, "-W", "error", "-c", PROGRAM.format(prelude=prelude), *map(str, arguments)]
    os.write(ours, before)
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=REPOSITORY, start_new_session=True)
    os.close(theirs)
    shown = bytearray()
    try:
        deadline = time.monotonic() + PATIENCE
        while select.select([ours], [], [], max(0, deadline - time.monotonic()))[0]:
            try:
                more = os.read(ours, 4096)
            except OSError:  # the program has ended
                break
            shown.extend(more)
            if keys and b"[y/N] " in shown:
                while state(child) == "R":  # a Ctrl-C just before it reads the answer would be seen with the answer only
                    time.sleep(0.001)
                os.write(ours, keys)
                keys = b""
        return child.wait(PATIENCE), shown.decode()
    finally:
        child.kill()
        child.wait()
        os.close(ours)


@pytest.mark.parametrize(
    ("keys", "yes"),
    [(b" Yes\n", True), (b"\n", False), (b"yeah\n", False), (b"\4", False), (b"\3", False)],
    ids=["yes", "enter", "yeah", "end of input", "Ctrl-C"],
)
def test_on_a_terminal_it_asks_once_and_only_yes_stores(drive: Path, configuration: Path, keys: bytes, yes: bool) -> None:
    status, shown = answered(keys, "--nvme_dir", drive)
    assert status == 0, shown
    assert shown.count("[y/N]") == 1
    assert re.search(r"^Let deepnvme use these settings for files on \S+ from now on\? \[y/N\] ", shown, re.MULTILINE)
    assert len(stored(configuration)) == yes
    assert ("stored in" in shown) == yes
    assert shown.endswith("\n")


def test_keys_that_were_pressed_while_it_measured_are_no_answer(drive: Path, configuration: Path) -> None:
    status, shown = answered(b"\n", "--nvme_dir", drive, before=b"y\n")
    assert status == 0, shown
    assert stored(configuration) == []


def test_with_several_folders_the_question_says_whose_settings_are_meant(drive: Path, configuration: Path) -> None:
    a, b = two_folders(drive)
    status, shown = answered(b"y\n", "--nvme_dir", a, b)
    assert status == 0, shown
    assert "Let deepnvme use the best settings of each drive alone for files on " in shown
    (profile,) = stored(configuration)
    assert profile.settings.queue_depth == 1


@pytest.mark.parametrize(("option", "count"), [("--save_profile", 1), ("--no_save_profile", 0)])
def test_with_either_option_nothing_is_asked(drive: Path, configuration: Path, option: str, count: int) -> None:
    status, shown = answered(b"y\n", "--nvme_dir", drive, option)
    assert (status, len(stored(configuration))) == (0, count), shown
    assert "[y/N]" not in shown


@pytest.mark.parametrize("prelude", [BACKGROUND, INTERRUPTED], ids=["background", "interrupted"])
def test_who_cannot_answer_is_not_asked(drive: Path, configuration: Path, prelude: str) -> None:
    """A background job would be stopped as it reads from its terminal. Who has pressed Ctrl-C could not do so again."""
    status, shown = answered(b"y\n", "--nvme_dir", drive, prelude=prelude)
    assert status == 0, shown
    assert "[y/N]" not in shown
    assert "with --save_profile" in shown
    assert stored(configuration) == []
