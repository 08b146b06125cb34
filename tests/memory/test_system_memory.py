"""What is left of memory where control groups of either version limit it, as their files and mounts say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from deepnvme.memory import system_memory
from deepnvme.memory.pool import BufferPool, OutOfBuffers
from deepnvme.memory.system_memory import available_memory

GIB = 2**30


@dataclass
class System:
    """Files in place of /proc/self and of the mounted control groups."""

    directory: Path

    def member_of(self, *memberships: str) -> None:
        (self.directory / "cgroup").write_text("".join(f"{line}\n" for line in memberships))

    def mount(self, kind: str, options: str = "rw", root: str = "/", name: str = "groups") -> Path:
        place = self.directory / name
        place.mkdir()
        shown = str(place).replace(" ", "\\040")
        with (self.directory / "mountinfo").open("a") as file:
            file.write(f"31 23 0:28 {root} {shown} rw,relatime shared:9 - {kind} {kind} {options}\n")
        return place


def group(directory: Path, limit: int | str, usage: int = 0, cached: int = 0) -> None:
    """Of version 2."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{usage}\n")
    (directory / "memory.stat").write_text(f"anon {usage}\nactive_file {cached // 4}\ninactive_file {cached - cached // 4}\n")


def group_1(directory: Path, limit: int, usage: int = 0, cached: int = 0) -> None:
    """Of version 1."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (directory / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (directory / "memory.stat").write_text(f"active_file 7\ntotal_active_file {cached}\ntotal_inactive_file 0\n")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    """64 GiB are available; no control groups."""
    directory = tmp_path / "a prøcess"
    directory.mkdir()
    monkeypatch.setattr(system_memory, "PROCESS", directory)
    monkeypatch.setattr(system_memory, "CONTROL_GROUPS", directory / "groups")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    return System(directory)


def test_without_control_groups_it_is_what_the_machine_has(system: System) -> None:
    assert available_memory() == 64 * GIB


@pytest.mark.parametrize(
    ("limit", "usage", "cached", "left"),
    [(8 * GIB, 5 * GIB, 2 * GIB, 5 * GIB), ("max", 5 * GIB, 0, 64 * GIB), (GIB, 2 * GIB, 0, 0)],
    ids=["cached files do not count as used", "no limit", "over the limit"],
)
def test_a_group_leaves_its_limit_less_what_is_used(system: System, limit: Any, usage: int, cached: int, left: int) -> None:
    system.member_of("0::/job")
    group(system.mount("cgroup2") / "job", limit, usage=usage, cached=cached)
    assert available_memory() == left


@pytest.mark.parametrize("tightest", [0, 1, 2])
def test_the_tightest_of_the_groups_around_counts(system: System, tightest: int) -> None:
    system.member_of("0::/slice/job")
    mount = system.mount("cgroup2")
    for index, directory in enumerate((mount, mount / "slice", mount / "slice/job")):
        group(directory, 3 * GIB if index == tightest else 8 * GIB, usage=GIB)
    group(mount / "slice/job/inner", GIB)
    group(mount / "slice/other", GIB)
    assert available_memory() == 2 * GIB


def test_version_1(system: System) -> None:
    system.member_of("9:cpu:/other", "4:hugetlb,memory:/job", "0::/")
    system.mount("cgroup", "rw,cpu", name="cpu")
    mount = system.mount("cgroup", "rw,hugetlb,memory")
    group_1(mount, 2**63 - 4096)
    group_1(mount / "job", 8 * GIB, usage=5 * GIB, cached=GIB)
    assert available_memory() == 4 * GIB


@pytest.mark.parametrize("root", ["/docker/abc", "/another"])
def test_in_a_container_the_mount_is_the_group(system: System, root: str) -> None:
    """Version 1 without a namespace of its own names the group as the host does."""
    system.member_of("4:memory:/docker/abc")
    group_1(system.mount("cgroup", "rw,memory", root=root), 8 * GIB, usage=GIB)
    assert available_memory() == 7 * GIB


def test_without_proc_the_groups_mounted_in_the_usual_place_count(system: System) -> None:
    group(system.directory / "groups", 8 * GIB, usage=5 * GIB)
    assert available_memory() == 3 * GIB
    group_1(system.directory / "groups" / "memory", 8 * GIB, usage=6 * GIB)
    assert available_memory() == 2 * GIB


def test_without_proc_it_is_what_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    monkeypatch.setattr(system_memory, "PROCESS", tmp_path)
    free = available_memory()
    monkeypatch.undo()
    assert 0 < free <= psutil.virtual_memory().total


def test_the_group_of_this_process_can_be_read() -> None:
    """Of whatever version, and without a limit as well as with one."""
    assert 0 < available_memory() <= psutil.virtual_memory().available + GIB


def test_memory_that_a_control_group_has_not_is_refused_since_the_kernel_would_kill_for_it(system: System) -> None:
    system.member_of("0::/job")
    group(system.mount("cgroup2") / "job", 200 << 20, usage=100 << 20)
    pool = BufferPool(8 * GIB)
    with pytest.raises(OutOfBuffers, match="128 MiB of memory are to be pinned, and 100 MiB are available to this process: give"):
        pool.lease(128 << 20)
    with pool.lease(96 << 20) as lease:
        assert lease.nbytes == 96 << 20
