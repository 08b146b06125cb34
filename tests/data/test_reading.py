"""Samples of a batch are read in few ranges, each sample whole."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from deepnvme.data.layouts import Places
from deepnvme.data.reading import group_runs

OFFSETS = st.one_of(st.integers(0, 30_000), st.integers(0, 1 << 40))
SAMPLES = st.tuples(st.integers(0, 3), OFFSETS, st.one_of(st.integers(0, 9000), st.integers(0, 1 << 23)))


@given(samples=st.lists(SAMPLES, max_size=30), sector=st.sampled_from([1, 512, 4096]))
def test_each_sample_is_in_its_run(samples: list[tuple[int, int, int]], sector: int) -> None:
    places = Places(*torch.tensor(samples, dtype=torch.int64).view(-1, 3).unbind(1))
    runs = group_runs(places, sector)
    members: dict[int, list[int]] = {}
    for index, run in enumerate(runs.of.tolist()):
        members.setdefault(run, []).append(index)
    assert sorted(members) == list(range(len(runs.begins)))
    assert runs.first.tolist() == sorted(runs.first.tolist())
    for run, (begin, end, first) in enumerate(zip(*(each.tolist() for each in runs[:3]), strict=True)):
        found = [samples[index] for index in members[run]]
        assert first in members[run]
        assert {file for file, _, _ in found} == {samples[first][0]}
        assert begin == min(offset for _, offset, _ in found) // sector * sector
        assert end == -(-max(offset + nbytes for _, offset, nbytes in found) // sector) * sector
        assert end - begin <= (4 << 20) + max(nbytes for _, _, nbytes in found) + 2 * sector


def test_neighbours_are_read_together_and_others_alone() -> None:
    places = Places(*torch.tensor([[0, 1024, 100], [1, 0, 512], [0, 0, 100], [0, 20_000, 9], [0, 100, 600]]).unbind(1))
    runs = group_runs(places, 512)
    assert list(zip(runs.begins.tolist(), runs.ends.tolist(), strict=True)) == [(0, 512), (0, 1536), (19_968, 20_480)]
    assert runs.of.tolist() == [1, 0, 1, 2, 1]
