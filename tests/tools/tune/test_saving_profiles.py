"""ds_nvme_tune stores what it found as the drive's profile, with --save_profile."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import deepnvme
from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.mounts import Drive, Kind, Mount
from deepnvme.tools.tune import ds_nvme_tune as program
from deepnvme.tools.tune.ds_nvme_tune import profiles_from

from ...support.disks import Disk
from ...support.tunings import tuning_of
from .conftest import Command

pytestmark = pytest.mark.usefixtures("configuration")


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuner has results at once."""
    monkeypatch.setattr(program, "tune", lambda order, progress: tuning_of(order.folders))


def stored(configuration: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(configuration.rglob("*.json"))]


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
        return Drive(kind and Mount(str(path), "xfs", f"/dev/{path.name}", "rw"), (), kind or "other")

    monkeypatch.setattr(program, "drive_of", drive_of)


def test_each_drive_gets_the_best_settings_of_its_folder_alone(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = two_folders(drive)
    on_drives(monkeypatch, {a: "other", b: "other"})
    found, skipped = profiles_from(tuning_of([a, b]))
    assert skipped == []
    assert [(drive.mount and drive.mount.point, settings.queue_depth) for drive, settings in found] == [(str(a), 1), (str(b), 2)]


def test_of_several_folders_on_one_drive_the_first_counts(drive: Path) -> None:
    ((_, settings),), _ = profiles_from(tuning_of(two_folders(drive)))
    assert settings.queue_depth == 1


def test_memory_and_unknown_mounts_have_no_profile_and_the_others_still_do(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = two_folders(drive)
    on_drives(monkeypatch, {drive: "memory", a: None, b: "other"})
    found, skipped = profiles_from(tuning_of([drive, a, b]))
    assert [each.mount and each.mount.point for each, _ in found] == [str(b)]
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
    assert f"'{next(configuration.rglob('*.json'))}'" in line
    assert line.endswith(f"for files on {profile['mount']}: block_size 4194304, queue_depth 1, 1 worker")
    assert AioConfig(**profile["settings"]) == AioConfig(block_size=4 << 20, queue_depth=1)


@pytest.mark.usefixtures("tuned")
def test_without_the_option_a_line_says_how_to_store(ds_nvme_tune: Command, drive: Path, configuration: Path) -> None:
    ran = ds_nvme_tune("--nvme_dir", drive)
    assert (ran.status, stored(configuration)) == (0, [])
    assert "--save_profile" in ran.behind_the_announcement()[0]


@pytest.mark.usefixtures("tuned")
def test_settings_of_the_gds_op_are_no_profile(ds_nvme_tune: Command, drive: Path, configuration: Path) -> None:
    assert "--save_profile" in ds_nvme_tune("--nvme_dir", drive, "--gpu", "--gds", "--save_profile").refusal(2)
    ran = ds_nvme_tune("--nvme_dir", drive, "--gpu", "--gds")
    assert (ran.status, ran.behind_the_announcement(), stored(configuration)) == (0, [], [])


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
