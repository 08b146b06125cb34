"""Initial values of a model's parameters: those in memory, those of a checkpoint, or those that modules reset them to.

Values are made one block at a time, in the memory from which the block is written, so that a model need not fit into memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from deepnvme.cache.block_cache import BlockCache
from deepnvme.checkpoint.file_io import shared_engine
from deepnvme.checkpoint.weight_locations import Location, OpenFiles, Weights, part_of, weights_in
from deepnvme.memory.host import empty_aligned
from deepnvme.model.structure import find_ties, weights_by_name
from deepnvme.model.weight_differences import WeightInfo, WeightMismatch, described, differences
from deepnvme.offload.activations.saved_tensor import is_distributed
from deepnvme.offload.tiles.tiling import cut_into_tiles
from deepnvme.telemetry.descriptions import shorten

from .blocks.parameter_block import ParameterBlock, absent_like
from .model_partition import ModelPartition
from .ranks import TrainingRanks

Checkpoint = str | os.PathLike[str] | Mapping[str, torch.Tensor]

_SHOWN = 8
"""Most names that an error's message lists."""
_UNSET = 0xA5
"""Byte that fills integer tensors that have no value yet. Floating-point tensors are filled with NaN."""


class InitialValues:
    """Gives the parameters and buffers of a model their initial values.

    With a checkpoint, values come from it. Without one, parameters in memory keep their values, and those on the meta device get
    values from ``reset_parameters()`` of their module, and then from ``_init_weights(module)`` of the transformers model around
    it. A parameter of several modules gets the value of the first one.

    With a checkpoint, modules reset only the buffers that no checkpoint has. If a part of the model is on the meta device,
    parameters in memory that the checkpoint lacks, as those of adapters, keep their values.

    The constructor checks all that can be checked beforehand. Nothing is changed before :meth:`place`.

    Args:
        model: On the CPU, on the meta device, or in part on either.
        checkpoint: As :func:`deepnvme.checkpoint.weight_locations.weights_in` takes it, or a mapping of names to tensors, such as
            ``torch.load(path, mmap=True)``. Values are converted to the dtypes of the model. It may be of the model before layers
            were tiled: each tile then reads its part. DTensors in a mapping must be sharded as the training is, and cannot be
            weights of tiled layers.
        ranks: The processes that train the model together.

    Raises:
        ValueError: If the checkpoint's weights are not those of the model; or if something on the meta device can get no value.
        OSError: If the checkpoint cannot be read.
    """

    def __init__(self, model: nn.Module, checkpoint: Checkpoint | None, ranks: TrainingRanks) -> None:
        self._model, self._ranks = model, ranks
        self._names: dict[torch.Tensor, str] = {}  # in the checkpoint, of what is read
        self._infos: Mapping[str, WeightInfo] = {}
        self._in_memory: Mapping[str, torch.Tensor] = {}
        self._weights: Weights | None = None
        self._files: OpenFiles | None = None
        if checkpoint is not None:
            self._look_into(checkpoint)
        self._all_names: dict[torch.Tensor, str] = {}  # the first of each
        for name, tensor in _tensors(model):
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
        self._check_resets()

    def _look_into(self, checkpoint: Checkpoint) -> None:
        """Find the model's weights in a checkpoint. Raises WeightMismatch if the checkpoint is of another model."""
        given = "state" if isinstance(checkpoint, Mapping) else f"checkpoint '{os.fspath(checkpoint)}'"
        what = f"the {given} is not of this {type(self._model).__name__}"
        if isinstance(checkpoint, Mapping):
            self._in_memory = cut_into_tiles(self._model, checkpoint, lambda weight: weight.shape, _slice, what)
            for name, value in self._in_memory.items():
                if is_distributed(value):
                    self._ranks.rows_in(value, name)  # raises for another placement
            self._infos = {name: WeightInfo.of(value) for name, value in self._in_memory.items()}
            found_ties = find_ties(self._in_memory)
        else:
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
        gone = [
            name
            for tensor, name in self._all_names.items()
            if tensor not in self._names and tensor.device.type == "cpu" and _is_absent(tensor)
        ]
        if gone:
            raise ValueError(
                f"parameters have no values any more ({shorten(map(repr, gone), _SHOWN)}), of a training that was closed without"
                " restore=True, or could not be begun: make the model anew, or give a checkpoint"
            )

    def _check_resets(self) -> None:
        """Raise ValueError if a parameter or buffer on the meta device cannot get a value from any module."""
        able = {
            tensor
            for module in self._model.modules()
            if _reset_of(module) is not None or module in self._init_weights
            for tensor in _own(module)
        }
        unable = [self._all_names[tensor] for tensor in self._all_names if tensor in self._reset - able]
        if unable:
            self._raise_unset(unable)

    def _raise_unset(self, names: Iterable[str]) -> None:
        raise ValueError(
            "on the meta device, without values: neither reset_parameters() of their modules nor a checkpoint gives them to"
            f" {shorten(map(repr, names), _SHOWN)}"
        )

    def place(self, partition: ModelPartition) -> ModelPartition:
        """Replace parameters and buffers on the meta device by new ones on the CPU, and return the partition with the new ones.

        The new parameters take no memory, and have no values. After an error the model cannot be used again.
        """
        placed: dict[torch.Tensor, torch.Tensor] = {}
        for module in self._model.modules():
            for name, param in list(module._parameters.items()):
                if param is not None and param.is_meta:
                    if param not in placed:
                        new = nn.Parameter(absent_like(param), requires_grad=param.requires_grad)
                        new.__dict__.update(param.__dict__)
                        placed[param] = new
                    setattr(module, name, placed[param])  # and not in _parameters alone: an LSTM has lists of them
            for name, buffer in list(module._buffers.items()):
                if buffer is not None and buffer.is_meta:
                    if buffer not in placed:
                        placed[buffer] = torch.empty_like(buffer, device="cpu")
                        _mark_unset(placed[buffer])
                    module._buffers[name] = placed[buffer]
        self._names = {placed.get(tensor, tensor): name for tensor, name in self._names.items()}
        self._all_names = {placed.get(tensor, tensor): name for tensor, name in self._all_names.items()}
        self._reset = {placed.get(tensor, tensor) for tensor in self._reset}

        def of(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
            found = [placed.get(param, param) for param in params]
            return [each for each in found if isinstance(each, nn.Parameter)]

        return partition._replace(params=[of(some) for some in partition.params], rest=of(partition.rest))

    @torch.no_grad()
    def write(self, blocks: Mapping[nn.Module, ParameterBlock], rest: ParameterBlock, cache: BlockCache) -> None:
        """Fill all blocks with the initial values. The cache starts writing a block when it has all of its values. Blocks.

        With several processes, all get the first process's values, also of buffers. Of a DTensor, each process has its own rows.

        In memory at a time are ``rest``, one block, the blocks around it, and one weight of a checkpoint with other dtypes.
        Modules are reset in the order in which they were made, provided that every module makes its submodules before its own
        parameters.

        Args:
            blocks: The block of each module.
            rest: The block of all other parameters.
            cache: The block cache.

        Raises:
            RuntimeError: If another process has failed or ended.
            ValueError: If modules have left something without a value, or replaced a parameter; or if a value cannot be
                quantised.
            CorruptCheckpoint: If the checkpoint is damaged, or was changed meanwhile.
            OSError: From the drives.
        """
        self._cache, self._blocks = cache, blocks
        try:
            distributed = sorted(name for name in self._names.values() if self._is_sharded(name))
            self._ranks.check_alike(distributed, "the names of the checkpoint's DTensors")
            self._begin(rest)
            self._read((name, buffer, None) for buffer, name in self._names.items() if not isinstance(buffer, nn.Parameter))
            self._visit(self._model)
            self._check_set((name, each) for name, each in _tensors(self._model) if not isinstance(each, nn.Parameter))
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
        own_rows = self._own_rows(block)
        for param, value in block.values():
            if param in own_rows:
                continue
            if param in self._names:
                place = _bytes_of(value) if value.is_contiguous() else None
                to_read.append((self._names[param], value, place))
            elif param in self._reset:
                _mark_unset(value)
            else:
                value.copy_(param.detach())
        self._read(to_read)
        self._begun.append(block)
        block.attach()

    def _end(self, block: ParameterBlock) -> None:
        """Check that a block has all of its values, and let the cache write it."""
        for param, value in block.values():
            if param.data_ptr() != value.data_ptr():  # a module has set its data to another tensor
                value.copy_(param.detach())
        self._check_set((self._all_names[param], param) for param in block.params)
        own_rows = self._own_rows(block)
        self._ranks.broadcast_from_first([value for param, value in block.values() if param not in own_rows], block.number)
        if block.ranks is not None:
            block.keep_own_shards(own_rows)
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
            reset = _reset_of(module)
            if reset is not None:
                reset()
            if init_weights is not None:
                init_weights(module)
            for tensor, value in kept:
                tensor.copy_(value)
            replaced = [self._all_names[each] for each in set(own) - set(_own(module)) if isinstance(each, nn.Parameter)]
            if replaced:
                raise ValueError(
                    f"reset_parameters() of a {type(module).__name__} has made other parameters in place of"
                    f" {shorten(map(repr, sorted(replaced)), _SHOWN)}: it has to give values to those that are there"
                )
            self._valued.update(own)
        elif init_weights is not None and not own and self._all_reset:
            init_weights(module)  # of some transformers models those around others change the values once more

    def _check_set(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raise ValueError if modules have given no values to some of these tensors, which are given with their names."""
        unset = [name for name, tensor in tensors if tensor in self._reset and _is_unset(tensor)]
        if unset:
            self._raise_unset(unset)

    # -- from the checkpoint

    def _is_sharded(self, name: str) -> bool:
        return name in self._in_memory and is_distributed(self._in_memory[name])

    def _own_rows(self, block: ParameterBlock) -> dict[torch.Tensor, torch.Tensor]:
        """Return this rank's rows of a sharded block's parameters for which the checkpoint has DTensors."""
        if block.ranks is None:
            return {}
        values = {param: self._in_memory[name] for param in block.params if self._is_sharded(name := self._names.get(param, ""))}
        return {param: self._ranks.local_shard(value, param) for param, value in values.items()}

    def _read(self, wanted: Iterable[tuple[str, torch.Tensor, torch.Tensor | None]]) -> None:
        """Read weights from the checkpoint. Blocks.

        Args:
            wanted: (name, tensor for the value, that tensor's memory as bytes or None if it has gaps).
        """
        to_convert = []
        reads = []
        try:
            for name, value, place in wanted:
                if self._weights is not None and place is not None and self._infos[name].dtype == value.dtype:
                    reads.append(self._weights.read_into(name, place))
                else:
                    to_convert.append((name, value))
            while reads:
                reads[0].result()
                reads.pop(0)
        finally:
            for each in reads:  # nothing may be read any more into memory that others will have
                with contextlib.suppress(Exception):
                    each.result()
        for name, value in to_convert:
            if self._weights is None:
                value.copy_(self._ranks.whole_of(self._in_memory[name], 0))
                continue
            dtype, shape = self._infos[name]
            raw = empty_aligned(self._infos[name].nbytes)
            self._weights.read_into(name, raw).result()
            value.copy_(raw.view(dtype).view(shape))


def _slice(weight: torch.Tensor, slices: Sequence[slice]) -> torch.Tensor:
    """Return a part of a weight. Raises ValueError for a DTensor, whose rows are divided among the ranks."""
    if is_distributed(weight):
        raise ValueError(
            "the checkpoint has a DTensor for a tiled layer, whose tiles have other rows on each rank: save it with"
            " deepnvme.save(state, path, group=group), and give the file as the checkpoint"
        )
    return weight[tuple(slices)]


def _shape_of(weight: torch.Tensor | Location) -> tuple[int, ...]:
    return tuple(weight.shape if isinstance(weight, torch.Tensor) else weight.info.shape)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's parameters and buffers, also non-persistent ones, by name; a tied one under each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _own(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that a module resets: its parameters and buffers, and those in its ParameterLists and ParameterDicts."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
    for child in module.children():
        if isinstance(child, nn.ParameterList | nn.ParameterDict):
            yield from _own(child)


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    """Return the function that resets a module's own parameters; None if there is none."""
    name = "_reset_parameters" if isinstance(module, nn.MultiheadAttention) else "reset_parameters"
    reset = getattr(module, name, None)
    return reset if callable(reset) else None


def _init_weights_by_module(model: nn.Module) -> dict[nn.Module, Callable[[nn.Module], object]]:
    """Return, for each module in a transformers model, the ``_init_weights`` of the innermost module around it that has one."""
    found: dict[nn.Module, Callable[[nn.Module], object]] = {}
    for module in model.modules():  # those around others come first
        init_weights = getattr(module, "_init_weights", None)
        if callable(init_weights):
            found.update(dict.fromkeys(module.modules(), init_weights))
    return found


def _is_absent(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() < tensor.nbytes


def _mark_unset(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        _bytes_of(tensor).fill_(_UNSET)


def _is_unset(tensor: torch.Tensor) -> bool:
    """Return whether a tensor still has no value: a floating-point one has NaN in it, any other has only ``_UNSET`` bytes."""
    if not tensor.numel():
        return False
    if not tensor.is_floating_point():
        low, high = _bytes_of(tensor.detach()).aminmax()
        return int(low) == int(high) == _UNSET
    if tensor.itemsize == 1:  # there are few operations on floats of 8 bits
        return bool(tensor.detach().float().isnan().any())
    return bool(tensor.detach().min().isnan())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor that has no gaps as bytes, whatever its strides."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
