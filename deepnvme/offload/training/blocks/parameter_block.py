"""The parameters of a module as one block: on the drive, and in memory while the module is in use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from deepnvme.model.quantization import Scheme
from deepnvme.offload.activations.saved_tensor import View, view_of
from deepnvme.offload.pinned_arena import PinnedArena
from deepnvme.offload.training.ranks import TrainingRanks
from deepnvme.states.sub_group import lay_out
from deepnvme.states.versions import VersionedBlock

from .frozen_parameters import FrozenParameters, quantizes


class ParameterBlock(VersionedBlock):
    """The parameters of one module. Parameters that are not trained may be in a separate block, :attr:`frozen`.

    With several processes, the block has this process's shards. While the parameters are in use, they are in separate memory,
    into which the shards of all processes are gathered.

    Args:
        number: Number of the block in the model.
        params: Its parameters, each once, on the CPU.
        names: Names of the parameters, for errors.
        arena: Lends the memory for dequantised weights and gathered shards.
        quantize: How weights that are not trained are quantised; None if they are not.
        ranks: The processes that the parameters are sharded over; None if this process has the whole parameters, as in the block
            that stays in memory.
    """

    def __init__(
        self,
        number: int,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        arena: PinnedArena,
        quantize: Scheme | None = None,
        ranks: TrainingRanks | None = None,
    ) -> None:
        self.number = number
        """Number of the block in the model."""
        self.params = tuple(params)
        self.ranks = ranks
        """The processes that the parameters are sharded over; None if this process has all of each parameter."""
        self.shards = self.params if ranks is None else tuple(_absent_shard(param, ranks) for param in params)
        """What the block stores of each parameter: the parameter itself, or a parameter that is this process's shard."""
        frozen = {index: self.shards[index] for index in _frozen(params, quantize)}
        own = [(index, "", shard.detach()) for index, shard in enumerate(self.shards) if index not in frozen]
        self.layout = lay_out(own)
        """Where the parameters, or their shards, lie in the block, without those in :attr:`frozen`."""
        super().__init__(f"{number}.parameters", self.layout.nbytes)
        self.frozen = FrozenParameters(f"{number}.frozen", frozen, names, quantize, arena) if frozen else None
        """The block of the parameters that are not trained; None if there are none, or they are in this block."""
        self._absent = [absent_like(param) for param in params]
        self._absent_bytes = [_element_bytes(absent).tolist() for absent in self._absent]
        self._arena = arena
        self._gathered: torch.Tensor | None = None
        self._whole = None if ranks is None else lay_out([(i, "", _padded(each, ranks)) for i, each in enumerate(params)])
        self.holds = 0
        """Number of uses of the parameters in progress."""

    @property
    def parts(self) -> tuple[VersionedBlock, ...]:
        """The blocks on the drive: this one and, if there is one, that of the frozen parameters."""
        return (self,) if self.frozen is None else (self, self.frozen)

    @property
    def values_nbytes(self) -> int:
        """Bytes of memory that the parameters' values need beside the block while they are in use."""
        if self._whole is not None:
            return self._whole.nbytes
        return 0 if self.frozen is None else self.frozen.values_nbytes

    def values(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield each parameter with the tensor in memory that has its whole value."""
        if self._whole is None:
            yield from self.stored_values()
            return
        for section in self._whole.sections:
            param = self.params[section.piece]
            yield param, section.of(self._gathered_bytes)[: len(param)]

    def stored_values(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield each parameter with the tensor in memory that has its stored value: all of it, or this process's shard."""
        for section in self.layout.sections:
            yield self.params[section.piece], section.of(self.content)
        if self.frozen is not None:
            for section in self.frozen.layout.sections:
                yield self.params[section.piece], section.of(self.frozen.values)

    @property
    def _gathered_bytes(self) -> torch.Tensor:
        if self._gathered is None:
            raise RuntimeError(f"{self!r} is not gathered")
        return self._gathered

    def begin_values(self) -> None:
        """Get memory for the parameters' values, if they need their own. Its content is undefined. Raises OutOfBuffers."""
        if self._whole is not None:
            self._gathered = self._arena.lend_beyond(self._whole.nbytes)
        elif self.frozen is not None:
            self.frozen.begin_values()

    def gather_shards(self, to_train: bool) -> None:
        """Gather the shards of all processes into whole parameters. This process's shards must be in memory. Blocks.

        Args:
            to_train: Whether the parameters are gathered for a forward or backward of a step.

        Raises:
            OutOfBuffers: If there is no memory for the whole parameters.
            RuntimeError: If another process has failed or ended.
        """
        assert self.ranks is not None
        assert self._whole is not None
        if self._gathered is None:
            self.begin_values()
        shards = dict(self.stored_values())
        places = [section.of(self._gathered_bytes) for section in self._whole.sections]
        in_order = [shards[self.params[section.piece]] for section in self._whole.sections]
        self.ranks.gather(self.number, in_order, places, to_train)

    def keep_own_shards(self) -> None:
        """Copy this process's rows of each whole parameter into its blocks."""
        assert self.ranks is not None
        whole = dict(self.values())
        for param, place in self.stored_values():
            place.copy_(self.ranks.shard_of(whole[param]))

    def fill(self, values: Iterable[torch.Tensor], quantized: Mapping[str, torch.Tensor] | None) -> bool:
        """Copy new values of the parameters to the memory of this block and of :attr:`frozen`, which quantises its values.

        Args:
            values: This process's value of each parameter, in order: all of it, or this process's rows.
            quantized: Quantised weights by name, as for :meth:`FrozenParameters.quantize`.

        Returns:
            Whether frozen parameters had other values before.

        Raises:
            ValueError: If a value cannot be quantised.
        """
        by_param = dict(zip(self.params, values, strict=True))
        frozen = set() if self.frozen is None else {self.params[index] for index in self.frozen.params}
        changed = set()
        for param, place in self.stored_values():
            value = by_param[param]
            # What is quantised would not be the same after a second time.
            if param not in frozen or value.dtype != place.dtype or not torch.equal(place, value):
                place.copy_(value)
                changed.add(param)
        if self.frozen is not None:
            self.frozen.quantize(quantized, changed)
        return not frozen.isdisjoint(changed)

    def attach(self) -> None:
        """Make each parameter's ``data`` a view of its value in memory."""
        for param, place in self.values():
            param.data = place

    def check_absent(self) -> None:
        """Raise RuntimeError if other code has changed parameters while they had no memory. Drops the changes."""
        states = list(zip(self.params, self._absent, self._absent_bytes, strict=True))
        changed = [
            param
            for param, absent, content in states
            if param.data_ptr() != absent.data_ptr() or _element_bytes(absent).tolist() != content
        ]
        if changed:
            for _, absent, content in states:
                _element_bytes(absent).copy_(torch.tensor(content, dtype=torch.uint8))
            self.detach()
            raise _changed_error(changed)

    def check_in_place(self) -> None:
        """Raise RuntimeError if other code has given parameters other memory than the block's. That memory is dropped."""
        moved = [
            param
            for param, place in self.values()
            if (param.data_ptr(), param.shape, param.stride()) != (place.data_ptr(), place.shape, place.stride())
        ]
        if moved:
            self.attach()
            raise _changed_error(moved)

    def detach(self) -> None:
        """Detach the parameters from their memory. They then read as NaN; :meth:`check_absent` finds writes to them."""
        for param, absent in zip(self.params, self._absent, strict=True):
            param.data = absent
        self._gathered = None
        if self.frozen is not None:
            self.frozen.end_values()

    def attach_shards(self) -> None:
        """Make the ``data`` of each shard, except frozen ones, a view of the block's memory, so that a step changes the block."""
        for section in self.layout.sections:
            self.shards[section.piece].data = section.of(self.content)

    def detach_shards(self) -> None:
        """Detach the shards from their memory, unless they are the parameters themselves."""
        if self.ranks is not None:
            for shard in self.shards:
                shard.data = absent_like(shard)

    def absent_addresses(self) -> set[int]:
        """Return the addresses that the parameters' ``data`` has while they have no memory."""
        return {absent.data_ptr() for absent in self._absent}

    def _contents(self) -> Iterator[tuple[VersionedBlock, torch.Tensor]]:
        """Yield this block and the frozen parameters, as far as they are in memory, each with the bytes of the parameters."""
        content = self._gathered if self.ranks is not None else self.content if self.in_memory else None
        if content is not None:
            yield self, content
        if self.frozen is not None and self.frozen.has_values:
            yield self.frozen, self.frozen.values

    def view_of(self, tensor: torch.Tensor) -> tuple[VersionedBlock, View] | None:
        """Return the block in whose memory a tensor lies, this one or :attr:`frozen`, and the tensor's layout in that memory.

        None if the tensor is in other memory, or the parameters have no memory.
        """
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or not tensor.numel():
            return None
        for part, content in self._contents():
            if 0 <= tensor.data_ptr() - content.data_ptr() < content.nbytes:
                return part, view_of(tensor, int(content.storage_offset()))
        return None

    def tensor(self, part: VersionedBlock, view: View) -> torch.Tensor:
        """Return a new tensor over the memory of ``part`` with the layout ``view``, both as :meth:`view_of` has returned them."""
        content = dict(self._contents())[part]
        return view.on(content.untyped_storage(), int(content.storage_offset()))

    # -- its versions on the drive

    def commit(self) -> None:
        """Make the newest version that of the last completed step."""
        super().commit()
        if self.frozen is not None:
            self.frozen.commit()

    def undo(self) -> None:
        """Return to the version of the last completed step: the next read of the block reads that version."""
        super().undo()
        if self.frozen is not None and self.frozen.uncommitted:
            self.frozen.undo()


def _frozen(params: Sequence[nn.Parameter], quantize: Scheme | None) -> dict[int, nn.Parameter]:
    """Return, by index, the parameters of the separate block of frozen parameters.

    If some parameters are trained, these are all others; their block is then never written again. If none is trained, these are
    all parameters if some of them are quantised, else none.
    """
    quantized = {index: param for index, param in enumerate(params) if quantizes(quantize, param)}
    if not (quantized or any(param.requires_grad for param in params)):
        return quantized
    return {index: param for index, param in enumerate(params) if not param.requires_grad}


def _absent_shard(param: nn.Parameter, ranks: TrainingRanks) -> nn.Parameter:
    """Return a parameter of the shape of this rank's shard of ``param``, without memory."""
    begin, end = ranks.rows_of(param)
    shape = torch.empty((end - begin, *param.shape[1:]), dtype=param.dtype, device="meta")
    return nn.Parameter(absent_like(shape), requires_grad=param.requires_grad)


def _padded(param: nn.Parameter, ranks: TrainingRanks) -> torch.Tensor:
    return torch.empty(ranks.padded_shape(param), dtype=param.dtype, device="meta")


def _changed_error(changed: Iterable[torch.Tensor]) -> RuntimeError:
    shapes = ", ".join(str(tuple(param.shape)) for param in changed)
    return RuntimeError(
        f"parameters of the shapes {shapes} were changed between steps, when their values are on the drive: the change is"
        " dropped. To change values, load_state_dict() a state_dict() of this OffloadedTraining that has them"
    )


def _element_bytes(absent: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the single element that a tensor of :func:`absent_like` repeats, as a view."""
    return absent.as_strided((1,), (1,)).view(torch.uint8)


def absent_like(param: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a parameter's shape and dtype that takes the memory of one element: NaN, or 0 for integers."""
    if param.is_floating_point() or param.is_complex():
        return torch.full((), torch.nan, dtype=param.dtype, device="cpu").expand(param.shape)
    return torch.zeros((), dtype=param.dtype, device="cpu").expand(param.shape)
