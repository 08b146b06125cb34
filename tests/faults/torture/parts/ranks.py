"""Several ranks, one of whose drives takes no more: each ends with an error, files are old or new, and the next try works."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import resource
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import deepnvme
from deepnvme import NVMeReader, NVMeWriter

from .. import Torn, Wrong

SHORT = 3
SECONDS = 180

_ROWS, _COLUMNS = 384, 2048  # 3 MiB in fp32


def attack(random: Random, directory: Path) -> None:
    """Each rank is a process of its own, which sends back what was wrong there."""
    size = random.choice((2, 3))
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    seed, ranks = random.randrange(1 << 31), []
    for rank in range(size):
        here, there = processes.Pipe(duplex=False)
        process = processes.Process(target=_run, args=(rank, size, seed, directory, there))
        process.start()
        there.close()
        ranks.append((process, here))
    said = []
    for rank, (process, here) in enumerate(ranks):
        with here, contextlib.suppress(EOFError):
            said.append(f"rank {rank}: {here.recv()}")
        process.join()
        process.close()
    failed = [text for text in said if not text.endswith(": well")]
    if failed or len(said) < size:
        raise (Torn if any("Torn" in text for text in failed) else Wrong)("\n".join(failed) or "a rank ended without a word")


def _run(rank: int, size: int, seed: int, directory: Path, answer: Connection) -> None:
    torch.set_num_threads(1)
    tempfile.gettempdir()  # remembered: torch asks for it when it makes the first DTensor, and a file is written to find it
    try:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=size)
        _attack(rank, size, Random(seed), directory)
        answer.send("well")
        dist.barrier()
    except BaseException as error:
        answer.send(f"{type(error).__name__}: {error}")
        raise


def _attack(rank: int, size: int, random: Random, directory: Path) -> None:
    """``random`` gives the same on all ranks."""
    generator = torch.Generator().manual_seed(random.randrange(1 << 31))
    kind = random.choice((_Saving, _Checkpointing))(size, directory / "own", generator)
    if random.random() < 0.7:
        kind.attempt()
        kind.check(new=True)
    for _ in range(random.choice((1, 2))):
        failing, limit = random.randrange(size), random.choice((0, 4096, 65536))
        error: BaseException | None = None
        try:
            with _full_drive(limit) if rank == failing else contextlib.nullcontext():
                kind.attempt()
        except (Exception, dcp.api.CheckpointException) as raised:  # which torch derives from BaseException
            error = raised
        kind.check_error(error, rank == failing, failing)
        kind.check(new=False)
    kind.attempt()
    kind.check(new=True)


@contextlib.contextmanager
def _full_drive(limit: int) -> Iterator[None]:
    """No file can be written beyond so many bytes: the kernel answers EFBIG, to this process alone."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _is_named(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EFBIG and bool(error.filename)


class _Saving:
    """``deepnvme.save`` of a group, and what of its file is to be there."""

    def __init__(self, size: int, directory: Path, generator: torch.Generator) -> None:
        self._directory = directory
        self._generator = generator
        self._mesh = init_device_mesh("cpu", (size,))
        self._saved: torch.Tensor | None = None
        self._value = torch.empty(0)
        if dist.get_rank() == 0:
            directory.mkdir()
        dist.barrier()

    def attempt(self) -> None:
        self._value = torch.randn(_ROWS, _COLUMNS, generator=self._generator)
        self._save({"whole": self._value, "shards": distribute_tensor(self._value, self._mesh, [Shard(0)])})

    def _save(self, state: dict[str, Any]) -> None:
        deepnvme.save(state, self._directory / "a.pt", group=dist.group.WORLD)

    def check(self, new: bool) -> None:
        """That the state saved last is what is there, or that before it."""
        self._saved = self._value if new else self._saved
        found = self._load()
        if (found is None) != (self._saved is None) or any(not torch.equal(each, self._saved) for each in found or ()):
            raise Torn(f"after a save that {'succeeded' if new else 'failed'} there is another state")
        dist.barrier()

    def _load(self) -> list[torch.Tensor] | None:
        if os.listdir(self._directory) not in ([], ["a.pt"]):
            raise Torn(f"files were left: {os.listdir(self._directory)}")
        if not os.listdir(self._directory):
            return None
        state = torch.load(self._directory / "a.pt")
        return [state["whole"], state["shards"]]

    def check_error(self, error: BaseException | None, here: bool, failing: int) -> None:
        told = isinstance(error, RuntimeError) and f"rank {failing}" in str(error)
        if not (_is_named(error) if here else told):
            raise Wrong(f"rank {failing} had a full drive, raised was {error!r}") from error


class _Checkpointing(_Saving):
    """``torch.distributed.checkpoint.save`` with our writer, loaded with our reader."""

    def _save(self, state: dict[str, Any]) -> None:
        dcp.save(state, storage_writer=NVMeWriter(self._directory))

    def _load(self) -> list[torch.Tensor] | None:
        if not (self._directory / ".metadata").exists():
            return None
        shards = distribute_tensor(torch.zeros(_ROWS, _COLUMNS), self._mesh, [Shard(0)])
        state = {"whole": torch.zeros(_ROWS, _COLUMNS), "shards": shards}
        dcp.load(state, storage_reader=NVMeReader(self._directory))
        return [state["whole"], state["shards"].full_tensor()]  # type: ignore[attr-defined]

    def check_error(self, error: BaseException | None, here: bool, failing: int) -> None:
        told = isinstance(error, dcp.api.CheckpointException) and list(error.failures) == [failing]
        if not told or not _is_named(error.failures[failing][0]):
            raise Wrong(f"rank {failing} had a full drive, raised was {error!r}") from error
