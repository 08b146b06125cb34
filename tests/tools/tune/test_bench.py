"""The bench of a search: what its transfers go to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepnvme.drives.aio_config import AioConfig
from deepnvme.tools.tune import transfers
from deepnvme.tools.tune.bench import TrialBench

MIB = 1 << 20


class Recording:
    """A handle that notes where transfers begin."""

    def __init__(self, handle: Any, offsets: list[int]) -> None:
        self._handle, self._offsets = handle, offsets

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def async_pread(self, tensor: Any, path: str, offset: int) -> int:
        self._offsets.append(offset)
        return int(self._handle.async_pread(tensor, path, offset))


def test_every_setting_that_a_handle_can_be_made_with_is_usable(drive: Path) -> None:
    with TrialBench([drive], MIB, False, False, lambda step: None) as bench:
        usable, refused = bench.usable([AioConfig(), AioConfig(backend="threads", queue_depth=8)])
        assert (len(usable), refused) == (2, {})
    assert list(drive.iterdir()) == []


def test_a_setting_is_tried_again_when_the_handles_before_it_are_gone(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, tries = transfers.make_handle, []

    def make_the_second_time(setting: AioConfig) -> Any:
        tries.append(setting)
        if setting.queue_depth == 8 and len([each for each in tries if each.queue_depth == 8]) == 1:
            raise OSError("no events left")
        return make(setting)

    with TrialBench([drive], MIB, False, False, lambda step: None) as bench:
        monkeypatch.setattr(transfers, "make_handle", make_the_second_time)
        usable, refused = bench.usable([AioConfig(queue_depth=16), AioConfig(queue_depth=8)])
    assert (len(usable), refused) == (2, {})


def test_transfers_walk_through_the_file_and_begin_anew_at_its_end(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, offsets = transfers.make_handle, []
    with TrialBench([drive], 8 * MIB, False, False, lambda step: None) as bench:
        monkeypatch.setattr(transfers, "make_handle", lambda setting: Recording(make(setting), offsets))
        for _ in range(4):
            bench.move([0], AioConfig(), "read", 3 * MIB)
        bench.move([0], AioConfig(), "read", 8 * MIB)
    assert [offset // MIB for offset in offsets] == [0, 3, 0, 3, 0]
