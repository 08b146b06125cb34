"""The tensors, files and handles of a search."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from deepnvme.config import AioConfig
from deepnvme.tune import transfers
from deepnvme.tune.folder import Unsuitable
from deepnvme.tune.rig import Rig

FEW, MANY = AioConfig(queue_depth=2), AioConfig(queue_depth=4)


class Events:
    """A system that has so many of them; a handle takes its queue depth, and takes a while to give it back."""

    def __init__(self, limit: int) -> None:
        self.left = limit

    def make_handle(self, setting: AioConfig) -> Any:
        return _Handle(self, setting.queue_depth)


class _Handle:
    def __init__(self, events: Events, count: int) -> None:
        self._count = 0
        if events.left < count:
            raise Unsuitable("out of events")
        self._events, self._count = events, count
        events.left -= count

    def __del__(self) -> None:
        if self._count:
            time.sleep(0.05)
            self._events.left += self._count


def test_events_of_handles_that_are_being_let_go_are_waited_for(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Rig([drive], 4096, False, False, lambda step: None) as rig:
        events = Events(5)
        monkeypatch.setattr(transfers, "make_handle", events.make_handle)
        assert rig.usable([FEW, MANY, FEW]) == ([FEW, MANY, FEW], {})


def test_a_setting_that_wants_too_much_is_refused_all_the_same(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Rig([drive], 4096, False, False, lambda step: None) as rig:
        events = Events(3)
        monkeypatch.setattr(transfers, "make_handle", events.make_handle)
        assert rig.usable([FEW, MANY, FEW]) == ([FEW, FEW], {"queue_depth 4": "out of events"})
