"""Page-locked tensors: what they are, who knows of them, and that they go away."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import deepnvme

MIB = 1 << 20


def locked_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmLck:\s+(\d+) kB", status)
    assert found
    return int(found[1]) * 1024


@pytest.mark.parametrize("shape", [-1, (3, -1)])
def test_a_negative_size_is_refused(engine: deepnvme.Engine, shape: Any) -> None:
    with pytest.raises(ValueError, match="must not be negative, got"):
        engine.empty_pinned(shape)


@pytest.mark.parametrize("shape", [2**50, (2**31, 2**30), 2**62], ids=str)
def test_more_than_there_is_is_a_memory_error(engine: deepnvme.Engine, shape: Any) -> None:
    with pytest.raises(MemoryError):
        engine.empty_pinned(shape, torch.float32)


def test_a_buffer_made_without_memory_has_no_bytes(op: ModuleType) -> None:
    with pytest.raises(BufferError, match="empty_pinned"):
        memoryview(op.PinnedBuffer.__new__(op.PinnedBuffer))


def test_an_unlocked_buffer_serves_after_a_warning(interpreters: Any) -> None:
    interpreters.run("""
        import ctypes, os, resource, warnings
        import deepnvme
        if os.geteuid() == 0:
            os.setgroups([]), os.setgid(65534), os.setuid(65534)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        engine = deepnvme.Engine("threads")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            first, second = engine.empty_pinned(5000), engine.empty_pinned(5000)
        assert [type(warning.message) for warning in caught] == [RuntimeWarning]
        assert "mlock of 20000 bytes was refused" in str(caught[0].message)
        assert first.eq(0).all() and op.is_pinned(first) and op.is_pinned(second)
    """).check()


@pytest.mark.parametrize("node", [-1, 1023, 1024, 2**31 - 1])
def test_pinned_memory_on_a_node_that_the_machine_has_not_is_refused(engine: deepnvme.Engine, node: int) -> None:
    with pytest.raises(ValueError, match=f"the machine has no memory on a NUMA node {node}"):
        engine.empty_pinned(5, node=node)


@pytest.mark.parametrize("dtype", [None, torch.uint8, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [0, (0, 3), 1, 1000, (3, 5, 7), (), [2, 3]], ids=str)
def test_a_pinned_tensor_has_the_shape_and_dtype_asked_for(
    engine: deepnvme.Engine, shape: Any, dtype: torch.dtype | None
) -> None:
    tensor = engine.empty_pinned(shape, dtype)
    assert tensor.shape == torch.empty(shape).shape
    assert tensor.dtype == (dtype or torch.get_default_dtype())
    assert tensor.is_contiguous()
    assert not tensor.any()


def test_pinned_memory_is_locked_while_it_lives_and_no_longer(engine: deepnvme.Engine) -> None:
    before = locked_bytes()
    tensor = engine.empty_pinned(4 * MIB, torch.uint8)
    during = locked_bytes() - before
    if not during:
        pytest.skip("needs a memlock limit above 4 MiB")
    del tensor
    gc.collect()
    assert (during, locked_bytes() - before) == (4 * MIB, 0)


def test_a_view_keeps_the_memory(engine: deepnvme.Engine, drive: Path) -> None:
    tensor = engine.empty_pinned(MIB, torch.uint8)
    tensor.fill_(7)
    whole, view = weakref.ref(tensor), tensor[4096:8192]
    del tensor
    gc.collect()
    assert whole() is None
    engine.write(view, drive / "file").result()
    assert (drive / "file").read_bytes() == b"\7" * 4096


def test_a_pinned_tensor_is_transferred_without_a_copy(engine: deepnvme.Engine, drive: Path) -> None:
    engine.write(engine.empty_pinned(MIB, torch.uint8), drive / "file").result()
    assert engine.stats().bytes_zero_copy == MIB


def test_pinned_memory_is_taken_from_the_node_asked_for(engine: deepnvme.Engine) -> None:
    numa_maps = Path("/proc/self/numa_maps")
    if not numa_maps.exists():
        pytest.skip("needs a kernel with NUMA")
    tensor, anywhere = engine.empty_pinned(3 << 20, node=0), engine.empty_pinned(3 << 20)
    policies = dict(re.findall(r"^([0-9a-f]+) (\S+)", numa_maps.read_text(), re.MULTILINE))
    assert policies[f"{tensor.data_ptr():x}"] == "prefer:0"
    assert policies.get(f"{anywhere.data_ptr():x}", "default") == "default"
    assert tensor.eq(0).all()
