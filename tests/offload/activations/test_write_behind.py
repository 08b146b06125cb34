"""Which saved bytes are written, and when."""

from __future__ import annotations

import torch

from deepnvme.offload.activations.saved_bytes import SavedBytes
from deepnvme.offload.activations.write_behind import WriteBehindPolicy

LIMIT = 400
"""Bytes in memory: four of 100."""


def saved(number: int, nbytes: int = 100) -> SavedBytes:
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    return SavedBytes(number, tensor.untyped_storage(), (0, nbytes), tensor)


def step(policy: WriteBehindPolicy, count: int, last: int, limit: int = LIMIT) -> list[list[int]]:
    """Save ``count`` times 100 bytes. Returns the numbers of what is to be written before each."""
    policy.begin_step(last)
    due = []
    for number in range(count):
        due.append([each.number for each in policy.due(100, 100 * number, limit)])
        policy.add(saved(number))
    return due


def dropped(policy: WriteBehindPolicy) -> None:
    for each in list(policy._candidates):
        policy.remove(each)


def test_what_fits_is_never_written_once_its_size_is_known() -> None:
    policy = WriteBehindPolicy()
    for last in (0, 400, 400):
        due = step(policy, 4, last)
        assert policy.candidate_bytes == 400 - 100 * sum(map(len, due))
        dropped(policy)
    assert due == [[], [], [], []]


def test_a_first_step_writes_the_oldest_ahead_of_the_need() -> None:
    due = step(WriteBehindPolicy(), 6, 0)
    assert due == [[], [], [0], [1], [2], [3]]  # more than half of the limit is not saved without writing


def test_a_known_step_writes_from_its_beginning_on_and_no_more_than_has_no_room() -> None:
    policy = WriteBehindPolicy()
    for last in (0, 1000):
        step(policy, 10, last)
        dropped(policy)
    assert step(policy, 10, 1000) == [[], [0], [1], [2], [3], [4], [5], [], [], []]
    assert policy.candidate_bytes == LIMIT


def test_of_steps_of_two_sizes_the_smaller_is_expected() -> None:
    policy = WriteBehindPolicy()
    for count, last in ((10, 0), (4, 1000)):
        step(policy, count, last)
        dropped(policy)
    assert step(policy, 4, 400) == [[], [], [], []]


def test_steps_that_save_nothing_are_not_expected() -> None:
    policy = WriteBehindPolicy()
    for count, last in ((10, 0), (10, 1000), (0, 1000), (0, 0)):
        step(policy, count, last)
        dropped(policy)
    assert step(policy, 10, 0)[1] == [0]


def test_what_was_removed_is_not_chosen() -> None:
    policy = WriteBehindPolicy()
    kept, gone = saved(0), saved(1)
    for each in (gone, kept):
        policy.add(each)
    policy.remove(gone)
    policy.remove(gone)
    assert policy.candidate_bytes == 100
    assert list(policy.due(1000, 0, LIMIT)) == [kept]
    assert policy.candidate_bytes == 0
    assert list(policy.due(1000, 0, LIMIT)) == []
