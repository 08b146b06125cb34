"""Rows that are read by number are those of the same tensor in memory, whatever their size, dtype, number and order."""

from __future__ import annotations

import concurrent.futures
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepnvme.tables import Table

from ..support.examples import examples
from ..support.memory import EXCHANGES

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128,
]  # fmt: skip
ID_DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]


def values_of(rows: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bytes, but for what is no bool."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (rows, *shape), generator=generator).bool()
    count = rows * torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype).view(rows, *shape)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Of the same bytes: NaN is equal to itself."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    # Copies: what has one element or none may be contiguous with any strides.
    ours, theirs = (each.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8) for each in (left, right))
    return torch.equal(ours, theirs)


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    dtype = draw(st.sampled_from(DTYPES))
    numel = draw(st.one_of(st.integers(1, 40), st.integers(1, (20 << 10) // dtype.itemsize)))
    shape = draw(st.sampled_from([(numel,), (1, numel), (numel, 1)])) if numel > 1 else draw(st.sampled_from([(), (1,)]))
    most = max((1 << 20) // (numel * dtype.itemsize), 2)
    return {
        "rows": draw(st.integers(1, min(most, 3000))),
        "shape": shape,
        "dtype": dtype,
        "directories": draw(st.integers(1, 3)),
        "updatable": draw(st.booleans()),
        "memory_budget": draw(st.sampled_from([0, 1, 1000, 20 << 10, 100 << 10, 4 << 20])),
    }


@settings(max_examples=examples(40), deadline=None)
@given(made=tables(), data=st.data())
def test_reads_are_what_indexing_gives(io_dir: Path, made: dict[str, Any], data: st.DataObject) -> None:
    place = Path(tempfile.mkdtemp(dir=io_dir))
    try:
        rows, directories = made["rows"], [place / str(number) for number in range(made["directories"])]
        values = values_of(rows, made["shape"], made["dtype"])
        table = Table.from_tensor(directories, values, updatable=made["updatable"], memory_budget=made["memory_budget"])
        with table:
            for _ in range(data.draw(st.integers(1, 6), label="reads")):
                dtype = data.draw(st.sampled_from(ID_DTYPES), label="dtype of ids")
                shape = data.draw(st.sampled_from([(), (0,), (1,), (50,), (7, 11), (2, 0, 3), (3, 1, 40)]), label="shape of ids")
                most = min(rows, torch.iinfo(dtype).max)
                ids = torch.randint(0, most, shape).to(dtype)
                expected = values[ids.to(torch.int64)]
                way = data.draw(st.sampled_from(["read", "out", "askew", "async", "prefetch"]), label="way")
                if way == "read":
                    assert same(table.read(ids), expected)
                elif way == "async":
                    assert same(table.read_async(ids).result(), expected)
                elif way == "prefetch":
                    table.prefetch(ids)
                    assert same(table.read(ids), expected)
                else:
                    out = torch.empty_like(expected)
                    if way == "askew":
                        out = torch.empty(*expected.shape, 2, dtype=expected.dtype)[..., 0]
                    assert table.read(ids, out) is out
                    assert same(out, expected)
    finally:
        shutil.rmtree(place)


@pytest.fixture
def values() -> torch.Tensor:
    return values_of(2000, (75,), torch.float32)


@pytest.fixture
def table(drive: Path, values: torch.Tensor) -> Any:
    """Whose cache has room for some hundred rows."""
    with Table.from_tensor(drive / "table", values, memory_budget=64 << 10) as table:
        yield table


def test_out_of_another_shape_or_dtype_is_refused(table: Table) -> None:
    ids = torch.arange(4)
    with pytest.raises(ValueError, match=r"\(4, 75\)"):
        table.read(ids, torch.empty(75, 4))
    with pytest.raises(TypeError, match="float32"):
        table.read(ids, torch.empty(4, 75, dtype=torch.float64))
    assert table.stats().misses == 0


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
def test_rows_are_read_into_the_memory_that_out_had_at_the_call(
    table: Table, values: torch.Tensor, exchange: Callable[[torch.Tensor, torch.Tensor], object]
) -> None:
    ids = torch.arange(0, 2000, 4)
    out, other = torch.zeros(500, 75), torch.full((500, 75), 7.0)
    memory = weakref.ref(out.untyped_storage())
    future = table.read_async(ids, out)
    exchange(out, other)
    del other  # whose memory out has now
    kept = memory()
    assert kept is not None
    future.result()
    assert torch.equal(out, torch.full((500, 75), 7.0))
    read = torch.empty(0).set_(kept, 0, (500, 75))  # type: ignore[call-overload]
    assert same(read, values[ids])
    del future, read, kept
    assert memory() is None


def test_neighbours_are_read_together(drive: Path) -> None:
    values = values_of(1000, (128,), torch.float32)
    with Table.from_tensor(drive / "table", values, memory_budget=0) as table:
        table.read(torch.arange(8))
        assert table.stats().bytes_read == 8 * 512


def test_without_a_budget_nothing_stays_in_memory(drive: Path, values: torch.Tensor) -> None:
    with Table.from_tensor(drive / "table", values, memory_budget=0) as table:
        ids = torch.arange(50)
        for _ in range(2):
            table.prefetch(ids)
            assert same(table.read(ids), values[:50])
        assert table.stats().cache_capacity == 0
        assert table.stats().rows_read == 100, "what is prefetched without memory for it is read in vain"


def test_rows_that_were_prefetched_count_as_hits(table: Table, values: torch.Tensor) -> None:
    ids = torch.arange(100, 150)
    table.prefetch(ids)
    table.read(ids)
    assert table.stats().rows_read == 50, "a read has not waited for the prefetch"
    assert same(table.read(ids), values[ids])
    stats = table.stats()
    assert stats.hits + stats.misses == 100, "a prefetch is not asked for by anybody"


def test_ids_may_be_changed_once_a_read_has_begun(drive: Path, values: torch.Tensor) -> None:
    with Table.from_tensor(drive / "table", values, updatable=True) as table:
        ids = torch.arange(100)
        future = table.read_async(ids)
        ids.zero_()
        assert same(future.result(), values[:100])


def test_a_future_may_be_asked_after_its_table_is_closed(drive: Path, values: torch.Tensor) -> None:
    table = Table.from_tensor(drive / "table", values)
    future = table.read_async(torch.arange(500))
    table.close()
    assert same(future.result(), values[:500])


@pytest.mark.parametrize("budget", [0, 64 << 10])
def test_threads_read_at_a_time(drive: Path, values: torch.Tensor, budget: int) -> None:
    with Table.from_tensor([drive / "a", drive / "b"], values, memory_budget=budget) as table:

        def read(seed: int) -> bool:
            generator = torch.Generator().manual_seed(seed)
            for turn in range(25):
                ids = torch.randint(0, 2000, (300,), generator=generator)
                if turn % 5 == 0:
                    table.prefetch(ids[:100])
                rows = table.read(ids) if turn % 2 else table.read_async(ids).result()
                if not same(rows, values[ids]):
                    return False
            return True

        with concurrent.futures.ThreadPoolExecutor(6) as threads:
            assert all(threads.map(read, range(6)))


@pytest.mark.parametrize("rows", [1, 3, 437, 438, 875, 1313])
def test_rows_are_striped_unevenly(drive: Path, rows: int) -> None:
    values = values_of(rows, (300,), torch.uint8)  # 218 rows are next to one another in each directory
    with Table.from_tensor([drive / "a", drive / "b", drive / "c"], values) as table:
        ids = torch.randperm(rows)
        assert same(table.read(ids), values[ids])


def test_a_table_of_no_rows_reads_none(drive: Path) -> None:
    with Table.create(drive / "table", 0, (3,), torch.float32) as table:
        assert table.read(torch.empty(2, 0, dtype=torch.int32)).shape == (2, 0, 3)
        table.write(torch.empty(0, dtype=torch.int64), torch.empty(0, 3))
        table.commit()
        with pytest.raises(IndexError, match="no rows"):
            table.read(torch.tensor([0]))
