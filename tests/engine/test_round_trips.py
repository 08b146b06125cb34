"""Any size, offset, address, dtype and setting moves exactly its bytes, on every backend, as plain file I/O would."""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deepnvme

from ..support.examples import examples
from ..support.memory import Guarded, bytes_of, pattern, zeros
from ..support.transfers import DTYPES, lengths


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "existing": draw(lengths(150_000)),
        "offset": draw(lengths(100_000)),
        "length": draw(lengths(200_000)),
        "misalignment": draw(st.sampled_from([0, 0, 1, 4, 64, 511, 512, 1000, 4095])),
        "settings": {
            "block_size": draw(st.sampled_from([512, 1000, 4096, 5000, 65536, 1 << 20])),
            "queue_depth": draw(st.sampled_from([1, 2, 7, 32])),
            "num_threads": draw(st.sampled_from([1, 1, 2, 4])),
            "single_submit": draw(st.booleans()),
        },
    }


@given(world=worlds(), seed=st.integers(0, 1000))
@settings(max_examples=examples(60), deadline=None)
def test_a_write_is_what_plain_python_writes(io_dir: Path, backends: list[Any], world: dict[str, Any], seed: int) -> None:
    before, content = pattern(world["existing"], seed), pattern(world["length"], seed + 1)
    expected = bytearray(before)
    if content:
        expected.extend(bytes(max(world["offset"] - len(expected), 0)))
        expected[world["offset"] : world["offset"] + len(content)] = content
    with tempfile.TemporaryDirectory(dir=io_dir) as directory:
        for backend in backends:
            path = Path(directory, backend)
            path.write_bytes(before)
            source = Guarded(content, world["misalignment"])
            with deepnvme.Engine(backend=backend, **world["settings"]) as engine:
                assert engine.write(source.tensor, path, world["offset"]).result() == len(content)
            assert path.read_bytes() == expected, backend
            assert source.content() == content, backend


@given(world=worlds(), seed=st.integers(0, 1000))
@settings(max_examples=examples(60), deadline=None)
def test_a_read_is_what_plain_python_reads(io_dir: Path, backends: list[Any], world: dict[str, Any], seed: int) -> None:
    file = pattern(world["offset"] + world["length"] + world["existing"], seed)
    with tempfile.NamedTemporaryFile(dir=io_dir) as opened:
        opened.write(file)
        opened.flush()
        for backend in backends:
            target = zeros(world["length"], world["misalignment"])
            with deepnvme.Engine(backend=backend, **world["settings"]) as engine:
                assert engine.read(target.tensor, opened.name, world["offset"]).result() == world["length"]
            assert target.content() == file[world["offset"] : world["offset"] + world["length"]], backend
            assert target.guards_are_intact(), backend


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_as_it_was(engine: deepnvme.Engine, drive: Path, dtype: torch.dtype) -> None:
    content = pattern(1021 * dtype.itemsize) if dtype != torch.bool else bytes(value % 2 for value in range(1021))
    source = Guarded(content, 16, dtype).tensor
    target = Guarded(bytes(len(content)), 32, dtype).tensor
    engine.write(source, drive / "file", 3).result()
    engine.read(target, drive / "file", 3).result()
    assert bytes_of(target) == content


def test_zero_bytes_create_the_file_and_otherwise_leave_it_as_it_is(engine: deepnvme.Engine, drive: Path) -> None:
    for content in (b"", b"abc"):
        assert engine.write(torch.empty(0), drive / "file", 100 * len(content)).result() == 0
        assert (drive / "file").read_bytes() == content
        assert engine.read(torch.empty(0, 7), drive / "file").result() == 0
        (drive / "file").write_bytes(b"abc")


@pytest.mark.parametrize("make", [
    pytest.param(lambda: torch.randn(64, 96).t(), id="transposed"),
    pytest.param(lambda: torch.randn(9000)[::3], id="strided"),
    pytest.param(lambda: torch.randn(1, 64).expand(64, 64), id="expanded"),
    pytest.param(lambda: torch.randn(5000, dtype=torch.complex64).conj(), id="conjugate"),
    pytest.param(lambda: torch.randn(5000, dtype=torch.complex64).conj().imag, id="negative"),
])  # fmt: skip
def test_a_tensor_laid_out_otherwise_is_written_as_it_reads(engine: deepnvme.Engine, drive: Path, make: Any) -> None:
    tensor = make()
    engine.write(tensor, drive / "file").result()
    assert (drive / "file").read_bytes() == bytes_of(tensor)


def test_a_length_past_four_gibibytes_does_not_wrap(testing: ModuleType, gate: Any, drive: Path) -> None:
    """With a backend that moves nothing, so that neither the memory nor the drive is needed."""
    nbytes = 2**32 + 1
    with (drive / "sparse").open("wb") as file:
        file.truncate(nbytes)
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as address_space:
        gate.release()
        engine = testing.instant_engine(gate, 1 << 20, 32, 1)
        future = engine.read(torch.frombuffer(address_space, dtype=torch.uint8), drive / "sparse")
        moved = future.result()
        engine.close()
        del future
    assert (moved, engine.stats()["bytes_read"]) == (nbytes, nbytes)
