"""A machine with CUDA devices, none of them real. Where a real one is, it is not covered up: these tests are skipped."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepnvme.ops.op_builder import toolchain

from .gds_fixtures import cached_stand_in
from .stand_in import StandIn


@pytest.fixture(scope="session")
def libcuda() -> Path:
    """The stand-in, compiled."""
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a CUDA device: the stand-in would take the place of its driver")
    compiler = toolchain.find()
    if isinstance(compiler, toolchain.Attempt):
        pytest.skip(f"needs a compiler: {compiler.reason}")
    return cached_stand_in("libcuda.so.1", "-O1")


@pytest.fixture(scope="package")
def driver(libcuda: Path) -> Iterator[StandIn]:
    """Loaded before the op asks for libcuda; torch's current streams are the test's."""
    driver = StandIn(libcuda)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", driver.current_stream)
        yield driver


@pytest.fixture(autouse=True)
def nothing_is_left(driver: StandIn) -> Iterator[None]:
    """After each test the driver has got everything back."""
    before = driver.held()
    driver.may_keep_some = False
    yield
    driver.forget_failures()
    driver.delay()
    if driver.held() != before:
        gc.collect()
    assert driver.held() == before or driver.may_keep_some
