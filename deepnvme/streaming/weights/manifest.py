"""What a store of weights says of itself: a tensor of it, two lines of JSON, the first with the checksum of the second."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepnvme.memory.alignment import padded
from deepnvme.memory.tensor_bytes import dtype_named
from deepnvme.store.manifest import CorruptManifest, check_length, string_at

from .quantization import SCHEMES, QuantizedLayout, Scheme, dequantize, is_worth_quantizing

NAME = "manifest"
"""The tensor's."""
_WHOLE = 4096
"""Bytes: what is read directly, on any drive."""
ALIGNMENT = 64
"""Bytes: a weight begins at a multiple of this in its extent, for the processor's widest vectors."""
_FORMAT = "deepnvme weights"
_VERSION = 1

LARGEST = 64 << 20
"""Bytes of a manifest: of half a million weights."""
_LONGEST_LINE = 64 << 10
"""Bytes of its first line."""
_EXTENT = re.compile(r",([0-9]{1,19}),(null|[0-9]{1,10}),\[")
_WEIGHT = re.compile(r',"([a-z0-9_]{1,64})",\[([0-9,]{0,1300})\],([0-9]{1,19})(?:,"([a-z0-9_]{1,64})")?\]')


class WeightInfo(NamedTuple):
    """What a weight is, wherever it is."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def named(self) -> tuple[str, tuple[int, ...]]:
        """The dtype as torch names it, without "torch."; and the shape."""
        return str(self.dtype).removeprefix("torch."), self.shape

    def __str__(self) -> str:
        dtype, shape = self.named()
        return f"{dtype} {list(shape)}"


class Weight(NamedTuple):
    """One, in its extent."""

    name: str
    info: WeightInfo
    """What it is to a model."""
    offset: int
    """Bytes."""
    scheme: Scheme | None = None
    """How it is quantised, if it is."""

    @property
    def nbytes(self) -> int:
        """That it takes here."""
        return self.info.nbytes if self.scheme is None else QuantizedLayout.of(self.scheme, self.info.shape).nbytes

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def stored(self, memory: torch.Tensor) -> torch.Tensor:
        """Its bytes, in those of its extent."""
        return memory[self.offset : self.end]

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """It, in the bytes of its extent. Raises ValueError for one that is quantised."""
        if self.scheme is not None:
            raise ValueError(f"weight {self.name!r} is quantised to {self.scheme}: dequantize its bytes, stored(memory)")
        return self.stored(memory).view(self.info.dtype).view(self.info.shape)


@dataclass(frozen=True)
class Extent:
    """Weights that are read as one."""

    name: str
    weights: tuple[Weight, ...]
    crc32: int | None = None
    """Of all of its bytes."""

    @property
    def nbytes(self) -> int:
        """A multiple of 4096; what is between weights, and behind the last, is 0."""
        return padded(max((weight.end for weight in self.weights), default=0), _WHOLE)

    def tensors(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The weights by name, of ``nbytes`` bytes that were read: views of these, but those that are quantised, which are new.
        Blocks while they are worked out."""
        found: dict[str, torch.Tensor] = {}
        quantized: list[tuple[Scheme, torch.Tensor, torch.Tensor]] = []
        for weight in self.weights:
            if weight.scheme is None:
                found[weight.name] = weight.view(memory)
                continue
            found[weight.name] = torch.empty(weight.info.shape, dtype=weight.info.dtype, device=memory.device)
            quantized.append((weight.scheme, weight.stored(memory), found[weight.name]))
        dequantize(quantized)
        return found


@dataclass(frozen=True)
class WeightManifest:
    model: str
    """The class of the model that it was built for; empty where only names were known."""
    extents: Mapping[str, Extent]
    """By name, in the order of the drive."""
    blocks: Mapping[str, tuple[str, ...]]
    """The extents that each block needs beside the rest, in the order of registration."""
    ties: Mapping[str, str]
    """Further names of weights, with the first."""
    origin: str = ""
    """What the builder said of where the weights are from."""


def laid_out(name: str, weights: Mapping[str, WeightInfo], scheme: Scheme | None = None) -> Extent:
    """The weights one after the other, quantised where that is worth it."""
    placed = []
    end = 0
    for weight, info in weights.items():
        worth = scheme is not None and is_worth_quantizing(scheme, info.shape, info.dtype)
        placed.append(Weight(weight, info, padded(end, ALIGNMENT), scheme if worth else None))
        end = placed[-1].end
    return Extent(name, tuple(placed))


def encode(manifest: WeightManifest) -> bytes:
    """Raises ValueError for more than :func:`decode` takes."""
    names = [weight.name for extent in manifest.extents.values() for weight in extent.weights]
    for text in (manifest.model, manifest.origin, *manifest.extents, *manifest.blocks, *manifest.ties, *names):
        check_length(text)
    extents = [
        [extent.name, extent.nbytes, extent.crc32, [_fields(each) for each in extent.weights]]
        for extent in manifest.extents.values()
    ]
    fields = {"model": manifest.model, "extents": extents, "blocks": manifest.blocks, "ties": manifest.ties}
    fields["origin"] = manifest.origin
    body = json.dumps(fields, separators=(",", ":"))
    head = json.dumps({"format": _FORMAT, "version": _VERSION, "crc32": zlib.crc32(body.encode())})
    data = f"{head}\n{body}\n".encode()
    if len(data) > LARGEST:
        raise ValueError(f"the manifest of {len(names)} weights would have {len(data)} bytes, and may have {LARGEST}")
    return data


def decode(data: bytes, where: Path) -> WeightManifest:
    """Raises CorruptManifest naming ``where``."""
    head, _, body = data.rstrip(b"\n").partition(b"\n")
    try:
        if len(head) > _LONGEST_LINE or len(data) > LARGEST:
            text = f"{len(data)} bytes, {len(head)} in its first line, and may have {LARGEST} and {_LONGEST_LINE}"
            raise ValueError(f"it has {text}")
        facts = json.loads(head)
        kind = facts.get("format"), facts.get("version")
        if kind != (_FORMAT, _VERSION):
            raise CorruptManifest(where, f"expected weights of format and version {(_FORMAT, _VERSION)}, got {kind}")
        if facts.get("crc32") != zlib.crc32(body):
            text = f"expected CRC-32 {facts.get('crc32')!r} of what it says of weights, found {zlib.crc32(body)}"
            raise CorruptManifest(where, text)
        return _manifest(_Written(body.decode("ascii")))
    except (ValueError, AttributeError, RecursionError) as error:
        raise CorruptManifest(where, f"what it says of weights: {type(error).__name__}: {error}") from error


def _fields(weight: Weight) -> list[Any]:
    fields = [weight.name, *weight.info.named(), weight.offset]
    return fields if weight.scheme is None else [*fields, weight.scheme]


class _Written:
    """What encode() has written, and nothing else: JSON of any kind could take thirty times its size. Raises ValueError."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def passes(self, what: str) -> bool:
        """Whether that comes next; it is passed then."""
        found = self._text.startswith(what, self._at)
        self._at += len(what) * found
        return found

    def expect(self, what: str) -> None:
        if not self.passes(what):
            raise ValueError(f"expected {what!r} at byte {self._at} of its second line")

    def take(self, pattern: re.Pattern[str]) -> tuple[str | None, ...]:
        """The groups."""
        found = pattern.match(self._text, self._at)
        if found is None:
            raise ValueError(f"it does not say what a weight or an extent is at byte {self._at} of its second line")
        self._at = found.end()
        return found.groups()

    def string(self) -> str:
        text, self._at = string_at(self._text, self._at)
        return text

    def key(self) -> str:
        text = self.string()
        self.expect(":")
        return text

    def each(self, begin: str, end: str) -> Iterator[None]:
        """Once before each member of a list or object, which the caller takes."""
        self.expect(begin)
        if self.passes(end):
            return
        while True:
            yield
            if self.passes(end):
                return
            self.expect(",")

    def finish(self) -> None:
        if self._at != len(self._text):
            raise ValueError(f"expected its end at byte {self._at} of its second line")


def _manifest(written: _Written) -> WeightManifest:
    written.expect('{"model":')
    model = written.string()
    written.expect(',"extents":')
    extents = [_extent(written) for _ in written.each("[", "]")]
    written.expect(',"blocks":')
    blocks = {written.key(): tuple(written.string() for _ in written.each("[", "]")) for _ in written.each("{", "}")}
    written.expect(',"ties":')
    ties = {written.key(): written.string() for _ in written.each("{", "}")}
    written.expect(',"origin":')
    origin = written.string()
    written.expect("}")
    written.finish()
    return WeightManifest(model, {extent.name: extent for extent in extents}, blocks, ties, origin)


def _extent(written: _Written) -> Extent:
    written.expect("[")
    name = written.string()
    nbytes, crc32 = written.take(_EXTENT)
    weights = tuple(_weight(written) for _ in written.each("", "]"))
    written.expect("]")
    found = Extent(name, weights, None if crc32 == "null" else int(crc32 or ""))
    if found.nbytes != int(nbytes or ""):
        raise ValueError(f"extent {name!r} has {nbytes} bytes, and its weights {found.nbytes}")
    return found


def _weight(written: _Written) -> Weight:
    written.expect("[")
    name = written.string()
    dtype, shape, offset, scheme = written.take(_WEIGHT)
    if scheme is not None and scheme not in SCHEMES:
        raise ValueError(f"weight {name!r} is quantised to {scheme!r}, which this version does not know")
    sizes = tuple(map(int, shape.split(","))) if shape else ()
    return Weight(name, WeightInfo(dtype_named(dtype or ""), sizes), int(offset or ""), scheme)
