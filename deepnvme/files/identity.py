"""The identity that all directories of one table or store on several drives have in common.

1. The manifest in the first directory has the identity, 32 random hexadecimal digits. Each other directory has a membership
   with the same identity, and its number.
2. A writer chooses a new identity before its first change. So an original and its copy have different identities once one of
   them was changed, and a mixture of their directories is refused.
3. While the identity is changed, memberships have the former identity too: first all memberships get both, then the manifest
   gets the new one, then the former one is removed from the memberships.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from deepnvme.files.manifest import LONGEST_LINE, json_object, number, read_manifest, string
from deepnvme.files.replacing import replace_durably


@dataclass(frozen=True)
class Membership:
    """Contents of the membership file: to which store or table the directory belongs, and its index."""

    store: str
    """The identity."""
    index: int
    """Index of this directory among all directories; at least 1."""
    first: str
    """Path of the first directory when the membership was written."""
    previous: str = ""
    """Previous identity, which the manifest may still have."""

    def is_of(self, identity: str) -> bool:
        """Return whether the directory belongs to the store or table with this identity."""
        return identity in (self.store, self.previous)


def join(directories: Sequence[Path], name: str, identity: str, previous: str = "") -> None:
    """Write the membership of every directory but the first, atomically and durably. Raises OSError."""
    for index, directory in enumerate(directories[1:], 1):
        member = Membership(identity, index, str(directories[0]), previous)
        replace_durably(directory / name, json.dumps(asdict(member)).encode() + b"\n")


def membership(path: Path, corrupt: Callable[[Path, str], OSError]) -> Membership | None:
    """Return the membership in a file, or None if there is no file.

    Raises:
        OSError: From reading; or what ``corrupt`` returns, given the path and the reason, if the file is damaged.
    """
    with contextlib.suppress(FileNotFoundError):
        return read_manifest(path, LONGEST_LINE, _membership, corrupt)
    return None


def _membership(data: bytes) -> Membership:
    """Parse a membership. Raises ValueError or RecursionError."""
    fields = json_object(data)
    try:
        return Membership(
            string(fields["store"]), number(fields["index"]), string(fields["first"]), string(fields.get("previous", ""))
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
