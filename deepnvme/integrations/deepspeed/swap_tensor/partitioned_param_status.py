"""Where a parameter's partition is."""

from __future__ import annotations

from enum import Enum


class PartitionedParamStatus(Enum):
    """``param.ds_tensor.status``. Equal to DeepSpeed's member of the same name, whichever side of a comparison it is on: one part
    of a program may have its class and another this one."""

    AVAILABLE = 1
    """In memory."""
    NOT_AVAILABLE = 2
    """In its file only."""
    INFLIGHT = 3
    """Being read."""

    def __eq__(self, other: object) -> bool:
        same_kind = isinstance(other, Enum) and type(other).__name__ == type(self).__name__
        return same_kind and other.name == self.name if isinstance(other, Enum) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)  # as for other enumerations, so that equal members hash alike
