"""Transfers leave no memory behind, on the host or on the device, however many there are."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from .conftest import FACES, Make

pytestmark = [pytest.mark.gpu, pytest.mark.alone]  # the device counts the memory of all processes together

MIB = 1 << 20
SIZE = 16 * MIB
# What caches and other programs' use of the device may make it seem; a leaked ring of staging shows after a few transfers.
LEEWAY = 32 * MIB


def resident() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def growth(device: torch.device, once: Callable[[], None], warm_up: int, times: int) -> tuple[int, int]:
    """Bytes that the host, and the device, have less after so many times."""
    for _ in range(warm_up):
        once()
    gc.collect()
    torch.cuda.synchronize(device)
    host, free = resident(), torch.cuda.mem_get_info(device)[0]
    for _ in range(times):
        once()
    gc.collect()
    torch.cuda.synchronize(device)
    return resident() - host, free - torch.cuda.mem_get_info(device)[0]


@pytest.mark.parametrize("kind", FACES)
@pytest.mark.parametrize("one_handle", [True, False])
def test_many_transfers_and_handles_leave_nothing(
    make: Make, path: Path, device: torch.device, kind: str, one_handle: bool
) -> None:
    tensor, kept = torch.ones(SIZE, dtype=torch.uint8, device=device), make(kind)

    def once() -> None:
        face = kept if one_handle else make(kind)
        face.write(tensor, path, 1)
        face.read(tensor, path, 1)
        if kind == "engine" and not one_handle:
            face.served.close()

    assert max(growth(device, once, 10, 40)) < LEEWAY


def test_many_registered_tensors_leave_nothing(make: Make, path: Path, device: torch.device) -> None:
    handle = make("gds_handle").served

    def once() -> None:
        tensor = handle.new_pinned_device_tensor(SIZE, torch.empty(0, dtype=torch.uint8, device=device))
        handle.sync_pwrite(tensor, str(path))
        handle.free_pinned_device_tensor(tensor)

    assert max(growth(device, once, 5, 40)) < LEEWAY


def test_a_large_tensor_takes_no_more_host_memory_than_the_staging(make: Make, path: Path, device: torch.device) -> None:
    face, tensor = make("engine"), torch.ones(512 * MIB, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    before = resident()
    face.write(tensor, path)
    assert resident() - before < 16 * MIB + LEEWAY
    assert face.served.stats().bytes_staged == tensor.nbytes
