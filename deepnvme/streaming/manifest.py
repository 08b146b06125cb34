"""What a store of weights says of itself: a tensor of it, two lines of JSON, the first with the checksum of the second."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepnvme.swap.extents import padded
from deepnvme.swap.manifest import CorruptManifest
from deepnvme.swap.memory import dtype_named

from .quantization import SCHEMES, Layout, Scheme, dequantize, is_worth_quantizing

NAME = "manifest"
"""The tensor's."""
_WHOLE = 4096
"""Bytes: what is read directly, on any drive."""
ALIGNMENT = 64
"""Bytes: a weight begins at a multiple of this in its extent, for the processor's widest vectors."""
_FORMAT = "deepnvme weights"
_VERSION = 1


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
        return self.info.nbytes if self.scheme is None else Layout.of(self.scheme, self.info.shape).nbytes

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
class Manifest:
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


def encode(manifest: Manifest) -> bytes:
    extents = [
        [extent.name, extent.nbytes, extent.crc32, [_fields(each) for each in extent.weights]]
        for extent in manifest.extents.values()
    ]
    fields = {"model": manifest.model, "extents": extents, "blocks": manifest.blocks, "ties": manifest.ties}
    fields["origin"] = manifest.origin
    body = json.dumps(fields, separators=(",", ":"))
    head = json.dumps({"format": _FORMAT, "version": _VERSION, "crc32": zlib.crc32(body.encode())})
    return f"{head}\n{body}\n".encode()


def decode(data: bytes, where: Path) -> Manifest:
    """Raises CorruptManifest naming ``where``."""
    head, _, body = data.rstrip(b"\n").partition(b"\n")
    try:
        facts = json.loads(head)
        kind = facts.get("format"), facts.get("version")
        if kind != (_FORMAT, _VERSION):
            raise CorruptManifest(where, f"expected weights of format and version {(_FORMAT, _VERSION)}, got {kind}")
        if facts.get("crc32") != zlib.crc32(body):
            text = f"expected CRC-32 {facts.get('crc32')!r} of what it says of weights, found {zlib.crc32(body)}"
            raise CorruptManifest(where, text)
        fields = json.loads(body)
        extents = [_extent(*each) for each in fields["extents"]]
        blocks = {name: tuple(each) for name, each in fields["blocks"].items()}
        return Manifest(fields["model"], {extent.name: extent for extent in extents}, blocks, fields["ties"], fields["origin"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptManifest(where, f"what it says of weights: {type(error).__name__}: {error}") from error


def _fields(weight: Weight) -> list[Any]:
    fields = [weight.name, *weight.info.named(), weight.offset]
    return fields if weight.scheme is None else [*fields, weight.scheme]


def _weight(name: str, dtype: str, shape: list[int], offset: int, scheme: Any = None) -> Weight:
    if scheme not in (None, *SCHEMES):
        raise ValueError(f"weight {name!r} is quantised to {scheme!r}, which this version does not know")
    return Weight(name, WeightInfo(dtype_named(dtype), tuple(shape)), offset, scheme)


def _extent(name: str, nbytes: int, crc32: int | None, weights: list[Any]) -> Extent:
    found = Extent(name, tuple(_weight(*each) for each in weights), crc32)
    if found.nbytes != nbytes:
        raise ValueError(f"extent {name!r} has {nbytes} bytes, and its weights {found.nbytes}")
    return found
