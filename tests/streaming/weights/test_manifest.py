"""What a store of weights says of itself."""

from __future__ import annotations

import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepnvme.model.quantization import ALIGNMENT
from deepnvme.model.weight_differences import WeightInfo
from deepnvme.streaming.weights.manifest import (
    LARGEST,
    Extent,
    WeightManifest,
    decode,
    encode,
    layout_extent,
)
from deepnvme.swap import CorruptManifest


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "JSONDecodeError"),
        (b"[]\n{}", "expected an object"),
        (b'{"format": "deepnvme weights", "version": 99}\n{}', r"'deepnvme weights', 99\)"),
        (b'{"format": "deepnvme weights", "version": 1, "crc32": 2745614147}\n{}', "KeyError"),
        (b"[" * 60_000, "RecursionError"),
        (b"[" * (1 << 20), "at most 65536 are allowed"),
        (b"\xff", "UnicodeDecodeError"),
        (b"[", "JSONDecodeError"),
    ],
)
def test_a_manifest_that_is_none(drive: Path, data: bytes, match: str) -> None:
    with pytest.raises(CorruptManifest, match=match):
        decode(data, drive)


BODY = '{"model":"","extents":[["e",0,0,[%s]]],"blocks":{},"ties":{},"origin":""}'
WRONG = {
    "brackets": "[" * (16 << 20),
    "lists": BODY % ("[]," * (4 << 20) + "[]"),
    "infinity": BODY % '["w","float32",[Infinity],0]',
    "empty numbers": BODY % ('["w","float32",[' + "," * (8 << 20) + "],0]"),
    "digits": BODY % ('["w","float32",[' + "1" * (8 << 20) + "],0]"),
    "escapes": BODY % ('["' + "\\a" * (4 << 20) + '","float32",[1],0]'),
    "no dtype": BODY % '["w","nn",[1],0]',
    "an object as origin": (BODY % "").replace('"origin":""', '"origin":{}'),
    "numbers as blocks": (BODY % "").replace('"blocks":{}', '"blocks":{"b":[' + "1," * (8 << 20) + "1]}"),
    "more behind it": BODY % "" + "{}",
    "a checksum of text": (BODY % "").replace("0,0", '0,"1"'),
}


@pytest.mark.parametrize("how", WRONG)
def test_what_encode_does_not_write_is_refused_at_once(drive: Path, how: str) -> None:
    body = WRONG[how].encode()
    data = b'{"format": "deepnvme weights", "version": 1, "crc32": %d}\n' % zlib.crc32(body) + body
    tracemalloc.start()
    try:
        with pytest.raises(CorruptManifest) as refused:
            decode(data, drive)
        assert tracemalloc.get_traced_memory()[1] < 40 * len(data) + (1 << 20)
    finally:
        tracemalloc.stop()
    assert refused.value.filename == str(drive)


def test_what_could_not_be_decoded_is_not_encoded() -> None:
    with pytest.raises(ValueError, match=f"may have {LARGEST}"):
        encode(WeightManifest("", {}, {}, {f"{number:060000}": "w" for number in range(LARGEST // 60_000 + 1)}))


def test_a_manifest_comes_back(drive: Path) -> None:
    infos = {"w": WeightInfo(torch.bfloat16, (64, 64)), "é\ud800": WeightInfo(torch.bool, ())}
    extent = replace(layout_extent("e", infos, "int4"), crc32=7)
    manifest = WeightManifest("Model", {"e": extent}, {"b": ("e",)}, {"alias": "w"})
    assert decode(encode(manifest), drive) == manifest


@pytest.mark.parametrize(
    ("written", "changed", "match"),
    [
        (b"int4", b"int2", "'w' is quantised to 'int2', which this version does not know"),
        (b'"e",4096', b'"e",8192', "extent 'e' has 8192 bytes, and its weights 4096"),
    ],
)
def test_a_manifest_that_contradicts_itself_or_is_of_a_later_version_is_refused(
    drive: Path, written: bytes, changed: bytes, match: str
) -> None:
    extent = replace(layout_extent("e", {"w": WeightInfo(torch.bfloat16, (64, 64))}, "int4"), crc32=7)
    body = encode(WeightManifest("", {"e": extent}, {}, {})).partition(b"\n")[2].rstrip()
    assert written in body
    body = body.replace(written, changed)
    head = b'{"format": "deepnvme weights", "version": 1, "crc32": %d}\n' % zlib.crc32(body)
    with pytest.raises(CorruptManifest, match=match):
        decode(head + body, drive)


def test_weights_are_laid_one_after_the_other_aligned() -> None:
    extent = layout_extent("e", {f"w{size}": WeightInfo(torch.uint8, (size,)) for size in (1, 64, 65, 0, 4000)})
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
    extent = layout_extent("e", infos, "int8")
    assert [weight.name for weight in extent.weights if weight.scheme] == ["large"]
