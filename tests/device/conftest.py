"""A machine with CUDA devices, none of them real. Where a real one is, it is not covered up: these tests are skipped."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepnvme.ops.op_builder import toolchain

from ..support.compiled import compile_first
from .gds_fixtures import ReadyBuilder, cached_stand_in
from .stand_in import StandIn


def obstacle() -> str | None:
    """Why there is no stand-in; None if there can be one."""
    if torch.cuda.is_available():
        return "needs a machine without a CUDA device: the stand-in would take the place of its driver"
    compiler = toolchain.find()
    return f"needs a compiler: {compiler.reason}" if isinstance(compiler, toolchain.Attempt) else None


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout's clock starts
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if obstacle() is None:
        cached_stand_in("libcuda.so.1", "-O1")
        if "libraries" in getattr(item, "fixturenames", ()):
            cached_stand_in("libcufile.so.0")
            compile_first(ReadyBuilder)  # looks for the libraries when it is used, not now
    return (yield)


@pytest.fixture(scope="session")
def libcuda() -> Path:
    """The stand-in, compiled."""
    if (why := obstacle()) is not None:
        pytest.skip(why)
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
