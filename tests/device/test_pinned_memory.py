"""Pinned memory is registered with CUDA where torch uses it, so that copies to and from devices are asynchronous."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import deepnvme

from .stand_in import StandIn

MIB = 1 << 20


@pytest.fixture
def in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has initialized CUDA, and is at its second device."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


Make = Callable[[int], torch.Tensor]


@pytest.fixture(params=["engine", "handle"])
def make(request: pytest.FixtureRequest, op: ModuleType) -> Make:
    """Pinned tensors of so many bytes."""
    if request.param == "engine":
        return lambda nbytes: deepnvme.Engine().empty_pinned(nbytes, torch.uint8)
    return lambda nbytes: op.aio_handle().new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))  # type: ignore[no-any-return]


@pytest.mark.usefixtures("in_use")
def test_pinned_memory_is_registered_for_as_long_as_it_lives(driver: StandIn, make: Make) -> None:
    before = driver.registered_bytes()
    tensor = make(3 * MIB)
    view = tensor[MIB:]
    assert driver.registered_bytes() == before + 3 * MIB
    del tensor
    assert driver.registered_bytes() == before + 3 * MIB
    assert view.sum() == 0
    del view
    assert driver.registered_bytes() == before


@pytest.mark.parametrize("function", ["cuMemHostRegister", "cuCtxPushCurrent", "cuInit", "no libcuda"])
def test_a_refusal_is_a_warning_once_and_the_memory_serves(interpreters: Any, libcuda: Path, drive: Path, function: str) -> None:
    interpreters.run(f"""
        import deepnvme
        from tests.device.stand_in import StandIn
        torch.cuda.is_initialized, torch.cuda.current_device = lambda: True, lambda: 0
        driver = StandIn({str(libcuda)!r}) if {function!r} != "no libcuda" else None
        engine = deepnvme.Engine()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tensors = []
            for _ in range(2):
                if driver:
                    driver.fail({function!r})
                tensors.append(engine.empty_pinned(5000))
        assert [type(warning.message) for warning in caught] == [RuntimeWarning], caught
        text = str(caught[0].message)
        assert text.startswith("pinned memory could not be registered with CUDA, copies to and from devices are slower: "), text
        assert {function.replace("no ", "")!r} in text, text
        for tensor in tensors:
            assert op.is_pinned(tensor)
            tensor.fill_(3)
            engine.write(tensor, {str(drive / "file")!r}).result()
        if driver:
            driver.forget_failures()
            before = driver.registered_bytes()
            served = engine.empty_pinned(5000)
            assert driver.registered_bytes() == before + 20_000
    """).check()


@pytest.mark.usefixtures("in_use")
def test_registered_memory_is_read_in_place(driver: StandIn, engine: deepnvme.Engine, drive: Path) -> None:
    tensor = engine.empty_pinned(MIB, torch.uint8)
    engine.write(tensor, drive / "file").result()
    engine.read(tensor, drive / "file").result()
    assert engine.stats().bytes_zero_copy == 2 * MIB
