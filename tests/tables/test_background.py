"""Prefetches and writing that go on while nobody calls the table, and what is left when it is gone."""

from __future__ import annotations

import errno
import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme import Engine
from deepnvme.files.directory_lock import StoreLocked
from deepnvme.tables import Table

from ..support.patience import until

ROWS, WIDTH = 4096, 1024
"""16 MiB: many parts of staging memory, of which there are the fewest."""
IDS = torch.arange(ROWS)


class HeldFuture:
    """The future of a transfer that does not end before it is let go."""

    def __init__(self, future: Any, released: threading.Event) -> None:
        self._future, self._released = future, released

    def done(self) -> bool:
        return self._released.is_set() and bool(self._future.done())

    def exception(self, timeout: float | None = None) -> OSError | None:
        if not self._released.wait(timeout):
            raise TimeoutError
        return self._future.exception()  # type: ignore[no-any-return]


def held(monkeypatch: pytest.MonkeyPatch, name: str, which: range = range(1 << 30)) -> threading.Event:
    """Have calls of a method of engines, those with these numbers, last until the event is set."""
    sound, released, calls = getattr(Engine, name), threading.Event(), iter(range(1 << 30))

    def call(self: Engine, *arguments: Any, **more: Any) -> Any:
        future = sound(self, *arguments, **more)
        return HeldFuture(future, released) if next(calls) in which else future

    monkeypatch.setattr(Engine, name, call)
    return released


def filled(path: Path, **more: Any) -> Table:
    return Table.from_tensor(path, torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH), staging_bytes=0, **more)


def test_a_prefetch_returns_before_anything_is_read_and_goes_on_by_itself(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(drive / "table") as table:
        released = held(monkeypatch, "gather")
        table.prefetch(IDS)
        assert table.stats().cached_rows == 0
        released.set()
        until(lambda: table.stats().cached_rows == ROWS)
        assert table.read(IDS)[:, 0].tolist() == (IDS * WIDTH).tolist()
        assert table.stats().misses == 0


def test_a_prefetch_that_hangs_does_not_hold_up_reads_of_other_rows(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(drive / "table") as table:
        released = held(monkeypatch, "gather", range(1))  # the first part
        table.prefetch(IDS[: ROWS // 2])
        assert table.read(IDS[-50:])[:, 0].tolist() == (IDS[-50:] * WIDTH).tolist()
        released.set()


def test_changed_rows_are_written_while_nobody_calls(drive: Path) -> None:
    with filled(drive / "table", updatable=True) as table:
        quarter = table.stats().cache_capacity // 4
        table.write(IDS[: 2 * quarter], torch.zeros(2 * quarter, WIDTH))
        until(lambda: table.stats().changed_rows < quarter)


@pytest.mark.parametrize("how", ["closed", "collected"])
def test_nothing_is_kept_of_a_table_that_is_gone(drive: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    allocated: list[weakref.ref[torch.Tensor]] = []
    sound = Engine.empty_pinned

    def empty_pinned(self: Engine, *arguments: Any, **more: Any) -> torch.Tensor:
        memory = sound(self, *arguments, **more)
        allocated.append(weakref.ref(memory.untyped_storage()))
        return memory

    monkeypatch.setattr(Engine, "empty_pinned", empty_pinned)
    table = filled(drive / "table", updatable=True)
    gc.collect()
    gc.disable()
    try:
        table.prefetch(IDS)
        table.write(IDS, torch.zeros(ROWS, WIDTH))
        assert table.read(IDS).count_nonzero() == 0
        gone = weakref.ref(table)
        if how == "closed":
            table.close()
        del table
        assert gone() is None
        until(lambda: "deepnvme table" not in [thread.name for thread in threading.enumerate()])
        assert len(allocated) == 2
        until(lambda: all(each() is None for each in allocated))
    finally:
        gc.enable()


def test_another_writer_waits_for_the_writes_of_a_table_that_was_not_closed(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [filled(drive / "table", updatable=True, memory_budget=4 << 20)]
    released = held(monkeypatch, "scatter")
    quarter = tables[0].stats().cache_capacity // 4
    tables[0].write(IDS[:quarter], torch.zeros(quarter, WIDTH))
    collector = threading.Thread(target=tables.clear)
    collector.start()
    collector.join(0.2)
    assert collector.is_alive()
    with pytest.raises(StoreLocked):
        Table.open(drive / "table", writable=True)
    released.set()
    collector.join()
    Table.open(drive / "table", writable=True).close()


def test_a_drive_that_fails_is_not_asked_again_and_again(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(drive / "table", updatable=True) as table:
        quarter = table.stats().cache_capacity // 4
        asked = 0

        def scatter(*_: Any, **__: Any) -> Any:
            nonlocal asked
            asked += 1
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(Engine, "scatter", scatter)
            table.write(IDS[: 2 * quarter], torch.zeros(2 * quarter, WIDTH))
            for _ in range(20):
                table.read(IDS)
                time.sleep(0.002)
            assert asked <= 2
            with pytest.raises(OSError, match="Input/output"):
                table.commit()
        table.commit()
    with Table.open(drive / "table") as table:
        assert table.read(IDS[: 2 * quarter]).count_nonzero() == 0
