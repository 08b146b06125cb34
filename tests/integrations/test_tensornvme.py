"""TensorNVMe's offloaders and writer, without TensorNVMe: what it documents is called here, and what ColossalAI calls."""

from __future__ import annotations

import errno
import gc
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepnvme.integrations import tensornvme as ours
from deepnvme.integrations.tensornvme import AsyncFileWriter, DiskOffloader, get_backends

from ..support.faulty_filesystem import FaultyFilesystem
from ..support.interpreters import Interpreters


@pytest.fixture
def enabled() -> Iterator[None]:
    ours.enable()
    yield
    ours.disable()


def memory(tensor: torch.Tensor) -> int:
    """Bytes that the tensor has."""
    return tensor.untyped_storage().nbytes()


def files(directory: Path) -> list[Path]:
    return list(directory.iterdir())


# The modules


def test_its_modules_can_be_imported_by_their_names(enabled: None, drive: Path) -> None:
    tensornvme: Any = importlib.import_module("tensornvme")
    assert tensornvme.DiskOffloader is importlib.import_module("tensornvme.offload").DiskOffloader is DiskOffloader
    assert tensornvme.async_file_io.AsyncFileWriter is AsyncFileWriter
    assert tensornvme.offload.get_backends() == get_backends()
    assert importlib.util.find_spec("tensornvme") is not None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("tensornvme.cli")


def test_enabling_twice_and_disabling(enabled: None) -> None:
    first = sys.modules["tensornvme"]
    ours.enable()
    assert sys.modules["tensornvme"] is first
    ours.disable()
    ours.disable()
    assert not [name for name in sys.modules if name.partition(".")[0] == "tensornvme"]


def test_tensornvme_itself_is_not_replaced_once_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = ModuleType("tensornvme")
    monkeypatch.setitem(sys.modules, "tensornvme", theirs)
    with pytest.raises(RuntimeError, match="already"):
        ours.enable()
    assert sys.modules["tensornvme"] is theirs
    assert "tensornvme._C" not in sys.modules


def test_backends(backends: list[str]) -> None:
    names = {"io_uring": "uring", "libaio": "aio", "threads": "pthread"}
    assert get_backends() == {names[name] for name in backends}


@pytest.mark.parametrize("make", [DiskOffloader, lambda path, **kwargs: AsyncFileWriter(path / "file", **kwargs)])
def test_an_unknown_backend_is_refused_and_no_file_made(drive: Path, make: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match="uring, aio, pthread"):
        make(drive, backend="none")
    assert files(drive) == []
    make(drive, n_entries=8, backend="pthread")


# DiskOffloader


def test_the_documented_example_of_synchronous_calls(enabled: None, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensornvme import DiskOffloader  # type: ignore[import-not-found]

    monkeypatch.chdir(drive)
    x, y = torch.rand(2, 2), torch.rand(4, 4, 4)
    before = x.clone(), y.clone()
    offloader = DiskOffloader("./offload")
    offloader.sync_write(x)
    assert memory(x) == 0
    offloader.sync_read(x)
    assert torch.equal(x, before[0])
    offloader.sync_writev([x, y])
    assert memory(x) == memory(y) == 0
    with pytest.raises(RuntimeError, match="nothing is stored"):
        offloader.sync_readv([y, x])
    with pytest.raises(RuntimeError):
        offloader.sync_readv(x)
    with pytest.raises(RuntimeError, match="nothing is stored"):
        offloader.sync_read(x)
    assert memory(x) == memory(y) == 0
    offloader.sync_readv([x, y])
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


def adam(parameters: list[torch.Tensor], offloader: DiskOffloader | None) -> list[torch.Tensor]:
    """Some steps of Adam, whose states are offloaded as ColossalAI's NVMeOptimizer does it."""
    torch.manual_seed(0)
    states = [(torch.zeros_like(each), torch.zeros_like(each)) for each in parameters]
    for step in range(1, 5):
        if offloader is not None and step > 1:
            for state in states[0]:
                offloader.async_read(state)
        for i, parameter in enumerate(parameters):
            if offloader is not None and step > 1:
                offloader.sync_read_events()
                if i + 1 < len(parameters):
                    for state in states[i + 1]:
                        offloader.async_read(state)
            gradient = torch.rand_like(parameter)
            mean, square = states[i]
            mean.mul_(0.9).add_(gradient, alpha=0.1)
            square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            scale = square.div(1 - 0.999**step).sqrt_().add_(1e-8)
            parameter.addcdiv_(mean, scale, value=-0.01 / (1 - 0.9**step))
            if offloader is not None:
                offloader.sync_write_events()
                offloader.async_write(mean)
                offloader.async_write(square)
        if offloader is not None:
            offloader.synchronize()
            assert not any(memory(state) for pair in states for state in pair)
    return parameters


def test_adam_with_offloaded_states_has_the_same_bits(drive: Path) -> None:
    shapes = [(3, 5), (1000, 700), (1,), (4096,), (123, 45)]
    start = [torch.rand(shape) for shape in shapes]
    with closing(DiskOffloader(drive, 8, backend="uring")) as offloader:
        found = adam([each.clone() for each in start], offloader)
    assert all(map(torch.equal, found, adam([each.clone() for each in start], None)))


def test_a_view_takes_all_of_its_memory_along(drive: Path) -> None:
    with closing(DiskOffloader(drive)) as offloader:
        base = torch.arange(10)
        view = base[3:6]
        offloader.sync_write(view)
        assert memory(base) == 0
        offloader.sync_read(base)
        assert base.tolist() == [*range(10)]
        assert view.tolist() == [3, 4, 5]


def test_a_read_right_after_an_asynchronous_write_of_the_same_tensor(drive: Path) -> None:
    events: list[str] = []
    with closing(DiskOffloader(drive)) as offloader:
        x = torch.rand(3_000_000)
        before = x.clone()
        for _ in range(3):
            offloader.async_write(x, lambda: events.append("written"))
            offloader.async_read(x, lambda: events.append("read"))
        offloader.synchronize()
        assert torch.equal(x, before)
    assert events == ["written", "read"] * 3


def test_callbacks_run_in_the_thread_that_waits_once_the_memory_is_freed(drive: Path) -> None:
    seen: list[tuple[int, threading.Thread]] = []
    with closing(DiskOffloader(drive)) as offloader:
        x = torch.rand(5)

        def then() -> None:
            seen.append((memory(x), threading.current_thread()))

        offloader.async_write(x, then)
        assert seen == []
        offloader.sync_read_events()
        assert seen == []
        offloader.sync_write_events()
        offloader.async_read(x, then)
        offloader.synchronize()
        assert seen == [(0, threading.current_thread()), (20, threading.current_thread())]


def test_a_callback_may_start_the_next_transfer_and_wait(drive: Path) -> None:
    with closing(DiskOffloader(drive)) as offloader:
        x, y = torch.rand(5), torch.rand(6)

        def then() -> None:
            offloader.async_write(y)
            offloader.synchronize()

        offloader.async_write(x, then)
        offloader.synchronize()
        assert memory(x) == memory(y) == 0


def test_tensors_that_cannot_be_offloaded(drive: Path) -> None:
    with closing(DiskOffloader(drive)) as offloader:
        for tensor in (torch.rand(4, 4).t(), torch.rand(4, device="meta"), torch.rand(4).to_sparse()):
            with pytest.raises(RuntimeError, match="contiguous"):
                offloader.async_write(tensor)
        with pytest.raises(RuntimeError, match="empty"):
            offloader.sync_write(torch.empty(0))
        with pytest.raises(RuntimeError, match="one at least"):
            offloader.sync_writev([])
        with pytest.raises(RuntimeError, match="cannot be freed"):
            offloader.sync_write(torch.frombuffer(bytearray(8), dtype=torch.uint8))
        x = torch.rand(4)
        offloader.sync_write(x)
        with pytest.raises(RuntimeError, match="already"):
            offloader.sync_write(x)
        offloader.sync_read(x)
        with pytest.raises(RuntimeError, match="read since"):
            offloader.sync_read(x)


def test_what_is_written_again_and_again_takes_its_space_once(drive: Path) -> None:
    with closing(DiskOffloader(drive)) as offloader:
        x = torch.rand(25_000)
        for _ in range(5):
            offloader.sync_write(x)
            offloader.sync_read(x)
        (file,) = files(drive)
        assert file.name.startswith("offload-")
        assert file.stat().st_size <= 102_400
        assert file.stat().st_mode & 0o777 == 0o600


# The file


def test_the_file_is_removed_when_it_is_closed(drive: Path) -> None:
    offloader = DiskOffloader(drive / "made" / "for it")
    offloader.async_write(torch.rand(5))
    assert len(files(drive / "made" / "for it")) == 1
    offloader.close()
    offloader.close()
    offloader.synchronize()
    assert files(drive / "made" / "for it") == []
    with pytest.raises(ValueError, match="closed"):
        offloader.sync_write(torch.rand(5))


def test_the_file_is_removed_with_the_offloader(drive: Path) -> None:
    offloader = DiskOffloader(drive / "offload")
    x = torch.rand(5)
    offloader.sync_write(x)
    offloader.async_read(x)
    offloader.synchronize()
    offloader.async_write(torch.rand(5))
    del offloader
    os.rmdir(drive / "offload")


def test_the_file_is_removed_at_exit_and_not_by_a_forked_child(drive: Path, interpreters: Interpreters) -> None:
    program = f"""
    import os
    from deepnvme.integrations.tensornvme import DiskOffloader
    offloader = DiskOffloader({str(drive)!r})
    x = torch.rand(5)
    before = x.clone()
    offloader.sync_write(x)
    child = os.fork()
    if child == 0:
        raise SystemExit(0)
    os.waitpid(child, 0)
    offloader.sync_read(x)
    assert torch.equal(x, before)
    offloader.async_write(x)
    print(len(os.listdir({str(drive)!r})))
    """
    assert interpreters.run(program).check() == "1\n"
    assert files(drive) == []


# A failing drive


def test_a_failed_write_is_raised_where_it_is_waited_for_and_frees_nothing(direct_disk: FaultyFilesystem) -> None:
    with closing(DiskOffloader(direct_disk.path)) as offloader:
        x, y = torch.rand(5000), torch.rand(10)
        before = x.clone(), y.clone()
        called: list[str] = []
        direct_disk.fail("write", times=-1)
        offloader.async_write(x, lambda: called.append("x"))
        offloader.async_write(y, lambda: called.append("y"))
        with pytest.raises(OSError, match="Input/output error") as raised:
            offloader.synchronize()
        assert raised.value.errno == errno.EIO
        with pytest.raises(OSError, match="Input/output error"):
            offloader.synchronize()
        offloader.synchronize()
        assert called == []
        assert torch.equal(x, before[0])
        assert torch.equal(y, before[1])
        with pytest.raises(RuntimeError, match="nothing is stored"):
            offloader.sync_read(x)
        with pytest.raises(OSError, match="Input/output error"):
            offloader.sync_write(x)
        direct_disk.heal()
        offloader.sync_write(x)
        offloader.sync_read(x)
        assert torch.equal(x, before[0])


def test_what_could_not_be_read_can_be_read_again(direct_disk: FaultyFilesystem) -> None:
    with closing(DiskOffloader(direct_disk.path)) as offloader:
        x = torch.rand(5000)
        before = x.clone()
        offloader.sync_write(x)
        direct_disk.fail("read", times=-1)
        offloader.async_read(x)
        with pytest.raises(OSError, match="Input/output error"):
            offloader.sync_read_events()
        assert memory(x) == 0
        direct_disk.heal()
        offloader.sync_read(x)
        assert torch.equal(x, before)


def test_closing_raises_the_error_of_a_write_and_removes_the_file(direct_disk: FaultyFilesystem) -> None:
    offloader = DiskOffloader(direct_disk.path)
    direct_disk.fail("write", times=-1)
    offloader.async_write(torch.rand(5000))
    with pytest.raises(OSError, match="Input/output error"):
        offloader.close()
    assert files(direct_disk.path) == []


def test_a_full_disk_is_reported_before_anything_is_written(direct_disk: FaultyFilesystem) -> None:
    with closing(DiskOffloader(direct_disk.path)) as offloader:
        x = torch.rand(5000)
        direct_disk.fail("fallocate", errno.ENOSPC, times=-1)
        with pytest.raises(OSError, match="space") as raised:
            offloader.async_write(x)
        assert raised.value.errno == errno.ENOSPC
        direct_disk.heal()
        offloader.synchronize()
        assert memory(x) == 20_000
        offloader.sync_write(x)


def test_ctrl_c_interrupts_the_waiting_and_nothing_else(direct_disk: FaultyFilesystem) -> None:
    with closing(DiskOffloader(direct_disk.path)) as offloader:
        x = torch.rand(5000)
        before = x.clone()
        direct_disk.fail("write", effect="hang", times=-1)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            offloader.sync_write(x)
        timer.join()
        assert torch.equal(x, before)
        direct_disk.heal()
        offloader.synchronize()
        assert memory(x) == 0
        offloader.sync_read(x)
        assert torch.equal(x, before)


def test_a_writers_error_is_raised_by_synchronize(direct_disk: FaultyFilesystem) -> None:
    writer = AsyncFileWriter(direct_disk / "file")
    direct_disk.fail("write", times=-1)
    writer.write(b"header")
    writer.write_tensor(torch.rand(5000))
    with pytest.raises(OSError, match="Input/output error"):
        writer.sync_before_step()
    with pytest.raises(OSError, match="Input/output error"):
        writer.synchronize()
    writer.synchronize()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_error_of_a_writer_that_was_dropped_is_reported(
    direct_disk: FaultyFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: reported.append(unraisable.exc_value.errno))
    writer = AsyncFileWriter(direct_disk / "file")
    direct_disk.fail("write", times=-1)
    writer.write_tensor(torch.rand(5000))
    del writer
    assert reported == [errno.EIO]


# AsyncFileWriter


def save(writer: AsyncFileWriter, state: dict[str, torch.Tensor], pinned: dict[str, torch.Tensor] | None, raw: bool) -> None:
    """Write a safetensors file by the calls that ColossalAI makes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in state.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        kind = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}[tensor.dtype]
        entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    assert writer.write(len(header).to_bytes(8, "little")) == 8
    assert writer.write(header) == len(header)
    writer.register_h2d(len(state))
    for name, tensor in state.items():
        if raw:
            writer.write_raw(tensor, tensor.data_ptr(), tensor.nbytes, writer.offset)
        elif pinned is None:
            writer.write_tensor(tensor)
        else:
            writer.write_tensor(tensor, pinned[name])
    assert writer.offset == 8 + len(header) + end


def states() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "weight": torch.rand(700, 1001),
        "step": torch.tensor(1.0),
        "half": torch.rand(333).bfloat16(),
        "ids": torch.arange(5),
        "nothing": torch.empty(0, 3),
    }


def assert_saved(path: Path, state: dict[str, torch.Tensor]) -> None:
    found = load_file(path)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize("kind", ["tensors", "pinned", "raw"])
def test_a_safetensors_file_as_colossalai_writes_it(enabled: None, drive: Path, kind: str) -> None:
    from tensornvme.async_file_io import AsyncFileWriter  # type: ignore[import-not-found]

    path = drive / "model.safetensors"
    path.write_bytes(bytes(10 << 20))  # an older one, which is longer
    state = states()
    pinned = {name: torch.empty_like(tensor) for name, tensor in state.items()} if kind == "pinned" else None
    writer = AsyncFileWriter(str(path), n_entries=32, backend="pthread", n_tasks=2 + len(state))
    save(writer, state, pinned, raw=kind == "raw")
    writer.sync_before_step()
    writer.synchronize()
    del writer
    assert_saved(path, state)


def test_a_tensor_may_be_changed_after_sync_before_step(drive: Path) -> None:
    for pinned in (None, {name: torch.empty_like(tensor) for name, tensor in states().items()}):
        state = states()
        writer = AsyncFileWriter(drive / "file")
        save(writer, state, pinned, raw=False)
        writer.sync_before_step()
        for tensor in state.values():
            tensor.zero_()
        writer.synchronize()
        assert_saved(drive / "file", states())


def test_a_writer_that_is_dropped_has_written(drive: Path, interpreters: Interpreters) -> None:
    writer = AsyncFileWriter(drive / "file")
    save(writer, states(), None, raw=False)
    del writer
    assert_saved(drive / "file", states())
    program = f"""
    from deepnvme.integrations.tensornvme import AsyncFileWriter
    writer = AsyncFileWriter({str(drive / "at exit")!r})
    writer.write_tensor(torch.arange(3_000_000))
    """
    interpreters.run(program).check()
    expected = torch.arange(3_000_000)
    assert torch.equal(torch.frombuffer(bytearray((drive / "at exit").read_bytes()), dtype=torch.int64), expected)


def test_torch_save_into_a_writer(drive: Path) -> None:
    writer = AsyncFileWriter(drive / "file.pt")
    torch.save(states(), writer)
    writer.synchronize()
    found = torch.load(drive / "file.pt")
    assert all(torch.equal(found[name], tensor) for name, tensor in states().items())


def test_bytes_of_any_kind_are_kept_until_they_are_written(drive: Path) -> None:
    writer = AsyncFileWriter(drive / "file")
    changing = bytearray(b"second")
    assert writer.write(b"first ") == 6
    assert writer.write(changing) == 6
    changing[:] = b"SECOND"
    assert writer.write(memoryview(b" third")) == 6
    assert writer.write(b"") == 0
    owner = torch.full((1 << 20,), 7, dtype=torch.uint8)
    writer.write_raw(owner, owner.data_ptr(), owner.nbytes, writer.offset)
    del owner
    gc.collect()
    writer.flush()
    writer.synchronize()
    assert (drive / "file").read_bytes() == b"first second third" + b"\7" * (1 << 20)


def test_what_a_writer_refuses(drive: Path) -> None:
    writer = AsyncFileWriter(drive / "file")
    for pinned in (torch.empty(3), torch.empty(4, dtype=torch.int32), torch.empty(4, device="meta")):
        with pytest.raises(ValueError, match="pinned must be"):
            writer.write_tensor(torch.rand(4), pinned)
    with pytest.raises(ValueError, match="write_tensor"):
        writer.write_raw(torch.empty(4, device="meta"), 0, 16, 0)
    assert writer.offset == 0
    for data in (5, [1, 2]):
        with pytest.raises(TypeError):
            writer.write(data)  # type: ignore[arg-type]
    with open(drive / "other", "wb") as file, pytest.raises(TypeError, match="PathLike"):
        AsyncFileWriter(file)
    with pytest.raises(IsADirectoryError):
        AsyncFileWriter(drive)


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_tensors_on_a_gpu(drive: Path, pinned: bool) -> None:
    state = {name: tensor.cuda() for name, tensor in states().items()}
    copies = {name: tensor.pin_memory() for name, tensor in states().items()} if pinned else None
    writer = AsyncFileWriter(drive / "file")
    save(writer, state, copies, raw=False)
    writer.sync_before_step()
    for tensor in state.values():
        tensor.zero_()
    writer.synchronize()
    assert_saved(drive / "file", states())
