"""Rows that are changed: read as they were written at once, and kept by a commit."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from deepnvme.tables import State, Table

from ..support.examples import examples

VALUES = torch.arange(600.0).view(200, 3)


STATES = {
    "flag": State(torch.uint8, (1,), 7),
    "sum": State(torch.complex128, (2,), 0.5),
    "step": State(torch.int16, ()),
    "mean": State(torch.bfloat16, (3,), 1.0),
}


@pytest.mark.parametrize("updatable", [True, False])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.complex128])
def test_states_of_any_dtype_are_beside_the_rows(drive: Path, dtype: torch.dtype, updatable: bool) -> None:
    ids = torch.randperm(100)
    values = torch.arange(500).view(100, 5).to(dtype)
    table = Table.create(
        drive / "table", 100, 5, dtype, values=lambda begin, end: values[begin:end], states=STATES, updatable=updatable
    )
    with table:
        assert table.states == {name: (state.dtype, state.shape) for name, state in STATES.items()}
        assert torch.equal(table.read(ids), values[ids])
        found = table.read_records(ids)
        assert torch.equal(found["values"], values[ids])
        for name, state in STATES.items():
            assert torch.equal(found[name], torch.full((100, *state.shape), state.initial, dtype=state.dtype)), name
        if not updatable:
            return
        steps = torch.arange(100, dtype=torch.int16)
        sums = torch.randn(100, 2, dtype=torch.complex128)
        table.write_records(ids, {"step": steps, "sum": sums})
        table.write(ids[:10], values[ids[10:20]])
        table.commit()
    with Table.open(drive / "table") as table:
        found = table.read_records(ids)
        assert torch.equal(found["step"], steps)
        assert torch.equal(found["sum"], sums)
        assert found["flag"].eq(7).all()
        assert torch.equal(found["values"], torch.cat([values[ids[10:20]], values[ids[10:]]]))


def test_commits_are_numbered_and_those_without_changes_do_nothing(drive: Path) -> None:
    with Table.from_tensor(drive / "table", VALUES, updatable=True) as table:
        first = table.commit()
        table.write(torch.tensor([0]), VALUES[1:2])
        second = table.commit()
        assert second > first
        assert table.commit() == second
        assert table.stats().commits == 1


def test_attributes_are_committed_with_the_rows(drive: Path) -> None:
    noted = {"step": 5, "history": [1.5, float("inf")], "name": "ü"}
    with Table.from_tensor(drive / "table", VALUES, updatable=True) as table:
        assert table.attributes == {}
        first = table.commit(noted)
        assert table.attributes == noted
        table.attributes["history"].append(2)
        noted["history"].append(3)  # type: ignore[attr-defined]
        assert table.attributes["history"] == [1.5, float("inf")]
        assert table.commit(noted) > first, "what the caller has changed since is not noticed"
        table.write(torch.tensor([0]), VALUES[1:2])
        table.commit()
        with pytest.raises(ValueError, match="serialize"):
            table.commit({"object": object()})
        table.commit()
    with Table.open(drive / "table") as table:
        assert table.attributes == noted


class ChangedTable(RuleBasedStateMachine):
    """A table with a cache that is too small, and the same rows in memory."""

    rows = 150
    io_dir: Path

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(dir=self.io_dir))
        self.table: Table | None = None

    @initialize(
        volumes=st.integers(1, 3),
        width=st.sampled_from([1, 60, 63, 64, 200, 1500]),
        budget=st.sampled_from([0, 20 << 10, 1 << 20]),
        zeros=st.booleans(),
    )
    def create(self, volumes: int, width: int, budget: int, zeros: bool) -> None:
        self.volumes, self.width, self.budget, self.turn, self.futures = volumes, width, budget, 0, []
        self.now = torch.zeros(self.rows, width, dtype=torch.int64)
        if not zeros:
            self.now += torch.arange(self.rows * width).view(self.rows, width)
        self.table = Table.create(
            self.directories(), self.rows, (width,), torch.int64,
            values=None if zeros else lambda begin, end: self.now[begin:end],
            states={"count": State(torch.int32, ())}, memory_budget=budget,
        )  # fmt: skip
        self.counts = torch.zeros(self.rows, dtype=torch.int32)
        self.committed = self.now.clone(), self.counts.clone()

    def directories(self) -> list[Path]:
        return [self.place / str(number) for number in range(self.volumes)]

    ids = st.lists(st.integers(0, rows - 1), max_size=120)

    @rule(ids=ids)
    def write(self, ids: list[int]) -> None:
        assert self.table is not None
        self.turn += 1
        values = torch.arange(len(ids) * self.width).view(-1, self.width) * 1000 + self.turn
        self.table.write(torch.tensor(ids, dtype=torch.int64), values)
        for position, row in enumerate(ids):
            self.now[row] = values[position]

    @rule(ids=ids, whole=st.booleans())
    def write_records(self, ids: list[int], whole: bool) -> None:
        assert self.table is not None
        self.turn += 1
        numbers = torch.tensor(sorted(set(ids)), dtype=torch.int64)
        columns = {"count": self.counts[numbers] + 1}
        if whole:
            columns["values"] = self.now[numbers] - self.turn
            self.now[numbers] = columns["values"]
        self.table.write_records(numbers, columns)
        self.counts[numbers] += 1

    @rule(ids=ids, ahead=st.booleans())
    def read(self, ids: list[int], ahead: bool) -> None:
        assert self.table is not None
        numbers = torch.tensor(ids, dtype=torch.int64)
        if ahead:
            self.table.prefetch(numbers)
        assert torch.equal(self.table.read(numbers), self.now[numbers])
        found = self.table.read_records(numbers)
        assert torch.equal(found["values"], self.now[numbers])
        assert torch.equal(found["count"], self.counts[numbers])

    @rule(ids=ids)
    def prefetch(self, ids: list[int]) -> None:
        assert self.table is not None
        self.table.prefetch(torch.tensor(ids, dtype=torch.int64))

    @rule()
    def commit(self) -> None:
        assert self.table is not None
        self.table.commit({"turn": self.turn})
        self.committed = self.now.clone(), self.counts.clone()

    @rule()
    def rollback(self) -> None:
        assert self.table is not None
        self.table.rollback()
        self.now, self.counts = self.committed[0].clone(), self.committed[1].clone()

    @rule(closed=st.booleans())
    def reopen(self, closed: bool) -> None:
        """Or find it as after a kill: from a copy of what is on the drive."""
        assert self.table is not None
        if not closed:
            self.table.stats()
            copy = self.place.with_name(self.place.name + "-copy")
            shutil.copytree(self.place, copy, ignore=shutil.ignore_patterns("*.lock"))
            self.table.close()
            shutil.rmtree(self.place)
            copy.rename(self.place)
        self.table.close()
        self.table = Table.open(self.directories(), writable=True, memory_budget=self.budget)
        self.now, self.counts = self.committed[0].clone(), self.committed[1].clone()
        assert torch.equal(self.table.read(torch.arange(self.rows)), self.now)

    def teardown(self) -> None:
        if self.table is not None:
            self.table.close()
        shutil.rmtree(self.place)


def _run(io_dir: Path, tries: int, steps: int) -> None:
    class Machine(ChangedTable):
        pass

    Machine.io_dir = io_dir
    Machine.TestCase.settings = settings(max_examples=tries, stateful_step_count=steps, deadline=None)
    Machine.TestCase().runTest()


def test_changes_are_those_of_a_tensor_in_memory(io_dir: Path) -> None:
    _run(io_dir, examples(24), 15)
