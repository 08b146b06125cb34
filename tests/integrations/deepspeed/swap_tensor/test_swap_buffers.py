"""Buffers that tensors are gathered in, and their manager."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.integrations.deepspeed.swap_tensor import (
    SwapBuffer,
    SwapBufferManager,
    SwapBufferPool,
    get_sized_buffer,
    get_sized_buffers,
    swap_in_tensors,
    swap_out_tensors,
)

from ....support.interpreters import Interpreters

EXAMPLE = torch.zeros(1)


def pinned(handle: Any, numel: int) -> torch.Tensor:
    tensor: torch.Tensor = handle.new_cpu_locked_tensor(numel, EXAMPLE)
    return tensor


def test_tensors_of_any_shape_lie_one_after_the_other(handle: Any) -> None:
    buffer = SwapBuffer(pinned(handle, 1024))
    scalar, matrix = torch.tensor(3.0), torch.arange(10.0).view(2, 5).t()
    buffer.insert_tensor(scalar, "scalar", 256)
    whole, part = buffer.insert_tensor(matrix, "matrix", 512)
    assert whole.numel() == 512
    assert torch.equal(part, matrix.reshape(-1))
    assert buffer.get_swap_paths() == ["scalar", "matrix"]
    assert [tensor.numel() for tensor in buffer.get_swap_tensors()] == [256, 512]
    assert [tensor.numel() for tensor in buffer.get_compute_tensors()] == [1, 10]
    assert buffer.get_num_elem() == 11
    assert buffer.get_swap_path(256) == "matrix"
    assert buffer.get_swap_tensor(256) is whole
    assert buffer.get_compute_tensor(256) is part
    assert buffer.get_swap_path(1) is buffer.get_swap_tensor(1) is buffer.get_compute_tensor(1) is None
    assert buffer.has_space(256)
    assert not buffer.has_space(257)
    with pytest.raises(ValueError, match="257 elements are wanted of a buffer of 1024, of which 768 are taken"):
        buffer.allocate_tensor("more", 257, 257)
    buffer.reset()
    assert buffer.get_swap_tensors() == []
    assert buffer.has_space(1024)


def test_a_tensor_of_no_elements_has_its_place_beside_the_next(handle: Any) -> None:
    buffer = SwapBuffer(pinned(handle, 1024))
    buffer.insert_tensor(torch.empty(0), "empty", 0)
    _, part = buffer.insert_tensor(torch.ones(3), "next", 256)
    assert buffer.get_swap_paths() == ["empty", "next"]
    assert [tensor.numel() for tensor in buffer.get_compute_tensors()] == [0, 3]
    assert buffer.get_swap_path(0) == "next"
    assert buffer.get_compute_tensor(0) is part


def test_a_pool_fills_its_buffers_in_turn_and_moves_all(handle: Any, drive: Path) -> None:
    pool = SwapBufferPool([pinned(handle, 1000), pinned(handle, 300), pinned(handle, 2000)], handle)
    tensors = [torch.full((numel,), float(numel)) for numel in (900, 1500, 200)]
    for tensor in tensors:
        swap, compute = pool.insert_tensor(tensor, str(drive / str(tensor.numel())), tensor.numel())
        assert swap is not None
        assert compute is not None
        assert torch.equal(compute, tensor)
    assert pool.insert_tensor(torch.zeros(400), "none", 400) == (None, None)
    assert pool.allocate_tensor(400, "none", 400) == (None, None)
    pool.swap_out(handle)
    for tensor in pool.get_compute_tensors():
        tensor.zero_()
    pool.swap_in(handle)
    for tensor, wanted in zip(pool.get_compute_tensors(), tensors, strict=True):
        assert torch.equal(tensor, wanted)
    pool.reset()
    assert pool.get_swap_paths() == []


def test_a_pool_takes_pinned_buffers_only_and_moves_nothing_without_a_path(handle: Any) -> None:
    with pytest.raises(ValueError, match="1 of 2 buffers are not pinned"):
        SwapBufferPool([pinned(handle, 10), torch.zeros(10)], handle)
    pool = SwapBufferPool([pinned(handle, 10)], handle)
    pool.allocate_tensor(10, None, 10)
    with pytest.raises(ValueError, match="no path"):
        pool.swap_out(handle)


def test_a_manager_lends_zeroed_buffers_and_takes_them_back(handle: Any) -> None:
    manager = SwapBufferManager(1000, 3, torch.float32, handle)
    buffers = manager.allocate(700, 2, torch.float32)
    assert [buffer.numel() for buffer in buffers] == [700, 700]
    assert all(handle.is_pinned(buffer) for buffer in buffers)
    assert not any(buffer.any() for buffer in buffers)
    assert len({buffer.data_ptr() for buffer in buffers}) == 2
    manager.free(buffers)
    with pytest.raises(ValueError, match="2 of 2 buffers are not allocated"):
        manager.free(buffers)
    assert len(manager.allocate_all(1000, torch.float32)) == 3
    with pytest.raises(ValueError, match=r"1000 elements of torch.float32, got 1001 of torch.float32"):
        manager.allocate(1001, 1, torch.float32)
    with pytest.raises(ValueError, match="float64"):
        manager.allocate(1, 1, torch.float64)


def test_a_manager_that_runs_out_leases_more_or_says_what_to_set(interpreters: Interpreters) -> None:
    """In a process whose pool nobody else uses."""
    interpreters.run("""
        import torch
        from deepnvme.integrations.deepspeed.swap_tensor import SwapBufferManager
        from deepnvme.swap import OutOfBuffers, set_buffer_budget
        handle = op.aio_handle()
        manager = SwapBufferManager(2048, 1, torch.float32, handle)
        set_buffer_budget(8192)
        buffers = manager.allocate(2048, 2, torch.float32)
        assert all(handle.is_pinned(buffer) for buffer in buffers)
        try:
            manager.allocate(2048, 1, torch.float32)
        except OutOfBuffers as error:
            assert "all 1 swap buffers are in use, set a larger 'buffer_count'; 8192 bytes" in str(error), error
        else:
            raise AssertionError("more than the budget")
        manager.free(buffers)
        del buffers
        manager.free(manager.allocate(2048, 2, torch.float32))
        assert len(manager.allocate_all(5, torch.float32)) == 1
        assert len(manager.allocate_all(5, torch.float32)) == 1
    """).check()


def test_a_managers_memory_is_unpinned_with_it(handle: Any) -> None:
    manager = SwapBufferManager(1000, 2, torch.float32, handle)
    address = manager.all_buffers[0]
    alias = torch.empty(0).set_(address)
    assert handle.is_pinned(alias)
    del manager
    gc.collect()
    assert not handle.is_pinned(address)


def test_sized_buffers() -> None:
    buffer = torch.arange(5)
    assert get_sized_buffer(buffer, 3).tolist() == [0, 1, 2]
    assert [part.numel() for part in get_sized_buffers([buffer, buffer, buffer], [1, 5])] == [1, 5]
    with pytest.raises(ValueError, match="6 elements are wanted of a buffer of 5"):
        get_sized_buffer(buffer, 6)


def test_tensors_go_to_files_and_come_back(handle: Any, drive: Path) -> None:
    tensors = [torch.randn(1000), torch.randn(7)]
    paths = [str(drive / "one"), str(drive / "two")]
    swap_out_tensors(handle, tensors, paths)
    assert handle.wait() == 2
    back = [torch.empty(1000), torch.empty(7)]
    swap_in_tensors(handle, back, paths)
    assert handle.wait() == 2
    assert all(map(torch.equal, back, tensors))
