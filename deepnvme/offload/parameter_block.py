"""The parameters of a module as one block: on the drive, and in memory while the module is used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from .block_versions import block_name
from .counted_io import StoredBlock
from .saved_tensor import View, view_of
from .sub_group import lay_out


class ParameterBlock(StoredBlock):
    """The parameters of one module.

    A step writes another version of it than that of the last completed step.

    Args:
        number: Number of the block in the model.
        params: Its parameters, each once, on the CPU.
    """

    __slots__ = ("_absent", "_committed", "changes", "current", "holds", "index", "layout", "params")

    def __init__(self, number: int, params: Sequence[nn.Parameter]) -> None:
        self.layout = lay_out([(index, "", param.detach()) for index, param in enumerate(params)])
        """Where the parameters lie in the block."""
        self.index = f"{number}.parameters"
        """Identifies its versions."""
        self.current = self._committed = 0
        """Number of the newest version."""
        super().__init__(block_name(self), self.layout.nbytes)
        self.stored = False
        self.params = tuple(params)
        self._absent = [absent_like(param) for param in params]
        self.holds = 0
        """Number of uses of the parameters that have begun and not ended."""
        self.changes = 0
        """Number of steps that have changed the parameters, or were undone."""

    def fill(self, values: Iterable[torch.Tensor]) -> None:
        """Copy a value of each parameter to the block's memory."""
        self.layout.fill(self.content, values)

    def attach(self) -> None:
        """Have the parameters be the block's memory."""
        content = self.content
        for section, param in zip(self.layout.sections, self.params, strict=True):
            param.data = section.of(content)

    def detach(self) -> None:
        """Have the parameters be without memory. To read one gives NaN, to write one raises RuntimeError."""
        for param, absent in zip(self.params, self._absent, strict=True):
            param.data = absent

    def absent_addresses(self) -> set[int]:
        """Return where the parameters are while they are without memory."""
        return {absent.data_ptr() for absent in self._absent}

    def view_of(self, tensor: torch.Tensor) -> View | None:
        """Return how a tensor looks at the block's memory; None if it looks elsewhere, or the block has none."""
        if not self.in_memory or tensor.layout is not torch.strided or tensor.device.type != "cpu" or not tensor.numel():
            return None
        content = self.content
        begin = tensor.data_ptr() - content.data_ptr()
        if not 0 <= begin < content.nbytes:
            return None
        return view_of(tensor, int(content.storage_offset()))

    def tensor(self, view: View) -> torch.Tensor:
        """Return a new tensor that looks at the block's memory."""
        content = self.content
        return view.on(content.untyped_storage(), int(content.storage_offset()))

    # -- its versions on the drive

    def changed(self, number: int) -> None:
        """Have the next write be of this version, since a step has changed the parameters."""
        self.changes += 1
        self.current = number
        self.rename(block_name(self))

    def commit(self) -> None:
        """Take the newest version for the last completed step's."""
        self._committed = self.current

    def undo(self) -> None:
        """Have the next read be of the last completed step's version."""
        self.changed(self._committed)


def absent_like(param: nn.Parameter) -> torch.Tensor:
    """Return a tensor of a parameter's shape that takes the memory of one element."""
    if param.is_floating_point() or param.is_complex():
        return torch.full((), torch.nan, dtype=param.dtype, device="cpu").expand(param.shape)
    return torch.zeros((), dtype=param.dtype, device="cpu").expand(param.shape)
