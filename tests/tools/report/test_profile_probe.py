"""ds_report --path says which settings the engines for a directory get, and where these are from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.mounts import Drive, Kind, Mount, drive_of
from deepnvme.drives.profiles import DriveProfile
from deepnvme.ops.op_builder import GDSBuilder
from deepnvme.tools.report import ds_report as report
from deepnvme.tools.report.directory_probes import directory_facts
from deepnvme.tools.report.facts import Fact
from deepnvme.tools.report.profile_probe import profile_fact

from ...support.disks import Disk

pytestmark = pytest.mark.usefixtures("configuration")

REPOSITORY = Path(__file__).resolve().parents[3]
TUNE = "ds_nvme_tune --nvme_dir {} --save_profile"
WORDS = "block_size 2097152, queue_depth 16, 2 workers, libaio; measured 2026-11-01: read 3.05, write 6.10 GB/s ({})"


@pytest.fixture
def profile(drive: Path, configuration: Path) -> Path:
    """The stored profile of the drive."""
    settings = AioConfig(block_size=2 << 20, queue_depth=16, intra_op_parallelism=2, backend="libaio")
    measured = {"read_gb_per_second": 3.05, "write_gb_per_second": 6.1, "measured_at": "2026-11-01T12:30:00+00:00"}
    return DriveProfile.of(drive_of(drive), settings, **measured).save()


def fact_of(directory: Path) -> Fact:
    (fact,) = (fact for fact in directory_facts(directory, GDSBuilder().probe()) if fact.name == "drive profile")
    return fact


def test_a_profile_is_told_with_its_settings_figures_and_file(drive: Path, profile: Path) -> None:
    fact = fact_of(drive)
    assert (fact.value, fact.text, fact.status, fact.problems) == (str(profile), WORDS.format(profile), "", ())


@pytest.mark.parametrize(
    ("measured", "told"),
    [
        ({}, "1 worker ({})"),
        ({"measured_at": "2026-11-01T12:30:00+00:00"}, "1 worker; measured 2026-11-01 ({})"),
        ({"write_gb_per_second": 6.1}, "1 worker; measured: write 6.10 GB/s ({})"),
    ],
    ids=["nothing", "the date", "writes"],
)
def test_only_what_the_profile_has_is_told(drive: Path, measured: dict[str, Any], told: str) -> None:
    path = DriveProfile.of(drive_of(drive), AioConfig(queue_depth=8), **measured).save()
    assert fact_of(drive).text == "block_size 1048576, queue_depth 8, " + told.format(path)


def test_without_a_profile_the_default_is_told_and_how_to_make_one(drive: Path) -> None:
    fact = fact_of(drive)
    assert (fact.value, fact.status) == (None, "")
    assert fact.text.startswith("none: the default of a")
    assert "block_size 1048576, queue_depth 128, 1 worker" in fact.text
    assert TUNE.format(drive) in fact.problems[0]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("nvme", "none: the default of an NVMe drive: block_size 1048576, queue_depth 128, 1 worker"),
        ("rotational", "none: the default of a rotational drive: block_size 4194304, queue_depth 4, 1 worker"),
        ("unknown", "none: the default of a drive of unknown kind: block_size 1048576, queue_depth 128, 1 worker"),
    ],
)
def test_the_default_is_that_of_the_kind_of_drive(tmp_path: Path, kind: Kind, told: str) -> None:
    fact = profile_fact(tmp_path, Drive(Mount("/mnt", "xfs", "/dev/vdb", "rw"), (), kind), tunable=True)
    assert fact.text == told


@pytest.mark.root
def test_for_files_in_memory_no_tuning_is_advised(tmpfs: Disk) -> None:
    fact = fact_of(tmpfs.path)
    assert fact.text.startswith("none: the default of files in memory: ")
    assert fact.problems == ()


def test_where_no_files_can_be_stored_no_tuning_is_advised() -> None:
    assert fact_of(Path("/proc")).problems == ()


def test_a_profile_that_is_switched_off_is_told_with_what_it_would_be(
    drive: Path, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPNVME_PROFILE", "off")
    fact = fact_of(drive)
    assert (fact.value, fact.status) == (None, "")
    assert fact.text.startswith("off by DEEPNVME_PROFILE: the default of a")
    assert fact.problems[0].endswith(WORDS.format(profile))
    profile.unlink()
    assert fact_of(drive).problems == ()


@pytest.mark.parametrize(("readable", "told"), [(True, "'{}' is damaged"), (False, "'{}'")])
def test_a_profile_that_is_not_usable_is_warned_of_with_the_remedy(drive: Path, profile: Path, readable: bool, told: str) -> None:
    if readable:
        profile.write_text("{")
    else:
        profile.unlink()
        profile.mkdir()
    fact = fact_of(drive)
    assert (fact.value, fact.status) == (None, "WARNING")
    assert fact.text.startswith("not usable: the default of a")
    assert told.format(profile) in fact.problems[0]
    assert TUNE.format(drive) in fact.problems[0]


@pytest.mark.usefixtures("profile")
def test_an_unknown_value_of_the_variable_is_warned_of(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPNVME_PROFILE", "maybe")
    fact = fact_of(drive)
    assert (fact.value, fact.status) == (None, "WARNING")
    assert "got 'maybe': unset DEEPNVME_PROFILE" in fact.problems[0]


def test_text_and_json_have_it(drive: Path, profile: Path) -> None:
    found = report.gather(drive)
    assert f"\ndrive profile .................... {WORDS.format(profile)}\n" in report.render(found)
    entry = json.loads(report.as_json(found))["directory"]["drive_profile"]
    assert entry == {"value": str(profile), "text": WORDS.format(profile), "status": "", "problems": []}


def test_it_is_found_out_without_torch(drive: Path) -> None:
    code = f"import sys, deepnvme.report; deepnvme.report.gather({str(drive)!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0


def test_the_device_is_told_with_its_disks_and_their_kind(drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = tmp_path / "md0" / "queue"
    sizes.mkdir(parents=True)
    (sizes / "logical_block_size").write_text("512\n")
    disks = []
    for number in range(2):
        disks.append(tmp_path / f"nvme{number}n1")
        (disks[-1] / "device").mkdir(parents=True)
        (disks[-1] / "device/model").write_text("Samsung SSD 990 PRO 4TB  \n")
    monkeypatch.setattr("deepnvme.tools.report.directory_probes.block_device", lambda path: tmp_path / "md0")
    raid = Drive(Mount(os.fspath(drive), "xfs", "/dev/md0", "rw"), tuple(disks), "nvme")
    monkeypatch.setattr("deepnvme.tools.report.directory_probes.drive_of", lambda path: raid)
    facts = {fact.name: fact.text for fact in directory_facts(drive, GDSBuilder().probe())}
    told = "/dev/md0 (md0 on nvme0n1 + nvme1n1, NVMe, 2 x Samsung SSD 990 PRO 4TB, logical block 512 bytes)"
    assert facts["device"] == told
