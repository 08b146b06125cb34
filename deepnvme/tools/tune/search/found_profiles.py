"""The drive profiles that follow from the results of a search."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from deepnvme.drives import drive_of
from deepnvme.profiles import DriveProfile

from .results import Figures, Tuning


@dataclass(frozen=True)
class FoundProfile:
    """The profile of a drive, before it is stored."""

    profile: DriveProfile
    """The profile."""
    folder: str
    """The folder on the drive whose search found it."""
    recommended: bool
    """Whether its settings are the ones that the tuner prints. For several folders these are the best for all at the same time,
    and the profile has the best for this folder alone."""


@dataclass(frozen=True)
class FoundProfiles:
    """The profiles of all drives that were measured."""

    profiles: tuple[FoundProfile, ...]
    """One for each drive, in the order of the folders; of several folders on one drive it is the first one's."""
    skipped: tuple[str, ...]
    """For each folder that can have none: why, in one line."""


def profiles_from(tuning: Tuning, ended: datetime) -> FoundProfiles:
    """Return the profiles of the drives that the folders are on, each with the best settings of a folder alone.

    Args:
        tuning: The results; not of GPUDirect Storage, whose settings are those of another op.
        ended: When the run ended.

    Raises:
        ValueError: If the run was interrupted.
        OSError: If a folder cannot be reached any more.
    """
    if not tuning.complete:
        raise ValueError("the search was interrupted: its settings may not be the best")
    found: dict[tuple[str, str, str], FoundProfile] = {}
    skipped = []
    for search in tuning.searches:
        if len(search.folders) > 1:
            continue
        folder, best = search.folders[0].path, search.best
        drive = drive_of(Path(folder))
        if drive.kind == "memory":
            skipped.append(f"no drive profile for '{folder}': its files are in memory, not on a drive")
            continue
        try:
            when = ended.isoformat(timespec="seconds")
            profile = DriveProfile.of(drive, best.setting, _rate(best.read), _rate(best.write), when)
        except ValueError as error:
            skipped.append(f"no drive profile for '{folder}': {error}".splitlines()[0])
            continue
        drive_key = (profile.mount, profile.filesystem, profile.disk_models)
        found.setdefault(drive_key, FoundProfile(profile, folder, recommended=search is tuning.chosen))
    return FoundProfiles(tuple(found.values()), tuple(skipped))


def _rate(figures: Figures | None) -> float | None:
    """Return the 10^9 bytes per second of one direction; None if it was not measured."""
    return None if figures is None else round(figures.gb_per_second, 3)
