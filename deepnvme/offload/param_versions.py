"""Parameters that others change between steps: their master weights are to follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .backward_hooks import Pieces
from .partition import local_of

if TYPE_CHECKING:
    import torch


class ParamVersionTracker:
    """By torch's count of the changes of a tensor, which ``.data`` gets round."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._versions: dict[torch.Tensor, tuple[int, int]] = {}

    def look(self) -> None:
        """Note what was changed since, with the sub-groups. To be called before a step changes any itself."""
        for param, version in self._versions.items():
            if version_of(param) != version:
                for sub_group, index in self._pieces[param]:
                    if sub_group.masters[index]:
                        sub_group.stale.add(index)

    def remember(self) -> None:
        """What there is now, is right."""
        self._versions = {
            param: version_of(param)
            for param, pieces in self._pieces.items()
            if any(sub_group.masters[index] for sub_group, index in pieces)
        }


def version_of(param: torch.Tensor) -> tuple[int, int]:
    """Another one after each change in place, and for each other memory."""
    local = local_of(param)
    return local._version, local.data_ptr()
