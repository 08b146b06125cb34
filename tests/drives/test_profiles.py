"""Drive profiles: stored and found again by drive, and the settings that engines get by them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

import deepnvme
from deepnvme import AioConfig
from deepnvme.drives import profiles
from deepnvme.drives.mounts import Drive, Mount, drive_of
from deepnvme.drives.profiles import default_settings, engine_for, profile_of, settings_for, store_profile
from deepnvme.engine import Engine

from ..support.drive_profiles import EngineSettings, engine_settings, engines_made

pytestmark = pytest.mark.usefixtures("configuration")

TUNED = AioConfig(block_size=262144, queue_depth=16, intra_op_parallelism=2, single_submit=True)


def some_drive(*disks: str, kind: str = "other", point: str = "/mnt/nvme", filesystem: str = "ext4") -> Drive:
    mount = Mount(point, filesystem, "/dev/nvme0n1", "rw")
    return Drive(mount, tuple(Path(disk) for disk in disks), kind)  # type: ignore[arg-type]


def tuned(path: Path, settings: AioConfig = TUNED) -> Path:
    """Store a profile of the drive that a path is on. Returns its file."""
    return store_profile(drive_of(path), settings)


# Storing.


def test_a_stored_profile_is_found_again(drive: Path) -> None:
    tuned(drive)
    assert profile_of(drive_of(drive)) == profile_of(drive_of(drive / "not there yet")) == TUNED


def test_a_new_profile_replaces_the_old_one_and_leaves_nothing_else(drive: Path, configuration: Path) -> None:
    tuned(drive, AioConfig(queue_depth=4))
    path = tuned(drive)
    assert profile_of(drive_of(drive)) == TUNED
    assert list(profiles.profile_directory().iterdir()) == [path]
    assert path.is_relative_to(configuration)


@pytest.mark.parametrize(
    "other",
    [
        some_drive("/sys/block/nvme0n1", point="/mnt/other"),
        some_drive("/sys/block/nvme0n1", filesystem="xfs"),
        Drive(Mount("/mnt/nvme", "ext4", "/dev/nvme1n1", "rw"), (), "other"),
    ],
    ids=["mount point", "file system", "device"],
)
def test_a_drive_is_told_apart_by_its(other: Drive) -> None:
    store_profile(some_drive("/sys/block/nvme0n1"), TUNED)
    assert profile_of(some_drive("/sys/block/nvme0n1")) is not None
    assert profile_of(other) is None


def test_a_drive_is_recognised_when_the_kernel_numbers_its_disks_anew(tmp_path: Path) -> None:
    def raid(*names: str) -> Drive:
        for name in names:
            (tmp_path / name / "device").mkdir(parents=True, exist_ok=True)
            (tmp_path / name / "device/model").write_text("Fast 4TB\n")
        mount = Mount("/mnt/nvme", "xfs", f"/dev/{names[0]}", "rw")
        return Drive(mount, tuple(tmp_path / name for name in names), "other")

    store_profile(raid("nvme0n1", "nvme1n1"), TUNED)
    assert profile_of(raid("nvme2n1", "nvme3n1")) == TUNED
    assert profile_of(raid("nvme2n1")) is None  # a disk less


def test_a_drive_without_a_known_mount_has_no_profile() -> None:
    unknown = Drive(None, (), "other")
    assert profile_of(unknown) is None
    with pytest.raises(ValueError, match="mountinfo"):
        store_profile(unknown, TUNED)


def test_a_directory_that_cannot_be_written_is_named(drive: Path, configuration: Path) -> None:
    configuration.write_text("a file where the directory should be")
    with pytest.raises(NotADirectoryError) as caught:
        tuned(drive)
    assert str(configuration) in str(caught.value.filename)


def test_profiles_are_below_the_home_directory_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CONFIG_HOME", value)
        assert profiles.profile_directory() == tmp_path / ".config/deepnvme/drives"


def test_there_is_no_profile_where_there_is_no_home_directory(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    for home in ("/dev/null", "/nonexistent"):  # of services
        monkeypatch.setenv("HOME", home)
        assert profile_of(drive_of(drive)) is None
        assert settings_for([drive]) == default_settings(drive_of(drive))


# Settings.


def test_an_engine_for_a_tuned_drive_has_the_settings_of_its_profile(drive: Path) -> None:
    tuned(drive)
    with engine_for([drive / "file.pt"]) as engine:
        assert (engine.block_size, engine.in_flight_bytes, engine.num_threads) == (262144, 16 * 262144, 2)
        assert engine.queue_depth == 128  # for small transfers, which a search for large ones says nothing of
        engine.write(torch.arange(1000), drive / "file.pt").result()
        read = torch.empty(1000, dtype=torch.int64)
        engine.read(read, drive / "file.pt").result()
        assert torch.equal(read, torch.arange(1000))


def test_given_settings_go_before_the_profile(drive: Path) -> None:
    tuned(drive)
    with engine_for([drive], AioConfig(queue_depth=3), in_flight_bytes=1) as engine:
        assert (engine.block_size, engine.queue_depth, engine.num_threads) == (1048576, 3, 1)


def test_drives_that_differ_share_an_engine_with_the_larger_of_each_setting(drive: Path, tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if drive_of(memory).kind != "memory":
        pytest.skip("needs a tmpfs on /dev/shm")
    tuned(drive, AioConfig(block_size=262144, queue_depth=64, backend="threads"))
    tuned(memory, AioConfig(block_size=1 << 21, queue_depth=2, intra_op_parallelism=3, single_submit=True))
    expected = AioConfig(block_size=1 << 21, queue_depth=64, intra_op_parallelism=3)
    assert settings_for([drive, memory]) == settings_for([memory, drive]) == expected


def test_an_engine_for_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a file or directory"):
        engine_for([])


# What is damaged.


@pytest.mark.parametrize("content", ["", "{", '{"mount": 1}', "[]", "x" * 70000], ids=["empty", "cut", "type", "array", "large"])
def test_a_damaged_profile_is_ignored_with_a_warning_that_names_it(drive: Path, content: str) -> None:
    path = tuned(drive)
    path.write_text(content)
    with pytest.raises(ValueError, match="tune the drive again"):
        profile_of(drive_of(drive))
    with pytest.warns(RuntimeWarning, match=path.name):
        settings = settings_for([drive])
    assert settings == default_settings(drive_of(drive))


def test_settings_out_of_range_are_damage(drive: Path) -> None:
    path = tuned(drive)
    path.write_text(path.read_text().replace('"queue_depth": 16', '"queue_depth": 0'))
    with pytest.warns(RuntimeWarning, match=r"damaged \(settings: queue_depth: Input should be greater than or equal to 1\)"):
        settings_for([drive])


def test_what_a_newer_version_has_noted_besides_the_settings_is_left_out(drive: Path) -> None:
    path = tuned(drive)
    path.write_text(path.read_text().replace("{", '{"new": 1,', 1))
    assert profile_of(drive_of(drive)) == TUNED


def refuse_libaio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel refuse libaio, and nothing else."""
    real = Engine.__init__

    def refusing(self: Engine, backend: str = "auto", *arguments: object, **settings: object) -> None:
        if backend == "libaio":
            raise OSError(38, "Function not implemented", "io_setup")
        real(self, backend, *arguments, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "__init__", refusing)


def test_a_backend_that_works_no_more_is_replaced_if_a_profile_names_it(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(drive, AioConfig(backend="libaio", queue_depth=5))
    refuse_libaio(monkeypatch)
    with pytest.warns(RuntimeWarning, match="backend libaio of the drive profile does not work"):
        engine = engine_for([drive])
    with engine:
        assert engine.in_flight_bytes == 5 << 20
        assert engine.backend != "libaio"


def test_a_backend_that_does_not_work_is_an_error_if_the_user_names_it(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_libaio(monkeypatch)
    with pytest.raises(OSError, match="io_setup"):
        engine_for([drive], AioConfig(backend="libaio"))


# Defaults.


def test_a_rotational_drive_gets_few_long_transfers() -> None:
    settings = default_settings(some_drive("/sys/block/sda", kind="rotational"))
    assert (settings.block_size, settings.queue_depth, settings.intra_op_parallelism) == (4 << 20, 4, 1)


@pytest.mark.parametrize(
    ("disks", "drives", "cores", "workers"),
    [(1, 1, 64, 1), (8, 1, 64, 8), (8, 1, 8, 4), (8, 4, 16, 2), (8, 8, 2, 1), (0, 1, 64, 1)],
)
def test_a_raid_gets_a_worker_for_each_disk_as_long_as_half_of_the_cores_are_left(
    monkeypatch: pytest.MonkeyPatch, disks: int, drives: int, cores: int, workers: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    raid = some_drive(*(f"/sys/block/nvme{number}n1" for number in range(disks)))
    settings = default_settings(raid, drives)
    assert (settings.block_size, settings.queue_depth, settings.intra_op_parallelism) == (1 << 20, 128, workers)


def test_a_store_and_an_optimizer_take_the_profile_of_their_drive(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def engines(config: AioConfig | None) -> list[EngineSettings]:
        with engines_made() as made:
            with deepnvme.store.TensorStore(drive / "store", aio_config=config) as store:
                store.put("a", torch.ones(5)).result()
            parameter = torch.nn.Parameter(torch.ones(5))
            deepnvme.OffloadedOptimizer([parameter], torch.optim.Adam, path=drive / "states", aio_config=config).close()
        return made

    tuned(drive)
    assert engines(None) == [engine_settings(TUNED)] * 2
    given = AioConfig(queue_depth=3)
    assert engines(given) == [engine_settings(given)] * 2


MAKES_AN_ENGINE = {
    "engine.py",  # its example
    "drives/profiles.py",
    "integrations/deepspeed/swap_tensor/aio_config.py",  # with the settings of DeepSpeed's JSON
}


def test_engines_are_made_by_their_drive_or_by_settings_that_the_user_gave() -> None:
    root = Path(deepnvme.__file__).parent
    making = {str(path.relative_to(root)) for path in root.rglob("*.py") if re.search(r"\bEngine\(", path.read_text())}
    assert {name for name in making if "op_builder" not in name} == MAKES_AN_ENGINE
