"""Whether a parameter's partition is in memory, in its file, or being read."""

from __future__ import annotations

from enum import Enum


class PartitionedParamStatus(Enum):
    """Where a parameter's partition is: the type of ``param.ds_tensor.status``.

    A member is equal to the member of the same name of DeepSpeed's enumeration, on either side of a comparison, because parts of
    a program may use DeepSpeed's class and others this one.
    """

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
        return hash(self.name)  # as enum.Enum does, so that equal members of both classes have equal hashes
