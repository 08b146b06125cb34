"""Initial values of a model's parameters: those in memory, those of a checkpoint, or those that modules reset them to.

Values are made one block at a time, in the memory from which the block is written, so that a model need not fit into memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from deepnvme.cache.block_cache import BlockCache
from deepnvme.checkpoint.file_io import shared_engine
from deepnvme.checkpoint.weight_locations import Location, OpenFiles, Weights, part_of, weights_in
from deepnvme.memory.host import empty_aligned
from deepnvme.model.structure import weights_by_name
from deepnvme.model.weight_differences import WeightInfo, WeightMismatch, described, differences
from deepnvme.offload.activations.saved_tensor import is_plain
from deepnvme.offload.tiles.tiling import cut_into_tiles
from deepnvme.telemetry.descriptions import shorten

from .blocks.parameter_block import ParameterBlock, absent_like
from .model_partition import ModelPartition
from .ranks import TrainingRanks

Checkpoint = str | os.PathLike[str]

_SHOWN = 8
"""Most names that an error's message lists."""
_UNSET = 0xA5
"""Byte that fills tensors that have no value yet."""

_left_on_meta: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose values were lost when their training was closed. A new training must not silently give them new values."""


class InitialValues:
    """Gives the parameters and buffers of a model their initial values.

    With a checkpoint, values come from it. Without one, parameters in memory keep their values, and those on the meta device get
    values from ``reset_parameters()`` of their module, and then from ``_init_weights(module)`` of the transformers model around
    it. A parameter of several modules gets the value of the first one.

    With a checkpoint, modules reset only the buffers that no checkpoint has. If a part of the model is on the meta device,
    parameters in memory that the checkpoint lacks, such as those of adapters, keep their values.

    The constructor makes all checks that are possible beforehand. Nothing is changed before :meth:`place`.

    Args:
        model: The model, on the CPU, on the meta device, or in part on either.
        checkpoint: A checkpoint, as for :func:`deepnvme.checkpoint.weight_locations.weights_in`. Values are converted to the
            dtypes of the model. It may be of the model before layers were tiled: each tile then reads its part.
        ranks: The processes that train the model together.

    Raises:
        ValueError: If the checkpoint's weights are not those of the model, or a tensor on the meta device can get no value.
        OSError: If the checkpoint cannot be read.
    """

    def __init__(self, model: nn.Module, checkpoint: Checkpoint | None, ranks: TrainingRanks) -> None:
        self._model, self._ranks = model, ranks
        self._names: dict[torch.Tensor, str] = {}  # in the checkpoint, of what is read
        self._infos: Mapping[str, WeightInfo] = {}
        self._weights: Weights | None = None
        self._files: OpenFiles | None = None
        if checkpoint is not None:
            self._look_into(checkpoint)
        self._all_names: dict[torch.Tensor, str] = {}  # the first of each
        every = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
        for name, tensor in itertools.chain(*every):
            self._all_names.setdefault(tensor, name)
        self._check_in_memory()
        self._reset = {tensor for tensor in self._all_names if tensor.is_meta and tensor not in self._names}
        """Parameters and buffers that modules give values to."""
        self._all_reset = all(param in self._reset for param in model.parameters())
        self._valued: set[torch.Tensor] = set()  # of what they give values to, what they have
        self._cache: BlockCache
        self._blocks: Mapping[nn.Module, ParameterBlock] = {}
        self._visited: set[nn.Module] = set()
        self._begun: list[ParameterBlock] = []  # in memory, and without all values yet
        self._init_weights = _init_weights_by_module(model)

    def _look_into(self, checkpoint: Checkpoint) -> None:
        """Find the model's weights in a checkpoint. Raises WeightMismatch if the checkpoint is of another model."""
        what = f"the checkpoint '{os.fspath(checkpoint)}' is not of this {type(self._model).__name__}"
        found = cut_into_tiles(self._model, weights_in(checkpoint), _shape_of, part_of, what)
        self._files = OpenFiles(shared_engine(Path(checkpoint)))
        self._weights = Weights(found, self._files)
        self._infos = {name: self._weights.info(name) for name in found}
        found_ties = dict(self._weights.ties())
        wanted, ties = described(self._model)
        weights = weights_by_name(self._model)
        if any(weight.is_meta for weight in weights.values()):
            found_weights = {weights[name] for name in self._infos if name in weights}
            added = {name for name, weight in weights.items() if not weight.is_meta and weight not in found_weights}
            wanted = {name: info for name, info in wanted.items() if name not in added}
            ties = {name: first for name, first in ties.items() if name not in added}
        said = differences(wanted, ties, self._infos, found_ties, dtypes=False)
        if said:
            raise WeightMismatch(what, said)
        for name, tensor in weights.items():
            if name in self._infos:
                self._names.setdefault(tensor, name)

    def _check_in_memory(self) -> None:
        left = self._model in _left_on_meta
        gone = [
            name
            for tensor, name in self._all_names.items()
            if tensor not in self._names and (_is_absent(tensor) or (left and tensor.is_meta))
        ]
        if gone:
            raise ValueError(
                f"parameters have no values any more ({shorten(map(repr, gone), _SHOWN)}), of a training that was closed without"
                " restore=True, or could not be begun: make the model anew, or give a checkpoint"
            )

    def _check_set(self, tensors: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Raise ValueError if modules have not set all tensors. ``tensors``: pairs of a tensor and its value in memory."""
        unset = [self._all_names[tensor] for tensor, value in tensors if tensor in self._reset and _is_unset(value)]
        if unset:
            raise ValueError(
                "on the meta device, without values: neither reset_parameters() of their modules nor a checkpoint gives them to"
                f" {shorten(map(repr, unset), _SHOWN)}"
            )

    def place(self, partition: ModelPartition) -> ModelPartition:
        """Replace parameters and buffers on the meta device by new ones on the CPU, and return the partition with the new ones.

        The new parameters have no memory yet: :meth:`write` fills their blocks. After an error the model cannot be used again.
        """
        placed = replace_tensors(self._model, _placed)
        self._names = {placed.get(tensor, tensor): name for tensor, name in self._names.items()}
        self._all_names = {placed.get(tensor, tensor): name for tensor, name in self._all_names.items()}
        self._reset = {placed.get(tensor, tensor) for tensor in self._reset}

        def of(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
            return [each for param in params if isinstance(each := placed.get(param, param), nn.Parameter)]

        return partition._replace(params=[of(some) for some in partition.params], rest=of(partition.rest))

    @torch.no_grad()
    def write(self, blocks: Mapping[nn.Module, ParameterBlock], rest: ParameterBlock, cache: BlockCache) -> None:
        """Fill all blocks with the initial values. The cache starts writing a block when it has all of its values. Blocks.

        With several processes, all get the first process's values, also for buffers.

        At any time, memory holds only ``rest``, one block, the blocks around that block, and one weight to be converted to
        another dtype.
        Modules are reset in the order in which they were made, provided that every module makes its submodules before its own
        parameters.

        Args:
            blocks: The block of each module.
            rest: The block of all other parameters.
            cache: The block cache.

        Raises:
            RuntimeError: If another process has failed or ended.
            ValueError: If modules have left a parameter or buffer without a value, or if a value cannot be quantised.
            CorruptCheckpoint: If the checkpoint is damaged, or was changed meanwhile.
            OSError: If a drive cannot be read or written.
        """
        self._cache, self._blocks = cache, blocks
        try:
            self._begin(rest)
            self._read((name, buffer, None) for buffer, name in self._names.items() if not isinstance(buffer, nn.Parameter))
            self._visit(self._model)
            self._check_set((buffer, buffer) for buffer in self._model.buffers())
            self._end(rest)
            self._ranks.broadcast_from_first([each for _, each in self._model.named_buffers()])
            if self._weights is not None:
                self._weights.check_unchanged()
        finally:
            for block in self._begun:
                block.detach()
            if self._files is not None:
                self._files.close()

    def _visit(self, module: nn.Module) -> None:
        """Give values to a module's submodules, then to the module itself."""
        self._visited.add(module)
        block = self._blocks.get(module)
        if block is not None:
            self._begin(block)
        for child in module.children():
            if child not in self._visited:
                self._visit(child)
        self._reset_module(module)
        if block is not None:
            self._end(block)

    def _begin(self, block: ParameterBlock) -> None:
        """Create a block in memory, with the values that are in memory or in the checkpoint."""
        for part in block.parts:
            self._cache.create(part)
        block.begin_values()
        to_read = []
        for param, value in block.values():
            if param in self._names:
                place = _bytes_of(value) if value.is_contiguous() else None
                to_read.append((self._names[param], value, place))
            elif param in self._reset:
                _bytes_of(value).fill_(_UNSET)
            else:
                value.copy_(param.detach())
        self._read(to_read)
        self._begun.append(block)
        block.attach()

    def _end(self, block: ParameterBlock) -> None:
        """Check that a block has all of its values, and let the cache write it."""
        self._check_set(block.values())
        self._ranks.broadcast_from_first([value for _, value in block.values()], block.number)
        if block.ranks is not None:
            block.keep_own_shards()
        elif block.frozen is not None:
            block.frozen.quantize()
        block.detach()
        self._begun.remove(block)
        self._cache.release(block.parts, changed=True)

    # -- from the modules

    def _reset_module(self, module: nn.Module) -> None:
        own = list(_own(module))
        init_weights = self._init_weights.get(module)
        if not self._reset.isdisjoint(own):
            kept = [(each, each.detach().clone()) for each in own if each not in self._reset or each in self._valued]
            name = "_reset_parameters" if isinstance(module, nn.MultiheadAttention) else "reset_parameters"
            getattr(module, name, lambda: None)()
            if init_weights is not None:
                init_weights(module)
            for tensor, value in kept:
                tensor.copy_(value)
            self._valued.update(own)
        elif init_weights is not None and not own and self._all_reset:
            init_weights(module)  # of some transformers models those around others change the values once more

    # -- from the checkpoint

    def _read(self, wanted: Iterable[tuple[str, torch.Tensor, torch.Tensor | None]]) -> None:
        """Read weights from the checkpoint. Blocks.

        Args:
            wanted: (name, tensor for the value, that tensor's memory as bytes or None if it has gaps).
        """
        to_convert = []
        reads = []
        try:
            for name, value, place in wanted:
                assert self._weights is not None
                if place is not None and self._infos[name].dtype == value.dtype:
                    reads.append(self._weights.read_into(name, place))
                else:
                    to_convert.append((name, value, self._weights))
            while reads:
                reads[0].result()
                reads.pop(0)
        finally:
            for each in reads:  # nothing may be read any more into memory that others will have
                with contextlib.suppress(Exception):
                    each.result()
        for name, value, weights in to_convert:
            dtype, shape = self._infos[name]
            raw = empty_aligned(self._infos[name].nbytes)
            weights.read_into(name, raw).result()
            value.copy_(raw.view(dtype).view(shape))


def _shape_of(weight: torch.Tensor | Location) -> tuple[int, ...]:
    return tuple(weight.shape if isinstance(weight, torch.Tensor) else weight.info.shape)


def _own(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that a module resets: its parameters and buffers, and those in its ParameterLists and ParameterDicts."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
    for child in module.children():
        if isinstance(child, nn.ParameterList | nn.ParameterDict):
            yield from _own(child)


def _init_weights_by_module(model: nn.Module) -> dict[nn.Module, Callable[[nn.Module], object]]:
    """Return, for each module in a transformers model, the ``_init_weights`` of the innermost module around it that has one."""
    found: dict[nn.Module, Callable[[nn.Module], object]] = {}
    for module in model.modules():  # those around others come first
        init_weights = getattr(module, "_init_weights", None)
        if callable(init_weights):
            found.update(dict.fromkeys(module.modules(), init_weights))
    return found


def _is_absent(tensor: torch.Tensor) -> bool:
    dense = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return dense and tensor.untyped_storage().nbytes() < tensor.nbytes


def _is_unset(tensor: torch.Tensor) -> bool:
    """Return whether a tensor still has only ``_UNSET`` bytes."""
    if not tensor.numel():
        return False
    low, high = _bytes_of(tensor.detach()).aminmax()
    return int(low) == int(high) == _UNSET


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 1-D uint8 view of a tensor whose elements fill a contiguous range of memory, in any order."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _placed(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor on the CPU, without a value, for one on the meta device."""
    if not tensor.is_meta:
        return None
    if isinstance(tensor, nn.Parameter):
        return absent_like(tensor)
    buffer = torch.empty_like(tensor, device="cpu")
    _bytes_of(buffer).fill_(_UNSET)
    return buffer


def leave_on_meta(model: nn.Module) -> None:
    """Replace parameters without memory, and buffers that have never been set, by tensors on the meta device."""

    def on_meta(tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor on the meta device for one without a value."""
        plain = is_plain(tensor) and tensor.device.type == "cpu" and tensor.is_contiguous()
        gone = _is_absent(tensor) if isinstance(tensor, nn.Parameter) else plain and _is_unset(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if gone else None

    replaced = set(replace_tensors(model, on_meta).values())
    if not replaced:
        return
    _left_on_meta.add(model)
    for module in model.modules():
        lost = replaced.intersection([*module._parameters.values(), *module._buffers.values()])
        if lost and _refuse_state_dict not in module._state_dict_pre_hooks.values():
            module.register_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Raise RuntimeError from ``state_dict()`` while weights of the module are on the meta device: it would save no values."""
    gone = [repr(prefix + name) for name, tensor in weights_by_name(module).items() if tensor.is_meta]
    if gone:
        raise RuntimeError(
            f"state_dict() of weights without values ({shorten(gone, _SHOWN)}): their training was closed without restore=True,"
            " or could not be begun. Give them values by load_state_dict(..., assign=True), or make the model anew"
        )


def replace_tensors(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor | None]) -> dict[torch.Tensor, torch.Tensor]:
    """Replace parameters and buffers of a model. Tied ones stay tied, and parameters keep their attributes.

    Args:
        model: The model.
        make: Returns the replacement of a parameter or buffer; None to leave it.

    Returns:
        Replaced parameter or buffer -> the new one.
    """
    made: dict[torch.Tensor, torch.Tensor | None] = {}
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None:
                continue
            if tensor not in made:
                new = made[tensor] = make(tensor)
                if new is not None and isinstance(tensor, nn.Parameter):
                    made[tensor] = nn.Parameter(new, requires_grad=tensor.requires_grad)
                    vars(made[tensor]).update(vars(tensor))
            if made[tensor] is not None:
                setattr(module, name, made[tensor])  # and not in _parameters alone: an LSTM has lists of them
    return {tensor: new for tensor, new in made.items() if new is not None}
