"""Tensors written behind the program's back."""

from __future__ import annotations

import errno
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.integrations.deepspeed.swap_tensor import AsyncTensorSwapper, SwapBuffer

ALIGNMENT = 256


class FlakyHandle:
    """A handle some of whose writes fail."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.failures = 0
        self.at_once = False
        self._pending: OSError | None = None

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return bool(self._handle.is_pinned(tensor))

    def async_pwrite(self, tensor: torch.Tensor, path: str, offset: int = 0) -> int:
        if not self.failures:
            return int(self._handle.async_pwrite(tensor, path, offset))
        self.failures -= 1
        error = OSError(errno.EIO, "injected", path)
        if self.at_once:
            raise error
        self._pending = error
        return 0

    def wait(self) -> int:
        count = int(self._handle.wait())
        if self._pending is not None:
            error, self._pending = self._pending, None
            raise error
        return count


def swapper_of(handle: Any, pinning: Any, *numels: int, dtype: torch.dtype = torch.float32) -> AsyncTensorSwapper:
    swapper = AsyncTensorSwapper(handle, ALIGNMENT, None)
    swapper.add_buffers([pinning.new_cpu_locked_tensor(numel, torch.zeros(1, dtype=dtype)) for numel in numels])
    return swapper


def content(path: Path, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_file(str(path), size=numel, dtype=dtype)


@pytest.mark.parametrize("numels", [(1024,), (1024, 1024), (256, 5000, 700), (100_000,) * 3])
def test_what_was_given_is_in_its_file(handle: Any, drive: Path, numels: tuple[int, ...]) -> None:
    swapper = swapper_of(handle, handle, *numels)
    tensors = {f"{count}": torch.randn(count) for count in (1, 255, 256, 257, 700, 1000, 3000, 20_001)}
    tensors |= {"matrix": torch.randn(30, 20).t(), "scalar": torch.tensor(5.0), "empty": torch.zeros(0)}
    given = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, tensor in given.items():
        swapper.swap_out_tensors([tensor], [str(drive / name)])
        tensor.fill_(float("nan"))
    assert swapper.has_buffers()
    buffers = swapper.release_buffers()
    assert sorted(buffer.numel() for buffer in buffers) == sorted(numels)
    assert not swapper.has_buffers()
    for name, tensor in tensors.items():
        if tensor.numel():
            assert torch.equal(content(drive / name, tensor.numel()), tensor.reshape(-1)), name
            assert (drive / name).stat().st_size % (ALIGNMENT * 4) == 0
    swapper.add_buffers(buffers)


def test_tensors_are_converted_to_the_buffers_dtype(handle: Any, drive: Path) -> None:
    swapper = swapper_of(handle, handle, 1024, dtype=torch.bfloat16)
    tensor = torch.randn(1000)
    swapper.swap_out_tensors([tensor], [str(drive / "file")])
    swapper.release_buffers()
    assert torch.equal(content(drive / "file", 1000, torch.bfloat16), tensor.bfloat16())


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("failures", [1, 3])
def test_what_could_not_be_written_is_written_by_the_next_call(handle: Any, drive: Path, failures: int, at_once: bool) -> None:
    flaky = FlakyHandle(handle)
    swapper = swapper_of(flaky, handle, 2048, 2048)
    tensors = [torch.randn(1000) for _ in range(9)]
    flaky.failures, flaky.at_once = failures, at_once
    errors = []
    for number, tensor in enumerate(tensors):
        for _ in range(5):
            try:
                swapper.swap_out_tensors([tensor], [str(drive / str(number))])
                break
            except OSError as error:
                errors.append(error)
    for _ in range(5):
        try:
            swapper.release_buffers()
            break
        except OSError as error:
            errors.append(error)
    assert errors
    assert all(error.errno == errno.EIO and error.filename.startswith(str(drive)) for error in errors)
    for number, tensor in enumerate(tensors):
        assert torch.equal(content(drive / str(number), 1000), tensor)


def test_an_error_of_the_drive_names_the_file(handle: Any, drive: Path) -> None:
    swapper = swapper_of(handle, handle, 1024)
    swapper.swap_out_tensors([torch.zeros(10)], [str(drive / "missing" / "file")])
    with pytest.raises(FileNotFoundError) as caught:
        swapper.release_buffers()
    assert caught.value.filename == str(drive / "missing" / "file")
    (drive / "missing").mkdir()
    swapper.release_buffers()
    assert (drive / "missing" / "file").stat().st_size == 1024


def test_wrong_calls_say_what_to_do(handle: Any) -> None:
    swapper = AsyncTensorSwapper(handle, ALIGNMENT, None)
    with pytest.raises(ValueError, match="add_buffers first"):
        swapper.swap_out_tensors([torch.zeros(1)], ["nowhere"])
    with pytest.raises(ValueError, match="pinned"):
        swapper.add_buffers([torch.zeros(1024)])
    with pytest.raises(ValueError, match=r"at least numel_alignment = 256 elements, got 255"):
        swapper.add_buffers([handle.new_cpu_locked_tensor(255, torch.zeros(1))])
    swapper.add_buffers([handle.new_cpu_locked_tensor(256, torch.zeros(1))])
    with pytest.raises(ValueError, match="release_buffers first"):
        swapper.add_buffers([handle.new_cpu_locked_tensor(256, torch.zeros(1))])


def test_nothing_old_is_written_again_after_ctrl_c_between_two_buffers(
    handle: Any, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapper = swapper_of(handle, handle, 4096, 4096)
    swapper.swap_out_tensors([torch.ones(4096), torch.ones(2048)], [str(drive / "a"), str(drive / "x")])
    reset = SwapBuffer.reset

    def interrupted(buffer: SwapBuffer) -> None:
        reset(buffer)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(SwapBuffer, "reset", interrupted)
        with pytest.raises(KeyboardInterrupt):
            swapper.swap_out_tensors([torch.ones(4096)], [str(drive / "b")])
    for name, numel in (("x", 2048), ("e", 2048), ("f", 1024)):
        swapper.swap_out_tensors([torch.full((numel,), 2.0)], [str(drive / name)])
    swapper.release_buffers()
    assert content(drive / "x", 2048).unique().tolist() == [2.0]
