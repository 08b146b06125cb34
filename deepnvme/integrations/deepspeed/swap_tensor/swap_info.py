"""Describe one sub-group: its master weights, optimizer states and gradient, and the tile with the bytes of each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from .aio_config import round_up
from .tile import Tile


class SwappedTensor:
    """A tensor with memory only while it is swapped in. Otherwise it is empty, as with DeepSpeed.

    Args:
        tensor: The tensor.
        shape: Its shape when it is swapped in.
        stride: Its strides when it is swapped in, in elements.
        tile: The memory and the file of its bytes.
    """

    def __init__(self, tensor: torch.Tensor, shape: torch.Size, stride: tuple[int, ...], tile: Tile) -> None:
        self.tensor = tensor
        self.shape = shape
        self.stride = stride
        self.tile = tile

    def memory(self) -> torch.Tensor:
        """Return the tile's memory as a tensor of this shape, stride and dtype. Raises RuntimeError if it is not in memory."""
        flat = self.tile.memory.tensor(self.shape.numel(), self.tensor.dtype)
        return flat.as_strided(self.shape, self.stride)

    def attach(self) -> None:
        """Swap the tensor in: make it use the tile's memory."""
        self.tensor.data = self.memory()

    def unchanged_place(self) -> bool:
        """Return whether the tensor still uses the tile's memory, and was not set to other memory."""
        return self.tile.lease is not None and self.tensor.is_set_to(self.memory())

    def detach(self) -> None:
        """Swap the tensor out: make it empty."""
        self.tensor.data = torch.empty(0, dtype=self.tensor.dtype, device="cpu")


class OptimizerStateSwapInfo:
    """The swapper's record of one parameter: a sub-group's flat partition of master weights, with its states and gradient.

    Args:
        parameter: The master weights, with ``ds_id``.
        numel: Number of elements.
        folder: The folder of the files. Each tensor has a file; a state's file is named after the state, as with DeepSpeed.
        aligned_bytes: File lengths are a multiple of this many bytes.
        turn: The sub-group's place in the order of a step, from 0.
    """

    def __init__(self, parameter: torch.Tensor, numel: int, folder: str, aligned_bytes: int, turn: int) -> None:
        self.parameter = parameter
        self.param_id: str = parameter.ds_id  # type: ignore[attr-defined]
        self.turn = turn
        self.active = False
        """Whether the sub-group is swapped in."""
        self.stepped = False
        """Whether the optimizer has stepped since the sub-group was swapped in, and so has used the gradient."""
        self._numel = numel
        self._folder = folder
        self._aligned_bytes = aligned_bytes
        nbytes = numel * parameter.element_size()
        self.master = SwappedTensor(parameter, torch.Size([numel]), (1,), self._tile(self.param_id, nbytes))
        self.states: dict[str, SwappedTensor] = {}
        """The swapped states, by name in the optimizer's state."""
        self.gradient = self._tile(f"{self.param_id}_gradient", nbytes)
        self.gradient_ranges: dict[int, int] = {}
        """The parts of the gradient that have arrived since the last step: offset -> length, in elements."""

    def numel(self) -> int:
        """Return the number of elements of the parameter."""
        return self._numel

    def dtype(self) -> torch.dtype:
        """Return the dtype of the parameter."""
        return self.parameter.dtype

    def device(self) -> torch.device:
        """Return the device of the parameter."""
        return self.parameter.device

    def has_gradients(self) -> bool:
        """Return whether any part of the gradient has arrived since the last step."""
        return bool(self.gradient_ranges)

    def num_tensors(self) -> int:
        """Return the number of swapped tensors: the master weights and the swapped states."""
        return 1 + len(self.states)

    def get_swap_paths(self) -> list[str]:
        """Return the paths of the files of the master weights and the swapped states."""
        return [swapped.tile.path for swapped in self.swapped()]

    def swapped(self) -> Iterator[SwappedTensor]:
        """Yield the master weights, then the swapped states."""
        yield self.master
        yield from self.states.values()

    def tiles(self) -> list[Tile]:
        """Return the tiles of the master weights and the swapped states, which last from step to step."""
        return [swapped.tile for swapped in self.swapped()]

    def new_state(self, name: str, tensor: torch.Tensor) -> SwappedTensor:
        """Return a record for a state that will be swapped from now on.

        It uses the tile of the state that it replaces, if that has the same size.
        """
        tensor.ds_id = f"{name}-{self.param_id}"  # type: ignore[attr-defined]
        stride = torch.empty_like(tensor, device="meta").stride()  # the tensor's own, unless its memory has gaps
        tile = self._tile(f"{name}-{self.param_id}", tensor.nbytes)
        if name in self.states and self.states[name].tile.nbytes == tile.nbytes:
            tile = self.states[name].tile
        return SwappedTensor(tensor, tensor.shape, stride, tile)

    def stored_state(self, name: str, tensor: torch.Tensor, shape: torch.Size, stride: tuple[int, ...]) -> SwappedTensor:
        """Return a record for a state whose values are in its file already; ``tensor`` is empty."""
        tensor.ds_id = f"{name}-{self.param_id}"  # type: ignore[attr-defined]
        tile = self._tile(f"{name}-{self.param_id}", shape.numel() * tensor.element_size(), stored=True)
        return SwappedTensor(tensor, shape, stride, tile)

    def attach(self) -> None:
        """Swap the sub-group in: make its tensors, and the gradient, use the memory of their tiles."""
        for swapped in self.swapped():
            swapped.attach()
        self.parameter.grad = self.gradient_memory()
        self.active = True

    def detach(self) -> None:
        """Swap the sub-group out: make its tensors empty and its gradient None."""
        for swapped in self.swapped():
            swapped.detach()
        self.parameter.grad = None
        self.active = self.stepped = False

    def gradient_memory(self) -> torch.Tensor:
        """Return the gradient's memory as a flat tensor. Raises RuntimeError if it is not in memory."""
        return self.gradient.memory.tensor(self._numel, self.parameter.dtype)

    def gradient_complete(self) -> bool:
        """Return whether all parts of the gradient have arrived since the last step."""
        return not any(True for _ in self.gradient_gaps())

    def gradient_gaps(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, length), in elements, of the parts of the gradient that have not arrived since the last step."""
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
        """Return whether ``value`` is the very tensor that is swapped under this name."""
        return name in self.states and self.states[name].tensor is value

    def is_in_place(self, name: str, value: Any) -> bool:
        """Return whether ``value`` is the tensor swapped under this name, and still uses its tile's memory."""
        return self.is_swapped(name, value) and self.states[name].unchanged_place()

    def copied(self, value: torch.Tensor) -> torch.Tensor:
        """Return the content of a tensor, as a copy if it uses the memory of a tile.

        The optimizer may have set a tensor to another tensor's memory, or swapped two, so tiles cannot be filled from each other.
        """
        memory = {swapped.tile.memory.buffer.data_ptr() for swapped in self.swapped() if swapped.tile.lease is not None}
        content = value.detach()
        return content.clone() if content.untyped_storage().data_ptr() in memory else content
