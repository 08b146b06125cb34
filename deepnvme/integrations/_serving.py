"""What the tiers for vLLM, SGLang and LMCache have in common: tested versions, keys, and settings that come from JSON."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from packaging.version import InvalidVersion, Version

from deepnvme.drives.aio_config import AioConfig

if TYPE_CHECKING:
    Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    AioSettings: TypeAlias = AioConfig | Mapping[str, Any] | None


def require_version(project: str, found: str | None, tested: Sequence[str]) -> None:
    """Raise ImportError, with the versions, unless a project has one of the tested versions.

    Args:
        project: The project's name, for the message.
        found: Its version. A local part ("+cpu") does not matter.
        tested: The versions that the tests ran with.
    """
    try:
        accepted = found is not None and Version(Version(found).public) in map(Version, tested)
    except InvalidVersion:
        accepted = False
    if not accepted:
        versions = " or ".join(tested)
        raise ImportError(
            f"this version of deepnvme is tested with {project} {versions}, and refuses {found or 'an unknown version'}:"
            f" the interface changes from version to version; install {project} {versions}, or another version of deepnvme"
        )


def block_key(*parts: object) -> bytes:
    """Return a key of 32 bytes for some texts and numbers: another key for other parts, whatever characters they have."""
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        text = str(part).encode()
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.digest()


def folders_in(path: Paths, name: str) -> list[Path]:
    """Return the folder ``name`` in a directory, or in each of several. Several parts of ``name`` are separated by "/"."""
    return [Path(each) / name for each in ([path] if isinstance(path, str | os.PathLike) else path)]


def aio_config_of(settings: AioSettings) -> AioConfig | None:
    """Return settings of an engine that were given in JSON. Raises pydantic.ValidationError, a ValueError, with the key."""
    return None if settings is None else AioConfig.model_validate(settings)
