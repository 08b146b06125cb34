"""ds_io on a device's tensor: --slow_bounce_buffer leaves it to the handle, which stages it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepnvme import AioConfig
from deepnvme.tools.tune import transfers
from deepnvme.tools.tune.job import Job, Operation, Place

from ..support.memory import pattern
from .stand_in import StandIn

SIZE = 5 << 20


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_tensor_left_to_the_handle_is_staged_and_right(
    driver: StandIn, drive: Path, operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = driver.tensor(pattern(SIZE))
    with monkeypatch.context() as patch:
        patch.setattr(transfers, "gpu", lambda number: torch.device("cuda", number))
        patch.setattr(torch, "empty", lambda *_, **__: tensor)
        patch.setattr(transfers, "random_bytes", lambda filled: filled)
        job = Job((Place(drive, 0),), operation, SIZE, AioConfig(), gpu=True, slow_bounce_buffer=True)
        transfer = transfers.TensorMover(job, 0)
    transfer.write(drive / "file")
    transfer.move(drive / "file")
    assert transfer.matches(drive / "file")
    assert transfer.memory == "cuda:0"
    stats = transfer.stats()
    assert stats is not None
    assert stats["bytes_staged"] == 2 * SIZE
