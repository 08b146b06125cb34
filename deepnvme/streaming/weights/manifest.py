"""The manifest of a weight store: names, layout and checksums of all extents.

It is stored as one tensor of the store: two lines of JSON, the first with format, version and the checksum of the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepnvme.checkpoint.formats.elements import Elements
from deepnvme.files.manifest import MOST_DIMENSIONS, checked_fields, number, numbers, string, with_checksum
from deepnvme.memory.alignment import PAGE, padded
from deepnvme.memory.tensor_bytes import dtype_named
from deepnvme.model.fp8 import ScaledMatrices, float32_scales
from deepnvme.model.quantization import ALIGNMENT, SCHEMES, QuantizedLayout, Scheme, dequantize, is_worth_quantizing
from deepnvme.model.weight_differences import WeightInfo
from deepnvme.store.manifest import CorruptManifest

NAME = "manifest"
"""Name of the store's tensor that holds the manifest."""
_KIND = "deepnvme weights", 1
"""Name and version of the manifest's format."""
LARGEST = 64 << 20
"""Most bytes of a manifest: enough for half a million weights."""


class ScalesInExtent(NamedTuple):
    """The scales of a part of an FP8 weight: where they are in the extent."""

    matrices: ScaledMatrices
    """The part."""
    offset: int
    """Where the scales begin, in bytes from the start of the extent."""
    info: WeightInfo
    """Dtype and shape of the scales."""

    def float32(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a copy of the scales in float32. ``memory``: the bytes of the extent."""
        stored = memory[self.offset : self.offset + self.info.nbytes].clone()  # its address is aligned
        return float32_scales(stored.view(self.info.dtype))


class Weight(NamedTuple):
    """A weight's place and form in its extent."""

    name: str
    """Name of the weight; the first name of a tied weight."""
    info: WeightInfo
    """Dtype and shape of the weight in the model, not as quantised."""
    offset: int
    """Where the weight begins, in bytes from the start of the extent."""
    scheme: Scheme | None = None
    """How the weight is quantised; None if it is not."""
    elements: Elements | None = None
    """Dtype, shape and strides of a weight that has to be copied before the model can use it; None for all others.

    Only weights that are read from a checkpoint's own files have to be copied: for another dtype, for other strides, or because
    they begin at a place that is no multiple of their dtype's size.
    """
    scales: tuple[ScalesInExtent, ...] = ()
    """The scales of an FP8 weight of a checkpoint, for its parts in the order of their values. None for all other weights."""

    @property
    def nbytes(self) -> int:
        """Bytes that the weight takes in the extent, quantised or not."""
        if self.elements is not None:
            return self.elements.nbytes
        return self.info.nbytes if self.scheme is None else QuantizedLayout.of(self.scheme, self.info.shape).nbytes

    @property
    def ready(self) -> bool:
        """Whether the model can use the weight as it is in the extent."""
        return self.scheme is None and self.elements is None

    @property
    def end(self) -> int:
        """Where the weight ends, in bytes from the start of the extent."""
        return self.offset + self.nbytes

    def stored(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the weight's bytes as they are stored, as a view of ``memory``, which holds the whole extent."""
        return memory[self.offset : self.end]

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the weight, with its dtype and shape, as a view of ``memory``, the bytes of the extent.

        Raises:
            ValueError: If the weight is quantised.
        """
        if self.scheme is not None:
            raise ValueError(f"weight {self.name!r} is quantised to {self.scheme}: dequantize its bytes, stored(memory)")
        return self.stored(memory).view(self.info.dtype).view(self.info.shape)

    def copy(self, memory: torch.Tensor, out: torch.Tensor) -> None:
        """Copy a weight that is neither quantised nor in FP8 into ``out``, which has the dtype and shape that the model wants.

        Args:
            memory: The bytes of the extent.
            out: Where the weight is copied to. It does not overlap the weight's bytes in ``memory``.
        """
        assert self.scheme is None
        assert not self.scales
        if self.elements is None:
            out.copy_(self.view(memory))
            return
        span = self.stored(memory)
        if span.storage_offset() % self.elements.dtype.itemsize:
            span = span.clone()
        out.copy_(span.view(self.elements.dtype).as_strided(self.elements.shape, self.elements.stride))


@dataclass(frozen=True)
class Extent:
    """Weights that lie together on the drive and are read as one."""

    name: str
    """Name of the extent."""
    weights: tuple[Weight, ...]
    """The weights in the extent, in the order of their offsets."""
    crc32: int | None = None
    """CRC-32 of all bytes of the extent; None while it is built."""

    @property
    def nbytes(self) -> int:
        """Bytes of the extent, a multiple of 4096 for direct I/O. Bytes between weights, and behind the last, are 0."""
        return padded(max((weight.end for weight in self.weights), default=0), PAGE)

    def tensors(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the weights by name. Quantised ones are dequantised; blocks meanwhile.

        Args:
            memory: The extent as it was read, ``nbytes`` bytes (uint8).

        Returns:
            Views of ``memory``; for quantised weights new tensors on the same device.
        """
        found: dict[str, torch.Tensor] = {}
        for weight in self.weights:
            if weight.scheme is None:
                found[weight.name] = weight.view(memory)
            else:
                found[weight.name] = torch.empty(weight.info.shape, dtype=weight.info.dtype, device=memory.device)
                dequantize(weight.scheme, weight.stored(memory), found[weight.name])
        return found


@dataclass(frozen=True)
class WeightManifest:
    """Describes the content of a weight store: extents, blocks, tied weights and origin."""

    model: str
    """Class name of the model for which the store was built; "" if it was built without a model."""
    extents: Mapping[str, Extent]
    """Extents by name, in their order on the drive."""
    blocks: Mapping[str, tuple[str, ...]]
    """For each block, in the order of registration, the names of the extents that it needs, except UNBLOCKED_EXTENT."""
    ties: Mapping[str, str]
    """First name of each tied weight, by its further names."""
    origin: str = ""
    """Text about the source of the weights, from the program that built the store."""


def key_of(extent: str) -> str:
    """Return the name of the store's tensor that holds an extent."""
    return f"extent/{extent}"


def layout_extent(name: str, weights: Mapping[str, WeightInfo], scheme: Scheme | None = None) -> Extent:
    """Return an extent that holds the weights one after another, without a checksum.

    Args:
        name: Name of the extent.
        weights: Dtype and shape of each weight, by name.
        scheme: How to quantise the weights for which :func:`is_worth_quantizing` is true; None for no quantisation.
    """
    placed = []
    end = 0
    for weight, info in weights.items():
        worth = scheme is not None and is_worth_quantizing(scheme, info.shape, info.dtype)
        placed.append(Weight(weight, info, padded(end, ALIGNMENT), scheme if worth else None))
        end = placed[-1].end
    return Extent(name, tuple(placed))


def encode(manifest: WeightManifest) -> bytes:
    """Return a manifest as the bytes that are stored.

    Raises:
        ValueError: If it would be longer than :func:`decode` accepts.
    """
    fields = {
        "model": manifest.model,
        "extents": [[each.name, each.nbytes, each.crc32, list(map(_fields, each.weights))] for each in manifest.extents.values()],
        "blocks": manifest.blocks,
        "ties": manifest.ties,
        "origin": manifest.origin,
    }
    data = with_checksum(_KIND, fields)
    if len(data) > LARGEST:
        count = sum(len(extent.weights) for extent in manifest.extents.values())
        raise ValueError(f"the manifest of {count} weights would have {len(data)} bytes, and may have {LARGEST}")
    return data


def decode(data: bytes, where: Path) -> WeightManifest:
    """Return the manifest encoded in ``data``.

    Args:
        data: What :func:`encode` returned.
        where: A directory of the store, for error messages.

    Raises:
        CorruptManifest: If the bytes are damaged, or of another format or version.
    """
    try:
        return _manifest(checked_fields(_KIND, data))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CorruptManifest(where, f"what it says of weights: {type(error).__name__}: {error}") from error


def _fields(weight: Weight) -> list[Any]:
    """Return a weight as a JSON list."""
    return [weight.name, *weight.info.named(), weight.offset, *([] if weight.scheme is None else [weight.scheme])]


def _manifest(fields: Any) -> WeightManifest:
    """Return the manifest for the parsed JSON of its second line. Raises ValueError, TypeError or others for wrong fields."""
    extents = {name: _extent(name, *each) for name, *each in fields["extents"]}
    blocks = {name: tuple(map(string, needed)) for name, needed in fields["blocks"].items()}
    ties = {name: string(first) for name, first in fields["ties"].items()}
    return WeightManifest(string(fields["model"]), extents, blocks, ties, string(fields["origin"]))


def _extent(name: Any, nbytes: Any, crc32: Any, weights: Any) -> Extent:
    """Return an extent, made of its parsed fields in the manifest. Raises ValueError if they are wrong."""
    found = Extent(string(name), tuple(_weight(*each) for each in weights), number(crc32))
    if found.nbytes != nbytes:
        raise ValueError(f"extent {name!r} has {nbytes} bytes, and its weights {found.nbytes}")
    return found


def _weight(name: Any, dtype: Any, shape: Any, offset: Any, scheme: Any = None) -> Weight:
    """Return a weight, made of its parsed fields in the manifest. Raises ValueError if they are wrong."""
    if scheme is not None and scheme not in SCHEMES:
        raise ValueError(f"weight {name!r} is quantised to {scheme!r}, which this version does not know")
    return Weight(string(name), WeightInfo(dtype_named(string(dtype)), numbers(shape, MOST_DIMENSIONS)), number(offset), scheme)
