"""One sub-group: its master weights, its optimizer's states and its gradient, and the tile that each of them is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from .aio_config import round_up
from .tile import Tile


class SwappedTensor:
    """A tensor whose memory comes and goes. It is empty in between, as with DeepSpeed; what it looks like is remembered here."""

    def __init__(self, tensor: torch.Tensor, shape: torch.Size, stride: tuple[int, ...], tile: Tile) -> None:
        self.tensor = tensor
        self.shape = shape
        self.stride = stride
        self.tile = tile

    def memory(self) -> torch.Tensor:
        """The tile's, which is in memory, as a tensor that looks like this one."""
        flat = self.tile.memory.tensor(self.shape.numel(), self.tensor.dtype)
        return flat.as_strided(self.shape, self.stride)

    def attach(self) -> None:
        """Make the tile's memory the tensor's."""
        self.tensor.data = self.memory()

    def unchanged_place(self) -> bool:
        """Whether the tensor is still what it was attached to, and not set to something else."""
        return self.tile.lease is not None and self.tensor.is_set_to(self.memory())

    def detach(self) -> None:
        self.tensor.data = torch.empty(0, dtype=self.tensor.dtype, device="cpu")


class OptimizerStateSwapInfo:
    """What the swapper knows of one parameter: a sub-group's flat partition of master weights, ``numel`` elements.

    ``folder``: of the files, one for each tensor: the states' are named after them, as with DeepSpeed. ``aligned_bytes``: what
    files are multiples of. ``turn``: when in a step it comes.
    """

    def __init__(self, parameter: torch.Tensor, numel: int, folder: str, aligned_bytes: int, turn: int) -> None:
        self.parameter = parameter
        self.param_id: str = parameter.ds_id  # type: ignore[attr-defined]
        self.turn = turn
        self.active = False
        """Whether the tensors are in memory, between swapping in and out."""
        self.stepped = False
        """Whether the optimizer has stepped since they are, so that the gradient is used up."""
        self._numel = numel
        self._folder = folder
        self._aligned_bytes = aligned_bytes
        nbytes = numel * parameter.element_size()
        self.master = SwappedTensor(parameter, torch.Size([numel]), (1,), self._tile(self.param_id, nbytes))
        self.states: dict[str, SwappedTensor] = {}
        """By their names in the optimizer's state."""
        self.gradient = self._tile(f"{self.param_id}_gradient", nbytes)
        self.gradient_ranges: dict[int, int] = {}
        """Offset -> length, in elements: what of the gradient has come since the last step."""

    def numel(self) -> int:
        return self._numel

    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    def device(self) -> torch.device:
        return self.parameter.device

    def has_gradients(self) -> bool:
        """Whether any part of the gradient has come since the last step."""
        return bool(self.gradient_ranges)

    def num_tensors(self) -> int:
        """Master weights and swapped states."""
        return 1 + len(self.states)

    def get_swap_paths(self) -> list[str]:
        """Of the master weights and the swapped states."""
        return [swapped.tile.path for swapped in self.swapped()]

    def swapped(self) -> Iterator[SwappedTensor]:
        """Master weights, then states."""
        yield self.master
        yield from self.states.values()

    def tiles(self) -> list[Tile]:
        """Theirs: all of the sub-group that lasts from step to step."""
        return [swapped.tile for swapped in self.swapped()]

    def new_state(self, name: str, tensor: torch.Tensor) -> SwappedTensor:
        """A state that is to be swapped, in the tile of the one that it replaces, if that is as large."""
        tensor.ds_id = f"{name}-{self.param_id}"  # type: ignore[attr-defined]
        stride = torch.empty_like(tensor, device="meta").stride()  # its own, unless that leaves gaps
        tile = self._tile(f"{name}-{self.param_id}", tensor.nbytes)
        if name in self.states and self.states[name].tile.nbytes == tile.nbytes:
            tile = self.states[name].tile
        return SwappedTensor(tensor, tensor.shape, stride, tile)

    def stored_state(self, name: str, tensor: torch.Tensor, shape: torch.Size, stride: tuple[int, ...]) -> SwappedTensor:
        """A state whose values are in its file already; ``tensor`` is empty."""
        tensor.ds_id = f"{name}-{self.param_id}"  # type: ignore[attr-defined]
        tile = self._tile(f"{name}-{self.param_id}", shape.numel() * tensor.element_size(), stored=True)
        return SwappedTensor(tensor, shape, stride, tile)

    def attach(self) -> None:
        """Give the tensors the memory of their tiles, the gradient too."""
        for swapped in self.swapped():
            swapped.attach()
        self.parameter.grad = self.gradient_memory()
        self.active = True

    def detach(self) -> None:
        for swapped in self.swapped():
            swapped.detach()
        self.parameter.grad = None
        self.active = self.stepped = False

    def gradient_memory(self) -> torch.Tensor:
        """The gradient, flat. Its tile is in memory."""
        return self.gradient.memory.tensor(self._numel, self.parameter.dtype)

    def gradient_complete(self) -> bool:
        return not any(True for _ in self.gradient_gaps())

    def gradient_gaps(self) -> Iterator[tuple[int, int]]:
        """(offset, length) of what of the gradient has not come, in elements."""
        at = 0
        for offset, length in sorted(self.gradient_ranges.items()):
            if offset > at:
                yield at, offset - at
            at = max(at, offset + length)
        if at < self._numel:
            yield at, self._numel - at

    def _tile(self, name: str, nbytes: int, stored: bool = False) -> Tile:
        return Tile(os.path.join(self._folder, f"{name}.tensor.swp"), round_up(nbytes, self._aligned_bytes), self.turn, stored)

    def is_swapped(self, name: str, value: Any) -> bool:
        """Whether this very object is the state that is swapped under that name."""
        return name in self.states and self.states[name].tensor is value

    def is_in_place(self, name: str, value: Any) -> bool:
        """Whether it is, and in the memory that it was given."""
        return self.is_swapped(name, value) and self.states[name].unchanged_place()

    def copied(self, value: torch.Tensor) -> torch.Tensor:
        """Its content, apart from the memory of tiles: it may have moved into another one's, or two may have changed places."""
        memory = {swapped.tile.memory.buffer.data_ptr() for swapped in self.swapped() if swapped.tile.lease is not None}
        content = value.detach()
        return content.clone() if content.untyped_storage().data_ptr() in memory else content
