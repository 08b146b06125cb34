"""What a store of weights says of itself."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch

from deepnvme.streaming.manifest import ALIGNMENT, Extent, Manifest, Weight, WeightInfo, decode, encode, laid_out
from deepnvme.swap import CorruptManifest


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "JSONDecodeError"),
        (b"[]\n{}", "AttributeError"),
        (b'{"format": "deepnvme weights", "version": 99}\n{}', r"'deepnvme weights', 99\)"),
        (b'{"format": "deepnvme weights", "version": 1, "crc32": 2745614147}\n{}', "KeyError"),
        (b"\xff", "UnicodeDecodeError"),
        (b"[", "JSONDecodeError"),
    ],
)
def test_a_manifest_that_is_none(drive: Path, data: bytes, match: str) -> None:
    with pytest.raises(CorruptManifest, match=match):
        decode(data, drive)


def test_a_scheme_of_a_later_version_is_refused(drive: Path) -> None:
    extent = laid_out("e", {"w": WeightInfo(torch.bfloat16, (64, 64))}, "int4")
    data = encode(Manifest("", {"e": extent}, {}, {})).partition(b"\n")[2].rstrip().replace(b"int4", b"int2")
    head = b'{"format": "deepnvme weights", "version": 1, "crc32": %d}\n' % zlib.crc32(data)
    with pytest.raises(CorruptManifest, match="'w' is quantised to 'int2', which this version does not know"):
        decode(head + data, drive)


def test_a_manifest_comes_back(drive: Path) -> None:
    infos = {"w": WeightInfo(torch.bfloat16, (64, 64)), "é\ud800": WeightInfo(torch.bool, ())}
    extent = laid_out("e", infos, "int4")
    manifest = Manifest("Model", {"e": extent}, {"b": ("e",)}, {"alias": "w"})
    assert decode(encode(manifest), drive) == manifest


def test_extents_that_are_not_as_long_as_their_weights_are_refused(drive: Path) -> None:
    data = encode(Manifest("", {"e": laid_out("e", {"w": WeightInfo(torch.float32, (3,))})}, {}, {}))
    body = data.partition(b"\n")[2].rstrip().replace(b'"e",4096', b'"e",8192')
    head = b'{"format": "deepnvme weights", "version": 1, "crc32": %d}\n' % zlib.crc32(body)
    with pytest.raises(CorruptManifest, match="extent 'e' has 8192 bytes, and its weights 4096"):
        decode(head + body, drive)


def test_a_quantised_weight_is_no_view_of_its_bytes() -> None:
    extent = laid_out("e", {"w": WeightInfo(torch.bfloat16, (64, 64))}, "int8")
    with pytest.raises(ValueError, match="'w' is quantised to int8: dequantize"):
        extent.weights[0].view(torch.zeros(extent.nbytes, dtype=torch.uint8))


def test_weights_are_laid_one_after_the_other_aligned() -> None:
    extent = laid_out("e", {f"w{size}": WeightInfo(torch.uint8, (size,)) for size in (1, 64, 65, 0, 4000)})
    assert [weight.offset for weight in extent.weights] == [0, 64, 128, 256, 256]
    assert all(weight.offset % ALIGNMENT == 0 for weight in extent.weights)
    assert extent.nbytes == 8192
    assert Extent("empty", ()).nbytes == 0


def test_only_what_is_smaller_for_it_is_quantised() -> None:
    infos = {
        "large": WeightInfo(torch.bfloat16, (64, 64)),
        "small": WeightInfo(torch.bfloat16, (63, 64)),
        "vector": WeightInfo(torch.bfloat16, (4096,)),
        "whole": WeightInfo(torch.int64, (64, 64)),
    }
    extent = laid_out("e", infos, "int8")
    assert [weight.name for weight in extent.weights if weight.scheme] == ["large"]


def test_a_weight_is_a_view_of_the_bytes_of_its_extent() -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    weight = Weight("w", WeightInfo(torch.float32, (2, 3)), 64)
    weight.view(memory).fill_(1)
    assert memory[:64].count_nonzero() == 0
    assert memory[64:88].view(torch.float32).equal(torch.ones(6))
    assert memory[88:].count_nonzero() == 0
