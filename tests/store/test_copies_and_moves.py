"""A store that was copied or moved is opened in its new directories; directories of several stores are not taken for one."""

from __future__ import annotations

import errno
import json
import os
import re
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


def test_directories_of_a_store_and_of_its_copies_from_other_times_are_not_mixed(original: list[Path]) -> None:
    monday = copied(original, "monday")
    put(original, TENSOR + 1)
    tuesday = copied(original, "tuesday")
    put(original, TENSOR + 2)
    for ours, theirs in ((monday, original), (original, monday), (monday, tuesday), (tuesday, monday)):
        refused([ours[0], *theirs[1:]], ours[0], "copied or moved together")
        refused([ours[0], ours[1], theirs[2]], ours[0], "copied or moved together")
    check(monday, TENSOR)
    check(tuesday, TENSOR + 1)
    check(original[::-1], TENSOR + 2)


def test_a_moved_store_is_opened_and_changed(original: list[Path]) -> None:
    moved = [each.rename(each.with_name(f"moved {each.name}")) for each in original]
    check(moved, TENSOR)
    put(moved, -TENSOR)
    check(moved, -TENSOR)


def test_a_crash_between_the_memberships_and_the_manifest_leaves_a_store(original: list[Path]) -> None:
    """The directories have a new identity then, and the manifest the one before."""
    before = copied(original, "before")
    put(original, TENSOR + 1)
    for each, old in zip(original[1:], before[1:], strict=True):
        members = [json.loads((directory / MEMBERSHIP_NAME).read_text()) for directory in (each, old)]
        assert members[0]["store"] != members[1]["store"]
        changed = members[1] | {"store": members[0]["store"], "previous": members[1]["store"]}
        (old / MEMBERSHIP_NAME).write_text(json.dumps(changed))
    check(before, TENSOR)
    TensorStore(before, persist=True).close()
    assert json.loads((before[1] / MEMBERSHIP_NAME).read_text())["previous"] == ""
    put(before, TENSOR + 2)
    check(before, TENSOR + 2)


def test_a_drive_that_is_full_at_several_commits_leaves_the_store(original: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with TensorStore(original, persist=True) as store, monkeypatch.context() as patch:
        store.put("tensor", -TENSOR).result()
        patch.setattr("deepnvme.store.manifest.replace_durably", full)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                store.commit()
    check(original, TENSOR)
