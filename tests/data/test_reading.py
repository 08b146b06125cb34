"""Samples of a batch are read in few ranges, each sample whole."""

from __future__ import annotations

import itertools

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
    begins, ends, firsts, of = (each.tolist() for each in group_runs(places, sector))
    members: dict[int, list[int]] = {}
    for index, run in enumerate(of):
        members.setdefault(run, []).append(index)
    assert sorted(members) == list(range(len(begins)))
    for run, (begin, end, first) in enumerate(zip(begins, ends, firsts, strict=True)):
        found = [samples[index] for index in members[run]]
        assert members[run] == list(range(first, first + len(found)))
        assert {file for file, _, _ in found} == {samples[first][0]}
        assert begin == found[0][1] // sector * sector
        assert end == -(-(found[-1][1] + found[-1][2]) // sector) * sector
        assert all(one[1] + one[2] <= other[1] for one, other in itertools.pairwise(found))
        assert end - begin <= (4 << 20) + found[-1][2] + 2 * sector


def test_samples_that_follow_one_another_in_the_batch_are_read_together_and_others_alone() -> None:
    places = Places(*torch.tensor([[1, 0, 512], [0, 0, 100], [0, 100, 600], [0, 1024, 100], [0, 20_000, 9], [0, 9, 9]]).unbind(1))
    begins, ends, first, of = (each.tolist() for each in group_runs(places, 512))
    assert list(zip(begins, ends, strict=True)) == [(0, 512), (0, 1536), (19_968, 20_480), (0, 512)]
    assert (first, of) == ([0, 1, 4, 5], [0, 1, 1, 1, 2, 3])
