"""What transformers would make of tensors is read right where it belongs, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

from deepnvme.checkpoint.weight_locations import Location
from deepnvme.model.weight_differences import WeightInfo
from deepnvme.streaming.merged_weights import merged


def converter(*operations: Any) -> WeightConverter:
    return WeightConverter(["experts.*.w1", "experts.*.w3"], "experts.merged", operations=list(operations))


def located(tensors: dict[str, list[torch.Tensor]]) -> tuple[dict[str, list[Location]], bytes]:
    """The tensors one after another in a file, in an order of its own, and the bytes of the file."""
    contents, places = b"", dict[str, list[Location]]()
    for pattern, several in reversed(tensors.items()):
        for tensor in several:
            places.setdefault(pattern, []).append(Location("file", len(contents), WeightInfo.of(tensor)))
            contents += tensor.numpy().tobytes()
    return places, contents


@pytest.mark.parametrize(
    ("operations", "contiguous"),
    [
        ([MergeModulelist(0), Concatenate(1)], True),  # as most mixtures have them
        ([MergeModulelist(0), Concatenate(0)], True),
        ([MergeModulelist(0), Concatenate(2)], False),
        ([MergeModulelist(0), Concatenate(-1)], False),
        ([MergeModulelist(1), Concatenate(1)], False),
        ([Concatenate(0)], True),
        ([Concatenate(1)], False),
    ],
)
def test_what_is_read_is_what_transformers_makes(operations: list[Any], contiguous: bool) -> None:
    numbers = torch.arange(1000, dtype=torch.float32).split(24)
    tensors = {f"experts.*.w{number}": [numbers[2 * index + number].view(4, 6) for index in range(5)] for number in (1, 3)}
    places, contents = located(tensors)
    weight = merged(converter(*operations), places)
    assert (weight is not None) == contiguous
    if weight is None:
        return
    made: Any = {pattern: list(several) for pattern, several in tensors.items()}
    patterns = {"source_patterns": list(tensors), "target_patterns": ["experts.merged"]}
    for operation in operations:
        made = operation.convert(made, **patterns)
    (expected,) = made.values()
    assert weight.info == WeightInfo.of(expected)
    read = bytearray(expected.nbytes)
    for piece in weight.pieces:
        assert len(read) > piece.place >= 0
        read[piece.place : piece.place + piece.nbytes] = contents[piece.offset : piece.offset + piece.nbytes]
    assert torch.equal(torch.frombuffer(read, dtype=expected.dtype).view(expected.shape), expected)
    assert sum(piece.nbytes for piece in weight.pieces) == expected.nbytes


def test_other_operations_and_mixed_dtypes_are_refused_and_shapes_have_to_fit() -> None:
    places = {"experts.*.w1": [Location("file", 0, WeightInfo(torch.float32, (2, 3)))]}
    other = {"experts.*.w3": [Location("file", 24, WeightInfo(torch.float16, (2, 3)))]}
    assert merged(converter(MergeModulelist(0), Transpose(1, 2)), places) is None
    assert merged(converter(MergeModulelist(0), Concatenate(1)), {**places, **other}) is None
    assert merged(converter(Concatenate(0)), {"experts.*.w1": [torch.empty(0, 3)]}) is None
    wrong = {"experts.*.w3": [Location("file", 24, WeightInfo(torch.float32, (2, 4)))]}
    with pytest.raises(ValueError, match=r"\(2, 3\), \(2, 4\).* cannot be merged along 0"):
        merged(converter(Concatenate(0)), {**places, **wrong})
