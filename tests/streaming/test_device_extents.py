"""Pinned memory that extents are copied to a device from, with a stand-in for the device's stream: no device is needed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from deepnvme.streaming import WeightStore, device_extents, extent_memory, extent_reader


def test_pinned_memory_is_lent_again_only_when_the_copy_before_an_error_has_ended(
    drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None: ...

        def wait_event(self, event: object) -> None:
            events.append("copy begun")

        def synchronize(self) -> None:
            events.append("copy ended")

    class Slot(extent_memory.PinnedSlot):
        def release(self) -> None:
            events.append("memory released")
            super().release()

    def failing(*arguments: Any, **options: Any) -> None:
        raise ArithmeticError

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(device_extents, "Computed", lambda device: SimpleNamespace(event=None))
    monkeypatch.setattr(extent_memory, "PinnedSlot", Slot)
    monkeypatch.setattr(extent_reader, "dequantize", failing)
    model = nn.Sequential(nn.Linear(128, 128))
    with WeightStore.build(model.state_dict(), drive, model=model, blocks=["0"], quantize="int8") as store:
        reads = device_extents.DeviceExtentReader(store, torch.device("cpu"), 1)
        try:
            transfer = reads.read("0", torch.empty(reads.nbytes("0"), dtype=torch.uint8))
            assert isinstance(transfer.exception(), ArithmeticError)
        finally:
            reads.close()
    assert events == ["copy begun", "copy ended", "memory released"]
