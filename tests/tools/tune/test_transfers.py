"""Each way to move a tensor: what it moves is right, and what is wrong is seen."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from deepnvme.drives.aio_config import AioConfig
from deepnvme.tools.tune import transfers
from deepnvme.tools.tune.folder import NotMeasurable
from deepnvme.tools.tune.job import EngineName, Job, Operation, Place
from deepnvme.tools.tune.transfers import TransferBuffer

ENGINES = get_args(EngineName)
ODD_SIZES = (1, 4097)

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


def job(engine: EngineName, operation: Operation, io_size: int = 4097, **more: Any) -> Job:
    setting = more.pop("setting", AioConfig(block_size=64 << 10, queue_depth=4))
    return Job((Place(Path(), 0),), operation, io_size, setting, engine, **more)


def change(path: Path, offset: int) -> None:
    """One bit of the byte there; negative from the end."""
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


# -- what is wrong is seen ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["aio_handle", "aio_basic"])
@pytest.mark.parametrize("offset", [0, 2048, -1])
def test_one_wrong_bit_in_the_file_is_seen(engine: EngineName, offset: int, drive: Path) -> None:
    transfer = transfers.TensorMover(job(engine, "write"), 0)
    transfer.move(drive / "file")
    assert transfer.matches(drive / "file")
    change(drive / "file", offset)
    assert not transfer.matches(drive / "file")


@pytest.mark.parametrize("engine", ["torch_io", "torch_fastio"])
@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:1000], lambda data: data[::-1]])
def test_a_file_that_torch_cannot_read_is_told_in_one_line(
    engine: EngineName, damage: Callable[[bytes], bytes], drive: Path
) -> None:
    transfer = transfers.TensorMover(job(engine, "read"), 0)
    transfer.write(drive / "file")
    (drive / "file").write_bytes(damage((drive / "file").read_bytes()))
    with pytest.raises(ValueError, match=r"\A'.*/file' holds no tensor that torch.load can read: .+\Z"):
        transfer.move(drive / "file")


def test_a_buffer_on_the_way_to_a_device_forgets_as_well(handle: Any, drive: Path) -> None:
    buffer = TransferBuffer(4097, handle, torch.device("cpu"))  # any device goes by way of locked memory
    handle.sync_pwrite(buffer.to_write(), str(drive / "file"))
    written = buffer.tensor.clone()
    buffer.renew()
    buffer.arrived()  # though nothing was read
    assert not torch.equal(buffer.tensor, written)
    handle.sync_pread(buffer.to_read(), str(drive / "file"))
    buffer.arrived()
    assert torch.equal(buffer.tensor, written)


# -- what cannot be done is told ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wrong", "option"), [
    (job("aio_basic", "write", setting=AioConfig(backend="threads")), "--backend, --io_parallel: aio_basic has one worker"),
    (job("aio_basic", "write", setting=AioConfig(intra_op_parallelism=2)), "--backend, --io_parallel: aio_basic has one worker"),
    (job("torch_fastio", "write", fast_io_size=8191), "--fast_io_size: must be at least 8192, got 8191"),
])  # fmt: skip
def test_what_an_engine_cannot_do_is_told_by_the_option(wrong: Job, option: str) -> None:
    with pytest.raises(NotMeasurable, match=f"^{option}"):
        transfers.TensorMover(wrong, 0)


def test_a_gpu_that_is_not_there_is_told_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert transfers.gpu(1) == torch.device("cuda", 1)
    with pytest.raises(NotMeasurable, match="there is no device 2, PyTorch sees 2"):
        transfers.gpu(2)


# -- what is moved is right --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("io_size", ODD_SIZES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_tensor_of_any_size_is_written_and_read(engine: EngineName, io_size: int, drive: Path) -> None:
    writer: Any = transfers.TensorMover(job(engine, "write", io_size), 0)
    writer.move(drive / "file")
    assert writer.matches(drive / "file")
    if engine.startswith("aio"):
        assert (drive / "file").stat().st_size == io_size
    else:
        assert torch.equal(torch.load(drive / "file", weights_only=True), writer.tensor)
    reader = transfers.TensorMover(job(engine, "read", io_size, validate=True), 0)
    reader.write(drive / "file")
    reader.renew()
    reader.move(drive / "file")
    assert reader.matches(drive / "file")


@pytest.mark.parametrize("engine", ["torch_io", "torch_fastio"])
def test_the_old_file_format_of_torch_is_another(engine: EngineName, drive: Path) -> None:
    for legacy in (False, True):
        transfer = transfers.TensorMover(job(engine, "write", torch_legacy_save=legacy), 0)
        transfer.move(drive / "file")
        assert transfer.matches(drive / "file")
        assert ((drive / "file").read_bytes()[:2] != b"PK") is legacy


@without_cuda
def test_memory_that_no_accelerator_pins_is_called_ordinary() -> None:
    assert "ordinary memory" in transfers.TensorMover(job("aio_handle", "write", accelerator_pin_memory=True), 0).memory
    assert transfers.TensorMover(job("aio_handle", "write"), 0).memory == "locked memory"
