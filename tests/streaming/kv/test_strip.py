"""Forms of keys and values, and strips of positions that grow."""

from __future__ import annotations

import pytest
import torch

from deepnvme.streaming.kv.strip import KVShape, Pair, Strip, in_one_thread

from .states import states


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8, dtype=torch.bfloat16)),
        (torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8, device="meta")),
        (torch.zeros(2, 2, 1, 8), torch.zeros(3, 2, 1, 8)),
        (torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 2, 8)),
        (torch.zeros(2, 1, 8), torch.zeros(2, 1, 8)),
    ],
    ids=["dtype", "device", "batch", "positions", "dimensions"],
)
def test_keys_and_values_that_are_no_pair_are_refused(keys: torch.Tensor, values: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"\[batch, heads, positions, dim\].*got"):
        KVShape.of(keys, values)


def test_keys_and_values_may_have_heads_of_their_own() -> None:
    keys, values = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 4)
    form = KVShape.of(keys, values)
    assert form.position_bytes * 5 == keys.nbytes + values.nbytes
    mine = form.pair(torch.empty(form.position_bytes * 5, dtype=torch.uint8), 5)
    assert [each.shape for each in mine] == [keys.shape, values.shape]
    assert all(each.is_contiguous() for each in mine)


def made_strip(pair: Pair, start: int = 0) -> Strip:
    strip = Strip(KVShape.of(*pair), lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), start)
    strip.append(*pair)
    return strip


def test_a_view_stays_what_it_is_while_positions_are_appended() -> None:
    strip = made_strip(states(positions=10))
    before = strip.view(0, 10)
    for seed in range(5000):
        strip.append(*states(seed=seed))
    assert all(map(torch.equal, before, states(positions=10)))
    assert all(map(torch.equal, strip.view(0, 10), before))
    assert all(map(torch.equal, strip.view(5009, 5010), states(seed=4999)))


def test_positions_that_are_forgotten_give_their_memory_back_when_more_is_needed() -> None:
    strip = made_strip(states(positions=3000))
    strip.keep(2990, 2995)
    assert (strip.start, strip.end) == (2990, 2995)
    before = strip.nbytes
    strip.append(*states(positions=2000, seed=1))
    assert strip.nbytes < before
    keys, _ = strip.view(2990, 4995)
    assert torch.equal(keys, torch.cat([states(positions=3000)[0][:, :, 2990:2995], states(positions=2000, seed=1)[0]], dim=2))


@pytest.mark.parametrize(("begin", "end"), [(0, 2), (9, 12), (4, 4)])
def test_a_strip_that_keeps_nothing_is_empty_where_it_was(begin: int, end: int) -> None:
    strip = made_strip(states(positions=4), start=4)
    strip.keep(begin, end)
    assert strip.start == strip.end
    assert 4 <= strip.start <= 8


def test_rows_are_selected_in_their_order() -> None:
    strip = made_strip(states(positions=6), start=3)
    strip.select(torch.tensor([1, 1, 0]))
    assert strip.form.batch == 3
    assert all(torch.equal(mine, theirs[[1, 1, 0]]) for mine, theirs in zip(strip.view(3, 9), states(positions=6), strict=True))


def test_threads_are_given_back_after_an_error() -> None:
    torch.set_num_threads(2)
    counts: list[int] = []

    def copying() -> None:
        counts.append(torch.get_num_threads())

    in_one_thread(copying)
    with pytest.raises(ZeroDivisionError):
        in_one_thread(lambda: 1 / 0)
    assert counts == [1]
    assert torch.get_num_threads() == 2
