"""Frozen parameters of a block, that is, those not trained: on the drive as they are or quantised, and only read from there."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch
from torch import nn

from deepnvme.model.quantization import QuantizedLayout, Scheme, dequantize, is_worth_quantizing, quantize
from deepnvme.offload.pinned_arena import PinnedArena
from deepnvme.states.sub_group import BlockSection, lay_out
from deepnvme.states.versions import VersionedBlock


class FrozenParameters(VersionedBlock):
    """The parameters of a block that are not trained.

    If some of them are quantised, the block has the quantised weights. It is then in memory only while they are dequantised into
    separate memory, which the parameters use. If none is quantised, the parameters use the block's own memory.

    Args:
        index: Identifies the block's versions.
        params: The parameters, with their numbers in the whole block.
        names: Names of all parameters of the block, for errors.
        scheme: How to quantise the weights for which that is worth it; None to quantise none.
        arena: Lends the memory that weights are dequantised into.
    """

    def __init__(
        self, index: str, params: Mapping[int, nn.Parameter], names: Sequence[str], scheme: Scheme | None, arena: PinnedArena
    ) -> None:
        self.params, self._names = dict(params), names
        self.layout = lay_out([(number, "", param.detach()) for number, param in params.items()])
        """Where the parameters' values lie in memory."""
        self._schemes = {number: quantizes(scheme, param) for number, param in params.items()}
        self._stored = lay_out([(number, "", _stored_like(self._schemes[number], param)) for number, param in params.items()])
        super().__init__(index, self._stored.nbytes)
        self._arena = arena
        self._values: torch.Tensor | None = None
        self.copy = DequantizedCopy(f"{index}.dequantized")
        """Versions of a copy on the drive with the dequantised values, for state dicts."""

    @property
    def quantized(self) -> bool:
        """Whether any parameter is stored quantised, so that the values need memory beside the block."""
        return any(self._schemes.values())

    @property
    def quantized_sections(self) -> list[BlockSection]:
        """Sections of the block that have the bytes of quantised weights."""
        return [section for section in self._stored.sections if self._schemes[section.piece] is not None]

    @property
    def values_nbytes(self) -> int:
        """Bytes of memory that the parameters' values need beside the block; 0 if none is quantised."""
        return self.layout.nbytes if self.quantized else 0

    @property
    def values(self) -> torch.Tensor:
        """Bytes of the parameters' values, as :attr:`layout` has them. Raises RuntimeError if they are not in memory."""
        if not self.quantized:
            return self.content
        if self._values is None:
            raise RuntimeError(f"{self!r} is not dequantised")
        return self._values

    @property
    def has_values(self) -> bool:
        """Whether the parameters' values are in memory."""
        return self._values is not None if self.quantized else self.in_memory

    def begin_values(self) -> None:
        """Get memory for the parameters' values, if they need their own. Its content is undefined. Raises OutOfBuffers."""
        if self.quantized:
            self._values = self._arena.lend_beyond(self.layout.nbytes)

    def end_values(self) -> None:
        """Return the memory of :meth:`begin_values`. Idempotent."""
        self._values = None

    def dequantize(self) -> None:
        """Dequantise the block, which must be in memory, into memory for the parameters' values. Blocks."""
        self.begin_values()
        for stored, section in self._sections():
            self._dequantize(stored, section.of(self.values), self._schemes[section.piece])

    def quantize(self, given: Mapping[str, torch.Tensor] | None = None, only: Container[nn.Parameter] | None = None) -> None:
        """Quantise the parameters into the block, and set them to their dequantised values. Both must be in memory.

        Args:
            given: Quantised weights by name. Such a weight is copied as it is if it dequantises to exactly the parameter's value.
            only: Parameters that have changed; None for all.

        Raises:
            ValueError: If a weight has a value that cannot be quantised.
        """
        if not self.quantized:
            return
        for stored, section in self._sections():
            param, scheme, value = self.params[section.piece], self._schemes[section.piece], section.of(self.values)
            name = self._names[section.piece]
            if only is not None and param not in only:
                continue
            if scheme is None:
                stored.copy_(value)
            elif not self._take(stored, value, scheme, None if given is None else given.get(name)):
                quantize(value, scheme, stored, name=name)
                self._dequantize(stored, value, scheme)

    def changed(self, number: int) -> None:
        """Set the version to write next, as in the base class, and mark the dequantised copy on the drive as outdated."""
        super().changed(number)
        self.copy.outdated = True

    def _sections(self) -> Sequence[tuple[torch.Tensor, BlockSection]]:
        """Return, for each parameter, its stored bytes in the block, and the section of its value in memory."""
        pairs = zip(self._stored.sections, self.layout.sections, strict=True)
        return [(stored.of(self.content), section) for stored, section in pairs]

    def _dequantize(self, stored: torch.Tensor, value: torch.Tensor, scheme: Scheme | None) -> None:
        if scheme is None:
            value.copy_(stored)
        elif value.is_contiguous():
            dequantize(scheme, stored, value)
        else:
            value.copy_(_dequantized(scheme, stored, value))

    def _take(self, stored: torch.Tensor, value: torch.Tensor, scheme: Scheme, given: torch.Tensor | None) -> bool:
        """Copy a given quantised weight to the block, and return whether it dequantises to exactly ``value``."""
        if given is None or given.dtype != torch.uint8 or given.shape != stored.shape:
            return False
        stored.copy_(given)
        return torch.equal(_dequantized(scheme, stored, value), value)


class DequantizedCopy:
    """Version numbers of the copy on the drive that has the dequantised values of quantised weights."""

    def __init__(self, index: str) -> None:
        self.index = index
        """Identifies the copy's versions in the store."""
        self.current: int | None = None
        """Number of the newest version; None if there is none."""
        self.outdated = True
        """Whether the newest version does not have the current values of the weights, or there is no version."""

    def written(self, number: int) -> None:
        """Record that version ``number`` has the current values."""
        self.current, self.outdated = number, False


def quantizes(scheme: Scheme | None, param: nn.Parameter) -> Scheme | None:
    """Return ``scheme`` if a parameter is to be quantised, because it is frozen and worth it; else None."""
    worth = scheme is not None and not param.requires_grad and is_worth_quantizing(scheme, param.shape, param.dtype)
    return scheme if worth else None


def _stored_like(scheme: Scheme | None, param: nn.Parameter) -> torch.Tensor:
    """Return a tensor with a parameter's stored dtype, shape and strides; on the meta device if it is stored quantised."""
    if scheme is None:
        return param.detach()
    return torch.empty(QuantizedLayout.of(scheme, param.shape).nbytes, dtype=torch.uint8, device="meta")


def _dequantized(scheme: Scheme, stored: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a quantised weight dequantised into new memory, with the dtype and shape of ``like``."""
    found = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    dequantize(scheme, stored, found)
    return found
