"""Which processors are near a drive, told by made-up sysfs trees, and threads that stay on them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NEAR = {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}


class Sysfs:
    """Two nodes of four processors each; devices are added."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "dev/block").mkdir(parents=True)
        self.nodes("0-1", "0-3", "4-7")

    def nodes(self, online: str, *processors: str) -> None:
        self._file("devices/system/node/online", online)
        for node, cpulist in enumerate(processors):
            self._file(f"devices/system/node/node{node}/cpulist", cpulist)

    def numbered(self, number: str, directory: str) -> str:
        (self.root / directory).mkdir(parents=True, exist_ok=True)
        (self.root / "dev/block" / number).symlink_to(self.root / directory)
        return directory

    def nvme(self, index: int, node: int, number: str) -> str:
        pci = f"devices/pci0000:00/0000:0{index}:00.0"
        self._file(f"{pci}/numa_node", str(node))
        return self.numbered(number, f"{pci}/nvme/nvme{index}/nvme{index}n1")

    def partition(self, disk: str, number: str) -> str:
        self._file(f"{disk}/part1/partition", "1")
        return self.numbered(number, f"{disk}/part1")

    def stacked(self, name: str, number: str, *below: str) -> str:
        directory = self.numbered(number, f"devices/virtual/block/{name}")
        (self.root / directory / "slaves").mkdir()
        for index, device in enumerate(below):
            (self.root / directory / "slaves" / f"below{index}").symlink_to(self.root / device)
        return directory

    def subsystem(self, number: str, *nodes: int) -> str:
        """A drive of several controllers, as the kernel shows one that reports several ports."""
        home = "devices/virtual/nvme-subsystem/nvme-subsys7"
        disk = self.numbered(number, f"{home}/nvme7n1")
        for index, node in enumerate(nodes):
            controller = f"devices/pci0000:80/0000:8{index}:00.0/nvme/nvme7{index}"
            self._file(f"{controller}/cntlid", "1")
            self._file(f"{controller}/../../numa_node", str(node))
            (self.root / home / f"nvme7{index}").symlink_to(self.root / controller)
        return disk

    def _file(self, path: str, content: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(content + "\n")


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path)


@pytest.fixture
def near(testing: Any, sysfs: Sysfs) -> Callable[[str], list[int]]:
    return lambda number: list(testing.processors_near(*map(int, number.split(":")), str(sysfs.root)))


@pytest.mark.parametrize("node", [0, 1])
def test_a_disk_and_its_partitions_are_near_the_processors_of_its_node(
    sysfs: Sysfs, near: Callable[[str], list[int]], node: int
) -> None:
    sysfs.partition(sysfs.nvme(0, node, "259:0"), "259:1")
    assert near("259:0") == near("259:1") == NEAR[node]


def test_a_drive_of_several_ports_is_near_the_processors_of_its_controllers(
    sysfs: Sysfs, near: Callable[[str], list[int]]
) -> None:
    sysfs.partition(sysfs.subsystem("259:0", 1, 1), "259:1")
    assert near("259:1") == NEAR[1]


def test_a_stack_is_near_where_all_its_disks_are(sysfs: Sysfs, near: Callable[[str], list[int]]) -> None:
    first = sysfs.partition(sysfs.nvme(0, 1, "259:0"), "259:1")
    second, elsewhere = sysfs.nvme(1, 1, "259:2"), sysfs.nvme(2, 0, "259:3")
    array = sysfs.stacked("md0", "9:0", first, second)
    sysfs.stacked("dm-0", "253:0", sysfs.partition(array, "259:9"))
    sysfs.stacked("dm-1", "253:1", array, elsewhere)
    assert near("253:0") == NEAR[1]
    assert near("253:1") == []


def test_a_thread_is_bound_to_processors_that_it_is_allowed_only(testing: Any) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    assert testing.bound_to([allowed[-1], 8191, 100_000, -1]) == (True, [allowed[-1]])
    assert sorted(os.sched_getaffinity(0)) == allowed
