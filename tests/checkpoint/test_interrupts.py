"""Ctrl-C in the code that owns files, memory and threads while something is saved: at one point in forty, or at each."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme._interrupts import Latch
from deepnvme.checkpoint import background, file_io
from deepnvme.checkpoint.file_io import write
from deepnvme.checkpoint.formats.file_image import FileImage
from deepnvme.checkpoint.publication import Destination, Publication
from deepnvme.memory.pool import BufferPool
from deepnvme.transfer import gather
from deepnvme.transfer.gather import DIRECT_FROM

from ..faults.torture.interruption import Interruption, interrupted
from ..faults.torture.parts import interrupts_save
from ..support.patience import PATIENCE

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    # A descriptor whose object was dropped between the call that opened it and the next instruction is closed with one.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
PACKAGE = Path(deepnvme.__file__).parent
_NAMES = ("publication.py", "background.py", "snapshot.py", "saving.py", "manager.py", "file_io.py", "dcp/writer.py")
OWNERS = {*(PACKAGE / "checkpoint" / name for name in _NAMES), PACKAGE / "transfer" / "gather.py"}
assert all(path.exists() for path in OWNERS)
OTHERS = (
    *(str(path) for path in PACKAGE.rglob("*.py") if path not in OWNERS),
    *interrupts_save.OTHERS,
    *(str(Path(sys.modules[name].__file__ or "")) for name in ("contextlib", "os", "pathlib", "traceback", "weakref", "pickle")),
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in interrupts_save.KINDS if kind is not interrupts_save.Streamed])
def test_a_save_that_is_interrupted_leaves_nothing_taken(drive: Path, kind: type[interrupts_save.Saves]) -> None:
    """While the traceback lives, as in a notebook, which keeps the last one."""

    def world(number: int) -> interrupts_save.Saves:
        (directory := drive / str(number)).mkdir()
        way = kind(directory, Random(number))
        way.shapes = [100, 200_000]
        way.save(way.tensors(1))
        interrupts_save.settled(way)
        return way

    for way in [world(0)]:
        points = interrupted(0, lambda way=way: way.save(way.tensors(2)), skip=OTHERS).passed
    assert points > 50
    for number in range(points, 0, -40):
        way = world(number)
        tensors = way.tensors(2)
        kept: list[BaseException] = []

        def operation(way: Any = way, tensors: Any = tensors, kept: list[BaseException] = kept) -> None:
            try:
                way.save(tensors)
            except BaseException as error:
                kept.append(error)
                raise

        where = interrupted(number, operation, skip=OTHERS).where
        interrupts_save.check(way, f"interrupted at {where}, ended with {kept!r}")


@pytest.mark.slow
def test_an_interrupted_write_ends_what_it_has_begun(drive: Path, faulty: Any, gate: Any) -> None:
    """Before it raises: memory that nothing waits for would stay in use, of a pool and of the caller."""
    engine, image = faulty("threads", gate=gate), FileImage()
    for size in (100, DIRECT_FROM, 100):
        image.add(torch.zeros(size, dtype=torch.uint8))
    pool = BufferPool(16 << 20)
    gate.release()
    with engine.open(str(drive / "file"), "w+") as file:
        write(image, file, engine, pool)  # with what is loaded once
    number, where = 0, "the first point"
    attacked = [module.__file__ for module in (file_io, gather)]
    others = tuple(str(path) for path in PACKAGE.rglob("*.py") if str(path) not in attacked)
    while where:
        number += 1
        kept: list[BaseException] = []

        def operation(kept: list[BaseException] = kept) -> None:
            try:
                write(image, file, engine, pool)
            except BaseException as error:
                kept.append(error)
                raise

        with engine.open(str(drive / "file"), "w+") as file:
            gate.hold()
            opener = threading.Timer(0.02, gate.release)
            opener.start()
            where = interrupted(number, operation, skip=(*OTHERS, *others)).where
            assert pool.in_use == 0, where
            opener.join()
    assert number > 20


def test_a_failed_publication_that_is_interrupted_once_more_is_given_up_with_its_traceback(drive: Path, engine: Any) -> None:
    def operation() -> None:
        with Publication(Destination(drive / "file"), 5, engine):
            raise OSError

    where = "the first"
    number = 0
    while where:
        number += 1
        interruption = Interruption(number)
        with pytest.raises((OSError, KeyboardInterrupt)), interruption:
            operation()
        where = interruption.where
    assert number > 20
    deepnvme.save([1], drive / "file")
    assert [path.name for path in drive.iterdir()] == ["file"]


def test_a_failure_that_nobody_has_seen_outlives_an_interrupt(drive: Path) -> None:
    def is_unseen() -> bool:
        try:
            background.raise_unseen()
        except FileNotFoundError:
            return True
        return False

    for number in range(1, 100):
        background.wait_for_saves(deepnvme.async_save([1], drive / "missing" / "a.pt").path)
        raised: list[BaseException] = []

        def told(raised: list[BaseException] = raised) -> None:
            try:
                background.raise_unseen()
            except OSError as error:
                raised.append(error)
            except KeyboardInterrupt as error:
                raised += [error.__context__] if isinstance(error.__context__, OSError) else []
                raise

        where = interrupted(number, told).where
        assert is_unseen() or raised  # interrupted before it was noted as told: told once more
        assert not is_unseen()
        if not where:
            break
    else:
        pytest.fail("the points do not end")


class TestLatch:
    def test_an_interrupted_wait_is_no_hindrance(self) -> None:
        points = interrupted(0, lambda: Latch().wait(0.001)).passed
        assert points > 1
        for number in range(1, points + 1):
            latch = Latch()
            interrupted(number, lambda latch=latch: latch.wait(0.001))
            interrupts_save.in_another_thread(latch.set)
            assert latch.wait(0)

    def test_one_who_waits_goes_on_when_it_is_set(self) -> None:
        latch, waited = Latch(), []
        others = [background.threading.Thread(target=lambda: waited.append(latch.wait(30))) for _ in range(4)]
        for other in others:
            other.start()
        assert not latch.wait(0.01)
        assert not latch.is_set()
        latch.set()
        latch.set()
        for other in others:
            other.join(PATIENCE)
        assert waited == [True] * 4
