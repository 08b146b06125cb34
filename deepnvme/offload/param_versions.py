"""Detect parameters that other code changed between steps, so that their master weights can be updated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .backward_hooks import Pieces
from .partition import local_of

if TYPE_CHECKING:
    import torch


class ParamVersionTracker:
    """Detects changed parameters by torch's version counter of a tensor and its address.

    Changes through ``.data`` are not detected: they do not count as versions.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._versions: dict[torch.Tensor, tuple[int, int]] = {}

    def look(self) -> None:
        """Add pieces of parameters that changed since :meth:`remember` to their sub-group's ``stale``.

        Call it before a step itself changes any parameter.
        """
        for param, version in self._versions.items():
            if version_of(param) != version:
                for sub_group, index in self._pieces[param]:
                    if sub_group.masters[index]:
                        sub_group.stale.add(index)

    def remember(self) -> None:
        """Take the current parameters as unchanged from here on. Only those with master weights are tracked."""
        self._versions = {
            param: version_of(param)
            for param, pieces in self._pieces.items()
            if any(sub_group.masters[index] for sub_group, index in pieces)
        }


def version_of(param: torch.Tensor) -> tuple[int, int]:
    """Return a value that differs after each in-place change of the parameter, and after its memory was replaced."""
    local = local_of(param)
    return local._version, local.data_ptr()
