"""A store that was copied or moved is opened in its new directories; directories of several stores are not taken for one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from deepnvme.store.manifest import MEMBERSHIP_NAME
from deepnvme.swap import TensorStore

from ..support.files import copied

TENSOR = torch.arange(3_000_000)  # large enough to be split over all directories


@pytest.fixture
def original(drive: Path) -> list[Path]:
    directories = [drive / name for name in ("a", "b", "c")]
    put(directories, TENSOR)
    return directories


def put(directories: Sequence[Path], tensor: torch.Tensor) -> None:
    with TensorStore(directories, persist=True) as store:
        store.put("tensor", tensor).result()
        store.commit()


def check(directories: Sequence[Path], tensor: torch.Tensor) -> None:
    with TensorStore(directories, read_only=True) as store:
        assert torch.equal(store.get("tensor").result(), tensor)


def refused(directories: Sequence[Path], *named: Path | str) -> None:
    for mode in ("read_only", "persist"):
        with pytest.raises(ValueError, match=".*".join(re.escape(str(each)) for each in named)):
            TensorStore(directories, **{mode: True})  # type: ignore[arg-type]


def test_directories_of_a_store_and_of_its_copy_are_not_mixed(original: list[Path]) -> None:
    """Neither before one of them is changed, nor after."""
    copies = copied(original, "copy")
    for changed in (None, copies, original):
        if changed is not None:
            put(changed, TENSOR + (1 if changed is copies else 2))
        refused([copies[0], *original[1:]], copies[0], "give")
        refused([original[0], copies[1], original[2]], "give")
        refused([*copies[:2], original[2]], copies[0], "give")
    check(copies, TENSOR + 1)
    check(original[::-1], TENSOR + 2)


def test_copies_of_different_times_are_not_mixed(original: list[Path]) -> None:
    monday = copied(original, "monday")
    put(original, TENSOR + 1)
    tuesday = copied(original, "tuesday")
    refused([monday[0], *tuesday[1:]], monday[0], "copied or moved together")
    refused([tuesday[0], tuesday[1], monday[2]], tuesday[0], "copied or moved together")
    check(monday, TENSOR)
    check(tuesday, TENSOR + 1)


def test_a_moved_store_is_opened_and_changed(original: list[Path]) -> None:
    moved = [each.rename(each.with_name(f"moved {each.name}")) for each in original]
    check(moved, TENSOR)
    put(moved, -TENSOR)
    check(moved, -TENSOR)


def test_one_directory_is_moved_to_another_drive(original: list[Path]) -> None:
    copy = original[1].with_name("new drive")
    shutil.copytree(original[1], copy)
    refused([original[0], copy, original[2]], copy, original[1], "away")
    shutil.rmtree(original[1])
    put([original[0], copy, original[2]], -TENSOR)
    check([original[0], copy, original[2]], -TENSOR)


def test_a_copy_beside_a_directory_in_place_is_refused_though_the_first_has_moved(original: list[Path]) -> None:
    copies = copied(original, "copy")
    moved = original[0].rename(original[0].with_name("moved"))
    refused([moved, original[1], copies[2]], copies[2], original[2], "away")
    check([moved, *original[1:]], TENSOR)


def test_a_crash_between_the_memberships_and_the_manifest_leaves_a_store(original: list[Path]) -> None:
    """The directories have a new identity then, and the manifest the one before."""
    before = copied(original, "before")
    put(original, TENSOR + 1)
    check(original, TENSOR + 1)
    for each, old in zip(original[1:], before[1:], strict=True):
        members = [json.loads((directory / MEMBERSHIP_NAME).read_text()) for directory in (each, old)]
        assert members[0]["store"] != members[1]["store"]
        changed = members[1] | {"store": members[0]["store"], "previous": members[1]["store"]}
        (old / MEMBERSHIP_NAME).write_text(json.dumps(changed))
    check(before, TENSOR)
    put(before, TENSOR + 2)
    check(before, TENSOR + 2)


def test_a_store_of_an_earlier_version_is_opened(original: list[Path]) -> None:
    for each in original[1:]:
        member = json.loads((each / MEMBERSHIP_NAME).read_text())
        (each / MEMBERSHIP_NAME).write_text(json.dumps({name: member[name] for name in ("store", "index", "first")}))
    moved = [each.rename(each.with_name(f"moved {each.name}")) for each in original]
    check(moved, TENSOR)
    put(moved, -TENSOR)
    check(moved, -TENSOR)
