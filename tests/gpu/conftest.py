"""A machine with a real CUDA device, and the ways to move its memory. Nothing here stands in for anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
import torch

import deepnvme
from deepnvme.ops.op_builder import GDSBuilder

from ..support.memory import GUARD, PAGE, bytes_of

Direction = Literal["read", "write"]
FACES = ("engine", "aio_handle", "gds_handle")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture
def path(drive: Path) -> Path:
    return drive / "file"


@pytest.fixture(scope="session")
def gds() -> ModuleType:
    """The compiled gds op."""
    lacking = GDSBuilder().lacking()
    if lacking:
        pytest.skip(f"needs the gds op: {'; '.join(lacking)}")
    return GDSBuilder().load()


@dataclass
class Face:
    """An engine or a handle, by the same names."""

    served: Any
    _futures: list[Any] = field(default_factory=list)

    def start(self, direction: Direction, tensor: torch.Tensor, path: Path, offset: int = 0) -> None:
        if isinstance(self.served, deepnvme.Engine):
            self._futures.append(getattr(self.served, direction)(tensor, path, offset))
        else:
            getattr(self.served, f"async_p{direction}")(tensor, str(path), offset)

    def wait(self) -> None:
        """For all that was started."""
        if not isinstance(self.served, deepnvme.Engine):
            self.served.wait()
        while self._futures:
            self._futures.pop(0).result()

    def write(self, tensor: torch.Tensor, path: Path, offset: int = 0) -> None:
        self.start("write", tensor, path, offset)
        self.wait()

    def read(self, tensor: torch.Tensor, path: Path, offset: int = 0) -> None:
        self.start("read", tensor, path, offset)
        self.wait()


Make = Callable[..., Face]


@pytest.fixture
def make(op: ModuleType, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Faces of the kind that is named."""
    engines: list[deepnvme.Engine] = []

    def make(kind: str) -> Face:
        if kind == "engine":
            engines.append(deepnvme.Engine())
            return Face(engines[-1])
        return Face(op.aio_handle() if kind == "aio_handle" else request.getfixturevalue("gds").gds_handle())

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(params=FACES)
def face(make: Make, request: pytest.FixtureRequest) -> Face:
    """Each kind in turn."""
    return make(request.param)


class OnDevice:
    """A tensor of ``content``, ``misalignment`` bytes into a page of a larger one, with guard bytes before and after it."""

    def __init__(self, content: bytes, device: torch.device, misalignment: int = 0, dtype: torch.dtype = torch.uint8) -> None:
        self._begin, self._end = PAGE + misalignment, PAGE + misalignment + len(content)
        self._memory = torch.full((self._end + PAGE,), GUARD[0], dtype=torch.uint8, device=device)
        inside = self._memory[self._begin : self._end]
        if content:
            inside.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self.tensor = inside.view(dtype)

    def content(self) -> bytes:
        return bytes_of(self.tensor)

    def guards_are_intact(self) -> bool:
        around = bytes_of(self._memory[: self._begin]) + bytes_of(self._memory[self._end :])
        return around == GUARD * len(around)
