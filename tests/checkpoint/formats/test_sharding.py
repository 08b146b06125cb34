"""Which bytes of a whole tensor a shard is: as an index that is sharded in the same way says."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from deepnvme.checkpoint.formats.sharding import Span, byte_runs, part_of_spans


def offsets_of(runs: list[Span]) -> list[int]:
    """Of every byte, in the order of the shard."""
    return [offset for run in runs for offset in range(*run)]


@pytest.mark.parametrize(("total", "count", "split"), [(10, 3, 2), (8, 3, 2)])
def test_uneven_strides_are_refused(total: int, count: int, split: int) -> None:
    with pytest.raises(ValueError, match=f"{total} in {count} shards of {split} strides are uneven: save the full_tensor"):
        part_of_spans([(0, total)], count, 0, split)


@pytest.mark.parametrize(("size", "steps"), [
    (7, [(2, 1)]), (2, [(3, 1)]), (1, [(4, 1)]), (0, [(2, 1)]), (12, [(2, 1), (3, 1)]), (7, [(2, 1), (2, 1)]),
    (12, [(2, 3), (3, 1)]), (16, [(2, 4), (2, 2), (2, 1)]),
])  # fmt: skip
def test_a_dimension_is_sharded_as_a_tensor_is(size: int, steps: list[tuple[int, int]]) -> None:
    covered = []
    for indices in itertools.product(*(range(count) for count, _ in steps)):
        expected, spans = torch.arange(size), [(0, size)]
        for (count, split), index in zip(steps, indices, strict=True):
            chunks = list(expected.chunk(count * split))
            chunks += [expected[:0]] * (count * split - len(chunks))
            expected, spans = torch.cat(chunks[index::count]), part_of_spans(spans, count, index, split)
        found = [each for span in spans for each in range(*span)]
        assert found == expected.tolist()
        assert all(one[1] != other[0] for one, other in itertools.pairwise(spans))
        covered += found
    assert sorted(covered) == list(range(size))


@pytest.mark.parametrize(("shape", "held"), [
    ((), []), ((5,), [[(1, 3)]]), ((4, 6), [[(0, 4)], [(0, 6)]]), ((4, 6), [[(1, 3)], [(0, 6)]]),
    ((4, 6), [[(0, 4)], [(2, 5)]]), ((4, 6), [[(0, 1), (3, 4)], [(0, 2), (4, 6)]]), ((2, 3, 4), [[(0, 2)], [(1, 2)], [(0, 4)]]),
    ((2, 3, 4), [[(1, 2)], [(0, 3)], [(3, 4)]]), ((3, 4), [[], [(0, 4)]]), ((3, 4), [[(0, 3)], []]),
])  # fmt: skip
@pytest.mark.parametrize("itemsize", [1, 4])
def test_runs_are_where_the_elements_lie(shape: tuple[int, ...], held: list[list[tuple[int, int]]], itemsize: int) -> None:
    index = torch.arange(math.prod(shape)).view(shape)
    for dim, spans in enumerate(held):
        index = index.index_select(dim, torch.tensor([each for span in spans for each in range(*span)], dtype=torch.int64))
    expected = [element * itemsize + byte for element in index.reshape(-1).tolist() for byte in range(itemsize)]
    runs = byte_runs(shape, held, itemsize)
    assert offsets_of(runs) == expected
    if held[:1] == [[(1, 3)]]:
        assert len(runs) == 1
