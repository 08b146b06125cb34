"""Device memory is written and read exactly, whatever its size, place, dtype and the engine's settings."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deepnvme

from ..support.disks import Disk
from ..support.examples import examples
from ..support.memory import Guarded, pattern, zeros
from ..support.transfers import DTYPES, lengths
from .stand_in import StandIn

CONTENT = pattern(3_000_001)


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "offset": draw(lengths(20_000)),
        "length": draw(lengths(300_000)),
        "misalignment": draw(st.sampled_from([0, 0, 1, 4, 511, 512, 4095])),
        "device": draw(st.integers(0, 1)),
        "settings": {
            "block_size": draw(st.sampled_from([512, 5000, 65536, 1 << 20])),
            "queue_depth": draw(st.sampled_from([1, 2, 7, 32])),
            "num_threads": draw(st.integers(1, 4)),
            "single_submit": draw(st.booleans()),
        },
    }


@given(world=worlds(), seed=st.integers(0, 1000))
@settings(max_examples=examples(25), deadline=None)
def test_what_is_written_from_a_device_comes_back_to_it(
    driver: StandIn, io_dir: Path, backends: list[Any], world: dict[str, Any], seed: int
) -> None:
    content = pattern(world["length"], seed)
    source = driver.tensor(content, world["device"], world["misalignment"])
    with tempfile.TemporaryDirectory(dir=io_dir) as directory:
        for backend in backends:
            path = Path(directory, backend)
            path.write_bytes(b"x" * world["offset"])
            target = driver.tensor(bytes(len(content)), 1 - world["device"], world["misalignment"])
            with deepnvme.Engine(backend=backend, **world["settings"]) as engine:
                assert engine.write(source, path, world["offset"]).result() == len(content)
                assert path.read_bytes() == b"x" * world["offset"] + content, backend
                assert engine.read(target, path, world["offset"]).result() == len(content)
            assert driver.content(target) == content, backend
            assert not content or driver.guards_are_intact(target), backend
    assert driver.content(source) == content


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_as_it_was(driver: StandIn, engine: deepnvme.Engine, drive: Path, dtype: torch.dtype) -> None:
    content = pattern(1021 * dtype.itemsize)
    source = driver.tensor(content, dtype=dtype)
    target = driver.tensor(bytes(len(content)), misalignment=16, dtype=dtype)
    engine.write(source, drive / "file", 3).result()
    assert engine.read(target, drive / "file", 3).result() == len(content)
    assert driver.content(target) == content


def test_a_file_of_whole_pages_serves_devices(driver: StandIn, backend: Any, drive: Path) -> None:
    target = driver.tensor(bytes(len(CONTENT)))
    with deepnvme.Engine(backend=backend) as engine, engine.open(drive / "file", "w+", whole_pages=True) as file:
        engine.write(driver.tensor(CONTENT), file).result()
        engine.read(target, file).result()
        assert engine.stats().bytes_staged == 2 * len(CONTENT)
    assert driver.content(target) == CONTENT
    assert driver.guards_are_intact(target)
    assert (drive / "file").read_bytes() == CONTENT + bytes(-len(CONTENT) % 4096)


@pytest.mark.parametrize("threads", [1, 3])
def test_host_and_device_requests_at_once(driver: StandIn, backend: Any, drive: Path, threads: int) -> None:
    contents = [pattern(200_000 + index, index) for index in range(40)]
    sources = [
        driver.tensor(content, index % 2) if index % 3 else Guarded(content, index % 2).tensor
        for index, content in enumerate(contents)
    ]
    on_devices = [driver.tensor(bytes(len(content))) for content in contents]
    on_host = [zeros(len(content), 1) for content in contents]
    with deepnvme.Engine(backend=backend, block_size=16384, queue_depth=8, num_threads=threads) as engine:
        for future in [engine.write(source, drive / str(index)) for index, source in enumerate(sources)]:
            future.result()
        reads = [engine.read(target, drive / str(index)) for index, target in enumerate(on_devices)]
        reads += [engine.read(target.tensor, drive / str(index)) for index, target in enumerate(on_host)]
        for future in reads:
            future.result()
    assert [driver.content(target) for target in on_devices] == contents
    assert [target.content() for target in on_host] == contents


@pytest.mark.parametrize("make", [lambda tensor: tensor.t(), lambda tensor: tensor[::3], lambda tensor: tensor[:, 1:5]])
def test_a_device_tensor_laid_out_otherwise_is_written_as_it_reads(
    driver: StandIn, engine: deepnvme.Engine, drive: Path, make: Any
) -> None:
    """The copy made of it is work of the current stream, and late."""
    tensor = make(driver.tensor(pattern(64 * 96 * 4), dtype=torch.float32).view(64, 96))
    with driver.using(driver.stream()):
        engine.write(tensor, drive / "file").result()
    assert (drive / "file").read_bytes() == driver.gather(tensor)


@pytest.mark.root
@pytest.mark.filterwarnings("ignore:transfers of")
def test_a_file_system_without_direct_io_serves_devices(driver: StandIn, backend: Any, tmpfs: Disk) -> None:
    """Blocks larger than a staging slot, which do not have to be cut for host memory."""
    target = driver.tensor(bytes(len(CONTENT)))
    with deepnvme.Engine(backend=backend, block_size=4 << 20) as engine:
        engine.write(driver.tensor(CONTENT), tmpfs / "file").result()
        assert (tmpfs / "file").read_bytes() == CONTENT
        engine.read(target, tmpfs / "file").result()
        assert engine.stats().bytes_buffered == 2 * len(CONTENT)
    assert driver.content(target) == CONTENT


@pytest.mark.parametrize("call", ["sync", "async", "plain", "validated"])
def test_a_handle_serves_devices(driver: StandIn, op: ModuleType, drive: Path, call: str) -> None:
    handle, path = op.aio_handle(65536, 8, False, True, 2), str(drive / "file")
    source, target = driver.tensor(CONTENT), driver.tensor(bytes(len(CONTENT)), misalignment=3)
    if call == "sync":
        assert (handle.sync_pwrite(source, path), handle.sync_pread(target, path)) == (1, 1)
    elif call == "async":
        handle.async_pwrite(source, path)
        assert handle.wait() == 1
        handle.async_pread(target, path)
        assert handle.wait() == 1
    elif call == "plain":
        assert (handle.write(source, path, False), handle.read(target, path, False)) == (0, 0)
    else:
        handle.pwrite(source, path, True, True)
        assert handle.wait() == 1
        assert handle.pread(target, path, True, False) == 1
    assert (drive / "file").read_bytes() == CONTENT
    assert driver.content(target) == CONTENT


def test_validation_finds_what_differs_on_the_device(driver: StandIn, op: ModuleType, drive: Path) -> None:
    """Far into it: what the device has is fetched in parts."""
    handle, path = op.aio_handle(), drive / "file"
    content = bytes(18 << 20)
    source = driver.tensor(content)
    handle.pwrite(source, str(path), True, True, 5)
    handle.wait()
    handle.pwrite(source, str(path), True, True, 5)
    differs = (17 << 20) + 3
    with driver.using(driver.stream()) as stream:
        handle.pread(source, str(path), True, True, 5)
        stream.fill(source[differs:], b"!", 0.2)
        while driver.content(source[differs : differs + 1]) != b"!":
            pass
    with pytest.raises(OSError, match=f"tensor and file differ at byte {5 + differs}"):
        handle.wait()


@pytest.mark.parametrize("files", [1, 3])
def test_many_tensors_of_several_devices_and_the_host_are_one_call(
    driver: StandIn, engine: deepnvme.Engine, drive: Path, files: int
) -> None:
    contents = [pattern(length, length) for length in (0, 1, 4096, 5000, 70_000, 3, 8192)]
    paths = [drive / str(index % files) for index in range(len(contents))]
    offsets = range(0, len(contents) * 100_000, 100_000)
    engine.write_many(
        [Guarded(each, 4).tensor if index % 3 == 2 else driver.tensor(each, index % 2) for index, each in enumerate(contents)],
        paths, offsets,
    ).result()  # fmt: skip
    back = [driver.tensor(bytes(len(each)), 1 - index % 2, 64) for index, each in enumerate(contents)]
    assert engine.read_many(back, paths, offsets).result() == sum(map(len, contents))
    assert [driver.content(tensor) for tensor in back] == contents
    assert all(driver.guards_are_intact(tensor) for tensor in back if tensor.nbytes)


def test_records_are_gathered_into_device_memory(driver: StandIn, engine: deepnvme.Engine, drive: Path) -> None:
    (drive / "file").write_bytes(CONTENT)
    out = driver.tensor(bytes(5 * 4096))
    engine.gather(drive / "file", torch.tensor([7, 3, 4, 5, 7]), out.view(5, 4096)).result()
    assert driver.content(out) == b"".join(CONTENT[index * 4096 : (index + 1) * 4096] for index in (7, 3, 4, 5, 7))
