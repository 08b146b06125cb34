"""The block of a sub-group's optimizer states: stepped in memory, and written beside the version that it was read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from deepnvme.cache.block import Block, State
from deepnvme.cache.block_cache import BlockCache
from deepnvme.memory.host import trim_heap

from .counted_io import StoredBlock
from .sub_group import BlockTensors, SubGroup
from .versions import BlockVersions, block_name

_KEPT_FREE = 32 << 20
"""Most bytes of freed memory that the C library may keep after the states of a first step were moved to pinned memory."""


class BlockAccess(Protocol):
    """Cache of the blocks of sub-groups, with the versions that it writes: of an optimizer's pipeline, or of a training."""

    cache: BlockCache
    """Reads the blocks, and writes them."""
    versions: BlockVersions
    """Chooses where on the drive a step writes."""

    def acquire(self, block: Block) -> None:
        """Begin a use of a block. Blocks while it is read. Raises like :meth:`BlockCache.acquire`."""

    def create(self, block: Block) -> None:
        """Begin a use of a block that the caller will fill; the block is not read. Raises like :meth:`BlockCache.create`."""

    def memory_bytes(self, sub_group: SubGroup) -> int:
        """Return the least bytes of memory to lease for the sub-group's block. Blocks with equal leases reuse each other's."""


class SubGroupStates:
    """The optimizer states of a sub-group as one block: :meth:`load`, :meth:`step` and :meth:`write` it.

    Args:
        sub_group: The sub-group.
        blocks: Cache of the block, and the versions that it writes.
    """

    def __init__(self, sub_group: SubGroup, blocks: BlockAccess) -> None:
        self.sub_group, self._blocks = sub_group, blocks
        self.block: StoredBlock | None = None
        """The block; None before the first step, and while nothing has asked for it."""
        self.unplaced: BlockTensors | None = None
        """State tensors that a step has made and that have no place in a block yet; None if there are none."""

    def stored_block(self) -> StoredBlock:
        """Return the block of a sub-group that was stepped before."""
        if self.block is None:
            assert self.sub_group.layout is not None
            block = self._new_block(self.sub_group.layout.nbytes)
            block.rename(block_name(self.sub_group))
            block.stored = True
            self.block = block  # only now: an interrupt leaves no block without a name
        return self.block

    def load(self) -> None:
        """Begin a use of the block. Blocks while it is read; before the first step there is nothing to read. Raises OSError."""
        if self.sub_group.layout is not None:
            self._blocks.acquire(self.stored_block())

    def step(self, collected: Mapping[int, torch.Tensor], scratch: torch.Tensor, groups: Sequence[dict[str, Any]]) -> None:
        """Step the sub-group, whose block is loaded. Arguments are those of :meth:`SubGroup.step`.

        Raises what the optimizer raises. The states on the drive are unchanged then, but parameters may be partly stepped, as
        with any torch optimizer, and so may states that are only in memory.
        """
        restore = self.sub_group.snapshot()
        try:
            content = None if self.block is None else self.block.content
            self.unplaced = self.sub_group.step(content, collected, scratch, groups)
        except BaseException:
            restore()
            if self.block is not None and self.block.state is State.CLEAN:
                self.forget()
            raise

    def write(self) -> None:
        """End the use of a block that was stepped, and start writing it as the next version, unless it is resident.

        Raises:
            OSError: From an earlier write.
            OutOfBuffers: If there is no memory for a new block. In both cases :attr:`unplaced` keeps the states.
        """
        if self.unplaced is not None:
            self._place(self.unplaced)
            self.unplaced = None
            trim_heap(_KEPT_FREE)
        assert self.block is not None
        if self.block.resident:
            self.sub_group.set_current_block(None)
        else:
            self.choose_version()
        self._blocks.cache.release([self.block], changed=True)

    def choose_version(self) -> None:
        """Choose the version that the next write of the block goes to."""
        assert self.block is not None
        self.sub_group.set_current_block(self._blocks.versions.next_of(self.sub_group))
        self.block.rename(block_name(self.sub_group))

    def forget(self) -> None:
        """Drop the block from memory, with all changes that are only there. Never blocks."""
        if self.block is not None:
            self._blocks.cache.reject([self.block])
            self.block = None

    def _new_block(self, nbytes: int) -> StoredBlock:
        """Make a block for the sub-group. It has no memory yet, and is not on the drive."""
        resident = self.sub_group.resident
        block = StoredBlock("", nbytes, 1 if resident else self._blocks.memory_bytes(self.sub_group))
        block.stored = False
        self._blocks.cache.keep({block: resident})
        return block

    def _place(self, made: BlockTensors) -> None:
        """Move state tensors to a new block with a layout for them. The tensors may be views of the old block."""
        layout = self.sub_group.lay_out(made)
        block = self._new_block(layout.nbytes)
        try:
            self._blocks.create(block)
        except BaseException:
            self.unplaced = [(index, key, tensor.clone()) for index, key, tensor in made]
            self._blocks.cache.reject([block])
            self.forget()
            raise
        layout.fill(block.content, [tensor for _, _, tensor in made])
        made.clear()  # frees the tensors, whoever has the list
        self.forget()
        self.block = block
