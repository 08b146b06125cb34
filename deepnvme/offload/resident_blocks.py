"""Sub-groups whose blocks stay in memory from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepnvme._interrupts import defer_interrupts
from deepnvme.memory.host import give_back_heap

from .block_versions import BlockVersions, block_name
from .sub_group import Held, SubGroup

if TYPE_CHECKING:
    from deepnvme.memory.pool import BufferPool

    from .io_stats import IOStats
    from .sub_group import Gradients


class ResidentBlocks:
    """A block comes here from the drive, where its first step has left it: what is to fail in the optimizer's own code mostly
    does so at once, and there it can be undone. From then on it has no second copy."""

    def __init__(self, traffic: IOStats, blocks: BlockVersions, pool: BufferPool) -> None:
        self._traffic, self._blocks, self._pool = traffic, blocks, pool

    def load(self, sub_groups: Sequence[SubGroup]) -> None:
        """Have the blocks of these in memory. Raises OSError, or MemoryError, and those that came stay."""
        coming = []
        errors = []
        try:
            for each in sub_groups:
                if each.resident is None:
                    assert each.layout is not None
                    lease = self._pool.lease(max(each.layout.nbytes, 1))
                    coming.append((each, lease, self._traffic.get(block_name(each), lease.buffer[: each.layout.nbytes])))
        finally:
            with self._traffic.spending("waiting"):
                for each, lease, reading in coming:  # all of them: one error is raised, and the others are the same drive's
                    errors.append(reading.exception())
                    if errors[-1] is None:
                        each.resident = lease
        for error in errors:
            if error is not None:
                raise error

    def step(self, sub_group: SubGroup, gradients: Gradients, groups: Sequence[dict[str, Any]]) -> None:
        """In place; what is on the drive is an older step's then."""
        assert sub_group.resident is not None
        sub_group.current = None
        held = sub_group.step(sub_group.resident.buffer, gradients, groups)
        if held is not None:
            self._replace(sub_group, held)
            del held
            give_back_heap()

    def write(self, sub_group: SubGroup) -> None:
        """Have a copy on the drive of what is in memory only, to be mapped: one in memory would double it."""
        if sub_group.resident is None or sub_group.current is not None:
            return
        assert sub_group.layout is not None
        number = self._blocks.next_of(sub_group)
        block = sub_group.resident.buffer[: sub_group.layout.nbytes]
        with self._traffic.aside():
            self._traffic.put(block_name(sub_group, number), block).result()
        sub_group.current = number

    def dismiss(self, sub_group: SubGroup) -> None:
        """Have this one on the drive only, from now on."""
        self.write(sub_group)
        with defer_interrupts():
            sub_group.in_memory = False
            self.drop(sub_group)

    def drop(self, sub_group: SubGroup) -> None:
        """Give its memory back."""
        lease, sub_group.resident = sub_group.resident, None
        if lease is not None:
            lease.release()

    def _replace(self, sub_group: SubGroup, held: Held) -> None:
        layout = sub_group.lay_out(held)
        lease = self._pool.lease(max(layout.nbytes, 1))
        for section, (_, _, tensor) in zip(layout.sections, held, strict=True):
            section.of(lease.buffer).copy_(tensor)
        sub_group.resident = lease  # the old one ends with the last who knows it: the step may be undone
