"""One sub-group of the optimizer: its master weights, states and gradient, which of them are swapped, and their tiles.

The optimizer may add or remove states in each step. States that are not swapped, and the list of all states, are saved in a
file beside the swap files. For the optimizer, DeepSpeed's checkpoints have only a copy of the swap folder, so the step count,
small states and the list would be lost otherwise.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.serialization import load as torch_load  # torch.load may be deepnvme.load by now

from deepnvme._interrupts import defer_interrupts
from deepnvme.checkpoint.formats.pt_records import CorruptCheckpoint, check_pickle, records_of
from deepnvme.files.replacing import replacing
from deepnvme.memory.alignment import padded
from deepnvme.memory.tensor_bytes import dtype_named

from .tile_cache import Tile, TileCache


@dataclass
class SavedStates:
    """Content of a sub-group's state file: values of states that are not swapped, and descriptions of swapped states."""

    kept: dict[str, Any]
    """Values of the states that are not swapped, by name."""
    swapped: dict[str, tuple[torch.Size, tuple[int, ...], torch.dtype]]
    """Shape, stride and dtype of the states in swap files, by name."""
    order: list[str]
    """Names of all states, in the order of the optimizer's state dict."""

    def save(self, path: str) -> None:
        """Write the file, replacing an older one atomically. Raises OSError.

        Values that ``torch.load`` does not accept by default (``weights_only=True``) are left out.
        """
        kept = {name: value for name, value in self.kept.items() if isinstance(value, torch.Tensor | int | float | str | None)}
        swapped = {name: (list(shape), stride, str(dtype).split(".")[1]) for name, (shape, stride, dtype) in self.swapped.items()}
        beside = f"{path}.{os.getpid()}"
        with replacing(path, beside):
            torch.save({"kept": kept, "swapped": swapped, "order": self.order}, beside)

    @classmethod
    def load(cls, path: str) -> SavedStates | None:
        """Read the file; return None if it does not exist.

        Raises an OSError that names the file if it cannot be read, is damaged, or was not written by :meth:`save`.
        """
        try:
            # Checked first: torch.load also reads files of older formats, and unpacks compressed ones of any size.
            found = records_of(path)
            if not found.stored:
                raise ValueError("it is not of torch.save")
            check_pickle(path, found)
            saved = torch_load(path, weights_only=True)
            swapped = {
                name: (torch.Size(shape), tuple(stride), dtype_named(dtype))
                for name, (shape, stride, dtype) in saved["swapped"].items()
            }
            return cls(saved["kept"], swapped, saved["order"])
        except FileNotFoundError:
            return None
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, CorruptCheckpoint):
                raise
            raise OSError(errno.EIO, "is damaged, or not of this package", path) from error


@dataclass(eq=False)
class SwappedTensor:
    """A tensor that has memory only while it is swapped in. Otherwise it is empty, as with DeepSpeed's swappers."""

    tensor: torch.Tensor
    shape: torch.Size
    """Shape of the tensor while it is swapped in."""
    stride: tuple[int, ...]
    """Strides of the tensor while it is swapped in, in elements."""
    tile: Tile
    """Tile with the tensor's bytes, in memory and in a file."""

    def memory(self) -> torch.Tensor:
        """Return the tile's memory as a tensor with shape, stride and dtype. Raises RuntimeError if it is not in memory."""
        return self.tile.tensor(self.shape.numel(), self.tensor.dtype).as_strided(self.shape, self.stride)

    def attach(self) -> None:
        """Swap the tensor in: make it use the tile's memory."""
        self.tensor.data = self.memory()

    def in_place(self) -> bool:
        """Return whether the tensor still uses the tile's memory, and was not set to other memory."""
        return self.tile.in_memory and self.tensor.is_set_to(self.memory())

    def detach(self) -> None:
        """Swap the tensor out: make it empty."""
        self.tensor.data = torch.empty(0, dtype=self.tensor.dtype, device="cpu")


class OptimizerStateSwapInfo:
    """The swapper's record of one parameter: a sub-group's flat partition of master weights, with its states and gradient.

    Methods that swap or write to files raise OSError. The error of an earlier write is raised before they change anything.

    Args:
        parameter: The master weights, with ``ds_id``.
        numel: Number of elements.
        cache: Reads and writes the tiles, and keeps some in memory.
        folder: The folder of the files. Each tensor has a file; a state's file is named after the state, as with DeepSpeed.
        alignment: File lengths are a multiple of this many bytes.
        index: The sub-group's index in the order of a step, from 0.
    """

    def __init__(self, parameter: torch.Tensor, numel: int, cache: TileCache, folder: str, alignment: int, index: int) -> None:
        self.parameter = parameter
        self.param_id: str = parameter.ds_id  # type: ignore[attr-defined]
        self.index = index
        self.active = False
        """Whether the sub-group is swapped in."""
        self._stepped = False
        """Whether the optimizer has stepped since the sub-group was swapped in, and so has used the gradient."""
        self._numel = numel
        self._cache = cache
        self._folder = folder
        self._alignment = alignment
        self._restores = False
        """Whether a checkpoint may have replaced the files since :meth:`save`."""
        nbytes = numel * parameter.element_size()
        self.master = SwappedTensor(parameter, torch.Size([numel]), (1,), self._tile(self.param_id, nbytes))
        self.states: dict[str, SwappedTensor] = {}
        """The swapped states, by their names in the optimizer."""
        self.gradient = self._tile(f"{self.param_id}_gradient", nbytes)
        self._arrived: dict[int, int] = {}
        """Parts of the gradient given to :meth:`add_gradients` since the last step: offset -> length, in elements."""

    def has_gradients(self) -> bool:
        """Return whether :meth:`add_gradients` was given any part of the gradient since the last step."""
        return bool(self._arrived)

    def tiles(self) -> list[Tile]:
        """Return the tiles of the master weights and the swapped states, without the gradient's."""
        return [swapped.tile for swapped in self._swapped()]

    # In and out of memory

    def initialize(self, fill: Callable[[torch.Tensor], object]) -> None:
        """Fill the master weights by calling ``fill`` with their flat tensor, and start writing them to their file."""
        self._cache.create(self.master.tile)
        fill(self.master.memory())
        self._cache.release([self.master.tile], changed=True)

    def swap_in(self, last_gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Bring the master weights, the states and the gradient into memory. Blocks.

        Parts of the gradient that :meth:`add_gradients` was not given since the last step are set to the tensors in
        ``last_gradients``, or else to zero.

        Args:
            last_gradients: Pairs of an offset in elements and a tensor of gradients from an earlier step.

        Raises:
            OutOfBuffers: If there is not enough memory.
            OSError: From reading, or from an earlier write.
        """
        wanted = self.tiles() + [self.gradient] * self.has_gradients()
        self._cache.acquire([tile for tile in wanted if not tile.users])  # an interrupted call may have acquired them
        if not self.has_gradients():
            self._cache.create(self.gradient)
        memory = self._gradient_memory()
        for offset, length in self.gradient_gaps():
            memory[offset : offset + length].zero_()
        for start, gradient in last_gradients:
            memory[start : start + gradient.numel()].copy_(gradient.detach().reshape(-1))
        with defer_interrupts():
            for swapped in self._swapped():
                swapped.attach()
            self.parameter.grad = memory
            self.active = True

    def mark_stepped(self) -> None:
        """Mark the gradient as used, because the optimizer has stepped. Does nothing while the sub-group is not swapped in."""
        self._stepped = self.active

    def swap_out(self, write_opt_state: bool, write_gradients: bool) -> None:
        """Swap the tensors out, and write the changes that the arguments select. A gradient that a step has used is dropped."""
        gradient = self.parameter.grad
        write_gradients = write_gradients and gradient is not None
        if write_gradients and gradient is not None:
            memory = self._gradient_memory()
            if gradient.data_ptr() != memory.data_ptr():
                memory.copy_(gradient.detach().reshape(-1))
        with defer_interrupts():
            used_up = self._stepped and write_opt_state
            for swapped in self._swapped():
                swapped.detach()
            self.parameter.grad = None
            self.active = self._stepped = False
            if used_up:
                self._arrived.clear()
            elif write_gradients:
                self._arrived = {0: self._numel}  # also if no gradient had arrived, and one was set
            self._cache.release(self.tiles(), changed=write_opt_state)
            if self.has_gradients():
                self._cache.release([self.gradient], changed=write_gradients)
            else:
                self.drop_gradient()

    # The gradient

    def add_gradients(self, offsets: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Copy parts of the gradient into memory. If the gradient is in its file only, it is read first."""
        self._cache.poll()
        if self.active or not self.has_gradients():
            self._cache.create(self.gradient)
        elif not self.gradient.users:  # an interrupted call may have acquired it
            self._cache.acquire([self.gradient])
        try:
            for offset, tensor in zip(offsets, gradients, strict=True):
                flat = tensor.detach().reshape(-1)
                self._gradient_memory()[offset : offset + flat.numel()].copy_(flat)
                self._arrived[offset] = max(flat.numel(), self._arrived.get(offset, 0))
        finally:
            if not self.active:
                self._cache.release([self.gradient], changed=True, write=next(self.gradient_gaps(), None) is None)

    def drop_gradient(self) -> None:
        """Drop the gradient, in memory and in its file."""
        self._arrived.clear()
        self._cache.discard(self.gradient)

    def gradient_gaps(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, length), in elements, of the parts that :meth:`add_gradients` was not given since the last step."""
        at = 0
        for offset, length in sorted(self._arrived.items()):
            if offset > at:
                yield at, offset - at
            at = max(at, offset + length)
        if at < self._numel:
            yield at, self._numel - at

    # The optimizer's states, which ``state`` has by name

    def adopt(self, state: dict[str, Any], swappable: Collection[str]) -> None:
        """Make the tiles match the current tensors of the parameter and its states. Called before the tensors are swapped out.

        Tensors that the optimizer has created or replaced are copied into tiles. Tiles of states that it has removed are
        dropped.

        Args:
            state: The optimizer's states of the parameter.
            swappable: Names of the states that are large enough to be swapped.

        Raises:
            OSError: From an earlier write. Nothing is changed then.
            OutOfBuffers: If there is not enough memory. Nothing is changed then.
        """
        changed = {name for name, value in state.items() if not (self._is_swapped(name, value) and self.states[name].in_place())}
        new = {name: self._new_state(name, state[name]) for name in swappable if name in changed}
        try:
            for swapped in new.values():
                self._cache.create(swapped.tile)
        except BaseException:
            for swapped in new.values():
                self._cache.discard(swapped.tile)
            raise
        with defer_interrupts():
            # The optimizer may have set a tensor to another one's memory, so all are copied before any tile is dropped.
            for name, swapped in new.items():
                swapped.memory().copy_(state[name].detach())
            if not self.master.in_place():
                self.master.memory().copy_(self.parameter.detach().reshape(-1))
            for name in [name for name in self.states if name not in state or name in changed]:
                self._cache.discard(self.states.pop(name).tile)
            for name, swapped in new.items():
                swapped.attach()
                self.states[name] = swapped

    def purge(self, state: dict[str, Any]) -> None:
        """Drop the gradient, and swapped states that the optimizer has removed or replaced since they were swapped out."""
        self._restores = False
        for name in [name for name in self.states if not self._is_swapped(name, state.get(name))]:
            self._cache.discard(self.states.pop(name).tile)
        self.drop_gradient()

    def save(self, state: dict[str, Any]) -> None:
        """Write the file with the states that are not swapped and the list of all states. Raises OSError."""
        swapped = {name: (each.shape, each.stride, each.tensor.dtype) for name, each in self.states.items()}
        kept = {name: value for name, value in state.items() if name not in swapped}
        SavedStates(kept, swapped, list(state)).save(self._saved_path())
        self._restores = True

    def restore(self, states: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Set the optimizer's states to those in the file of :meth:`save`, if a checkpoint may have replaced the file since.

        States that the file does not list are removed. States that are not swapped get their values from the file; a state whose
        value :meth:`save` has left out stays unchanged. Does nothing if there is no file.

        Args:
            states: The optimizer's states by parameter.
        """
        if not self._restores:
            return
        saved = SavedStates.load(self._saved_path())
        if saved is not None and (saved.order or self.parameter in states):
            self._set(states.setdefault(self.parameter, {}), saved)
        self._restores = False

    def _set(self, state: dict[str, Any], saved: SavedStates) -> None:
        """Set the optimizer's states to the saved list of states. States that are not swapped get their saved values."""
        for name in [name for name in state if name not in saved.order]:
            del state[name]
        for name in saved.order:
            if name in saved.kept:
                state[name] = saved.kept[name]
            elif name in saved.swapped and name not in self.states:
                shape, stride, dtype = saved.swapped[name]
                state[name] = torch.empty(0, dtype=dtype, device="cpu")
                tile = self._state_tile(name, state[name], shape.numel() * dtype.itemsize, stored=True)
                self.states[name] = SwappedTensor(state[name], shape, stride, tile)
        for name in [name for name in self.states if name not in saved.swapped]:
            self._cache.discard(self.states.pop(name).tile)

    # Private helpers

    def _swapped(self) -> list[SwappedTensor]:
        """Return the master weights, then the swapped states."""
        return [self.master, *self.states.values()]

    def _new_state(self, name: str, tensor: torch.Tensor) -> SwappedTensor:
        """Return a record for a state that will be swapped from now on."""
        stride = torch.empty_like(tensor, device="meta").stride()  # the tensor's own, unless its memory has gaps
        return SwappedTensor(tensor, tensor.shape, stride, self._state_tile(name, tensor, tensor.nbytes))

    def _state_tile(self, name: str, tensor: torch.Tensor, nbytes: int, stored: bool = False) -> Tile:
        """Return a tile for the state of this name, and set the tensor's ``ds_id``, which names the file."""
        tensor.ds_id = f"{name}-{self.param_id}"  # type: ignore[attr-defined]
        return self._tile(f"{name}-{self.param_id}", nbytes, stored)

    def _tile(self, name: str, nbytes: int, stored: bool = False) -> Tile:
        """Return a tile for the file of this name in the folder."""
        return Tile(os.path.join(self._folder, f"{name}.tensor.swp"), padded(nbytes, self._alignment), self.index, stored)

    def _gradient_memory(self) -> torch.Tensor:
        """Return the gradient's memory as a flat tensor. Raises RuntimeError if the gradient is not in memory."""
        return self.gradient.tensor(self._numel, self.parameter.dtype)

    def _is_swapped(self, name: str, value: Any) -> bool:
        """Return whether ``value`` is the very tensor that is swapped under this name."""
        return name in self.states and self.states[name].tensor is value

    def _saved_path(self) -> str:
        """Return the path of the file that :meth:`save` writes."""
        return os.path.join(self._folder, f"{self.param_id}.states.pt")
