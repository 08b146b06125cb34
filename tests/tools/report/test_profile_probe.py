"""ds_report --path says which settings the engines for a directory get, and where these are from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.mounts import Drive, Mount, drive_of
from deepnvme.drives.profiles import store_profile
from deepnvme.tools.report.directory_probes import directory_facts
from deepnvme.tools.report.facts import Fact

from ...support.disks import Disk

pytestmark = pytest.mark.usefixtures("configuration")

REPOSITORY = Path(__file__).resolve().parents[3]
TUNE = "ds_nvme_tune --nvme_dir {} --save_profile"
WORDS = "block_size 2097152, queue_depth 16, 2 workers, libaio ({})"


@pytest.fixture
def profile(drive: Path, configuration: Path) -> Path:
    """The stored profile of the drive."""
    settings = AioConfig(block_size=2 << 20, queue_depth=16, intra_op_parallelism=2, backend="libaio")
    return store_profile(drive_of(drive), settings)


def fact_of(directory: Path) -> Fact:
    (fact,) = (fact for fact in directory_facts(directory) if fact.name == "drive profile")
    return fact


def test_a_profile_is_told_with_its_settings_figures_and_file(drive: Path, profile: Path) -> None:
    fact = fact_of(drive)
    assert (fact.value, fact.text, fact.status, fact.problems) == (str(profile), WORDS.format(profile), "", ())


def test_without_a_profile_the_default_is_told_and_how_to_make_one(drive: Path) -> None:
    fact = fact_of(drive)
    assert (fact.value, fact.status) == (None, "")
    assert fact.text == "none: the default, block_size 1048576, queue_depth 128, 1 worker"
    assert TUNE.format(drive) in fact.problems[0]


@pytest.mark.root
def test_for_files_in_memory_no_tuning_is_advised(tmpfs: Disk) -> None:
    fact = fact_of(tmpfs.path)
    assert fact.text.startswith("none: the default, ")
    assert fact.problems == ()


@pytest.mark.parametrize(("readable", "told"), [(True, "'{}' is damaged"), (False, "'{}'")])
def test_a_profile_that_is_not_usable_is_warned_of_with_the_remedy(drive: Path, profile: Path, readable: bool, told: str) -> None:
    if readable:
        profile.write_text("{")
    else:
        profile.unlink()
        profile.mkdir()
    fact = fact_of(drive)
    assert (fact.value, fact.status) == (None, "WARNING")
    assert fact.text == "not usable"
    assert told.format(profile) in fact.problems[0]


def test_it_is_found_out_without_torch(drive: Path) -> None:
    code = f"import sys, deepnvme.report; deepnvme.report.gather({str(drive)!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0


def test_the_device_is_told_with_its_disks_and_their_kind(drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disks = []
    for number in range(2):
        disks.append(tmp_path / f"nvme{number}n1")
        (disks[-1] / "device").mkdir(parents=True)
        (disks[-1] / "device/model").write_text("Samsung SSD 990 PRO 4TB  \n")
    raid = Drive(Mount(os.fspath(drive), "xfs", "/dev/md0", "rw"), tuple(disks), "other")
    monkeypatch.setattr("deepnvme.tools.report.directory_probes.drive_of", lambda path: raid)
    facts = {fact.name: fact.text for fact in directory_facts(drive)}
    told = "/dev/md0 (nvme0n1 + nvme1n1, 2 x Samsung SSD 990 PRO 4TB)"
    assert facts["device"] == told
