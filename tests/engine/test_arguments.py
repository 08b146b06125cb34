"""What cannot be transferred is refused with a clear error, before any byte moves."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import deepnvme
from deepnvme.engine import Backend
from deepnvme.ops.op_builder import AsyncIOBuilder

from ..support.memory import page_aligned


@pytest.fixture
def file(drive: Path) -> Path:
    """A file of 10 000 bytes that no refused transfer may change."""
    path = drive / "file"
    path.write_bytes(b"x" * 10_000)
    return path


@pytest.fixture
def tensor() -> torch.Tensor:
    return page_aligned(b"y" * 8192)


# Settings


@pytest.mark.parametrize(
    ("name", "least", "most"), [("block_size", 512, 1 << 30), ("queue_depth", 1, 4096), ("num_threads", 1, 256)]
)
def test_an_absurd_setting_is_refused_with_its_range(name: str, least: int, most: int) -> None:
    for value in (-(2**40), -1, 0, least - 1, most + 1, 2**62 if name == "block_size" else 2**40):
        with pytest.raises(ValueError, match=rf"{name} must be in \[{least}, {most}\], got {value}"):
            deepnvme.Engine(**{name: value})


def test_an_unknown_backend_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="backend must be one of auto, io_uring, libaio, threads, got 'posix'") as error:
        deepnvme.Engine(backend="posix")  # type: ignore[arg-type]
    names = get_args(Backend)
    assert f"one of {', '.join(names)}, got" in str(error.value)
    assert names == ("auto", *(each.name for each in AsyncIOBuilder().backends()), "threads")


# Tensors


@pytest.mark.parametrize("make", [
    pytest.param(lambda: None, id="None"),
    pytest.param(lambda: [1, 2, 3], id="list"),
    pytest.param(lambda: b"bytes", id="bytes"),
    pytest.param(lambda: bytearray(8), id="bytearray"),
    pytest.param(lambda: memoryview(bytearray(8)), id="memoryview"),
    pytest.param(lambda: array.array("f", [1.0]), id="array"),
    pytest.param(lambda: torch.empty(1).untyped_storage(), id="storage"),
    pytest.param(lambda: torch.Tensor, id="the class"),
    pytest.param(lambda: pytest.importorskip("numpy", reason="needs numpy").zeros(8), id="numpy"),
    pytest.param(lambda: torch.eye(4).to_sparse(), id="sparse"),
])  # fmt: skip
@pytest.mark.parametrize("direction", ["read", "write"])
def test_what_is_no_dense_tensor_is_a_type_error(engine: deepnvme.Engine, file: Path, direction: str, make: Any) -> None:
    with pytest.raises(TypeError, match=r"(?i)tensor"):
        getattr(engine, direction)(make(), file)
    assert file.read_bytes() == b"x" * 10_000


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_meta_tensor_has_no_memory(engine: deepnvme.Engine, file: Path, direction: str) -> None:
    with pytest.raises(ValueError, match="meta"):
        getattr(engine, direction)(torch.empty(8, device="meta"), file)


@pytest.mark.parametrize("make", [
    pytest.param(lambda: torch.zeros(64, 8).t(), id="transposed"),
    pytest.param(lambda: torch.zeros(512)[::2], id="strided"),
    pytest.param(lambda: torch.zeros(1, 8).expand(8, 8), id="expanded"),
    pytest.param(lambda: torch.zeros(8, dtype=torch.complex64).conj(), id="conjugate"),
    pytest.param(lambda: torch.zeros(8, dtype=torch.complex64).conj().imag, id="negative"),
])  # fmt: skip
def test_reading_into_a_tensor_laid_out_otherwise_is_refused(engine: deepnvme.Engine, file: Path, make: Any) -> None:
    target = make()
    with pytest.raises(ValueError, match="cannot read into a tensor that is"):
        engine.read(target, file)
    assert not target.resolve_conj().resolve_neg().any()


# Ranges


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("offset", [-1, -4096, -(2**63)])
def test_a_negative_offset_is_refused(
    engine: deepnvme.Engine, tensor: torch.Tensor, file: Path, direction: str, offset: int
) -> None:
    with pytest.raises(ValueError, match=f"offset must not be negative, got {offset}") as caught:
        getattr(engine, direction)(tensor, file, offset)
    assert not hasattr(caught.value, "file_size")  # which only a range past the end of the file has
    assert file.read_bytes() == b"x" * 10_000


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("offset", [2**63 - 1, 2**63 - 8191])
def test_an_offset_past_the_largest_file_is_refused(
    engine: deepnvme.Engine, tensor: torch.Tensor, file: Path, direction: str, offset: int
) -> None:
    with pytest.raises(ValueError, match=f"offset {offset} plus 8192 bytes is past the largest file offset"):
        getattr(engine, direction)(tensor, file, offset)
    assert file.stat().st_size == 10_000


def test_an_offset_past_what_the_file_system_can_hold_leaves_the_file_as_it_is(
    engine: deepnvme.Engine, tensor: torch.Tensor, file: Path
) -> None:
    with pytest.raises(OSError, match="write of 8192 bytes") as caught:
        engine.write(tensor, file, 2**63 - 8192 - 1).result()
    assert caught.value.filename == str(file)
    assert file.stat().st_size == 10_000


@pytest.mark.parametrize("offset", [1809, 10_000, 10_001, 2**40])
def test_a_file_shorter_than_asked_is_said_with_both_lengths(
    engine: deepnvme.Engine, tensor: torch.Tensor, file: Path, offset: int
) -> None:
    match = f"bytes .{offset}, {offset + 8192}. is past the end of '{file}', which has 10000 bytes"
    with pytest.raises(ValueError, match=match) as caught:
        engine.read(tensor, file, offset)
    assert vars(caught.value) == {"file_size": 10_000}
    assert tensor.eq(ord("y")).all()


# Paths


@pytest.mark.parametrize("path", [None, 3, 3.5, ["path"], object()], ids=lambda path: type(path).__name__)
@pytest.mark.parametrize("direction", ["read", "write"])
def test_what_is_no_path_is_a_type_error(engine: deepnvme.Engine, tensor: torch.Tensor, direction: str, path: Any) -> None:
    with pytest.raises(TypeError, match=r"expected str, bytes or os\.PathLike object, not"):
        getattr(engine, direction)(tensor, path)


@pytest.mark.parametrize(
    ("path", "error", "match"),
    [
        ("a\0b", ValueError, "null"), (b"a\0b", ValueError, "null"), ("\0", ValueError, "null"),
        ("lone surrogate \ud800", UnicodeEncodeError, "surrogates"), ("", FileNotFoundError, "No such file"),
        ("x" * 300, OSError, "too long: .*/?x{300}'"), ("file/below", NotADirectoryError, "file/below"),
        ("circle", OSError, "symbolic links"),
    ],
    ids=ascii,
)  # fmt: skip
def test_a_path_that_no_file_can_have_is_refused(
    engine: deepnvme.Engine, tensor: torch.Tensor, file: Path, drive: Path, monkeypatch: pytest.MonkeyPatch, path: Any,
    error: type[Exception], match: str,
) -> None:  # fmt: skip
    (drive / "circle").symlink_to(drive / "circle")
    monkeypatch.chdir(drive)
    with pytest.raises(error, match=match):
        engine.write(tensor, path)
    assert sorted(os.listdir(drive)) == ["circle", "file"]


def test_a_name_that_is_not_utf8_is_a_name(engine: deepnvme.Engine, tensor: torch.Tensor, drive: Path) -> None:
    name = os.fsencode(drive) + b"/\xff\xfe"
    engine.write(tensor, name).result()
    engine.read(tensor, os.fsdecode(name)).result()
    assert os.path.getsize(name) == 8192


@pytest.mark.parametrize("call", [
    pytest.param(lambda engine, tensor, path: engine.read(tensor, path), id="read"),
    pytest.param(lambda engine, tensor, path: engine.fsync(path), id="fsync"),
    pytest.param(lambda engine, tensor, path: engine.open(path), id="open"),
    pytest.param(lambda engine, tensor, path: engine.open(path, "r+"), id="open to change"),
    pytest.param(lambda engine, tensor, path: engine.write(tensor, path / "below"), id="write below"),
])  # fmt: skip
def test_a_missing_file_is_named(engine: deepnvme.Engine, tensor: torch.Tensor, drive: Path, call: Any) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        call(engine, tensor, drive / "missing")
    assert str(drive / "missing") in caught.value.filename
    assert not (drive / "missing").exists()


@pytest.mark.parametrize("call", [
    pytest.param(lambda engine, tensor, path: engine.read(tensor, path), id="read"),
    pytest.param(lambda engine, tensor, path: engine.write(tensor, path), id="write"),
    pytest.param(lambda engine, tensor, path: engine.open(path), id="open"),
    pytest.param(lambda engine, tensor, path: engine.open(path, "w"), id="open to write"),
])  # fmt: skip
def test_a_directory_is_no_file(engine: deepnvme.Engine, tensor: torch.Tensor, drive: Path, call: Any) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        call(engine, tensor, drive)
    assert caught.value.filename == str(drive)


@pytest.fixture(params=["pipe", "socket", "character device", "terminal"])
def no_file(request: pytest.FixtureRequest, drive: Path) -> Iterator[Path]:
    """Something that opening might wait for, and that has no offsets."""
    path = drive / "special"
    listener = socket.socket(socket.AF_UNIX)
    descriptors: tuple[int, ...] = ()
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "socket":
        listener.bind(os.path.relpath(path))
    elif request.param == "character device":
        path = Path("/dev/null")
    else:
        descriptors = os.openpty()
        path = Path(os.ttyname(descriptors[1]))
    yield path
    listener.close()
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize("call", [
    pytest.param(lambda engine, tensor, path: engine.read(tensor, path), id="read"),
    pytest.param(lambda engine, tensor, path: engine.write(tensor, path), id="write"),
    pytest.param(lambda engine, tensor, path: engine.fsync(path), id="fsync"),
    pytest.param(lambda engine, tensor, path: engine.open(path, "w"), id="open"),
])  # fmt: skip
def test_what_has_no_offsets_is_refused_without_waiting(
    engine: deepnvme.Engine, tensor: torch.Tensor, no_file: Path, call: Callable[..., Any]
) -> None:
    with pytest.raises(OSError, match="neither a regular file nor a block device") as caught:
        call(engine, tensor, no_file)
    assert caught.value.filename == str(no_file)


# Closed things


@pytest.mark.parametrize("call", [
    pytest.param(lambda engine, tensor, path: engine.read(tensor, path), id="read"),
    pytest.param(lambda engine, tensor, path: engine.write(tensor, path), id="write"),
    pytest.param(lambda engine, tensor, path: engine.fsync(path), id="fsync"),
    pytest.param(lambda engine, tensor, path: engine.open(path), id="open"),
])  # fmt: skip
def test_a_closed_engine_says_so(tensor: torch.Tensor, file: Path, call: Any) -> None:
    engine = deepnvme.Engine()
    engine.close()
    for path in (file, file.with_name("new")):
        with pytest.raises(ValueError, match="the engine is closed"):
            call(engine, tensor, path)
    assert file.read_bytes() == b"x" * 10_000
    assert os.listdir(file.parent) == [file.name]


@pytest.mark.parametrize("call", [
    pytest.param(lambda engine, tensor, file: engine.read(tensor, file), id="read"),
    pytest.param(lambda engine, tensor, file: engine.write(tensor, file), id="write"),
    pytest.param(lambda engine, tensor, file: engine.fsync(file), id="fsync"),
    pytest.param(lambda engine, tensor, file: file.size(), id="size"),
])  # fmt: skip
def test_a_closed_file_says_so(engine: deepnvme.Engine, tensor: torch.Tensor, file: Path, call: Any) -> None:
    opened = engine.open(file, "r+")
    opened.close()
    with pytest.raises(ValueError, match="the file is closed"):
        call(engine, tensor, opened)
