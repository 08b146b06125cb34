"""Libraries that write a checkpoint and read it, each as its users call it, through fsync."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import deepnvme
from deepnvme.memory.host import empty_aligned
from harness.workloads import ContenderFailed

State = dict[str, torch.Tensor]
PAGE = 4096


@dataclass(frozen=True)
class Library:
    """``save`` leaves the state at the path on stable storage; ``load`` gives it back from there, in new memory."""

    save: Callable[[State, Path], None]
    load: Callable[[Path, State], State]
    """Given the state too, for those that have to be told the shapes: its tensors may be on the meta device."""


def transformer(width: int, layers: int, vocabulary: int, device: str = "cpu") -> State:
    """The parameters of one, in bfloat16, with values of no meaning; or, on the meta device, only their shapes."""
    state: State = {"embedding.weight": _made(device, vocabulary, width)}
    for layer in range(layers):
        for name, shape in (
            ("attention.in.weight", (3 * width, width)),
            ("attention.out.weight", (width, width)),
            ("mlp.in.weight", (4 * width, width)),
            ("mlp.out.weight", (width, 4 * width)),
            ("norm1.weight", (width,)),
            ("norm2.weight", (width,)),
        ):
            state[f"layers.{layer}.{name}"] = _made(device, *shape)
    return state


def _made(device: str, *shape: int) -> torch.Tensor:
    """A tensor of random values."""
    if device == "meta":
        return torch.empty(shape, dtype=_VALUES.dtype, device=device)
    # Random bytes repeated: no drive or file system finds them easier, and they cost no minutes.
    numel = int(torch.Size(shape).numel())
    return _VALUES.repeat(-(-numel // _VALUES.numel()))[:numel].clone().view(shape)


_VALUES = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def touch(state: State) -> None:
    """One byte of each page, as whoever uses the state does: what a library has only mapped is read now."""
    for tensor in state.values():
        tensor.view(-1).view(torch.uint8)[::PAGE].amax()


def nbytes_of(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def _sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to stable storage."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- ours


def _ours() -> Library:
    return Library(deepnvme.save, lambda path, _: deepnvme.load(path))


def _our_safetensors() -> Library:
    import deepnvme.safetensors

    return Library(deepnvme.safetensors.save_file, lambda path, _: deepnvme.safetensors.load_file(path))


def _raw() -> Library:
    """The engine alone: each tensor at the next page of a new file; and the file in one request into new memory."""
    engine = deepnvme.Engine()

    def save(state: State, path: Path) -> None:
        futures, offset = [], 0
        with engine.open(path, "w") as file:
            for tensor in state.values():
                futures.append(engine.write(tensor, file, offset))
                offset += -(-tensor.nbytes // PAGE) * PAGE
            for future in futures:
                future.result()
            engine.fsync(file).result()

    def load(path: Path, state: State) -> State:
        memory = empty_aligned(path.stat().st_size)
        engine.read(memory, path).result()
        found, offset = {}, 0
        for name, tensor in state.items():
            found[name] = memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            offset += -(-tensor.nbytes // PAGE) * PAGE
        return found

    return Library(save, load)


# -- others


def _torch() -> Library:
    def save(state: State, path: Path) -> None:
        torch.save(state, path)
        _sync(path)

    return Library(save, lambda path, _: torch.load(path))


def _safetensors() -> Library:
    import safetensors.torch

    def save(state: State, path: Path) -> None:
        safetensors.torch.save_file(state, path)
        _sync(path)

    return Library(save, lambda path, _: safetensors.torch.load_file(path))


def _run_ai() -> Library:
    """Reads what safetensors wrote, by its direct engine."""
    os.environ.setdefault("RUNAI_STREAMER_FS_STRATEGY", "io_uring_direct")
    os.environ.setdefault("RUNAI_STREAMER_LOG_LEVEL", "ERROR")
    from runai_model_streamer import SafetensorsStreamer

    def load(path: Path, _: State) -> State:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path))
            # What it yields lies in a buffer that it uses again; with none given, one for all, which is kept.
            return dict(streamer.get_tensors())

    return Library(_safetensors().save, load)


def _dcp(writer: Callable[[Path], Any], reader: Callable[[Path], Any]) -> Library:
    """torch.distributed.checkpoint with a given writer and reader."""
    import torch.distributed.checkpoint as dcp

    def save(state: State, path: Path) -> None:
        with _quiet():
            dcp.save(state, storage_writer=writer(path))

    def load(path: Path, state: State) -> State:
        found = {name: torch.empty_like(tensor, device="cpu") for name, tensor in state.items()}
        with _quiet():
            dcp.load(found, storage_reader=reader(path))
        return found

    return Library(save, load)


def _stock_dcp() -> Library:
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

    return _dcp(lambda path: FileSystemWriter(path, thread_count=2), FileSystemReader)


def _our_dcp() -> Library:
    from deepnvme.checkpoint import NVMeReader, NVMeWriter

    return _dcp(lambda path: NVMeWriter(path, thread_count=2), NVMeReader)


@contextlib.contextmanager
def _quiet() -> Any:
    """That no process group is there is no news."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_MAKERS: Mapping[str, Callable[[], Library]] = {
    "deepnvme": _ours,
    "deepnvme safetensors": _our_safetensors,
    "raw": _raw,
    "torch": _torch,
    "safetensors": _safetensors,
    "Run:ai": _run_ai,
    "DCP": _stock_dcp,
    "deepnvme DCP": _our_dcp,
}


@functools.cache
def library(name: str) -> Library:
    """Raises ContenderFailed if it is not installed."""
    try:
        return _MAKERS[name]()
    except ImportError as error:
        raise ContenderFailed(f"not installed: {error}") from error


def remove(path: Path) -> None:
    """A file or a directory, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
